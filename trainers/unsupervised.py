"""
Train a retriever as SimCSE or TSDAE do, on the same prepared text as Revela; both are sentence-transformers' own.

    accelerate launch trainers/unsupervised.py simcse-bert-base-wikipedia --train_sets prepared/ --output_dir out

In order:
1. Prepare text first, as for Revela: `revela-hub prepare SOURCE --out prepared/`. Each chunk is one example.
2. Choose a recipe (a YAML file or a shipped name) and override any field on the command line.
   - simcse: a chunk is its own positive, and dropout is all that tells the two apart: a decoder without dropout needs
     --lora_dropout. The other chunks of the batch are negatives.
   - tsdae: a decoder rebuilds a chunk from the embedding of what is left after most words are deleted. It is the
     encoder's own architecture with its weights tied (BERT and its like), or --decoder_name_or_path, of the same
     width, for what has no cross-attention (Llama and its like) or trains with LoRA.
3. `--eval_strategy steps` measures nDCG@10 on pairs cut from the held-out documents, by inverse cloze and cropping.
4. The output folder is a sentence-transformers model, as the contrastive rival's is.
"""

import inspect
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from sentence_transformers.losses import DenoisingAutoEncoderLoss
from torch import nn

from trainers.arguments import parse_recipe, run_script
from trainers.checks import cap_workers, check_choice, check_steps
from trainers.contriever import RawTextArguments, describe_raw_text, load_train_set, load_validation_set
from trainers.finetune import Finetuning, MethodArguments, run_to_end
from trainers.finetune_model import ModelArguments, has_adapters
from trainers.finetune_trainer import FinetuneTrainer, FinetuneTrainingArguments

OBJECTIVES = ("simcse", "tsdae")


@dataclass
class UnsupervisedArguments(RawTextArguments):
    """What is read, and what is learned from it; the pairs are of the evaluation only."""

    objective: str = field(default="simcse", metadata={"help": "simcse or tsdae; see above.", "choices": OBJECTIVES})
    temperature: float = field(default=0.05, metadata={"help": "simcse: divides the similarities."})
    deletion_ratio: float = field(default=0.6, metadata={"help": "tsdae: the share of words that are deleted."})
    decoder_name_or_path: str | None = field(
        default=None,
        metadata={"help": "tsdae: what rebuilds the text; the encoder's own weights, tied, if left out."},
    )

    def __post_init__(self):
        super().__post_init__()
        check_choice("objective", self.objective, OBJECTIVES)
        if not 0 < self.deletion_ratio < 1:
            raise ValueError(f"`deletion_ratio` must be between 0 and 1, not {self.deletion_ratio}.")
        self.method()

    def method(self) -> MethodArguments:
        return MethodArguments(
            method="dpr", num_negatives=0, temperature=self.temperature, cross_device_negatives=False
        )

    def training_pairs(self, groups: Iterable, seed: int) -> Iterator[tuple[str, str]]:
        """Each chunk, as it is or damaged, with itself."""
        texts = (text for group in groups for text in group["texts"] if text.strip())
        for number, text in enumerate(texts):
            damaged = (
                text if self.objective == "simcse" else delete_words(text, self.deletion_ratio, f"{seed} {number}")
            )
            yield damaged, text


def delete_words(text: str, ratio: float, seed: str) -> str:
    """What is left of a text when each word is deleted with this probability; one word at least."""
    draw, words = random.Random(seed), text.split()
    return " ".join([word for word in words if draw.random() >= ratio] or [draw.choice(words)])


class UnsupervisedRun(Finetuning):
    """A run of fine-tuning whose examples are texts with themselves."""

    def __init__(self, model_args: ModelArguments, arguments: UnsupervisedArguments, *args, **kwargs):
        self.arguments = arguments
        super().__init__(model_args, *args, **kwargs)

    @property
    def record(self) -> dict:
        arguments = self.arguments
        return super().record | {"objective": arguments.objective, "deletion_ratio": arguments.deletion_ratio}

    def make_loss(self) -> nn.Module:
        if self.arguments.objective == "tsdae":
            return self._denoising
        if not _has_dropout(self.model):
            raise ValueError(
                f"{self.model_args.model_name_or_path} has no dropout, which is all that simcse learns from: pass "
                "--lora_r 64 --lora_dropout 0.1."
            )
        return super().make_loss()

    @cached_property
    def _denoising(self) -> nn.Module:
        decoder = self.arguments.decoder_name_or_path
        if decoder is None and has_adapters(self.model):
            raise ValueError("With LoRA there are no weights to tie a decoder to: name a --decoder_name_or_path.")
        name = decoder or self.model_args.model_name_or_path
        reason = "it has no cross-attention."
        try:
            loss = DenoisingAutoEncoderLoss(self.model, decoder, tie_encoder_decoder=decoder is None)
            # Llama and its like take the embedding as one more argument, and leave it unread.
            if "encoder_hidden_states" in inspect.signature(loss.decoder.forward).parameters:
                return loss
        except (AssertionError, ValueError, TypeError) as error:
            reason = str(error) or type(error).__name__
        raise ValueError(
            f"{name} cannot rebuild the texts: {reason} Name a --decoder_name_or_path with cross-attention (as BERT "
            f"has) and a width of {self.model.get_embedding_dimension()}."
        )

    def train(self, checkpoint: str | None = None) -> FinetuneTrainer:
        if checkpoint is not None and self.arguments.objective == "tsdae":
            raise ValueError(
                "sentence-transformers leaves TSDAE's decoder out of its checkpoints, so a run cannot go on: start it "
                "anew, or fine-tune from its retriever."
            )
        return super().train(checkpoint)


def _has_dropout(model: nn.Module) -> bool:
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()):
        return True
    config = model.transformers_model.config.get_text_config()
    return getattr(config, "attention_dropout", 0.0) > 0


def train(
    model_args: ModelArguments,
    arguments: UnsupervisedArguments,
    args: FinetuneTrainingArguments,
    callbacks: list | None = None,
) -> FinetuneTrainer:
    """Train, or go on with an earlier run of simcse; the retriever is left in the output folder, LoRA merged."""
    check_steps(args)
    cap_workers(args)
    data = load_train_set(arguments, args.seed)
    development = load_validation_set(arguments, args.seed) if args.eval_strategy != "no" else None
    run = UnsupervisedRun(model_args, arguments, data, arguments.method(), args, development, callbacks)
    run.facts = describe_raw_text(arguments.objective, arguments, (model_args, arguments, args), data)
    return run_to_end(run)


def main(argv: list[str] | None = None) -> None:
    classes = (ModelArguments, UnsupervisedArguments, FinetuneTrainingArguments)
    train(*parse_recipe(classes, argv, description=__doc__))


if __name__ == "__main__":
    run_script(main)
