"""What a folder of weights says it is, and whether it may be loaded or written; found out without loading any."""

import hashlib
import json
import os
import tempfile
from pathlib import Path

EXPORT_RECORD = "revela_export.json"
"""What an export names its own files in, by which a later one knows what it may replace; and what its card says."""

# Pickled weights -> what is read in their place where it is there as well.
_PICKLES = {"pytorch_model": "model", "adapter_model": "adapter_model"}


def model_type(folder: str | Path) -> str | None:
    """
    The `model_type` that a folder's config.json names, `"revela"` or `"bert"` say; `None` without that file.

    Raises:
        ValueError: for a config.json that is no JSON object, naming it.
    """
    config = Path(folder) / "config.json"
    return _read_json(config, dict).get("model_type") if config.is_file() else None


def check_folder(folder: str | Path, trust_remote_code: bool = False) -> None:
    """
    Refuse a folder of weights that is broken, or that would have its loader read a pickle, code or foreign files.

    Looks at the folder itself and at the modules that a sentence-transformers folder names. Links may lead anywhere
    inside the folder, and from a snapshot in the Hub's cache to the files of the same repository. Pickled weights that
    lie beside safetensors are left alone, as nothing reads them. What is no folder (a Hub id) passes.

    Args:
        trust_remote_code: let a sentence-transformers folder name modules of its own code.

    Raises:
        ValueError: naming the file, for pickled weights without safetensors, a module whose code is not
            sentence-transformers', weights that lie or link outside, and a file that is no whole safetensors file.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return
    root = folder.resolve()
    if root.parent.name == "snapshots" and (root.parents[1] / "blobs").is_dir():
        root = root.parents[1]
    modules = folder / "modules.json"
    parts = {folder: None}
    for module in _read_json(modules, list) if modules.is_file() else []:
        code, path = (str(module.get(name)) if isinstance(module, dict) else "" for name in ("type", "path"))
        if not (trust_remote_code or code.startswith("sentence_transformers.")):
            raise ValueError(
                f"{modules} names the module {code!r}, which is not sentence-transformers' own, and code that comes "
                "with a model is not run: choose another model."
            )
        _require_inside(folder, path, root, modules)
        parts[folder / path] = None
    for part in parts:
        _check_weights(part, root, may_be_sharded=part == folder)


def require_base(folder: str | Path) -> None:
    """Raises ValueError for a folder with an adapter that does not say which model it is for."""
    config = Path(folder) / "adapter_config.json"
    if config.is_file() and not _read_json(config, dict).get("base_model_name_or_path"):
        raise ValueError(
            f"{config} names no base model, as an export leaves local paths out: write the folder or Hub id of the "
            "model that it was trained on there (`base_model_name_or_path`)."
        )


def require_writable(folder: str | Path, option: str) -> None:
    """
    Refuse at once a folder, there or still to be made, that cannot be written; nothing is left behind.

    Args:
        option: by which another is chosen, as `--out`.

    Raises:
        PermissionError: naming the part of the path that is in the way.
    """
    folder = Path(folder).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        # Only trying tells: root may write anywhere, and still not to /proc or a disk that is read-only.
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        raise PermissionError(
            f"{there} is no folder that can be written to ({error.strerror}): choose another {option}."
        ) from error


def require_whole(folder: str | Path) -> None:
    """
    Raises ValueError naming all that a published folder lacks: config, weights, tokenizer, modules of its own.

    The folder is a retriever of sentence-transformers, a PEFT adapter or a causal LM; the files are not loaded.
    """
    folder = Path(folder)
    modules = folder / "modules.json"
    named = _read_json(modules, list) if modules.is_file() else []
    named = [module for module in named if isinstance(module, dict)]
    # The backbone is the first module.
    places = [folder, *(folder / str(module.get("path", "")) for module in named[:1])]
    config, weights = "config.json", "model.safetensors"
    if not named and (folder / "adapter_config.json").is_file():
        config, weights = "adapter_config.json", "adapter_model.safetensors"
    lacking = []
    for what, patterns in (
        (config, [config]),
        (f"weights ({weights})", [weights, f"{weights}.index.json"]),
        ("a tokenizer (tokenizer.json)", ["tokenizer.json", "vocab.txt", "vocab.json", "*.model"]),
    ):
        if not any(next(place.glob(pattern), None) for place in places for pattern in patterns):
            lacking.append(what)
    for module in named:
        kind, path = (str(module.get(name, "")) for name in ("type", "path"))
        # Of the others, such as Normalize, nothing has to be written.
        if kind.endswith((".Pooling", ".Dense")) and not (folder / path / "config.json").is_file():
            lacking.append(f"{path}/config.json")
    if lacking:
        raise ValueError(
            f"{folder} is not whole: it lacks {', '.join(lacking)}. Write it again by `revela-hub export`."
        )


def broken(file: Path) -> str | None:
    """Why a file is no whole safetensors file, told by its header and length; `None` if it is one."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "np"):
            return None
    except (SafetensorError, OSError) as error:
        return str(error)


def record_graph(folder: str | Path, kind: str) -> None:
    """
    Note in a published folder's `EXPORT_RECORD` the files of a graph, and which weights it was made of.

    A folder without a record, as fine-tuning writes it, stays without.

    Args:
        kind: its folder, `"onnx"` or `"openvino"`.
    """
    folder = Path(folder)
    path = folder / EXPORT_RECORD
    if not path.is_file():
        return
    record = _read_json(path, dict)
    files = sorted(file.relative_to(folder).as_posix() for file in (folder / kind).iterdir())
    digests = {name: sha256(folder / name) for name in files}
    record["graphs"] = record.get("graphs", {}) | {kind: {"made_of": _made_of(folder), "files": digests}}
    record["files"] = sorted({*record["files"], kind, *files})
    write_whole(path, json.dumps(record, indent=2, ensure_ascii=False) + "\n")


def check_graphs(folder: str | Path) -> None:
    """
    Whether the ONNX and OpenVINO files that a published folder's record names are those of its weights.

    Raises:
        ValueError: naming a file that is not as it was written, or a graph that was made of other weights.
    """
    folder = Path(folder)
    for kind, graph in _read_json(folder / EXPORT_RECORD, dict).get("graphs", {}).items():
        if not (folder / kind).exists():
            continue
        again = (
            f"write it again by `revela-hub export-onnx {folder}{' --openvino' * (kind == 'openvino')} --overwrite`."
        )
        for name, digest in graph["files"].items():
            if not (folder / name).is_file() or sha256(folder / name) != digest:
                raise ValueError(f"{folder / name} is not as it was written: {again}")
        if graph.get("made_of") != _made_of(folder):
            raise ValueError(f"{folder / kind} was made of other weights than those beside it: {again}")


def _made_of(folder: Path) -> dict[str, str]:
    """What decides a graph, by file."""
    return {file.name: sha256(file) for file in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]}


def sha256(path: Path) -> str:
    """The hexadecimal digest of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def write_whole(path: Path, text: str) -> None:
    """Write a text whole or not at all: beside, then renamed."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _check_weights(part: Path, root: Path, may_be_sharded: bool) -> None:
    for pickled, safe in _PICKLES.items():
        read = [f"{safe}.safetensors"] + [f"{safe}.safetensors.index.json"] * may_be_sharded
        found = sorted(part.glob(f"{pickled}*.bin"))
        if found and not any((part / name).exists() for name in read):
            raise ValueError(
                f"{found[0]} is a pickle, which may run code when it is read: save the model again as safetensors."
            )
    for index in part.glob("*.safetensors.index.json"):
        shards = _read_json(index, dict).get("weight_map")
        if not isinstance(shards, dict):
            raise ValueError(f"{index} has no `weight_map`: copy it or write it again.")
        beside = set(os.listdir(part))
        for name in map(str, shards.values()):
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise ValueError(f"{index} names {name!r}, which is no safetensors file beside it: leave it unread.")
            if name not in beside:
                raise ValueError(f"{index} names {name}, which is missing: copy it or write it again.")
    for file in sorted(part.glob("*.safetensors")):
        _require_inside(part, file.name, root, file)
        if wrong := broken(file):
            raise ValueError(f"{file} is no whole safetensors file ({wrong}): copy it or write it again.")


def _require_inside(folder: Path, name: str, root: Path, named_by: Path) -> None:
    try:
        place = (folder / name).resolve()
    except (ValueError, OSError, RuntimeError) as error:  # halves of surrogate pairs, NUL, a link to itself
        raise ValueError(f"{named_by} names {name!r}, which is no path ({error}): choose another model.") from error
    if not place.is_relative_to(root):
        raise ValueError(
            f"{named_by} leads to {place}, outside of its own folder: put the file itself into the folder."
        )


def _read_json(path: Path, kind: type) -> dict | list:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON ({error}): copy it or write it again.") from error
    if not isinstance(value, kind):
        what = "object" if kind is dict else "list"
        raise ValueError(f"{path} holds no JSON {what}, which it must: copy it or write it again.")
    return value


__all__ = [
    "EXPORT_RECORD",
    "broken",
    "check_folder",
    "check_graphs",
    "model_type",
    "record_graph",
    "require_base",
    "require_whole",
    "require_writable",
    "sha256",
    "write_whole",
]
