"""Checkpoint folders: written whole or not at all, and looked at before a run goes on from one."""

import json
import os
import re
import shutil
import zipfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import PreTrainedConfig, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME

from hub_cards.card import TRAINING_RECORD
from hub_cards.checkpoints import broken, model_type, require_writable
from hub_cards.privacy import hub_id

# Where a checkpoint is written before it gets its name.
STAGING = ".saving"
# What a whole checkpoint holds: the size of each of its files.
MANIFEST = "manifest.json"
# The arguments of a run, and with them what decides where in the data a step stands.
ARGUMENTS = "training_args.json"
# Fields of a config that a run may go on with others of: how weights are held, read, written and named.
_FREE = {
    "architectures", "auto_map", "dtype", "embed_batch_size", "lm_generation_config", "save_backbones",
    "transformers_version", "use_cache",
}  # fmt: skip


def seal(folder: Path) -> None:
    """Have a written checkpoint reach the disk, and leave word of what belongs to it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
    (folder / MANIFEST).write_text(json.dumps(sizes, indent=2) + "\n", encoding="utf-8")


def replace(source: Path, target: Path) -> None:
    """Move a file or folder to where another may be."""
    if target.is_dir():
        shutil.rmtree(target)
    os.replace(source, target)


def read_weights(checkpoint: str | Path) -> dict[str, torch.Tensor]:
    """All weights of a checkpoint, in one file or several, on the CPU."""
    weights = {}
    for path in sorted(Path(checkpoint).glob("model*.safetensors")):
        weights.update(load_file(path))
    return weights


def load_tensors(path: str | Path):
    """What `torch.save` wrote, as long as it is tensors and plain values: a pickle of anything else is refused."""
    return torch.load(path, map_location="cpu", weights_only=True)


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint to resume from, as the end of a sentence; `None` if nothing is."""
    pickles = sorted(path.name for path in checkpoint.glob("*.bin"))
    if pickles:
        return f"holds {pickles[0]}, a pickle, and nothing but safetensors is read"
    files = [TRAINER_STATE_NAME, SCHEDULER_NAME]
    if not any(checkpoint.glob("global_step*")):  # where fine-tuning under DeepSpeed keeps its optimizer
        files.append(OPTIMIZER_NAME)
    manifest = checkpoint / MANIFEST
    sizes = {}
    if manifest.exists():
        try:
            sizes = json.loads(manifest.read_text(encoding="utf-8"))
        except ValueError:
            return f"has a broken {MANIFEST}"
    for name in [*files, *sizes]:
        path = checkpoint / name
        if not path.is_file():
            return f"lacks {name}"
        if name in sizes and path.stat().st_size != sizes[name]:
            return f"is broken: {name} has {path.stat().st_size:,} bytes, and {sizes[name]:,} were written"
    for path in sorted(checkpoint.rglob("*.safetensors")):
        if wrong := broken(path):
            return f"is broken: {path.name} is no whole safetensors file ({wrong})"
    for path in sorted(checkpoint.glob("*.pt*")):
        if not zipfile.is_zipfile(path):
            return f"is broken: {path.name} is no whole file of torch's"
    try:
        json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except ValueError:
        return f"is broken: {TRAINER_STATE_NAME} is no JSON"
    return None


def _checkpoints(folder: Path) -> dict[int, Path]:
    return {
        int(match[1]): path
        for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*")
        if (match := re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", path.name))
    }


def _can_resume(checkpoint: Path) -> bool:
    # Without these, as in an output folder or with save_only_model, Trainer would begin a new run.
    return (checkpoint / TRAINER_STATE_NAME).exists() and any(checkpoint.glob("rng_state*.pth"))


def last_checkpoint(args: TrainingArguments) -> str | None:
    """
    The checkpoint to resume from, after a look at what the output folder holds; nothing is changed there.

    Returns:
        A path, or `None` for a fresh start. `--resume_from_checkpoint true` takes the newest one; a path, that one.

    Raises:
        FileExistsError: if the folder holds another run that is neither resumed nor to be overwritten, or a model
            that no run wrote.
        FileNotFoundError: if there is nothing to resume from.
        PermissionError: if the output folder cannot be written.
        ValueError: if the checkpoint is damaged, naming the newest whole one.
    """
    folder = Path(args.output_dir)
    require_writable(folder, "--output_dir")
    checkpoints = _checkpoints(folder)
    resume = str(args.resume_from_checkpoint or "false")
    if resume.lower() in ("true", "last"):
        candidates = [path for _, path in sorted(checkpoints.items()) if _can_resume(path)]
        if not candidates:
            raise FileNotFoundError(f"{folder} holds no checkpoint to resume from: leave resume_from_checkpoint out.")
        return str(_whole(candidates.pop(), candidates))
    if resume.lower() != "false":
        path = Path(resume)
        if not _can_resume(path):
            raise FileNotFoundError(
                f"{resume} is no checkpoint to resume from, as it lacks {TRAINER_STATE_NAME} or the state of the "
                "random numbers: name a checkpoint-N folder, or pass true for the newest in output_dir."
            )
        beside = sorted(_checkpoints(path.parent).items())
        return str(_whole(path, [other for _, other in beside if other != path and _can_resume(other)]))
    weights = list(folder.glob("model*.safetensors"))
    strangers = [path for path in checkpoints.values() if model_type(path) not in (args.model_type, None)]
    if strangers or (weights and model_type(folder) != args.model_type):
        name = {"revela": "Revela", "retromae": "RetroMAE"}[args.model_type]
        where = strangers[0] if strangers else folder
        raise FileExistsError(f"{where} holds a model that is no {name} run: choose another --output_dir.")
    if (checkpoints or weights) and not args.overwrite_output:
        raise FileExistsError(
            f"{folder} holds an earlier run. Pass --resume_from_checkpoint true to go on with it, "
            "--overwrite_output true to delete it, or another --output_dir."
        )
    return None


def _whole(checkpoint: Path, others: list[Path]) -> Path:
    """The checkpoint, if it is whole; an error that names the newest of the others that is, if not."""
    wrong = damage(checkpoint)
    if wrong is None:
        return checkpoint
    whole = next((path for path in reversed(others) if damage(path) is None), None)
    mend = "start anew" if whole is None else f"go on from the one before with --resume_from_checkpoint {whole}"
    raise ValueError(f"{checkpoint} {wrong}: {mend}.")


def clear_output(folder: Path) -> None:
    """Delete what an earlier run left in the output folder; what else lies there is the user's."""
    old = [*_checkpoints(folder).values(), folder / STAGING]
    if list(folder.glob("model*.safetensors")):
        # Files of the model that stay are written again under their names.
        old += [*folder.glob("model*.safetensors"), folder / SAFE_WEIGHTS_INDEX_NAME, folder / CONFIG_NAME]
        old += [folder / TRAINER_STATE_NAME, folder / ARGUMENTS, folder / TRAINING_RECORD]
    for path in old:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def check_position(checkpoint: str | Path, now: dict) -> None:
    """
    Compare what decides where in the data a step stands with the run that wrote a checkpoint.

    Args:
        now: `rows_a_step`, `seed` and whatever else has to be equal.

    Raises:
        ValueError: naming what changed.
    """
    path = Path(checkpoint) / ARGUMENTS
    before = json.loads(path.read_text(encoding="utf-8")).get("position", {}) if path.exists() else {}
    for name, value in before.items():
        if now.get(name) != value:
            what = {
                "rows_a_step": "rows a step (processes × per_device_train_batch_size × gradient_accumulation_steps)",
                "train_rows": "rows to train on",
            }.get(name, name)
            raise ValueError(
                f"{checkpoint} was written with {value} {what}, and this run has {now.get(name)}: its place in the "
                "data would be another. With more or fewer processes change gradient_accumulation_steps along."
            )


def check_step(checkpoint: str | Path, max_steps: int) -> None:
    """Raises ValueError for a checkpoint of a run's last step; transformers would train one more."""
    state = json.loads((Path(checkpoint) / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    if 0 < max_steps <= state["global_step"]:
        raise ValueError(
            f"{checkpoint} is at step {state['global_step']}, and the run ends at {max_steps}: export it as it is, or "
            "raise --max_steps."
        )


def check_config(checkpoint: str | Path, now: PreTrainedConfig) -> None:
    """
    Compare the config of the model that a run is to go on with to that of a checkpoint, whose weights it takes over.

    Args:
        now: what the run's options made.

    Raises:
        ValueError: naming each option that changed, with both of its values.
    """
    before = _options_of(type(now).from_pretrained(checkpoint).to_dict())
    after = _options_of(now.to_dict())
    changed = [
        f"`{name}` {before[name]!r}, not {after[name]!r}"
        for name in before
        if name in after and before[name] != after[name]
    ]
    if changed:
        raise ValueError(
            f"{checkpoint} was trained with {', '.join(changed[:5])}{' and more' if len(changed) > 5 else ''}: go on "
            "with the values that it was trained with, or train anew into another --output_dir."
        )


def _options_of(config: dict, prefix: str = "") -> dict:
    """The fields of a config by the names that they have as options, those of its parts under `part.name`."""
    options = {}
    for name, value in config.items():
        if name in _FREE or name.startswith("_") or name.endswith("_revision"):
            continue
        if name.endswith("_name_or_path"):
            # A folder may have been moved; a Hub id is what it was.
            if hub_id(value):
                options[prefix + name] = value
        elif name in ("retriever_lora", "lm_lora"):
            fields = {"r": 0} if value is None else value
            options |= {f"{name}_{field.removeprefix('lora_')}": fields[field] for field in fields}
        elif isinstance(value, dict) and "model_type" in value:
            options |= _options_of(value, f"{prefix}{name}.")
        else:
            options[prefix + name] = value
    return options


__all__ = [
    "ARGUMENTS",
    "STAGING",
    "check_config",
    "check_position",
    "check_step",
    "clear_output",
    "damage",
    "last_checkpoint",
    "load_tensors",
    "read_weights",
    "replace",
    "seal",
]
