"""What happens to long jobs: they are told to stop, run out of memory, or meet a loss that is no number."""

import json
import signal
import sys
import threading
from pathlib import Path

import torch
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

# The exit status of a run that SIGTERM ended: 128 + 15, as shells have it.
PREEMPTED = 143
# What `NamedRows` adds to a batch; no input of a model.
ROW_IDS = "row_ids"


class StopWhenTold(TrainerCallback):
    """Ends a run, on all processes at once and with a checkpoint, after the step in which one of them got SIGTERM."""

    def __init__(self, accelerator):
        self.accelerator = accelerator
        self.told = False
        self._before = None

    def _tell(self, *_) -> None:
        self.told = True

    def on_train_begin(self, args, state, control, **kwargs):
        self.told = False
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._tell)

    def on_step_end(self, args, state, control, **kwargs):
        self.told = any_process(self.accelerator, self.told)
        if self.told:
            control.should_save = control.should_training_stop = True

    def on_train_end(self, args, state, control, **kwargs):
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def leave_if_told(self, args, state) -> None:
        """Raises SystemExit with status 143 if SIGTERM ended the training; says where the checkpoint is."""
        if not self.told:
            return
        if args.should_save:
            checkpoint = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            print(
                f"Stopped by SIGTERM after step {state.global_step}, which is in {checkpoint}. Go on with "
                "--resume_from_checkpoint true.",
                file=sys.stderr,
            )
        sys.exit(PREEMPTED)


def any_process(accelerator, flag: bool) -> bool:
    """Whether a flag is set on any process; all of them ask together."""
    if accelerator.num_processes == 1:
        return flag
    return bool(accelerator.reduce(torch.tensor(int(flag), device=accelerator.device), reduction="sum"))


class NamedRows:
    """A collator whose batches also say which rows of the prepared set they are made of, under `row_ids`."""

    def __init__(self, collator):
        self.collator = collator

    def __call__(self, rows: list[dict]) -> dict:
        ids = [row.get("doc_ids", row.get("doc_id")) for row in rows]
        return {**self.collator(rows), ROW_IDS: ids}


def without_ids(batch: dict) -> dict:
    """The inputs of the model alone."""
    return {name: value for name, value in batch.items() if name != ROW_IDS}


def write_not_finite(folder: str | Path, process: int, step: int, loss: float, rows: list) -> Path:
    """Add the documents of a batch whose loss is no number to a file of the output folder; returns its path."""
    path = Path(folder) / (f"not-finite-{process}.jsonl" if process else "not-finite.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, "loss": str(loss), "doc_ids": rows}, ensure_ascii=False) + "\n")
    return path


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an error of torch means that a device, or the CPU's allocator, has no more memory to give."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


__all__ = [
    "PREEMPTED",
    "ROW_IDS",
    "NamedRows",
    "StopWhenTold",
    "any_process",
    "is_out_of_memory",
    "without_ids",
    "write_not_finite",
]
