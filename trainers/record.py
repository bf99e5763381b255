"""What a run leaves word of for its model card: data, options, hardware, versions. Never a local path or a name."""

import dataclasses
import hashlib
import json
import os
import platform
from collections.abc import Sequence
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from datasets import Dataset

from hub_cards.privacy import hub_id

# Where a run is kept, watched and launched: nothing that it learns by.
_NO_OPTIONS = (
    "output_dir", "overwrite_output", "resume_from_checkpoint", "logging_strategy", "logging_first_step", "log_level",
    "log_level_replica", "log_on_each_node", "disable_tqdm", "report_to", "save_total_limit", "run_name", "project",
    "use_cpu",
    "accelerator_config", "parallelism_config", "deepspeed", "fsdp", "fsdp_config", "debug", "local_rank", "hub_token",
    "push_to_hub", "hub_model_id", "hub_private_repo", "hub_strategy", "hub_always_push", "hub_revision", "train_sets",
    "validation_set", "remove_unused_columns", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id",
    "dataloader_pin_memory", "do_eval", "prediction_loss_only",
)  # fmt: skip
# Options besides `*_name_or_path` that name a model, and those that name texts: by Hub ids, or by paths.
_MODELS = ("teacher", "cross_encoder")
_DATA = ("train_set", "dev_set", "negatives_file", "corpus")
_PACKAGES = ("revela-hub", "torch", "transformers", "accelerate", "peft", "tokenizers", "datasets", "deepspeed",
    "sentence-transformers")  # fmt: skip


def describe_run(arguments: Sequence, train_set: Dataset | None = None) -> dict:
    """
    What is known of a run before it starts.

    Args:
        arguments: the dataclasses of its options.
        train_set: what it learns from, rows with `source`; left out where it is no prepared set.

    Returns:
        `base_models` (option -> Hub id), `local_models` (options that named a folder), `options` (those that differ
        from their defaults), `data` (one entry a prepared set) and `train_rows`.
    """
    options, bases, local = {}, {}, []
    for config in arguments:
        for name, value in _changed(config).items():
            if name.endswith("_name_or_path") or name in _MODELS:
                if hub_id(value):
                    bases[name] = options[name] = value
                elif value is not None:
                    local.append(name)
            elif name in _DATA:
                if hub_id(value):
                    options[name] = value
            elif name not in _NO_OPTIONS and _is_plain(value):
                options[name] = value
    names = [name for config in arguments for name in getattr(config, "train_sets", ())]
    names += [config.train_set for config in arguments if hasattr(config, "train_set")]
    known = [name for name in names if hub_id(name)]
    if known and len(known) == len(names) and "train_set" not in options:
        options["train_sets"] = known
    sources = set()
    if train_set is not None and len(names) == 1:
        sources = {row["source"] for row in train_set.select(range(min(1, len(train_set))))}
    return {
        "base_models": bases,
        "local_models": local,
        "options": options,
        "data": [_describe_set(name, sources) for name in names],
    } | ({} if train_set is None else {"train_rows": len(train_set)})


def describe_machine(device: torch.device, processes: int) -> dict:
    """`device` (what it is called), `processes`, and `versions` of Python and the packages that compute."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{_processor()} (CPU threads: {torch.get_num_threads()})"
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {"device": name, "processes": processes, "versions": versions}


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else f"{platform.machine()} processor"


def _changed(config) -> dict:
    """The options of a dataclass that differ from its defaults, in JSON's values."""
    changed = {}
    for item in dataclasses.fields(config):
        if not item.init:
            continue
        value = getattr(config, item.name)
        default = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
        # transformers makes False of some that are left open.
        if value != default and not (default is None and value is False):
            changed[item.name] = value.value if isinstance(value, Enum) else value
    return changed


def _is_plain(value) -> bool:
    """Numbers, switches and words; what holds a slash may be a path."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    return value is None or isinstance(value, (bool, int, float)) or (isinstance(value, str) and "/" not in value
        and "\\" not in value)  # fmt: skip


def _describe_set(name: str, sources: set[str]) -> dict:
    """A prepared set by its own account, `prepare.json`; of a set without one, its Hub id where it has one."""
    entry = {"dataset": hub_id(name)}
    account = Path(name) / "prepare.json"
    if not account.is_file():
        return entry
    summary = json.loads(account.read_text(encoding="utf-8"))
    settings = summary["settings"]
    # `prepare` writes what it read into the rows: the name alone of a local file or folder, all of a Hub id.
    source = settings["source"]
    if entry["dataset"] is None and "/" in source and source in sources:
        entry["dataset"] = hub_id(source)
    kept = ["method", "kind", "min_words", "language", "validation_share", "seed"]
    kept += (
        ["max_words", "group_size", "documents_per_group", "shuffle"] if "groups" in summary else ["max_seq_length"]
    )
    kept += ["dataset_config", "dataset_split"] if entry["dataset"] else []
    entry["settings"] = {name: settings[name] for name in kept if settings.get(name) is not None}
    if hub_id(settings.get("tokenizer")):
        entry["settings"]["tokenizer"] = settings["tokenizer"]
    entry |= {name: summary[name] for name in ("documents", "chunks", "groups", "sequences") if name in summary}
    lines = [f"{shard['sha256']}  {file}\n" for file, shard in sorted(summary["shards"].items()) if "train-" in file]
    # What `sha256sum train-*.parquet | sha256sum` says in the folder.
    entry["shards"], entry["sha256"] = len(lines), hashlib.sha256("".join(lines).encode()).hexdigest()
    return entry


def write_record(path: str | os.PathLike, record: dict) -> None:
    """Write the record of a run as JSON."""
    Path(path).write_text(json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8")


__all__ = ["describe_machine", "describe_run", "write_record"]
