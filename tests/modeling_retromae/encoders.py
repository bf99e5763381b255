"""Tiny masked LMs of each family."""

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DistilBertConfig,
    DistilBertForMaskedLM,
    ElectraConfig,
    ElectraForMaskedLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    MPNetConfig,
    MPNetForMaskedLM,
    PreTrainedModel,
    RobertaConfig,
    RobertaForMaskedLM,
    XLMRobertaConfig,
    XLMRobertaForMaskedLM,
)

VOCABULARY = 50
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 24,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.3,
    "pad_token_id": 1,
}
_DISTIL = {
    "vocab_size": VOCABULARY,
    "dim": 16,
    "n_layers": 2,
    "n_heads": 2,
    "hidden_dim": 32,
    "max_position_embeddings": 24,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "initializer_range": 0.3,
}
_MODERN = {
    **{name: _SIZES[name] for name in list(_SIZES)[:6]},
    "initializer_range": 0.3,
    "pad_token_id": 1,
    "cls_token_id": 0,
    "bos_token_id": 0,
    "sep_token_id": 2,
    "eos_token_id": 2,
    "local_attention": 8,
}
ENCODERS = {
    "bert": (BertForMaskedLM, BertConfig, _SIZES),
    "roberta": (RobertaForMaskedLM, RobertaConfig, _SIZES),
    "xlm-roberta": (XLMRobertaForMaskedLM, XLMRobertaConfig, _SIZES),
    "distilbert": (DistilBertForMaskedLM, DistilBertConfig, _DISTIL),
    "mpnet": (MPNetForMaskedLM, MPNetConfig, _SIZES),
    "electra": (ElectraForMaskedLM, ElectraConfig, {**_SIZES, "embedding_size": 16}),
    "electra-small": (ElectraForMaskedLM, ElectraConfig, {**_SIZES, "embedding_size": 8}),
    "modernbert": (ModernBertForMaskedLM, ModernBertConfig, _MODERN),
}


def make_encoder(name: str, seed: int = 0) -> PreTrainedModel:
    model_class, config_class, options = ENCODERS[name]
    torch.manual_seed(seed)
    return model_class(config_class(**options)).eval()
