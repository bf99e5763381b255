"""Where `prepare` writes: what it replaces, what it leaves alone, and what is left of a run that was stopped."""

import dataclasses
import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainers.data.prepare import PrepareConfig, prepare
from trainers.data.readers import DataError

ROOT = Path(__file__).parents[3]
STOPPING = {signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGINT: 130}  # and the status that a shell expects


@pytest.fixture
def corpus(tmp_path, write_jsonl, article) -> Path:
    return write_jsonl(tmp_path / "corpus.jsonl", [article(number, 40) for number in range(40)])


def test_an_existing_folder_is_kept_unless_told(tmp_path, corpus):
    out = tmp_path / "out"
    out.mkdir()
    config = PrepareConfig(str(corpus), str(out))
    prepare(config)  # an empty folder is as good as none
    before = (out / "prepare.json").read_bytes()
    with pytest.raises(FileExistsError, match="--overwrite"):
        prepare(config)
    assert (out / "prepare.json").read_bytes() == before
    prepare(dataclasses.replace(config, overwrite=True, group_size=8))
    assert json.loads((out / "prepare.json").read_bytes())["settings"]["group_size"] == 8
    with pytest.raises(DataError):
        prepare(dataclasses.replace(config, overwrite=True, group_size=10_000))
    assert json.loads((out / "prepare.json").read_bytes())["settings"]["group_size"] == 8


def test_overwrite_deletes_prepared_sets_only(tmp_path, corpus):
    out = tmp_path / "precious"
    out.mkdir()
    (out / "thesis.tex").write_text("x")
    with pytest.raises(FileExistsError, match="no prepare.json"):
        prepare(PrepareConfig(str(corpus), str(out), overwrite=True))
    assert (out / "thesis.tex").exists()


def test_overwrite_keeps_what_lies_beside_a_prepared_set(tmp_path, corpus):
    out = tmp_path / "out"
    config = PrepareConfig(str(corpus), str(out), overwrite=True)
    shards = prepare(config)["shards"]
    (out / "thesis.tex").write_text("x")
    with pytest.raises(FileExistsError, match=r"holds more than its prepared set \(thesis\.tex\)"):
        prepare(config)
    assert (out / "thesis.tex").exists() and {path.name for path in out.glob("*.parquet")} == set(shards)
    (out / "thesis.tex").unlink()
    (out / "train-00000-of-00002.parquet").write_text("another set's")
    with pytest.raises(FileExistsError, match=r"train-00000-of-00002\.parquet"):
        prepare(config)


def test_a_prepare_json_that_is_not_ours_gives_nothing_away(tmp_path, corpus):
    out = tmp_path / "out"
    out.mkdir()
    for content in ("{}", "[]", "not JSON", '{"shards": null}'):
        (out / "prepare.json").write_text(content)
        with pytest.raises(FileExistsError, match="no prepare.json that lists its shards"):
            prepare(PrepareConfig(str(corpus), str(out), overwrite=True))
        assert (out / "prepare.json").read_text() == content


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_source_is_not_overwritten(tmp_path, corpus, overwrite):
    out = tmp_path / "out"
    prepare(PrepareConfig(str(corpus), str(out)))
    (shard,) = out.glob("train-*.parquet")
    (tmp_path / "linked").symlink_to(out)
    for source in (out, shard, tmp_path / "linked" / shard.name):
        with pytest.raises(FileExistsError, match="The source .* lies in .*/out"):
            prepare(PrepareConfig(str(source), str(out), overwrite=overwrite))
    assert shard.exists()


def test_what_came_into_the_folder_meanwhile_is_kept(tmp_path, corpus, monkeypatch):
    out = tmp_path / "out"
    dump = json.dump

    def slowly(*arguments, **options):
        out.mkdir()
        (out / "late.txt").write_text("x")
        dump(*arguments, **options)

    monkeypatch.setattr(json, "dump", slowly)
    with pytest.raises(FileExistsError, match="not empty"):
        prepare(PrepareConfig(str(corpus), str(out)))
    assert (out / "late.txt").exists() and not list(tmp_path.glob(".out*"))


def test_a_place_that_cannot_be_written_is_named(tmp_path, corpus):
    (tmp_path / "file").write_text("x")
    for out in ("file", "file/x", "file/x/y"):
        with pytest.raises(NotADirectoryError, match="/file is a file, and --out is a folder") as caught:
            prepare(PrepareConfig(str(corpus), str(tmp_path / out), overwrite=True))
        assert "partial" not in str(caught.value)
    if Path("/proc/self").exists():
        with pytest.raises(OSError, match="/proc cannot be written to .* choose another --out"):
            prepare(PrepareConfig(str(corpus), "/proc/set"))
    with pytest.raises(ValueError, match=r"caf\\udce9 is not UTF-8"):
        prepare(PrepareConfig(str(corpus), str(tmp_path / os.fsdecode(b"caf\xe9"))))


def partial_folders(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if ".partial-" in path.name]


def test_what_another_machine_left_is_named_when_it_is_old(tmp_path, corpus, capsys):
    for name, days in (("old", 3), ("new", 0)):
        folder = tmp_path / f".out.partial-{name}-1"
        folder.mkdir()
        (folder / "train-00000").touch()
        for path in (folder / "train-00000", folder):
            os.utime(path, (time.time() - days * 86_400,) * 2)
    prepare(PrepareConfig(str(corpus), str(tmp_path / "out")))
    errors = capsys.readouterr().err
    assert ".out.partial-old-1 of another machine was last written to 3 days ago" in errors and "-new-1" not in errors
    assert len(partial_folders(tmp_path)) == 2


def test_a_killed_runs_folder_is_removed_by_the_next_run(tmp_path, corpus):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    here = f".out.partial-{platform.node()}"
    others = [f"{here}-{os.getppid()}", f".out.partial-elsewhere-{dead.pid}", f"{here}-mine"]
    for name in (f"{here}-{dead.pid}", f"{here}-{os.getpid()}", *others):
        (tmp_path / name / "sub").mkdir(parents=True)
    prepare(PrepareConfig(str(corpus), str(tmp_path / "out")))
    assert sorted(partial_folders(tmp_path)) == sorted(others)


def test_signal_handlers_are_put_back(tmp_path, corpus):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    prepare(PrepareConfig(str(corpus), str(tmp_path / "out")))
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.fixture
def running(tmp_path, corpus):
    """`revela-hub prepare --num-proc 2` on a named pipe that never ends: its process, and those that it started."""
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    command = [sys.executable, "-m", "revela_hub", "prepare", str(pipe), "--out", str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "--num-proc", "2"],
        cwd=ROOT,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Whatever this process was told to ignore: a shell's background jobs, for one, ignore Ctrl-C.
        preexec_fn=lambda: [signal.signal(number, signal.SIG_DFL) for number in STOPPING],
    )
    with open(pipe, "wb") as writer:
        for _ in range(100):  # more than the workers are let run ahead
            writer.write(corpus.read_bytes())
        writer.flush()
        deadline = time.monotonic() + 60
        while len(workers := children(process.pid)) < 3 and time.monotonic() < deadline:  # two, and what tracks them
            time.sleep(0.05)
        time.sleep(1)
        yield process, workers
        process.kill()
        process.wait()


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in found.read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


linux = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the workers in /proc")


@linux
@pytest.mark.parametrize(("number", "status"), [*STOPPING.items(), (signal.SIGKILL, -9)])
def test_a_stopped_run_leaves_no_worker_and_no_folder(tmp_path, running, number, status):
    process, workers = running
    assert len(partial_folders(tmp_path)) == 1 and len(workers) >= 2
    if number == signal.SIGINT:  # which a terminal sends to all processes
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    printed = process.communicate(timeout=60)[1]
    assert process.returncode == status
    assert "Traceback" not in printed
    if number == signal.SIGINT:
        assert printed.endswith(f"error: interrupted, so nothing was written to {tmp_path / 'out'}.\n")
    assert bool(partial_folders(tmp_path)) == (number == signal.SIGKILL)
    assert not (tmp_path / "out").exists()
    deadline = time.monotonic() + 20
    while any(map(is_alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, workers))
