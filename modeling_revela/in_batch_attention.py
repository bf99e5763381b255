"""In-batch attention (arXiv 2506.16552, Eq. 3-9) as an attention function of stock transformers models.

The LM runs once over a doubled batch `[e; h]` of 2B rows that share its weights. Self-attention is the model's own in
all rows (Eq. 4). The rows of h also attend, without a causal mask, to the keys and values of the e rows of other
chunks (Eq. 5), and the outputs are summed with the retriever's weights (Eq. 6, 9) and added (Eq. 7). Gradients flow
through the keys and values of e, and through the weights into the retriever.

Where the LM is frozen nothing of e is trained, so e is run by itself, without gradients, and leaves its keys and
values in the context for h, which is run after it: the same loss and gradients for less time and half of the
activations.

At the paper's temperature most weights are zero, so what is computed is a list of pairs (i, j) whose weight lies above
a floor, each one row of attention: the same loss and gradients at a cost near linear in the group size.
"""

from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

IN_BATCH_ATTENTION = "revela_in_batch"

# Arguments some models hand to attention that change the softmax; computing b_ij without them would be silently wrong.
_UNSUPPORTED = {
    "softcap": "soft-capped attention logits",
    "s_aux": "attention sinks",
    "position_bias": "a position bias",
}


@dataclass(eq=False)
class InBatchContext:
    """What in-batch attention needs to know beside queries, keys and values; made once a forward.

    Args:
        weights: (B, B), row i holds Sim(D_i, D_j) over j; any float dtype, zero where i must not see j.
        key_mask: (B, L) bool, True at real tokens; `None` where no row is padded.
        v_norm: whether Eq. 8 is applied; `v_norm_eps` is its constant.
        gate: (number of layers, number of heads) scale of b, or `None` for Eq. 7 as it stands.
        floor: weights at or below it, times the largest second weight of any row, are skipped.
        stream: what the rows of the batch are: `"both"`, e and then h; or one of them, `"e"` before `"h"`.
        stored: keys and values of e, by layer, that its own pass leaves for that of h.
    """

    weights: torch.Tensor
    key_mask: torch.Tensor | None = None
    v_norm: bool = True
    v_norm_eps: float = 1e-6
    gate: torch.Tensor | None = None
    floor: float = 0.0
    stream: str = "both"
    stored: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    layers_seen: set = field(default_factory=set)

    def __post_init__(self):
        with torch.no_grad():
            # The gradient of similarity ij is w_ij (g_ij - sum_k w_ik g_ik): of rows that are all but one-hot the
            # runner-up carries it. So the floor follows the largest runner-up, or a sharp temperature would lose
            # the retriever's whole gradient where every runner-up happens to lie below a fixed floor.
            runner_up = self.weights.topk(2, dim=-1).values[:, 1].max()
            self.rows, self.columns = (self.weights > self.floor * runner_up).nonzero(as_tuple=True)
        self.pair_weights = self.weights[self.rows, self.columns]
        self.pair_key_mask = None if self.key_mask is None else self.key_mask[self.columns][:, None, None, :]

    @property
    def num_pairs(self) -> int:
        return self.rows.numel()


def in_batch_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    in_batch: InBatchContext | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """
    Attention function in the form of transformers' `AttentionInterface`. Without `in_batch` it is `sdpa`.

    Args:
        query: (2B, H, L, D); key, value: (2B, H_kv, L, D): rows 0..B-1 are the e stream, the rest h. B rows where
            `in_batch.stream` is one of them.
        attention_mask: what `sdpa_mask` made for these rows.
        in_batch: the weights and options; reaches the layers as a keyword argument of the model's forward.

    Returns:
        (2B, L, H, D), or (B, L, H, D), and `None`.

    Raises:
        ValueError: for a model whose attention has a soft cap, sinks or a position bias.
    """
    for name, what in _UNSUPPORTED.items():
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} uses {what} (`{name}`), which in-batch attention cannot honour: "
                "choose a backbone without it."
            )
    if in_batch is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    in_batch.layers_seen.add(module.layer_idx)
    if torch.is_autocast_enabled(query.device.type) and query.dtype != torch.float64:
        # Rotary embeddings leave queries and keys in float32. The fused kernel would cast all three by itself.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if attention_mask is None and _prefers_plain(query):
        length = query.shape[2]
        attention_mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    if attention_mask is not None and _prefers_plain(query):
        repeats = query.shape[1] // key.shape[1]
        keys, values = (states.repeat_interleave(repeats, dim=1) for states in (key, value))
        output = _plain_attention(
            query, keys, values, attention_mask, scaling or query.shape[-1] ** -0.5, dropout
        ).transpose(1, 2)
    else:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    if in_batch.stream == "e":
        in_batch.stored[module.layer_idx] = key, value
    if in_batch.stream == "e" or in_batch.num_pairs == 0:
        return output, None

    plain = 0  # rows of e in this batch, which come first
    if in_batch.stream == "both":
        plain = query.shape[0] // 2
        key, value = key[:plain], value[:plain]
    else:
        key, value = in_batch.stored[module.layer_idx]
    cross = _cross_chunk_attention(query[plain:], key, value, in_batch, scaling, dropout)
    if in_batch.gate is not None:
        cross = cross * in_batch.gate[module.layer_idx].to(cross.dtype)[None, :, None, None]
    # Eq. 7: h = s + b, in the rows of h only.
    return torch.cat((output[:plain], output[plain:] + cross.transpose(1, 2)), dim=0), None


def _cross_chunk_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    in_batch: InBatchContext,
    scaling: float | None,
    dropout: float,
) -> torch.Tensor:
    """Eq. 5, 6, 8 and 9: (B, H, L, D) queries of h, (B, H_kv, L, D) keys and values of e -> b, (B, H, L, D)."""
    chunks, heads, length, head_dim = query.shape
    kv_heads = key.shape[1]
    value_dim = value.shape[-1]
    scaling = head_dim**-0.5 if scaling is None else scaling
    # The cross mask has no query dimension, so the heads that share a key head fold into the length: keys and values
    # are never repeated for grouped-query attention.
    query = query.reshape(chunks, kv_heads, heads // kv_heads * length, head_dim)
    if in_batch.v_norm:
        # softmax(QK^T)·||V|| of Eq. 8 comes out of the same product: the norm rides along as one more channel of V.
        norms = value.float() if value.dtype.itemsize < 4 else value
        value = torch.cat((value, norms.norm(dim=-1, keepdim=True).to(value.dtype)), dim=-1)
    attend = _BlockedPairs.apply if query.device.type == "cpu" and dropout == 0 else _fused_pairs
    output = attend(query, key, value, in_batch.pair_weights, in_batch, scaling, dropout)
    return output.reshape(chunks, heads, length, value_dim)


def _fused_pairs(query, key, value, pair_weights, in_batch: InBatchContext, scaling: float, dropout: float):
    """All pairs at once, each a batch row of a fused kernel: the way of a GPU. Arguments as in `_BlockedPairs`."""
    rows, columns = in_batch.rows, in_batch.columns
    head_dim, channels = query.shape[-1], value.shape[-1]
    # Fused kernels want one head dimension, a multiple of 8, for all three.
    padded = -(-max(head_dim, channels) // 8) * 8
    query, key, value = (nn.functional.pad(states, (0, padded - states.shape[-1])) for states in (query, key, value))
    pairs = nn.functional.scaled_dot_product_attention(
        query[rows], key[columns], value[columns], in_batch.pair_key_mask, dropout_p=dropout, scale=scaling
    )
    pairs, factor = _weigh(pairs[..., :channels], pair_weights[:, None, None, None], in_batch)
    pairs = pairs * factor.to(pairs.dtype)
    return pairs.new_zeros(*query.shape[:-1], pairs.shape[-1]).index_add(0, rows, pairs)


def _weigh(pairs: torch.Tensor, weights: torch.Tensor, in_batch: InBatchContext) -> tuple[torch.Tensor, torch.Tensor]:
    """What `value` gave -> output of each pair, and the factor that it is summed with: Eq. 6, or Eq. 9 by Eq. 8."""
    if not in_batch.v_norm:
        return pairs, weights
    return pairs[..., :-1], weights / (pairs[..., -1:].to(weights.dtype) + in_batch.v_norm_eps)


class _BlockedPairs(torch.autograd.Function):
    """
    A few pairs at a time, whose attention maps stay in the processor's cache and are computed again in the backward
    pass: the way of a CPU, several times faster there than fused kernels (benchmarks/in_batch_attention.md), in memory
    that does not grow with the number of pairs.

    Args:
        query: (B, H_kv, R·L, D), the R heads that share a key head one after the other.
        key: (B, H_kv, L, D); value: (B, H_kv, L, D), with V-normalisation and ||V|| (B, H_kv, L, D + 1).
        pair_weights: (P,), the weights of the pairs `in_batch.rows`, `in_batch.columns`, the rows in order.

    Returns:
        (B, H_kv, R·L, D): for each chunk the weighted sum over its pairs.
    """

    BLOCK_ELEMENTS = 2**19  # of the attention maps of a block; fewer leave a thread idle

    @staticmethod
    def blocks(query: torch.Tensor, key: torch.Tensor, in_batch: InBatchContext):
        """(chunk i, its columns, slice of the list of pairs, attention maps) of each block: pairs of one row."""
        size = max(1, _BlockedPairs.BLOCK_ELEMENTS // (query.shape[1] * query.shape[2] * key.shape[2]))
        start = 0
        for row, count in enumerate(torch.bincount(in_batch.rows, minlength=query.shape[0]).tolist()):
            for first in range(start, start + count, size):
                pairs = slice(first, min(first + size, start + count))
                columns = in_batch.columns[pairs]
                scores = query[row] @ key[columns].transpose(-1, -2)
                if in_batch.pair_key_mask is not None:
                    scores.masked_fill_(~in_batch.pair_key_mask[pairs], -torch.inf)
                yield row, columns, pairs, torch.softmax(scores, dim=-1)
            start += count

    @staticmethod
    def forward(ctx, query, key, value, pair_weights, in_batch, scaling, dropout):
        ctx.save_for_backward(query, key, value, pair_weights)
        ctx.in_batch, ctx.scaling = in_batch, scaling
        output = value.new_zeros(*query.shape[:-1], value.shape[-1] - in_batch.v_norm)
        for row, columns, pairs, maps in _BlockedPairs.blocks(query * scaling, key, in_batch):
            outputs, factor = _weigh(maps @ value[columns], pair_weights[pairs, None, None, None], in_batch)
            output[row] += (outputs * factor.to(outputs.dtype)).sum(0)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_output):
        query, key, value, pair_weights = ctx.saved_tensors
        in_batch = ctx.in_batch
        query = query * ctx.scaling
        grad_query, grad_key, grad_value = (torch.zeros_like(states) for states in (query, key, value))
        grad_weights = torch.zeros_like(pair_weights)
        norms = value[..., -1:] if in_batch.v_norm else None
        values = value[..., :-1].contiguous() if in_batch.v_norm else value
        for row, columns, pairs, maps in _BlockedPairs.blocks(query, key, in_batch):
            weights = pair_weights[pairs, None, None, None]
            # `factor` is what a query's output is scaled with.
            factor = weights
            if in_batch.v_norm:
                lengths = (maps @ norms[columns]).to(weights.dtype) + in_batch.v_norm_eps
                factor = weights / lengths
            grads = grad_output[row] * factor.to(maps.dtype)
            # d loss / d maps, short of what comes by `lengths`; with the maps it gives <d loss / d output, output>.
            grad_maps = grads @ values[columns].transpose(-1, -2)
            products = (maps * grad_maps).sum(-1, keepdim=True, dtype=weights.dtype)
            grad_weights[pairs] = products.sum((1, 2, 3)) / weights.flatten()
            # A softmax's gradient takes `products` off. With V-normalisation that and what comes by `lengths` are one
            # term, for to scale a row of the maps would change nothing but for eps.
            if in_batch.v_norm:
                grad_lengths = (products / lengths).to(maps.dtype)
                shift = (norms[columns] + in_batch.v_norm_eps).transpose(-1, -2)
                grad_scores = grad_maps.addcmul_(shift, grad_lengths, value=-1).mul_(maps)
                grads = torch.cat((grads, -grad_lengths), dim=-1)
            else:
                grad_scores = grad_maps.sub_(products.to(maps.dtype)).mul_(maps)
            grad_query[row] += (grad_scores @ key[columns]).sum(0)
            if ctx.needs_input_grad[1]:  # not where e is frozen
                grad_value.index_add_(0, columns, maps.transpose(-1, -2) @ grads)
                grad_key.index_add_(0, columns, grad_scores.transpose(-1, -2) @ query[row])
        return grad_query * ctx.scaling, grad_key, grad_value, grad_weights, None, None, None


def _prefers_plain(query: torch.Tensor) -> bool:
    # On a CPU the fused kernel's backward in half precision takes several times what plain products take, which run
    # on matrix units there; everywhere else, and in float32, the fused kernel wins (benchmarks/in_batch_attention.md).
    return query.device.type == "cpu" and query.dtype in (torch.bfloat16, torch.float16) and torch.is_grad_enabled()


def _plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    scale: float,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """Attention as two products around a softmax; a boolean mask, True where a key is seen."""
    scores = (query * scale) @ key.transpose(-1, -2)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, torch.finfo(scores.dtype).min)
    return nn.functional.dropout(torch.softmax(scores, dim=-1), dropout_p) @ value


AttentionInterface.register(IN_BATCH_ATTENTION, in_batch_attention_forward)
# Without a mask function of its own transformers hands such an attention no mask at all: silently wrong on padding.
AttentionMaskInterface.register(IN_BATCH_ATTENTION, sdpa_mask)

__all__ = ["IN_BATCH_ATTENTION", "InBatchContext", "in_batch_attention_forward"]
