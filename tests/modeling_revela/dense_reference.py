"""
Eq. 3-9 of the paper, written down plainly: chunk by chunk, layer by layer, all pairs, no padding and no batch.

Norms, projections and MLPs are the stock modules of a causal LM; attention, rotary positions and the way the pieces
are put together are written here. Nothing is shared with `modeling_revela`.
"""

import torch
from torch import nn


class PreNormDecoder:
    """Llama, Mistral, Qwen2, Qwen3: norm, attention, residual; norm, MLP, residual."""

    def __init__(self, lm: nn.Module):
        self.lm = lm
        self.config = lm.config
        self.layers = lm.model.layers
        self.heads = self.config.num_attention_heads
        self.head_dim = getattr(self.config, "head_dim", None) or self.config.hidden_size // self.heads
        self.rotary_dim = self.head_dim
        self.scaling = self.head_dim**-0.5

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.lm.model.embed_tokens(ids)

    def finish(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm.lm_head(self.lm.model.norm(hidden))

    def is_sliding(self, index: int) -> bool:
        if self.config.model_type == "mistral":
            return True
        return getattr(self.config, "layer_types", ["full_attention"] * len(self.layers))[index] == "sliding_attention"

    def rotary_base(self, index: int) -> float:
        return self.config.rope_parameters["rope_theta"]

    def rotate(self, states: torch.Tensor, index: int) -> torch.Tensor:
        """(L, heads, D): each pair of channels (c, c + half) turned by position · base^(-c / half)."""
        half = self.rotary_dim // 2
        # float32, as stock models compute it whatever their weights are.
        frequencies = self.rotary_base(index) ** -(torch.arange(half, dtype=torch.float32) / half)
        angles = torch.arange(states.shape[0], dtype=torch.float32)[:, None] * frequencies
        cos, sin = (trig.to(states.dtype)[:, None, :] for trig in (angles.cos(), angles.sin()))
        first, second, rest = states.split((half, half, self.head_dim - self.rotary_dim), dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)

    def project(self, index: int, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Eq. 3: (L, d) -> queries, keys and values, (heads, L, D) each."""
        layer = self.layers[index]
        attention = layer.self_attn
        normed = layer.input_layernorm(hidden)
        shape = (hidden.shape[0], -1, self.head_dim)
        query, key, value = (
            projection(normed).view(shape) for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if hasattr(attention, "q_norm"):
            query, key = attention.q_norm(query), attention.k_norm(key)
        query, key = self.rotate(query, index), self.rotate(key, index)
        # Grouped-query attention: one key head serves several query heads.
        key, value = (states.repeat_interleave(self.heads // states.shape[1], dim=1) for states in (key, value))
        return query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)

    def rest_of_layer(self, index: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        layer = self.layers[index]
        hidden = hidden + layer.self_attn.o_proj(attended)
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))


class GemmaDecoder(PreNormDecoder):
    """Gemma 2 and 3: norms around both halves of a layer, layers that slide, a scale of its own."""

    def __init__(self, lm: nn.Module):
        super().__init__(lm)
        self.scaling = self.config.query_pre_attn_scalar**-0.5

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        # By weight: the scale is the embedding's or the model's, as the release of transformers has it.
        return self.lm.model.embed_tokens.weight[ids] * self.config.hidden_size**0.5

    def rotary_base(self, index: int) -> float:
        parameters = self.config.rope_parameters
        return parameters.get(self.config.layer_types[index], parameters)["rope_theta"]

    def finish(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().finish(hidden)
        cap = self.config.final_logit_softcapping
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def rest_of_layer(self, index: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        layer = self.layers[index]
        hidden = hidden + layer.post_attention_layernorm(layer.self_attn.o_proj(attended))
        return hidden + layer.post_feedforward_layernorm(layer.mlp(layer.pre_feedforward_layernorm(hidden)))


class GPTNeoXDecoder(PreNormDecoder):
    """GPT-NeoX: attention and MLP side by side, one projection for all three, rotary on a part of the channels."""

    def __init__(self, lm: nn.Module):
        self.lm = lm
        self.config = lm.config
        self.layers = lm.gpt_neox.layers
        self.heads = self.config.num_attention_heads
        self.head_dim = self.config.hidden_size // self.heads
        self.rotary_dim = int(self.head_dim * self.config.rope_parameters["partial_rotary_factor"])
        self.scaling = self.head_dim**-0.5

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.lm.gpt_neox.embed_in(ids)

    def finish(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm.get_output_embeddings()(self.lm.gpt_neox.final_layer_norm(hidden))

    def project(self, index: int, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        layer = self.layers[index]
        fused = layer.attention.query_key_value(layer.input_layernorm(hidden))
        query, key, value = fused.view(hidden.shape[0], self.heads, 3 * self.head_dim).chunk(3, dim=-1)
        query, key = self.rotate(query, index), self.rotate(key, index)
        return query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)

    def rest_of_layer(self, index: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        layer = self.layers[index]
        return hidden + layer.attention.dense(attended) + layer.mlp(layer.post_attention_layernorm(hidden))


_DECODERS = {"gemma2": GemmaDecoder, "gemma3_text": GemmaDecoder, "gpt_neox": GPTNeoXDecoder}


def dense_revela(
    lm: nn.Module,
    chunks: list[torch.Tensor],
    weights: torch.Tensor,
    v_norm: bool,
    v_norm_eps: float = 1e-6,
    gate: torch.Tensor | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """
    Run a causal LM with in-batch attention.

    Args:
        lm: a stock causal LM.
        chunks: unpadded token ids, (L_i,) each.
        weights: (B, B), Sim(D_i, D_j).
        gate: (layers, heads), the scale of b; `None` for Eq. 7.

    Returns:
        Logits (L_i, V) of the h stream and of the e stream.
    """
    decoder = _DECODERS.get(lm.config.model_type, PreNormDecoder)(lm)
    e_stream = [decoder.embed(chunk) for chunk in chunks]
    h_stream = list(e_stream)
    for index in range(len(decoder.layers)):
        e_parts = [decoder.project(index, hidden) for hidden in e_stream]
        h_parts = [decoder.project(index, hidden) for hidden in h_stream]
        next_e, next_h = [], []
        for i in range(len(chunks)):
            e_attended = _self_attention(decoder, index, *e_parts[i])  # Eq. 4
            attended = _self_attention(decoder, index, *h_parts[i])  # s_i
            cross = torch.zeros_like(attended)  # b_i
            for j in range(len(chunks)):
                _, key, value = e_parts[j]
                probabilities = torch.softmax(h_parts[i][0] @ key.mT * decoder.scaling, dim=-1)
                b_ij = probabilities @ value  # Eq. 5
                if v_norm:
                    b_ij = b_ij / (probabilities @ value.norm(dim=-1, keepdim=True) + v_norm_eps)  # Eq. 8
                cross = cross + weights[i, j] * b_ij  # Eq. 6, 9
            if gate is not None:
                cross = gate[index][:, None, None] * cross
            next_e.append(decoder.rest_of_layer(index, e_stream[i], _join_heads(e_attended)))
            next_h.append(decoder.rest_of_layer(index, h_stream[i], _join_heads(attended + cross)))  # Eq. 7
        e_stream, h_stream = next_e, next_h
    return [decoder.finish(hidden) for hidden in h_stream], [decoder.finish(hidden) for hidden in e_stream]


def mean_loss(logits: list[torch.Tensor], chunks: list[torch.Tensor]) -> torch.Tensor:
    """Mean over all tokens but the first of each chunk of -log p(token | those before it)."""
    losses = [
        -torch.log_softmax(scores[:-1], dim=-1).gather(-1, chunk[1:, None])
        for scores, chunk in zip(logits, chunks, strict=True)
    ]
    return torch.cat(losses).mean()


def _self_attention(decoder: PreNormDecoder, index: int, query, key, value) -> torch.Tensor:
    positions = torch.arange(query.shape[1])
    distance = positions[:, None] - positions[None, :]
    hidden = distance < 0
    if decoder.is_sliding(index):
        hidden = hidden | (distance >= decoder.config.sliding_window)
    scores = (query @ key.mT * decoder.scaling).masked_fill(hidden, -torch.inf)
    return torch.softmax(scores, dim=-1) @ value


def _join_heads(states: torch.Tensor) -> torch.Tensor:
    """(heads, L, D) -> (L, heads · D)."""
    return states.transpose(0, 1).flatten(1)
