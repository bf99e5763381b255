"""`RevelaTrainer`: Revela's step, logs, learning rates and label-free evaluation."""

import random
import time
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from transformers import TrainerCallback
from transformers.integrations import is_deepspeed_zero3_enabled

from hub_cards.validation import retrieval_gain, sibling_retrieval
from trainers.backbones import leave_casting_to_autocast
from trainers.base_trainer import PretrainingArguments, PretrainingTrainer
from trainers.checks import check_at_least
from trainers.data.neighbours import neighbour_groups
from trainers.mishaps import NamedRows, is_out_of_memory
from trainers.sharding import whole


@dataclass
class RevelaTrainingArguments(PretrainingArguments):
    """transformers' own arguments; `per_device_train_batch_size` counts groups."""

    model_type: ClassVar[str] = "revela"

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
    regroup_every: int | None = field(
        default=None,
        metadata={
            "help": "Steps after which chunks are embedded with the current retriever and nearest neighbours grouped; "
            "never, if left out."
        },
    )
    regroup_groups: int = field(
        default=256, metadata={"help": "Prepared groups, drawn anew each time, whose chunks are grouped by nearness."}
    )
    regroup_share: float = field(
        default=0.5, metadata={"help": "Share of forward passes on neighbours; the rest are on groups as prepared."}
    )

    def __post_init__(self):
        check_at_least(self, regroup_every=1, regroup_groups=1)
        if not 0 < self.regroup_share <= 1:
            raise ValueError(f"`regroup_share` must be above 0 and at most 1, not {self.regroup_share}.")
        super().__post_init__()


# The picture of in-batch attention takes so many chunks of one group: more cannot be told apart in it.
PICTURED_CHUNKS = 8
# ... and so many checkpoints are kept for it to choose from.
PICTURED_STEPS = 8


class _PictureStart(TrainerCallback):
    """Takes the picture of in-batch attention before the first step."""

    def __init__(self, trainer: "RevelaTrainer"):
        self._trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        self._trainer._picture()


class RevelaTrainer(PretrainingTrainer):
    """
    Trains a `RevelaForPreTraining` on prepared groups.

    Logs, averaged over the steps since the last log and over processes: `in_batch_loss`; `next_token_loss` and
    `in_batch_gain` (its difference to the in-batch loss), measured at the logged step; `max_weight` and
    `weight_entropy` (nats) of the weights a chunk gives; `learning_chunks`, the share of chunks whose weights are not
    one-hot and so give the retriever a gradient; `mean_cosine` of different chunks, near 1 where it collapses;
    `pairs` computed a forward pass; `tokens_per_second`; `gate`, the mean size of the gates; `temperature` where it is
    trained. With `regroup_every`, each time: `regroup_seconds`, what it cost, and `neighbour_cosine`, how near a chunk
    of the new groups is to the one that its group was made around.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.args.bf16 or self.args.fp16:
            leave_casting_to_autocast(self.model)
        self._pictures: list[dict] = []
        self._neighbours: dict = {"step": 0, "groups": []}
        self.add_callback(_PictureStart(self))
        if self.args.device.type == "cpu" and self.args.bf16:
            # The fused kernel's backward in bf16 on a CPU is several times slower than plain products.
            self.model.retriever.set_attn_implementation("eager")

    # What a step logs

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        self._start_clock()
        # Scoring the plain stream as well costs a pass through the head, so only the steps that are logged do it.
        logged = (self.state.global_step + 1) % self.state.logging_steps == 0
        first = self.state.global_step == 0 and self.args.logging_first_step
        inputs = {**inputs, "return_next_token_loss": logged or first}
        loss, output = super().compute_loss(model, inputs, True, num_items_in_batch)
        self._collect(output, inputs, num_items_in_batch)
        return (loss, output) if return_outputs else loss

    @torch.no_grad()
    def _collect(self, output, inputs, num_items_in_batch) -> None:
        # Undo the division by the whole step's tokens: what is summed is what the tokens of this forward pass cost.
        tokens = output.num_target_tokens
        divided_by = tokens if num_items_in_batch is None else num_items_in_batch
        weights, group_ids = output.in_batch_weights, inputs["group_ids"]
        self._add("in_batch_loss", output.in_batch_loss * divided_by, tokens)
        if output.next_token_loss is not None:
            next_token_loss = output.next_token_loss.detach()
            self._add("next_token_loss", next_token_loss * divided_by, tokens)
            self._add("in_batch_gain", (next_token_loss - output.in_batch_loss) * divided_by, tokens)
        self._add_weights(weights)
        self._add("learning_chunks", (weights.amax(-1) < 0.999).float().sum(), len(weights))
        if output.similarities is not None:
            self._add_cosines(output.similarities, group_ids)
        self._add("pairs", torch.tensor(float(output.num_pairs), device=weights.device))
        self._tokens += int(inputs["attention_mask"].sum())

    def _add_weights(self, weights: torch.Tensor, prefix: str = "") -> None:
        self._add(f"{prefix}max_weight", weights.amax(-1).sum(), len(weights))
        self._add(f"{prefix}weight_entropy", torch.special.entr(weights).sum(), len(weights))

    def _add_cosines(self, similarities: torch.Tensor, group_ids: torch.Tensor) -> None:
        same = (group_ids[:, None] == group_ids[None]).fill_diagonal_(False)
        self._add("mean_cosine", similarities[same].float().sum(), same.sum())

    def _log_parts(self) -> dict[str, float]:
        model, parts = self.accelerator.unwrap_model(self.model), {}
        if model.lm.in_batch_gate is not None:
            parts["gate"] = float(whole(model.lm.in_batch_gate).abs().mean())
        if model.log_temperature is not None:
            parts["temperature"] = float(whole(model.log_temperature).exp())
        return parts

    # Harder groups: iterative indexing, the paper's first direction for later work

    def get_batch_samples(self, epoch_iterator, num_batches: int, device):
        if self.args.regroup_every:
            begin = self.state.global_step // self.args.regroup_every * self.args.regroup_every
            if begin > self._neighbours["step"]:
                self._regroup(begin)
            epoch_iterator = self._with_neighbours(epoch_iterator)
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def _with_neighbours(self, batches):
        """Neighbours instead of some batches, as seed, step and place in the step decide."""
        args, groups = self.args, self._neighbours["groups"]
        step, collator = self.state.global_step, NamedRows(self.data_collator)
        for number, batch in enumerate(batches):
            place = number * args.world_size + args.process_index
            if groups and random.Random(f"{args.seed} {step} {place}").random() < args.regroup_share:
                place += (step - self._neighbours["step"]) * args.gradient_accumulation_steps * args.world_size
                size = args.per_device_train_batch_size
                chosen = [groups[(place * size + index) % len(groups)] for index in range(size)]
                batch = collator([self._group_of(members) for members in chosen])
            yield batch

    def _group_of(self, members: list[list[int]]) -> dict:
        rows = [(self.train_dataset[row], position) for row, position in members]
        group = {name: [row[name][position] for row, position in rows] for name in ("texts", "doc_ids")}
        return {**rows[0][0], **group}

    def _regroup(self, step: int) -> None:
        """Group the chunks of a sample of the prepared groups by nearness, as the retriever sees them now."""
        args, start, rows = self.args, time.time(), self.train_dataset
        drawn = random.Random(f"{args.seed} {step}").sample(range(len(rows)), min(args.regroup_groups, len(rows)))
        sample = [rows[row] for row in drawn]
        collator = self.data_collator
        members, texts = [], []
        for row, group in zip(drawn, sample, strict=True):
            for position, text in enumerate(group["texts"]):
                if collator.readable([text]):
                    members.append([row, position])
                    texts.append(collator.document_prompt + text)
        # Each process embeds its share: as many texts as the others, since split weights are gathered by all together.
        processes = self.accelerator.num_processes
        share = (texts + texts[: -len(texts) % processes])[self.accelerator.process_index :: processes]
        model = self.accelerator.unwrap_model(self.model)
        model.eval()
        with self.accelerator.autocast():
            embeddings = self._embed(model.embed, collator.retriever_tokenizer, collator.retriever_max_length, share)
        model.train()
        gathered = self.accelerator.gather(embeddings.to(args.device)).cpu()
        embeddings = gathered.view(processes, -1, gathered.shape[-1]).transpose(0, 1).flatten(0, 1)[: len(texts)]
        groups = neighbour_groups(embeddings, max(len(group["texts"]) for group in sample), args.seed + step)
        near = embeddings[groups]
        self._neighbours = {
            "step": step,
            "groups": [[members[position] for position in group] for group in groups.tolist()],
        }
        seconds = time.time() - start
        if self._since is not None:
            self._since += seconds
        cosine = float((near[:, 1:] * near[:, :1]).sum(-1).mean())
        self.log({"regroup_seconds": round(seconds, 3), "neighbour_cosine": cosine})

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

    def _measure(self, model, rows) -> dict[str, float]:
        """Retrieval gain and sibling retrieval on held-out groups."""
        return retrieval_gain(model, self._batches(rows)) | self._siblings(model, rows)

    def _siblings(self, model, rows) -> dict[str, float]:
        collator = self.data_collator

        def encoder(prompt: str):
            return lambda texts: self._embed(
                model.embed,
                collator.retriever_tokenizer,
                collator.retriever_max_length,
                [prompt + text for text in texts],
            )

        siblings = sibling_retrieval(
            rows,
            encoder(collator.query_prompt),
            encoder(collator.document_prompt),
            span_ratio=collator.similarity_span_ratio,
        )
        return {f"sibling_{name}": value for name, value in siblings.items()}

    # In-batch attention, for the model card (Fig. 6)

    def save_model(self, output_dir=None, _internal_call: bool = False) -> None:
        self._picture()
        super().save_model(output_dir, _internal_call)

    @torch.no_grad()
    def _picture(self) -> None:
        """Keep the weights between the chunks of a fixed group, held out where there is one, and each token's loss."""
        if self.is_fsdp_enabled or is_deepspeed_zero3_enabled():
            # All processes gather split weights together, so that one without the memory for the picture, which leaves
            # it out below, would keep the others waiting for ever. With whole weights nothing here waits for anyone.
            return
        step = self.state.global_step
        if any(picture["step"] == step for picture in self._pictures):
            return
        rows = self.train_dataset if self.eval_dataset is None else self.eval_dataset
        group = {name: rows[0][name][:PICTURED_CHUNKS] for name in ("texts", "doc_ids")}
        kept = [index for index, text in enumerate(group["texts"]) if self.data_collator.readable([text])]
        if len(kept) < 2:
            return
        group = {name: [values[index] for index in kept] for name, values in group.items()}
        model = self.accelerator.unwrap_model(self.model)
        was_training = model.training
        model.eval()
        try:
            batch = self._prepare_inputs(self.data_collator([group]))
            labels = batch.pop("labels")[:, 1:]
            with self.accelerator.autocast():
                output = model(**batch)
            # A chunk at a time: float32 logits of a large vocabulary are the largest tensor there is.
            losses = [
                torch.nn.functional.cross_entropy(logits[:-1].float(), targets, reduction="none")[targets != -100]
                for logits, targets in zip(output.logits, labels, strict=True)
            ]
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return  # A picture is not worth the run.
        finally:
            model.train(was_training)
        documents = list(dict.fromkeys(group["doc_ids"]))
        self._pictures = self._pictures[:: 2 if len(self._pictures) >= PICTURED_STEPS else 1]
        self._pictures.append(
            {
                "step": step,
                "held_out": self.eval_dataset is not None,
                "documents": [documents.index(name) for name in group["doc_ids"]],
                "weights": [[round(weight, 4) for weight in row] for row in output.in_batch_weights.tolist()],
                "losses": [[round(loss, 3) for loss in row.tolist()] for row in losses],
            }
        )

    def _record(self) -> dict:
        record = {**super()._record(), "in_batch_attention": self._pictures}
        # What a resumed run goes on with until it groups anew.
        return {**record, "neighbours": self._neighbours} if self.args.regroup_every else record

    def _go_on_from(self, record: dict) -> None:
        super()._go_on_from(record)
        self._pictures = record.get("in_batch_attention", [])
        self._neighbours = record.get("neighbours", self._neighbours)

    _what_takes_memory = "max_length or group_size"

    def _tokenizers(self) -> dict:
        return {"": self.data_collator.retriever_tokenizer, "lm_tokenizer": self.data_collator.lm_tokenizer}


__all__ = ["RevelaTrainer", "RevelaTrainingArguments"]
