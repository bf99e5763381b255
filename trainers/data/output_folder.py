"""The folder that `prepare` writes: there whole or not at all, and nothing that is the user's deleted for it."""

import glob
import json
import os
import platform
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

# What a job's end or a closed terminal sends; Windows has no SIGHUP.
_ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


@contextmanager
def replaced_folder(out: Path, source: str, overwrite: bool) -> Iterator[Path]:
    """A hidden folder beside `out` to write to, which becomes `out` when the block ends and is removed when it fails.

    SIGTERM and SIGHUP end the block with `SystemExit` (143, 129), where nothing else handles them. What a run that was
    killed left behind is removed by the next one of the same name on the same machine, and named by those elsewhere.

    Args:
        out: the folder's final, resolved name.
        source: what the set is made of, which `out` must not hold.
        overwrite: replace the prepared set that `out` holds.

    Raises:
        FileExistsError: `out` holds something, and `overwrite` is off or it is not all of one prepared set.
        OSError: nothing can be written beside `out`.
        ValueError: a name that is not UTF-8.
    """
    _replaceable(out, source, overwrite)
    prefix = f".{out.name}.partial-{platform.node()}-"
    for folder in out.parent.glob(f"{glob.escape(f'.{out.name}.partial-')}*"):
        if not folder.name.startswith(prefix):
            _name_if_old(folder)
        elif not _is_running(folder.name.removeprefix(prefix)):
            shutil.rmtree(folder, ignore_errors=True)
    partial = out.parent / f"{prefix}{os.getpid()}"
    with _ending_by_exception():
        try:
            try:
                partial.mkdir(parents=True)
            except OSError as error:
                raise OSError(
                    f"{out.parent} cannot be written to ({error.strerror}), so no {out.name} can be made in it; "
                    "choose another --out."
                ) from error
            yield partial
            _hold_signals()  # between two renames there is no set at all
            _replace(partial, out, source, overwrite)
        finally:
            _hold_signals()
            shutil.rmtree(partial, ignore_errors=True)


def _replaceable(out: Path, source: str, overwrite: bool) -> list[str]:
    """The names of the files in `out` that a new set replaces; an error where it must not."""
    if readable(out) != str(out):
        raise ValueError(f"--out {readable(out)} is not UTF-8; choose another name.")
    for part in (out, *out.parents):
        if part.exists() and not part.is_dir():
            raise NotADirectoryError(f"{part} is a file, and --out is a folder; choose another --out.")
    place = Path(source).resolve()
    if Path(source).exists() and out in (place, *place.parents):
        raise FileExistsError(
            f"The source {source} lies in {out}, which is to be the prepared set; choose another --out."
        )
    found = sorted(path.name for path in out.iterdir()) if out.exists() else []
    if not found:
        return []
    if not overwrite:
        raise FileExistsError(f"{out} exists and is not empty; choose another --out, or pass --overwrite.")
    try:
        own = {"prepare.json", *json.loads((out / "prepare.json").read_text(encoding="utf-8"))["shards"]}
    except (OSError, ValueError, KeyError, TypeError):
        raise FileExistsError(
            f"{out} holds no prepare.json that lists its shards, so it is no prepared set and --overwrite does not "
            "delete it; remove it yourself, or choose another --out."
        ) from None
    others = [name for name in found if name not in own or not (out / name).is_file()]
    if others:
        raise FileExistsError(
            f"{out} holds more than its prepared set ({', '.join(map(readable, others[:3]))}), which --overwrite does "
            "not delete; move that, or choose another --out."
        )
    return found


def _replace(partial: Path, out: Path, source: str, overwrite: bool) -> None:
    found = _replaceable(out, source, overwrite)  # once more: it may have been hours
    if not out.exists():
        partial.rename(out)
        return
    old = out.parent / f".{out.name}.old-{os.getpid()}"
    out.rename(old)
    partial.rename(out)
    for name in found:
        (old / name).unlink()
    old.rmdir()


def readable(path: Path | str) -> str:
    """A path for people: bytes of its name that are not UTF-8 as `\\udcff`."""
    return str(path).encode("utf-8", "backslashreplace").decode("utf-8")


def _is_running(pid: str) -> bool:
    if not pid.isdigit() or os.name != "posix":  # elsewhere, to ask is to kill
        return True
    if int(pid) == os.getpid():  # that of an earlier process: this one has not begun
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # not ours to signal
        return True
    return True


def _name_if_old(folder: Path) -> None:
    try:
        written = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    except OSError:  # it has just become the set
        return
    days = (time.time() - written) / 86_400
    if days > 1:
        print(
            f"{readable(folder)} of another machine was last written to {days:.0f} days ago; if nothing runs there "
            "any more, remove it.",
            file=sys.stderr,
        )


@contextmanager
def _ending_by_exception() -> Iterator[None]:
    """SIGTERM and SIGHUP raise `SystemExit`, so that `finally` clauses run; all handlers are put back afterwards."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # which has the signals to itself
        yield
        return
    before: dict[int, Any] = {number: signal.getsignal(number) for number in (*_ENDING, signal.SIGINT)}
    try:
        for number in _ENDING:
            if before[number] == signal.SIG_DFL:  # not where nohup, say, has it ignored
                signal.signal(number, end)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _hold_signals() -> None:
    if threading.current_thread() is threading.main_thread():
        for number in (*_ENDING, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)


__all__ = ["readable", "replaced_folder"]
