"""Tiny causal LMs of several families and batches of random chunks, for the tests of this folder."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from modeling_revela import in_batch_attention

VOCABULARY = 48
WINDOW = 4  # of the sliding layers, shorter than every chunk

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_GEMMA = {
    **_SIZES,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 12,
    "attn_logit_softcapping": None,
}

FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama-gqa": lambda: LlamaConfig(**_SIZES, num_key_value_heads=2),
    "llama-mha": lambda: LlamaConfig(**_SIZES, num_key_value_heads=4, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**_SIZES, num_key_value_heads=2),
    "qwen3": lambda: Qwen3Config(**_SIZES, num_key_value_heads=2, head_dim=16),
    "mistral": lambda: MistralConfig(**_SIZES, num_key_value_heads=2, sliding_window=WINDOW),
    "gemma2": lambda: Gemma2Config(**_GEMMA, final_logit_softcapping=2.0),
    "gemma3": lambda: Gemma3TextConfig(**_GEMMA),
    "gpt-neox": lambda: GPTNeoXConfig(**_SIZES),
}


def make_lm(
    family: str = "llama-gqa", dtype: torch.dtype = torch.float64, seed: int = 0, **changes
) -> PreTrainedModel:
    """A causal LM with every weight random, those of norms and biases too, so that none can be left out unseen."""
    config = FAMILIES[family]()
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and "norm" in name and name.endswith("weight"):
                parameter += 0.2 * torch.randn_like(parameter)
            else:
                parameter.normal_(0.0, 0.25)
    # Drawn in float32: what a generator gives in half precision differs between releases of torch.
    return model.to(dtype).eval()


def make_chunks(lengths: Sequence[int], seed: int = 0) -> list[torch.Tensor]:
    """Random token ids, one unpadded chunk a length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCABULARY, (length,), generator=generator) for length in lengths]


def pad_chunks(chunks: Sequence[torch.Tensor], side: str = "right", extra: int = 0) -> dict[str, torch.Tensor]:
    """Chunks -> `input_ids`, `attention_mask`, `labels` (B, L), padded on a side with `extra` columns too many."""
    length = max(len(chunk) for chunk in chunks) + extra
    # The padding is a real token's id: a leak shows.
    input_ids = torch.full((len(chunks), length), 7)
    attention_mask = torch.zeros(len(chunks), length, dtype=torch.long)
    for row, chunk in enumerate(chunks):
        place = slice(0, len(chunk)) if side == "right" else slice(length - len(chunk), length)
        input_ids[row, place] = chunk
        attention_mask[row, place] = 1
    labels = input_ids.masked_fill(attention_mask == 0, -100)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def random_weights(rows: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    """(B, B) in-batch weights with a zero diagonal and rows that sum to one; a leaf that wants a gradient."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, rows, generator=generator, dtype=torch.float64)
    scores.fill_diagonal_(-torch.inf)
    return torch.softmax(scores, dim=-1).to(dtype).requires_grad_()


KERNELS = ("blocked", "fused")


@contextmanager
def use_kernel(name: str) -> Iterator[None]:
    """Compute the pairs in the CPU's way ("blocked"), or on the CPU in the way that a GPU takes ("fused")."""
    with pytest.MonkeyPatch.context() as patch:
        if name == "fused":
            patch.setattr(in_batch_attention._BlockedPairs, "apply", in_batch_attention._fused_pairs)
        yield


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """‖value − reference‖ / ‖reference‖; the plain norm where the reference is zero."""
    size = reference.norm().item()
    return (value.double() - reference.double()).norm().item() / (size or 1.0)


def checkpoint_activations(model: PreTrainedModel, **options) -> None:
    """Switch activation checkpointing on, under the name that the installed transformers has for it."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(options)
