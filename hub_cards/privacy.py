"""What must not leave the machine that a model was trained on: local paths, host names, tokens."""

import json
import mmap
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

# Texts that a published folder holds beside its weights. A vocabulary may hold anything, `/usr/bin/` and `/home/` too.
_TEXTS = (".json", ".jsonl", ".md", ".yaml", ".yml", ".txt", ".csv", ".jinja", ".cfg", ".toml", ".xml")
# What a graph says of itself stands between its weights, in which twelve such characters in a row are rare.
_GRAPH = ".onnx"
_READABLE = re.compile(rb"[\t\n\x20-\x7e]{12,}")
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_TOKEN = re.compile(r"\b(hf_[A-Za-z0-9]{20,}|hf_oauth_[\w-]{20,}|api_org_[A-Za-z0-9]{20,})")
_PATH = re.compile(
    r"(?<![\w./:<>~$)\]-])(?:~|/[\w.+-]+)(?:/[\w.+ -]*[\w.+-])+|\b[A-Za-z]:\\{1,2}\w[^\s\"']*|\bfile://\S+"
)
# Where people keep files, on this machine or on another.
_ROOTS = {"home", "Users", "root", "tmp", "mnt", "media", "work", "workspace", "scratch", "var", "srv", "opt", "nfs"}


def hub_id(name: str | os.PathLike | None) -> str | None:
    """The name if it is a Hub id; `None` for a local folder, also one whose path looks like an id, and for `None`."""
    name = None if name is None else os.fspath(name)
    if name is None or not _HUB_ID.fullmatch(name) or os.path.exists(name):
        return None
    return name


def without_local_paths(value):
    """JSON's values without what is a local path: such entries of mappings and lists are left out."""
    if isinstance(value, dict):
        return {name: without_local_paths(item) for name, item in value.items() if not _is_local_path(item)}
    if isinstance(value, (list, tuple)):
        return [without_local_paths(item) for item in value if not _is_local_path(item)]
    return value


def clean_configs(folder: Path) -> None:
    """
    Take out of a published folder's JSON files what names a place on this machine.

    Older tokenizers carry the path they were read from, and peft writes where the base model was; a base model of that
    kind is left open (null), for the card to name.
    """
    for path in sorted(folder.rglob("*.json")):
        if path.name in _VOCABULARIES:
            continue
        before = json.loads(path.read_text(encoding="utf-8"))
        after = without_local_paths(before)
        if path.name == "adapter_config.json":
            after["base_model_name_or_path"] = hub_id(before.get("base_model_name_or_path"))
        if after != before:
            path.write_text(json.dumps(after, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def check_private(folder: Path) -> None:
    """
    Look for tokens of the Hub, local paths and this machine's name in the texts of a folder, and in ONNX graphs.

    Raises:
        ValueError: naming the file and, but for tokens, what was found.
    """
    host = socket.gethostname()
    # A name such as `vm` is a word like any other.
    host = host if re.search(r"[\d.-]", host) and len(host) > 4 and host != "localhost" else None
    for path in sorted(
        path for path in folder.rglob("*") if path.is_file() and path.suffix in (*_TEXTS, _GRAPH, ".py")
    ):
        text = _readable(path) if path.suffix == _GRAPH else path.read_text(encoding="utf-8", errors="replace")
        name = path.relative_to(folder).as_posix()
        if _TOKEN.search(text):
            raise ValueError(f"{path} holds a token of the Hub: take it out, and revoke it in your settings there.")
        if path.name in _VOCABULARIES or path.suffix == ".py":
            continue
        if found := next(_local_paths(path.suffix, text), None):
            raise ValueError(
                f"{folder / name} holds the local path {found!r}: take it out, or name the thing instead."
            )
        if host and re.search(rf"(?<![\w-]){re.escape(host)}(?![\w-])", text):
            raise ValueError(f"{folder / name} holds this machine's name, {host!r}: take it out.")


def _readable(path: Path) -> str:
    if path.stat().st_size == 0:
        return ""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return "\n".join(match[0].decode() for match in _READABLE.finditer(content))


def _local_paths(suffix: str, text: str) -> Iterator[str]:
    if suffix == ".json":
        try:
            values = list(_strings(json.loads(text)))
        except ValueError:
            values = [text]
        # Of a template, a path is a part; a value of its own is one whatever its root.
        yield from (value for value in values if _is_local_path(value))
        text = "\n".join(values)
    for match in _PATH.finditer(text):
        if _is_local_path(match[0]) and (match[0][0] != "/" or _is_root(match[0].split("/")[1])):
            yield match[0]


def _is_local_path(value) -> bool:
    return isinstance(value, str) and "\n" not in value and _PATH.fullmatch(value) is not None


def _is_root(name: str) -> bool:
    return name in _ROOTS or os.path.isdir(f"/{name}")


def _strings(value) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield str(name)
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


__all__ = ["check_private", "clean_configs", "hub_id", "without_local_paths"]
