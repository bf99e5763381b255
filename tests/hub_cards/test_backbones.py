"""What a backbone and its tokenizer can take."""

import pytest
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    LlamaConfig,
    MambaConfig,
    RobertaConfig,
)

from hub_cards.backbones import positions, set_pad_token

SIZES = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (BertConfig(**SIZES, max_position_embeddings=12), 12),
        (RobertaConfig(**SIZES, max_position_embeddings=12, pad_token_id=1), 10),
        (LlamaConfig(**SIZES, max_position_embeddings=12), 12),
        (MambaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1), None),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_positions(config, count):
    assert positions(AutoModel.from_config(config)) == count
    if config.model_type == "roberta":
        assert positions(AutoModelForSequenceClassification.from_config(config)) == count


def test_padding_is_eos_or_else_the_first_token(tiny_lm_folder, tiny_bert_folder):
    for folder, options, expected in (
        (tiny_lm_folder, {}, "</s>"),
        (tiny_lm_folder, {"eos_token": None}, "<s>"),
        (tiny_bert_folder, {}, "[PAD]"),
    ):
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        set_pad_token(tokenizer)
        assert tokenizer.pad_token == expected
