"""The weights of RetroMAE's decoder: layers like BERT's whose queries and context may differ."""

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from .configuration_retromae import RetroMAEConfig


class RetroMAEDecoderLayer(nn.Module):
    """A BERT layer whose queries and context may differ (Eq. 5); sizes, activation and dropout are the encoder's."""

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        size, self.num_heads = config.hidden_size, config.num_attention_heads
        inner = _first(config, "intermediate_size", "hidden_dim", default=4 * size)
        eps = _first(config, "layer_norm_eps", "norm_eps", default=1e-12)
        self.query = nn.Linear(size, size)
        self.key = nn.Linear(size, size)
        self.value = nn.Linear(size, size)
        self.attention_output = nn.Linear(size, size)
        self.attention_norm = nn.LayerNorm(size, eps=eps)
        self.intermediate = nn.Linear(size, inner)
        self.output = nn.Linear(inner, size)
        self.output_norm = nn.LayerNorm(size, eps=eps)
        self.activation = ACT2FN[_first(config, "hidden_act", "activation", "hidden_activation", default="gelu")]
        self.dropout = nn.Dropout(_first(config, "hidden_dropout_prob", "dropout", "mlp_dropout", default=0.0))
        self.attention_dropout = _first(config, "attention_probs_dropout_prob", "attention_dropout", default=0.0)

    def forward(self, query: torch.Tensor, context: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        """(B, L, d) queries, (B, L, d) context, (B, L or 1, L) bool -> (B, L, d)."""
        # A softmax over nothing is NaN in some kernels: such a row looks at all, and what it found is dropped.
        blind = ~visible.any(-1, keepdim=True)
        attended = nn.functional.scaled_dot_product_attention(
            self._heads(self.query(query)),
            self._heads(self.key(context)),
            self._heads(self.value(context)),
            attn_mask=(visible | blind)[:, None],
            dropout_p=self.attention_dropout if self.training else 0.0,
        )
        attended = attended.transpose(1, 2).flatten(2).masked_fill(blind, 0.0)
        hidden = self.attention_norm(query + self.dropout(self.attention_output(attended)))
        inner = self.activation(self.intermediate(hidden))
        return self.output_norm(hidden + self.dropout(self.output(inner)))

    def _heads(self, states: torch.Tensor) -> torch.Tensor:
        return states.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


class RetroMAEDecoder(nn.Module):
    """
    The decoder's own weights. Words, absolute positions and the prediction head are the encoder's.

    An encoder without a table of absolute positions (ModernBERT), or with one of another size than its states (small
    ELECTRA), leaves the decoder to learn positions, and in the second case a projection of the embeddings, of its own.
    """

    def __init__(self, config: RetroMAEConfig, embeddings: nn.Module):
        super().__init__()
        encoder_config = config.get_text_config()
        size = encoder_config.hidden_size
        positions = getattr(embeddings, "position_embeddings", None)
        self.positions_in_embeddings = isinstance(positions, nn.Embedding)
        words = _word_embeddings(embeddings).embedding_dim
        self.embedding_projection = None if words == size else nn.Linear(words, size)
        self.position_embeddings = None
        if words != size or not self.positions_in_embeddings:
            self.position_embeddings = nn.Embedding(encoder_config.max_position_embeddings, size)
        self.layers = nn.ModuleList(RetroMAEDecoderLayer(encoder_config) for _ in range(config.decoder_layers))


def _first(config: PreTrainedConfig, *names: str, default):
    """The first of the attributes that the config has and sets: families name the same thing differently."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), default)


def _word_embeddings(embeddings: nn.Module) -> nn.Embedding:
    return _first(embeddings, "word_embeddings", "tok_embeddings", default=None)


__all__ = ["RetroMAEDecoder", "RetroMAEDecoderLayer"]
