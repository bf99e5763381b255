"""What the trainers of both methods share: transformers' Trainer with checkpoints written whole, and averaged logs."""

import ctypes
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch
from safetensors import SafetensorError
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, rotate_checkpoints, speed_metrics
from transformers.utils import CONFIG_NAME

from hub_cards.card import TRAINING_RECORD, read_training_record
from hub_cards.eos_tokenizer import save_tokenizer
from trainers import sharding
from trainers.checkpoints import (
    ARGUMENTS,
    STAGING,
    check_config,
    check_position,
    check_step,
    clear_output,
    load_tensors,
    read_weights,
    replace,
    seal,
)
from trainers.mishaps import (
    ROW_IDS,
    NamedRows,
    StopWhenTold,
    any_process,
    is_out_of_memory,
    without_ids,
    write_not_finite,
)
from trainers.pushing import PUSHING, PushingTrainer
from trainers.record import describe_machine, write_record


@dataclass
class PretrainingArguments(TrainingArguments):
    """transformers' own arguments, with the defaults and the folder handling of both methods."""

    model_type: ClassVar[str]
    """What the config of a checkpoint of the method says."""

    learning_rate: float = field(default=1e-4, metadata={"help": "Peak learning rate."})
    logging_steps: float = field(default=10, metadata={"help": "Log every so many optimisation steps."})
    remove_unused_columns: bool = field(
        default=False, metadata={"help": "Keep False: the collator reads the prepared set's own columns."}
    )
    metric_for_best_model: str | None = field(
        default=None,
        metadata={"help": "What load_best_model_at_end goes by; eval_sibling_ndcg_at_10, if left out."},
    )
    overwrite_output: bool = field(
        default=False, metadata={"help": "Delete what an earlier run left in output_dir instead of refusing to start."}
    )
    skip_nan: bool = field(
        default=False,
        metadata={
            "help": "Leave out and count steps whose loss is no finite number, instead of stopping at the first."
        },
    )

    def __post_init__(self):
        picks_best = self.load_best_model_at_end or self.save_strategy == SaveStrategy.BEST
        if picks_best and self.metric_for_best_model is None:
            # transformers' own default, the loss, is none of what `evaluate` measures for Revela.
            self.metric_for_best_model = "eval_sibling_ndcg_at_10"
        super().__post_init__()


class PretrainingTrainer(PushingTrainer):
    """
    transformers' Trainer for a method of ours.

    A subclass says what a step adds to the log (`_add`), what an evaluation measures (`_measure`) and which tokenizers
    a checkpoint holds (`_tokenizers`). Logged besides, over the steps since the last log: `tokens_per_second`.

    Beside each checkpoint lies `training_record.json`, which the model card is made of: `facts` (what `describe_run`
    says of the options and the data), the machine, and what was spent up to there, earlier parts of the run included.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.args.device.type == "cpu":
            keep_freed_memory()
        self._sums: dict[str, torch.Tensor] = {}
        self._counts: dict[str, int | torch.Tensor] = {}
        self._tokens, self._since = 0, None
        self.facts: dict = {}
        self._spent, self._began = {"tokens": 0, "seconds": 0.0}, time.time()
        self._staging: Path | None = None
        self._stop = StopWhenTold(self.accelerator)
        self.add_callback(self._stop)
        self._skipped_steps, self._not_finite = 0, False
        if self.args.skip_nan and self.is_deepspeed_enabled:
            raise ValueError(
                "`skip_nan` cannot leave out a step of DeepSpeed, which makes it within the backward pass."
            )
        if self.args.n_gpu > 1:
            # DataParallel would cut the rows of a batch between the GPUs: groups apart, and counts that no longer fit.
            raise ValueError(
                f"One process sees {self.args.n_gpu} GPUs: start one a GPU with `accelerate launch --multi_gpu` or "
                "`revela-hub train`, or set CUDA_VISIBLE_DEVICES to one of them."
            )
        started = int(os.environ.get("WORLD_SIZE", "1"))
        if started != self.args.world_size:
            raise ValueError(
                f"{started} processes were started, but each would train by itself: on a CPU pass --use_cpu true, or "
                "start them by `revela-hub train`, which does."
            )
        if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true" and not self.is_fsdp_enabled:
            raise ValueError(
                "accelerate splits a model by FSDP on GPUs only and would train without it: take another launch "
                "config, such as ddp, or zero3, which runs on a CPU as well."
            )

    # What a step logs

    def _start_clock(self) -> None:
        if self._since is None:
            self._since = time.perf_counter()

    def _add(self, name: str, value: torch.Tensor, count: int | torch.Tensor = 1) -> None:
        """Take a sum over `count` things into the mean that is logged next, if it is a number."""
        value = value.float()
        finite = torch.isfinite(value)
        self._sums[name] = self._sums.get(name, 0.0) + torch.where(finite, value, 0.0)
        self._counts[name] = self._counts.get(name, 0) + count * finite

    def _log_parts(self) -> dict[str, float]:
        """What a subclass logs at each log besides the means."""
        return {}

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and self._sums:
            names = sorted(self._sums)
            sums = torch.stack([self._sums[name] for name in names])
            counts = torch.stack([torch.as_tensor(self._counts[name], device=sums.device).float() for name in names])
            means = self.accelerator.reduce(sums, reduction="sum") / self.accelerator.reduce(counts, reduction="sum")
            # Over nothing but skipped steps a mean is none.
            logs.update((name, mean) for name, mean in zip(names, means.tolist(), strict=True) if mean == mean)
            seconds = time.perf_counter() - self._since
            logs["tokens_per_second"] = self._tokens * self.accelerator.num_processes / max(seconds, 1e-9)
            logs.update(self._log_parts())
            if self.args.skip_nan:
                logs["skipped_steps"] = self._skipped_steps
            self._spent["tokens"] += self._tokens * self.accelerator.num_processes
            self._sums, self._counts, self._tokens, self._since = {}, {}, 0, None
        super().log(logs, start_time)

    # Steps that go wrong

    def get_train_dataloader(self):
        collator, self.data_collator = self.data_collator, NamedRows(self.data_collator)
        try:
            return super().get_train_dataloader()
        finally:
            self.data_collator = collator

    def training_step(self, model, inputs, num_items_in_batch=None) -> torch.Tensor:
        try:
            loss = super().training_step(model, without_ids(inputs), num_items_in_batch)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise MemoryError(
                f"Step {self.state.global_step + 1} ran out of memory. Lower per_device_train_batch_size (and raise "
                f"gradient_accumulation_steps by as much), {self._what_takes_memory}, or pass "
                f"--gradient_checkpointing true; a model of its own takes less under --launch-config zero3. ({error})"
            ) from error
        if not bool(torch.isfinite(loss)):
            step, rows = self.state.global_step + 1, inputs[ROW_IDS]
            path = write_not_finite(self.args.output_dir, self.args.process_index, step, float(loss), rows)
            if not self.args.skip_nan:
                raise ValueError(
                    f"The loss of step {step} is {float(loss)}; the documents of its batch are in {path}. Look at "
                    "them, lower the learning rate, or pass --skip_nan true to leave such steps out."
                )
            self._not_finite = True
        return loss

    def _clip_grad_norm(self, model):
        if self.args.skip_nan and any_process(self.accelerator, self._not_finite):
            # Without a gradient the optimizer leaves everything as it is.
            model.zero_grad(set_to_none=True)
            self._skipped_steps += 1
        self._not_finite = False
        return super()._clip_grad_norm(model)

    # Evaluation without labels

    def _measure(self, model, rows) -> dict[str, float]:
        """What an evaluation of held-out rows measures, by name; called in eval mode, under training's autocast."""
        raise NotImplementedError

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Measures without labels, on held-out rows; see `hub_cards.validation`."""
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        start = time.time()
        model = self.accelerator.unwrap_model(self.model)
        was_training = model.training
        model.eval()
        # The forward pass that accelerate wrapped has the autocast of the training; the embedding alone has not.
        with self.accelerator.autocast():
            measured = self._measure(model, rows)
        model.train(was_training)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in measured.items()}
        metrics.update(speed_metrics(metric_key_prefix, start, num_samples=len(rows)))
        if self._since is not None:
            self._since += time.time() - start
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _batches(self, rows) -> Iterator[dict[str, torch.Tensor]]:
        """The collator's batches of held-out rows, on the device."""
        step = self.args.per_device_eval_batch_size
        for first in range(0, len(rows), step):
            batch = [rows[index] for index in range(first, min(first + step, len(rows)))]
            yield self._prepare_inputs(self.data_collator(batch))

    @torch.no_grad()
    def _embed(self, embed, tokenizer, max_length: int, texts: list[str], batch_size: int = 32) -> torch.Tensor:
        """(N, d) embeddings of N texts, on the CPU; `embed` takes (B, L) ids and attention mask, longest first."""
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        embeddings = [None] * len(texts)
        for first in range(0, len(order), batch_size):
            chosen = order[first : first + batch_size]
            batch = tokenizer(
                [texts[index] for index in chosen],
                padding=True,
                truncation=True,
                max_length=max_length,
                return_tensors="pt",
            ).to(self.args.device)
            for index, embedding in zip(chosen, embed(batch["input_ids"], batch["attention_mask"]), strict=True):
                embeddings[index] = embedding.float().cpu()
        return torch.stack(embeddings)

    # A whole run

    def run(self, resume_from_checkpoint: str | None) -> None:
        """
        Train, or go on with an earlier run; the last state is left in the output folder itself.

        Raises:
            SystemExit: with status 143 if SIGTERM ended the run; there is a checkpoint to go on from.
        """
        folder = Path(self.args.output_dir)
        if resume_from_checkpoint is not None:
            check_config(resume_from_checkpoint, self.model.config)
            check_position(resume_from_checkpoint, self._position())
            check_step(resume_from_checkpoint, self.args.max_steps)
            self._go_on_from(read_training_record(resume_from_checkpoint))
        elif self.args.should_save:
            # Only now, when all that the run needs has been found and read.
            clear_output(folder)
        if self.args.should_save:
            shutil.rmtree(folder / PUSHING, ignore_errors=True)  # of a run that was killed
        self._began = time.time()
        self.accelerator.wait_for_everyone()
        self.train(resume_from_checkpoint=resume_from_checkpoint)
        self._stop.leave_if_told(self.args, self.state)
        if self.args.load_best_model_at_end and self.state.best_global_step:
            self.facts["weights_of_step"] = self.state.best_global_step
        self.save_state()
        if self.args.push_to_hub:
            self.push_to_hub()
        else:
            self.save_model()

    def _position(self) -> dict[str, int]:
        """What decides which rows a step is made of."""
        args = self.args
        rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        return {"rows_a_step": rows, "train_rows": len(self.train_dataset), "seed": args.seed}

    # What the model card is made of

    def _record(self) -> dict:
        # This process' tokens since the last log stand for those of the others.
        tokens = self._spent["tokens"] + self._tokens * self.accelerator.num_processes
        spent = {"tokens": tokens, "seconds": self._spent["seconds"] + time.time() - self._began}
        machine = describe_machine(self.args.device, self.accelerator.num_processes)
        return {"method": self.args.model_type, "step": self.state.global_step, **self.facts, **machine, **spent}

    def _go_on_from(self, record: dict) -> None:
        self._spent = {name: record.get(name, 0) for name in self._spent}

    # A model that DeepSpeed or FSDP2 splits over the processes: its checkpoints are those of one process

    @property
    def _is_split(self) -> bool:
        return self.is_deepspeed_enabled or self.is_fsdp_enabled

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        if not self._is_split:
            return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        groups = self.create_optimizer().param_groups
        self._optimized = [[names[id(parameter)] for parameter in group["params"]] for group in groups]
        self.optimizer = None
        if resume_from_checkpoint is not None:
            self._load_from_checkpoint(resume_from_checkpoint)
        if self.is_fsdp_enabled:
            with sharding.vocabulary_in_root(self.model, self.accelerator.state.fsdp_plugin):
                prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
            # What an evaluation calls besides `forward` has to gather the weights as well.
            register_fsdp_forward_method(self.model, "embed")
        else:
            if self.args.bf16:
                # ZeRO-3 reads backbones in bfloat16; adapters and what else was made beside them are float32 still.
                # Of all that is trained DeepSpeed keeps float32 copies.
                for parameter in self.model.parameters():
                    if not hasattr(parameter, "ds_id"):
                        parameter.data = parameter.data.bfloat16()
            prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        if resume_from_checkpoint is not None:
            if self.is_deepspeed_enabled:
                # Once more, for the float32 copies that it keeps beside bfloat16 weights.
                sharding.load_weights(self.model, read_weights(resume_from_checkpoint))
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        return prepared

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self._is_split:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        state = sharding.whole_optimizer(self.model, self.optimizer, self._optimized)
        if self.args.should_save:
            torch.save(state, os.path.join(output_dir, OPTIMIZER_NAME))
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not self._is_split:
            super()._load_optimizer_and_scheduler(checkpoint)
        elif checkpoint is not None:
            state = load_tensors(os.path.join(checkpoint, OPTIMIZER_NAME))
            sharding.load_optimizer(self.model, self.optimizer, self._optimized, state)
            self.lr_scheduler.load_state_dict(load_tensors(os.path.join(checkpoint, SCHEDULER_NAME)))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        model, weights = self.model if model is None else model, read_weights(resume_from_checkpoint)
        left_out = model._left_out() if hasattr(model, "_left_out") else set()
        missing = sorted(set(model.state_dict()) - set(weights) - set(model.all_tied_weights_keys) - left_out)
        if missing:
            raise ValueError(
                f"{resume_from_checkpoint} lacks {len(missing)} weights of this run's model, {missing[0]!r} first: "
                "resume with the options of the first run."
            )
        sharding.load_weights(model, weights)

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def _write_model(self, folder: str) -> None:
        if not self._is_split:
            super().save_model(folder, _internal_call=True)
            return
        weights = sharding.whole_weights(self.model)
        with sharding.unwrapped_class(self.model):
            self._save(folder, state_dict=weights)

    # Checkpoints: written beside and renamed, so that what looks like a checkpoint is one

    def _get_output_dir(self, trial) -> str:
        return super()._get_output_dir(trial) if self._staging is None else str(self._staging)

    def _save_checkpoint(self, model, trial) -> None:
        run = Path(self._get_output_dir(trial))
        target = run / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        earlier_best = self.state.best_model_checkpoint
        with self._written_beside(run) as staging:
            super()._save_checkpoint(model, trial)
        staged = staging / target.name
        # transformers looked for the best checkpoint beside the staged one. It may have been measured but not saved.
        best = run / f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
        self.state.best_model_checkpoint = str(best) if best == target or best.is_dir() else earlier_best
        if self.args.should_save:
            self.state.save_to_json(str(staged / TRAINER_STATE_NAME))
            seal(staged)
            replace(staged, target)
            shutil.rmtree(run / STAGING, ignore_errors=True)
            if self.args.push_to_hub:
                self._push_from_checkpoint(str(target))
            rotate_checkpoints(
                output_dir=str(run),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=False,
            )
        self.accelerator.wait_for_everyone()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As in transformers, but each file is moved to its place when all are written, the config last."""
        if self._staging is not None:
            self._write_model(output_dir)
            return
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        with self._written_beside(folder) as staged:
            self._write_model(str(staged))
        if self.args.should_save:
            written = sorted(staged.iterdir(), key=lambda path: path.name == CONFIG_NAME)
            for path in written:
                replace(path, folder / path.name)
            staged.rmdir()
            self._saved = [path.name for path in written]
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save")

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._staging is None:  # transformers calls it while the checkpoint is still being written
            super()._push_from_checkpoint(checkpoint_folder)

    @contextmanager
    def _written_beside(self, folder: Path) -> Iterator[Path]:
        """A folder to write into; what was written there is thrown away if that fails."""
        self._staging = staging = folder / STAGING
        if self.args.should_save:
            shutil.rmtree(staging, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        try:
            yield staging
        except (OSError, SafetensorError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "PytorchStreamWriter" not in str(error):
                raise
            shutil.rmtree(staging, ignore_errors=True)
            raise OSError(
                f"The state after step {self.state.global_step} could not be written to {folder}: {error}. What was "
                f"saved before is whole ({shutil.disk_usage(folder).free / 2**30:.1f} GiB are free): make room there, "
                "and go on with --resume_from_checkpoint true."
            ) from error
        finally:
            self._staging = None
        self.accelerator.wait_for_everyone()

    @property
    def _what_takes_memory(self) -> str:
        """Options of the data to lower, for an error."""
        raise NotImplementedError

    def _tokenizers(self) -> dict:
        """The tokenizers of a checkpoint by their folder in it."""
        raise NotImplementedError

    def _save(self, output_dir=None, state_dict=None) -> None:
        if state_dict is not None:
            # Gathered, a tied weight is there once more under its second name.
            tied = self.accelerator.unwrap_model(self.model).all_tied_weights_keys
            state_dict = {name: value for name, value in state_dict.items() if name not in tied}
        super()._save(output_dir, state_dict)
        if not self.args.should_save:
            return
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        for name, tokenizer in self._tokenizers().items():
            save_tokenizer(tokenizer, folder / name)
        # The Trainer pickles its arguments; a checkpoint of ours holds no pickle that anyone would have to trust.
        (folder / TRAINING_ARGS_NAME).unlink(missing_ok=True)
        arguments = self.args.to_sanitized_dict() | {"position": self._position()}
        text = json.dumps(arguments, indent=2, sort_keys=True, default=str)
        (folder / ARGUMENTS).write_text(text + "\n", encoding="utf-8")
        write_record(folder / TRAINING_RECORD, self._record())


def keep_freed_memory() -> None:
    """
    Have glibc keep what is freed instead of giving it back to the system, for the rest of the process.

    Training frees and asks for the same large tensors at each step, and on a CPU up to a quarter of the time goes
    into the page faults of fresh memory (benchmarks/in_batch_attention.md). Nothing happens with another C library.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        trim_threshold, mmap_max = -1, -4  # as in malloc.h
        libc.mallopt(trim_threshold, 2**31 - 1)
        libc.mallopt(mmap_max, 0)


__all__ = ["PretrainingArguments", "PretrainingTrainer", "keep_freed_memory"]
