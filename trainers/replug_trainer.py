"""`ReplugTrainer`: the retriever's distribution over the other chunks of a group is drawn to a frozen LM's."""

import math
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled

from trainers.checks import check_at_least, check_choice
from trainers.revela_trainer import RevelaTrainer, RevelaTrainingArguments

SCORES = ("sum", "mean")


@dataclass
class ReplugTrainingArguments(RevelaTrainingArguments):
    """transformers' own arguments and the LM's; `per_device_train_batch_size` counts groups."""

    # Of Revela's LM, which is trained.
    lm_learning_rate: float | None = field(default=None, init=False)
    gate_learning_rate: float | None = field(default=None, init=False)

    lm_temperature: float = field(default=1e-3, metadata={"help": "Temperature of the LM's softmax (§B.3: 0.001)."})
    lm_score: str = field(
        default="sum",
        metadata={"help": "sum (the chunk's log-likelihood, §B.3) or mean (a token's, whatever the length)."},
    )
    lm_batch_size: int = field(default=16, metadata={"help": "Sequences of two chunks the LM reads at a time."})

    def __post_init__(self):
        check_at_least(self, lm_batch_size=1)
        check_choice("lm_score", self.lm_score, SCORES)
        if not 0 < self.lm_temperature < math.inf:
            raise ValueError(f"`lm_temperature` must be above 0, not {self.lm_temperature}.")
        super().__post_init__()


@torch.no_grad()
def pairwise_nll(
    lm: PreTrainedModel,
    input_ids: torch.LongTensor,
    attention_mask: torch.Tensor,
    visible: torch.Tensor,
    batch_size: int = 16,
    score: str = "sum",
) -> torch.Tensor:
    """
    How badly each chunk explains each other: -log g(D_i | D_j) of §B.3.

    Every pair is a sequence of its own, D_j and then D_i, of which the tokens of D_i are scored; a BOS that the
    tokenizer puts before every chunk is left out of D_i.

    Args:
        lm: a causal LM.
        input_ids, attention_mask: (B, L), right-padded chunks in its tokens.
        visible: (B, B) bool, which j are a context for which i.
        batch_size: sequences a forward pass.
        score: `"sum"` over the tokens of D_i, or their `"mean"`.

    Returns:
        (B, B) float32, nats; infinite where not visible.
    """
    lengths = attention_mask.sum(-1)
    bos = getattr(lm.config.get_text_config(), "bos_token_id", None)
    skipped = int(bos is not None and bool((input_ids[:, 0] == bos).all()))
    rows, contexts = visible.nonzero(as_tuple=True)
    # Sequences of like length together, the longest first: little is spent on padding, and memory runs out at once.
    order = (lengths[rows] + lengths[contexts]).argsort(descending=True, stable=True)
    nll = torch.full(visible.shape, math.inf, device=input_ids.device)
    for part in order.split(batch_size):
        i, j = rows[part], contexts[part]
        first, total = lengths[j, None], lengths[j, None] + lengths[i, None] - skipped
        positions = torch.arange(int(total.max()), device=input_ids.device).expand(len(part), -1)
        last = input_ids.shape[1] - 1
        ids = torch.where(
            positions < first,
            input_ids[j].gather(1, positions.clamp(max=last)),
            input_ids[i].gather(1, (positions - first + skipped).clamp(0, last)),
        )
        logits = lm(input_ids=ids, attention_mask=(positions < total).to(attention_mask.dtype), use_cache=False).logits
        scored = ((positions >= first) & (positions < total))[:, 1:]
        losses = torch.zeros(scored.shape, device=ids.device)
        losses[scored] = torch.nn.functional.cross_entropy(
            logits[:, :-1][scored].float(), ids[:, 1:][scored], reduction="none"
        )
        summed = losses.sum(-1)
        nll[i, j] = summed if score == "sum" else summed / scored.sum(-1).clamp(min=1)
    return nll


def replug_loss(
    similarities: torch.Tensor, nll: torch.Tensor, temperature: float | torch.Tensor, lm_temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    KL(P_LM || P_retriever), averaged over the chunks (§B.3).

    Args:
        similarities: (B, B), of query i and passage j.
        nll: (B, B), from [`pairwise_nll`]; infinite where j is no context of i.
        temperature, lm_temperature: of either softmax.

    Returns:
        The loss, scalar, and the (B, B) distributions of the retriever and the LM.
    """
    visible = torch.isfinite(nll)
    log_retriever = torch.log_softmax((similarities.float() / temperature).masked_fill(~visible, -math.inf), dim=-1)
    log_lm = torch.log_softmax(-nll / lm_temperature, dim=-1)
    lm = log_lm.exp()
    divergence = (lm * (log_lm - log_retriever).masked_fill(~visible, 0.0)).sum(-1)
    return divergence.mean(), log_retriever.exp(), lm


class ReplugTrainer(RevelaTrainer):
    """
    Trains the retriever of a `RevelaForPreTraining` with a frozen LM on prepared groups.

    Logs, averaged over the steps since the last log and over processes: `max_weight` and `weight_entropy` (nats) of
    the retriever's distribution, `lm_max_weight` and `lm_weight_entropy` of the LM's; `mean_cosine` of different
    chunks; `lm_sequences`, what the LM read for a forward pass; `tokens_per_second`, of chunks.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.is_fsdp_enabled or is_deepspeed_zero3_enabled():
            raise ValueError(
                "REPLUG's frozen LM reads as many sequences as a group has pairs, which may differ between processes, "
                "and split weights are gathered by all of them together: take --launch-config ddp, zero1 or zero2."
            )
        # The loss is a mean over chunks, not over the tokens that Trainer counts.
        self.model_accepts_loss_kwargs = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self._start_clock()
        args, group_ids = self.args, inputs["group_ids"]
        unwrapped = self.accelerator.unwrap_model(self.model)
        visible = group_ids[:, None] == group_ids[None]
        if not unwrapped.config.include_diagonal:
            visible = visible & ~torch.eye(len(visible), dtype=torch.bool, device=visible.device)
        lm = unwrapped.lm.backbone
        was_training = lm.training
        lm.eval()
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        with self.compute_loss_context_manager():
            nll = pairwise_nll(lm, ids, mask, visible, args.lm_batch_size, args.lm_score)
        lm.train(was_training)
        sides = {name: value for name, value in inputs.items() if name.startswith(("query_", "document_"))}
        output = model(group_ids=group_ids, **sides)
        loss, retriever, lm_weights = replug_loss(output.similarities, nll, unwrapped.temperature, args.lm_temperature)
        with torch.no_grad():
            self._add_weights(retriever)
            self._add_weights(lm_weights, prefix="lm_")
            self._add_cosines(output.similarities, group_ids)
            self._add("lm_sequences", visible.sum())
        self._tokens += int(mask.sum())
        return (loss, output) if return_outputs else loss

    def _measure(self, model, rows) -> dict[str, float]:
        """Sibling retrieval on held-out groups; the LM never saw in-batch attention, so there is no gain to take."""
        return self._siblings(model, rows)

    def _record(self) -> dict:
        # Its checkpoints are Revela's, by another method.
        return {**super()._record(), "method": "replug"}

    def _picture(self) -> None:
        """None: there is no in-batch attention to show."""

    _what_takes_memory = "lm_batch_size, max_length or group_size"


__all__ = ["ReplugTrainer", "ReplugTrainingArguments", "pairwise_nll", "replug_loss"]
