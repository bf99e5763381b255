"""sentence-transformers' trainer as fine-tuning uses it: losses, evaluation, stops for a round, and resumption."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import PartialState
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.evaluation import InformationRetrievalEvaluator
from sentence_transformers.losses import (
    CachedMultipleNegativesRankingLoss,
    DistillKLDivLoss,
    MatryoshkaLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.util import cos_sim, dot_score, pairwise_cos_sim, pairwise_dot_score
from torch import nn
from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy
from transformers.utils import ADAPTER_SAFE_WEIGHTS_NAME

from hub_cards.card import TRAINING_RECORD
from hub_cards.checkpoints import check_folder
from hub_cards.eos_tokenizer import save_tokenizer
from trainers.checkpoints import last_checkpoint
from trainers.finetune_data import DevelopmentSet
from trainers.finetune_model import STAGING, has_adapters
from trainers.mishaps import StopWhenTold
from trainers.pushing import PushingTrainer
from trainers.record import write_record as write_training_record

RECORD, NEGATIVES, CROSS_ENCODER = "finetune.json", "negatives", "cross_encoder"
"""What a run leaves in its output folder: its settings, the negatives of its rounds, and a teacher."""
_PEFT = "base_model.model."  # what peft puts before a weight's name


@dataclass
class FinetuneTrainingArguments(SentenceTransformerTrainingArguments):
    """sentence-transformers' own arguments; one example is a query with its positive and its hard negatives."""

    # What fine-tuning sets by itself, or has no use for with one set of rows.
    prompts: str | None = field(default=None, init=False)
    router_mapping: str | None = field(default=None, init=False)
    learning_rate_mapping: str | None = field(default=None, init=False)
    warmup_ratio: float | None = field(default=None, init=False)

    per_device_train_batch_size: int = field(default=16, metadata={"help": "Queries a device and forward pass."})
    learning_rate: float = field(default=2e-5, metadata={"help": "Peak learning rate."})
    batch_sampler: str = field(
        default="no_duplicates",
        metadata={
            "help": "no_duplicates keeps a text from being its own negative in a batch; batch_sampler is plain."
        },
    )
    logging_steps: float = field(default=10, metadata={"help": "Log every so many optimisation steps."})
    metric_for_best_model: str | None = field(
        default=None,
        metadata={"help": "What load_best_model_at_end goes by; nDCG@10 on the development set, if left out."},
    )
    overwrite_output: bool = field(
        default=False, metadata={"help": "Delete what an earlier run left in output_dir instead of refusing to start."}
    )

    def __post_init__(self):
        picks_best = self.load_best_model_at_end or self.save_strategy == SaveStrategy.BEST
        if picks_best and self.metric_for_best_model is None:
            # The prefix is the similarity's, which only the model knows; `train` puts it there.
            self.metric_for_best_model = "eval_dev_cosine_ndcg@10"
        super().__post_init__()


class FinetuneTrainer(PushingTrainer, SentenceTransformerTrainer):
    """
    sentence-transformers' trainer, with checkpoints that hold no pickled arguments, and adapters alone under LoRA.

    (transformers' own loading of adapters asks for a newer peft than this package does.)

    `describe`, called with the step, says what `training_record.json` beside a checkpoint has.
    """

    describe: Callable[[int], dict] | None = None

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.stop = StopWhenTold(self.accelerator)
        self.add_callback(self.stop)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Nothing: what goes to the Hub is the retriever at the end."""

    def _save(self, output_dir=None, state_dict=None) -> None:
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        if has_adapters(self.model):
            folder.mkdir(parents=True, exist_ok=True)
            _save_adapters(self.model[0].auto_model, folder)
            save_tokenizer(self.model.tokenizer, folder)
        else:
            super()._save(output_dir, state_dict)
            (folder / TRAINING_ARGS_NAME).unlink()
        arguments = json.dumps(self.args.to_sanitized_dict(), indent=2, sort_keys=True, default=str)
        (folder / "training_args.json").write_text(arguments + "\n", encoding="utf-8")
        if self.describe is not None:
            write_training_record(folder / TRAINING_RECORD, self.describe(self.state.global_step))

    def _load_from_checkpoint(self, checkpoint_path: str) -> None:
        if has_adapters(self.model):
            backbone = self.model[0].auto_model
            weights = load_file(Path(checkpoint_path) / ADAPTER_SAFE_WEIGHTS_NAME, device=str(backbone.device))
            set_peft_model_state_dict(backbone, {name.removeprefix(_PEFT): value for name, value in weights.items()})
        else:
            check_folder(checkpoint_path)
            super()._load_from_checkpoint(checkpoint_path)


def _save_adapters(backbone: nn.Module, folder: Path) -> None:
    """As peft writes them, so that `PeftModel.from_pretrained(backbone, folder)` reads them."""
    weights = get_peft_model_state_dict(backbone)
    save_file(
        {_PEFT + name: value.contiguous() for name, value in weights.items()}, folder / ADAPTER_SAFE_WEIGHTS_NAME
    )
    backbone.peft_config["default"].save_pretrained(str(folder))


class StopAt(TrainerCallback):
    """Ends training at a step and leaves a checkpoint there, from which the next round goes on."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step >= self.step:
            control.should_save = control.should_training_stop = True


# What the trainer is given


def make_loss(
    model: SentenceTransformer,
    method: str,
    temperature: float | None = None,
    cross_device_negatives: bool = True,
    grad_cache_batch_size: int = 0,
    matryoshka_dims: list[int] | None = None,
    matryoshka_weights: list[float] | None = None,
) -> nn.Module:
    """sentence-transformers' loss for the method, on the similarity that the model ranks by; see `MethodArguments`."""
    if matryoshka_dims is not None:
        loss = make_loss(model, method, temperature, cross_device_negatives, grad_cache_batch_size)
        return MatryoshkaLoss(model, loss, [*matryoshka_dims, model.get_embedding_dimension()], matryoshka_weights)
    cosine = model.similarity_fn_name == "cosine"
    if temperature is None:
        temperature = 0.05 if cosine else 1.0
    if method == "distill":
        # Its own temperatures would scale the loss by their square.
        return DistillKLDivLoss(model, scaled(pairwise_cos_sim if cosine else pairwise_dot_score, temperature))
    options = {
        "scale": 1 / temperature,
        "similarity_fct": cos_sim if cosine else dot_score,
        "gather_across_devices": cross_device_negatives and PartialState().num_processes > 1,
    }
    if grad_cache_batch_size:
        return CachedMultipleNegativesRankingLoss(model, mini_batch_size=grad_cache_batch_size, **options)
    return MultipleNegativesRankingLoss(model, **options)


def scaled(similarity: Callable, temperature: float) -> Callable:
    """A similarity divided by the temperature, so that its softmax is the one that the retriever ranks by."""

    def divided(queries: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        return similarity(queries, documents) / temperature

    return divided


def make_evaluator(dev: DevelopmentSet | None, batch_size: int) -> InformationRetrievalEvaluator | None:
    """nDCG@10 and the paper's MRR@10 and recall, by exact search with the model's own prompts and similarity."""
    if dev is None:
        return None
    return InformationRetrievalEvaluator(
        dev.queries,
        dev.corpus,
        dev.relevant,
        name="dev",
        batch_size=batch_size,
        accuracy_at_k=[1],
        precision_recall_at_k=[10, 100],
        write_csv=False,
    )


def curves(history: list[dict]) -> list[dict]:
    """What a model card draws of a trainer's log: `step` with `finetune_loss` or `dev_ndcg_at_10`."""
    kept = []
    for entry in history:
        found = {"finetune_loss": entry["loss"]} if "loss" in entry else {}
        measured = [value for name, value in entry.items() if name.endswith("_ndcg@10")]
        if measured:
            found["dev_ndcg_at_10"] = measured[0]
        if found:
            kept.append({"step": entry["step"], **found})
    return kept


# Checkpoints


def step_of(checkpoint: str | os.PathLike) -> int:
    """The number of optimisation steps behind a checkpoint."""
    return json.loads((Path(checkpoint) / TRAINER_STATE_NAME).read_text(encoding="utf-8"))["global_step"]


def starting_point(args: FinetuneTrainingArguments, record: dict) -> str | None:
    """
    The checkpoint to resume from, after a look at what the output folder holds.

    Args:
        record: the settings that decide what a step learns from; a run is only gone on with under its own.

    Returns:
        A path, or `None` for a fresh start. `--resume_from_checkpoint true` takes the newest one; a path, that one.

    Raises:
        FileExistsError: if the folder holds another run that is neither resumed nor to be overwritten, or a model
            that no fine-tuning wrote.
        FileNotFoundError: if there is nothing to resume from.
        ValueError: if the run to be resumed had other settings.
    """
    if str(args.resume_from_checkpoint or "false").lower() != "false":
        checkpoint = last_checkpoint(args)
        _check_record(Path(checkpoint).parent / RECORD, record)
        return checkpoint
    folder = Path(args.output_dir)
    ours = (folder / RECORD).exists()
    others = [*folder.glob("*.safetensors"), *folder.glob("modules.json"), *folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*")]
    if others and not ours:
        raise FileExistsError(f"{folder} holds a model that is no fine-tuning run: choose another --output_dir.")
    if ours and not args.overwrite_output:
        raise FileExistsError(
            f"{folder} holds an earlier run. Pass --resume_from_checkpoint true to go on with it, "
            "--overwrite_output true to delete it, or another --output_dir."
        )
    if ours and args.should_save:
        # What else lies there is the user's.
        old = [
            *others,
            *(
                folder / name
                for name in (NEGATIVES, CROSS_ENCODER, "eval", STAGING, TRAINER_STATE_NAME, TRAINING_RECORD)
            ),
        ]
        for path in [*old, folder / RECORD]:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    return None


def write_record(args: FinetuneTrainingArguments, record: dict) -> None:
    """Leave word of what the run is, which also marks the folder as one."""
    if args.should_save:
        folder = Path(args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _check_record(path: Path, record: dict) -> None:
    if not path.exists():
        raise ValueError(f"{path.parent} has no {RECORD}, so what its checkpoints were trained on is not known.")
    before = json.loads(path.read_text(encoding="utf-8"))
    changed = [name for name in record if json.loads(json.dumps(record[name])) != before.get(name)]
    if changed:
        name = changed[0]
        old, new = before.get(name), record[name]
        if isinstance(old, dict) and isinstance(new, dict):
            name = next(key for key in new if json.loads(json.dumps(new[key])) != old.get(key))
            old, new = old.get(name), new[name]
        raise ValueError(
            f"The run in {path.parent} had {name} {old!r}, not {new!r}: resume it as it was, or start another in "
            "another --output_dir."
        )


__all__ = [
    "CROSS_ENCODER",
    "NEGATIVES",
    "RECORD",
    "FinetuneTrainer",
    "FinetuneTrainingArguments",
    "StopAt",
    "curves",
    "make_evaluator",
    "make_loss",
    "starting_point",
    "step_of",
    "write_record",
]
