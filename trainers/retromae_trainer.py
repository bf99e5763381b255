"""`RetroMAETrainer`: RetroMAE's step, logs and label-free evaluation."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from transformers import TrainerCallback

from hub_cards.validation import sibling_groups, sibling_retrieval
from trainers.base_trainer import PretrainingArguments, PretrainingTrainer
from trainers.data.masking import NumberedExamples
from trainers.mishaps import without_ids


@dataclass
class RetroMAETrainingArguments(PretrainingArguments):
    """transformers' own arguments; `per_device_train_batch_size` counts sequences."""

    model_type: ClassVar[str] = "retromae"

    per_device_train_batch_size: int = field(default=32, metadata={"help": "Sequences a device and forward pass."})
    per_device_eval_batch_size: int = field(default=32, metadata={"help": "Held-out sequences a forward pass."})

    def __post_init__(self):
        super().__post_init__()
        if self.dataloader_persistent_workers:
            raise ValueError(
                "`dataloader_persistent_workers` keeps the first epoch's copies of the data, so every epoch would "
                "hide the same words: leave it out."
            )


class _TellEpoch(TrainerCallback):
    """Tells the examples which epoch it is, before the workers copy them.

    The data loader's own `set_epoch` does not reach them in several processes, nor in the epoch that is resumed:
    accelerate stops at the sampler there.
    """

    def __init__(self, examples: NumberedExamples):
        self._examples = examples

    def on_epoch_begin(self, args, state, control, **kwargs):
        self._examples.set_epoch(int(state.epoch or 0))


class RetroMAETrainer(PretrainingTrainer):
    """
    Trains a `RetroMAEForPreTraining` on prepared sequences.

    Logs, over the tokens that were predicted since the last log in all processes: `encoder_loss` and `decoder_loss`,
    whose sum is the loss (Algorithm 1), `bow_loss` where it is trained, which is then part of the loss by its weight,
    `encoder_accuracy` and `decoder_accuracy`, the share of predicted tokens that are right; and `tokens_per_second`.

    Args:
        train_dataset, eval_dataset: rows `text`, `doc_id`, `source`, as `load_sequences` returns them.
        the others: as in transformers.
    """

    def __init__(self, *args, train_dataset=None, eval_dataset=None, **kwargs):
        # What is hidden depends on an example's place in the whole run, so each row has to know its own.
        train_dataset, eval_dataset = (
            NumberedExamples(rows) if rows is not None else None for rows in (train_dataset, eval_dataset)
        )
        super().__init__(*args, train_dataset=train_dataset, eval_dataset=eval_dataset, **kwargs)
        if train_dataset is not None:
            self.add_callback(_TellEpoch(train_dataset))

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> torch.Tensor | None:
        # Each loss is a mean over tokens of its own, so the whole step's tokens are counted for each (int64, (3,)).
        if not batch_samples:
            return None
        model = self.accelerator.unwrap_model(self.model)
        batches = (self._prepare_inputs(without_ids(batch)) for batch in batch_samples)
        items = sum(model.count_items(**batch) for batch in batches).to(device)
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            items = self.accelerator.gather(items[None]).sum(0)
        return items

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        self._start_clock()
        loss, output = super().compute_loss(model, inputs, True, num_items_in_batch)
        self._collect(output, num_items_in_batch)
        self._tokens += int(inputs["attention_mask"].sum())
        return (loss, output) if return_outputs else loss

    @torch.no_grad()
    def _collect(self, output, num_items_in_batch) -> None:
        # Undo the division by the whole step's items: what is summed is what the tokens of this forward pass cost.
        texts = output.sentence_embedding.new_tensor(len(output.sentence_embedding))
        counts = {"encoder": output.num_encoder_tokens, "decoder": output.num_decoder_tokens, "bow": texts}
        for index, (name, count) in enumerate(counts.items()):
            loss, accuracy = (getattr(output, f"{name}_{what}", None) for what in ("loss", "accuracy"))
            if loss is not None:
                divided_by = count.clamp(min=1) if num_items_in_batch is None else num_items_in_batch[index]
                self._add(f"{name}_loss", loss * divided_by, count)
            if accuracy is not None:
                self._add(f"{name}_accuracy", accuracy * count, count)

    def evaluate(self, eval_dataset=None, *args, **kwargs) -> dict[str, float]:
        if eval_dataset is not None and not isinstance(eval_dataset, NumberedExamples):
            eval_dataset = NumberedExamples(eval_dataset)
        return super().evaluate(eval_dataset, *args, **kwargs)

    def _measure(self, model, rows) -> dict[str, float]:
        """Losses, accuracies and sibling retrieval on held-out sequences."""
        collator = self.data_collator
        sums: dict[str, float] = {}
        counts: dict[str, int] = {}
        with torch.no_grad():
            for batch in self._batches(rows):
                output = model(**batch)
                texts = len(output.sentence_embedding)
                of = {"encoder": output.num_encoder_tokens, "decoder": output.num_decoder_tokens, "bow": texts}
                for half, count in of.items():
                    for name in (f"{half}_loss", f"{half}_accuracy"):
                        if (value := getattr(output, name, None)) is not None:
                            sums[name] = sums.get(name, 0.0) + float(value) * int(count)
                            counts[name] = counts.get(name, 0) + int(count)

        def encode(texts: list[str]) -> torch.Tensor:
            embeddings = self._embed(model.embed, collator.tokenizer, collator.max_length, texts)
            return torch.nn.functional.normalize(embeddings, dim=-1)

        siblings = sibling_retrieval(sibling_groups(rows), encode, encode)
        measured = {name: total / max(counts[name], 1) for name, total in sums.items()}
        weights = {"encoder_loss": 1.0, "decoder_loss": 1.0, "bow_loss": model.config.bow_loss_weight}
        measured["loss"] = sum(weight * measured[name] for name, weight in weights.items() if name in measured)
        return measured | {f"sibling_{name}": value for name, value in siblings.items()}

    _what_takes_memory = "max_seq_length"

    def _tokenizers(self) -> dict:
        return {"": self.data_collator.tokenizer}


__all__ = ["RetroMAETrainer", "RetroMAETrainingArguments"]
