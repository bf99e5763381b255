"""`RevelaTrainer`: transformers' Trainer with Revela's logs, label-free evaluation and checkpoints written whole."""

import json
import os
import re
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, rotate_checkpoints, speed_metrics
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME

from hub_cards.eos_tokenizer import save_tokenizer
from hub_cards.validation import retrieval_gain, sibling_retrieval

# Where a checkpoint is written before it gets its name.
_STAGING = ".saving"


@dataclass
class RevelaTrainingArguments(TrainingArguments):
    """transformers' own arguments; `per_device_train_batch_size` counts groups."""

    per_device_train_batch_size: int = field(default=1, metadata={"help": "Groups a device and forward pass."})
    per_device_eval_batch_size: int = field(default=1, metadata={"help": "Held-out groups a forward pass."})
    learning_rate: float = field(default=1e-4, metadata={"help": "Peak learning rate of the retriever."})
    lm_learning_rate: float | None = field(
        default=None, metadata={"help": "Peak learning rate of the LM; learning_rate, if left out."}
    )
    gate_learning_rate: float | None = field(
        default=None,
        metadata={"help": "Peak learning rate of gates and temperature; 20 x learning_rate if not given."},
    )
    logging_steps: float = field(default=10, metadata={"help": "Log every so many optimisation steps."})
    remove_unused_columns: bool = field(
        default=False, metadata={"help": "Keep False: the collator reads the groups' own columns."}
    )
    metric_for_best_model: str | None = field(
        default=None,
        metadata={"help": "What load_best_model_at_end goes by; eval_sibling_ndcg_at_10, if left out."},
    )
    overwrite_output: bool = field(
        default=False, metadata={"help": "Delete what an earlier run left in output_dir instead of refusing to start."}
    )

    def __post_init__(self):
        picks_best = self.load_best_model_at_end or self.save_strategy == SaveStrategy.BEST
        if picks_best and self.metric_for_best_model is None:
            # transformers' own default, the loss, is none of what `RevelaTrainer.evaluate` measures.
            self.metric_for_best_model = "eval_sibling_ndcg_at_10"
        super().__post_init__()


class RevelaTrainer(Trainer):
    """
    Trains a `RevelaForPreTraining` on prepared groups.

    Logs, averaged over the steps since the last log and over processes: `in_batch_loss`; `next_token_loss` and
    `in_batch_gain` (its difference to the in-batch loss), measured at the logged step; `max_weight` and
    `weight_entropy` (nats) of the weights a chunk gives; `learning_chunks`, the share of chunks whose weights are not
    one-hot and so give the retriever a gradient; `mean_cosine` of different chunks, near 1 where it collapses;
    `pairs` computed a forward pass; `tokens_per_second`; `gate`, the mean size of the gates; `temperature` where it is
    trained.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._sums: dict[str, torch.Tensor] = {}
        self._counts: dict[str, int] = {}
        self._tokens, self._since = 0, None
        self._staging: Path | None = None
        if self.args.n_gpu > 1:
            # DataParallel would cut the rows of a batch, and so the groups, between the GPUs.
            raise ValueError(
                f"One process sees {self.args.n_gpu} GPUs: start one a GPU with `accelerate launch --multi_gpu` or "
                "`revela-hub train`, or set CUDA_VISIBLE_DEVICES to one of them."
            )
        if self.args.bf16 or self.args.fp16:
            for module in self.model.modules():
                # Autocast casts what a product needs; peft's own cast, to the adapters' float32, would copy every
                # input twice.
                if hasattr(module, "cast_input_dtype_enabled"):
                    module.cast_input_dtype_enabled = False
        if self.args.device.type == "cpu" and self.args.bf16:
            # The fused kernel's backward in bf16 on a CPU is several times slower than plain products.
            self.model.retriever.set_attn_implementation("eager")

    # What a step logs

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self._since is None:
            self._since = time.perf_counter()
        # Scoring the plain stream as well costs a pass through the head, so only the steps that are logged do it.
        logged = (self.state.global_step + 1) % self.state.logging_steps == 0
        first = self.state.global_step == 0 and self.args.logging_first_step
        inputs = {**inputs, "return_next_token_loss": logged or first}
        loss, output = super().compute_loss(model, inputs, True, num_items_in_batch)
        self._collect(output, inputs, num_items_in_batch)
        return (loss, output) if return_outputs else loss

    @torch.no_grad()
    def _collect(self, output, inputs, num_items_in_batch) -> None:
        # Undo the division by the whole step's tokens: these are means over the tokens of this forward pass.
        scale = 1 if num_items_in_batch is None else num_items_in_batch / output.num_target_tokens
        weights, group_ids = output.in_batch_weights, inputs["group_ids"]
        self._add("in_batch_loss", output.in_batch_loss * scale)
        if output.next_token_loss is not None:
            self._add("next_token_loss", output.next_token_loss.detach() * scale)
            self._add("in_batch_gain", (output.next_token_loss.detach() - output.in_batch_loss) * scale)
        largest = weights.amax(-1)
        self._add("max_weight", largest.mean())
        self._add("weight_entropy", torch.special.entr(weights).sum(-1).mean())
        self._add("learning_chunks", (largest < 0.999).float().mean())
        if output.similarities is not None:
            same = (group_ids[:, None] == group_ids[None]).fill_diagonal_(False)
            self._add("mean_cosine", output.similarities[same].float().mean())
        self._add("pairs", torch.tensor(float(output.num_pairs), device=weights.device))
        self._tokens += int(inputs["attention_mask"].sum())

    def _add(self, name: str, value: torch.Tensor) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + value.float()
        self._counts[name] = self._counts.get(name, 0) + 1

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and self._sums:
            names = sorted(self._sums)
            means = torch.stack([self._sums[name] / self._counts[name] for name in names])
            means = self.accelerator.reduce(means, reduction="mean").tolist()
            logs.update(zip(names, means, strict=True))
            seconds = time.perf_counter() - self._since
            logs["tokens_per_second"] = self._tokens * self.accelerator.num_processes / max(seconds, 1e-9)
            model = self.accelerator.unwrap_model(self.model)
            if model.lm.in_batch_gate is not None:
                logs["gate"] = float(model.lm.in_batch_gate.detach().abs().mean())
            if model.log_temperature is not None:
                logs["temperature"] = float(model.temperature.detach())
            self._sums, self._counts, self._tokens, self._since = {}, {}, 0, None
        super().log(logs, start_time)

    # Learning rates of the parts

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            model = self.model if model is None else model
            decayed = set(self.get_decay_parameter_names(model))
            groups: dict[tuple[float, float], list] = {}
            for name, parameter in model.named_parameters():
                if not parameter.requires_grad:
                    continue
                ours = name.endswith(("in_batch_gate", "log_temperature"))
                decay = self.args.weight_decay if name in decayed and not ours else 0.0
                groups.setdefault((self._learning_rate_of(name, ours), decay), []).append(parameter)
            optimizer_class, options = self.get_optimizer_cls_and_kwargs(self.args, model)
            options.pop("lr", None)
            self.optimizer = optimizer_class(
                [{"params": members, "lr": rate, "weight_decay": decay} for (rate, decay), members in groups.items()],
                lr=self.args.learning_rate,
                **options,
            )
        return self.optimizer

    def _learning_rate_of(self, name: str, ours: bool) -> float:
        args = self.args
        if ours:
            return 20 * args.learning_rate if args.gate_learning_rate is None else args.gate_learning_rate
        if name.startswith("lm.") and args.lm_learning_rate is not None:
            return args.lm_learning_rate
        return args.learning_rate

    # Evaluation without labels

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Retrieval gain and sibling retrieval on held-out groups; see `hub_cards.validation`."""
        groups = self.eval_dataset if eval_dataset is None else eval_dataset
        start = time.time()
        model = self.accelerator.unwrap_model(self.model)
        was_training = model.training
        model.eval()
        step = self.args.per_device_eval_batch_size
        batches = (
            self._prepare_inputs(self.data_collator([groups[i] for i in range(first, min(first + step, len(groups)))]))
            for first in range(0, len(groups), step)
        )
        # The forward pass that accelerate wrapped has the autocast of the training; the embedding alone has not.
        with self.accelerator.autocast():
            gain = retrieval_gain(model, batches)
            siblings = sibling_retrieval(
                groups,
                lambda texts: self._encode(model, self.data_collator.query_prompt, texts),
                lambda texts: self._encode(model, self.data_collator.document_prompt, texts),
                span_ratio=self.data_collator.similarity_span_ratio,
            )
        model.train(was_training)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in gain.items()}
        metrics.update({f"{metric_key_prefix}_sibling_{name}": value for name, value in siblings.items()})
        metrics.update(speed_metrics(metric_key_prefix, start, num_samples=len(groups)))
        if self._since is not None:
            self._since += time.time() - start
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    @torch.no_grad()
    def _encode(self, model, prompt: str, texts: list[str], batch_size: int = 32) -> torch.Tensor:
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        embeddings = [None] * len(texts)
        for first in range(0, len(order), batch_size):
            chosen = order[first : first + batch_size]
            batch = self.data_collator.retriever_tokenizer(
                [prompt + texts[index] for index in chosen],
                padding=True,
                truncation=True,
                max_length=self.data_collator.retriever_max_length,
                return_tensors="pt",
            ).to(self.args.device)
            for index, embedding in zip(chosen, model.embed(batch["input_ids"], batch["attention_mask"]), strict=True):
                embeddings[index] = embedding.float().cpu()
        return torch.stack(embeddings)

    # Checkpoints: written beside and renamed, so that what looks like a checkpoint is one

    def _get_output_dir(self, trial) -> str:
        return super()._get_output_dir(trial) if self._staging is None else str(self._staging)

    def _save_checkpoint(self, model, trial) -> None:
        run = Path(self._get_output_dir(trial))
        target = run / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        earlier_best = self.state.best_model_checkpoint
        self._begin_staging(run)
        try:
            super()._save_checkpoint(model, trial)
        finally:
            staged, self._staging = self._staging / target.name, None
        self.accelerator.wait_for_everyone()
        # transformers looked for the best checkpoint beside the staged one. It may have been measured but not saved.
        best = run / f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
        self.state.best_model_checkpoint = str(best) if best == target or best.is_dir() else earlier_best
        if self.args.should_save:
            self.state.save_to_json(str(staged / TRAINER_STATE_NAME))
            _replace(staged, target)
            shutil.rmtree(run / _STAGING, ignore_errors=True)
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
            super().save_model(output_dir, _internal_call=True)
            return
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        self._begin_staging(folder)
        try:
            super().save_model(str(self._staging), _internal_call=True)
        finally:
            staged, self._staging = self._staging, None
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            for path in sorted(staged.iterdir(), key=lambda path: path.name == CONFIG_NAME):
                _replace(path, folder / path.name)
            staged.rmdir()
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _begin_staging(self, folder: Path) -> None:
        self._staging = folder / _STAGING
        if self.args.should_save:
            shutil.rmtree(self._staging, ignore_errors=True)
        self.accelerator.wait_for_everyone()

    def _save(self, output_dir=None, state_dict=None) -> None:
        super()._save(output_dir, state_dict)
        if not self.args.should_save:
            return
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        save_tokenizer(self.data_collator.retriever_tokenizer, folder)
        save_tokenizer(self.data_collator.lm_tokenizer, folder / "lm_tokenizer")
        # The Trainer pickles its arguments; a checkpoint of ours holds no pickle that anyone would have to trust.
        (folder / TRAINING_ARGS_NAME).unlink(missing_ok=True)
        arguments = json.dumps(self.args.to_sanitized_dict(), indent=2, sort_keys=True, default=str)
        (folder / "training_args.json").write_text(arguments + "\n", encoding="utf-8")


def _replace(source: Path, target: Path) -> None:
    """Move a file or folder to where another may be."""
    if target.is_dir():
        shutil.rmtree(target)
    os.replace(source, target)


def last_checkpoint(args: TrainingArguments) -> str | None:
    """
    The checkpoint to resume from, after a look at what the output folder holds.

    Returns:
        A path, or `None` for a fresh start. `--resume_from_checkpoint true` takes the newest one; a path, that one.

    Raises:
        FileExistsError: if the folder holds another run that is neither resumed nor to be overwritten, or a model
            that no run wrote.
        FileNotFoundError: if there is nothing to resume from.
    """
    folder = Path(args.output_dir)
    checkpoints = {
        int(match[1]): path
        for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*")
        if (match := re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", path.name))
    }
    resume = str(args.resume_from_checkpoint or "false")
    if resume.lower() in ("true", "last"):
        whole = [number for number, path in checkpoints.items() if _can_resume(path)]
        if not whole:
            raise FileNotFoundError(f"{folder} holds no checkpoint to resume from: leave resume_from_checkpoint out.")
        return str(checkpoints[max(whole)])
    if resume.lower() != "false":
        if not _can_resume(Path(resume)):
            raise FileNotFoundError(
                f"{resume} is no checkpoint to resume from, as it lacks {TRAINER_STATE_NAME} or the state of the "
                "random numbers: name a checkpoint-N folder, or pass true for the newest in output_dir."
            )
        return resume
    weights = list(folder.glob("model*.safetensors"))
    ours = _model_type(folder) == "revela"
    if weights and not ours:
        raise FileExistsError(f"{folder} holds a model that is no Revela run: choose another --output_dir.")
    if checkpoints or weights:
        if not getattr(args, "overwrite_output", False):
            raise FileExistsError(
                f"{folder} holds an earlier run. Pass --resume_from_checkpoint true to go on with it, "
                "--overwrite_output true to delete it, or another --output_dir."
            )
        if args.should_save:
            # What else lies there is the user's. Files of the model that stay are written again under their names.
            old = [*checkpoints.values(), folder / _STAGING]
            if ours:
                old += [*weights, *(folder / name for name in (SAFE_WEIGHTS_INDEX_NAME, CONFIG_NAME))]
                old += [folder / TRAINER_STATE_NAME, folder / "training_args.json"]
            for path in old:
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
    return None


def _can_resume(checkpoint: Path) -> bool:
    # Without the optimizer's state, as in an output folder or with save_only_model, Trainer would begin a new one.
    return (checkpoint / TRAINER_STATE_NAME).exists() and any(checkpoint.glob("rng_state*.pth"))


def _model_type(folder: Path) -> str | None:
    config = folder / CONFIG_NAME
    return json.loads(config.read_text(encoding="utf-8")).get("model_type") if config.exists() else None


__all__ = ["RevelaTrainer", "RevelaTrainingArguments", "last_checkpoint"]
