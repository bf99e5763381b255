"""RevelaConfig: what it keeps, what it refuses, and that it survives a file."""

import inspect

import pytest
from transformers import AutoConfig, BertConfig, LlamaConfig

from modeling_revela import RevelaConfig
from tests.modeling_revela.tiny import FAMILIES


def test_survives_a_file(tmp_path):
    options = {
        "v_norm": False,
        "in_batch_gate": True,
        "in_batch_gate_init": 0.2,
        "include_diagonal": True,
        "dual_loss": True,
        "weight_floor": 1e-6,
        "similarity_temperature": 0.03,
        "trainable_temperature": True,
        "similarity_dtype": "bfloat16",
        "similarity_span": "full",
        "similarity_span_ratio": 0.4,
        "pooling": "mean",
        "matryoshka_dims": [8, 24],
        "embed_batch_size": 8,
        "query_prompt": "q: ",
        "document_prompt": "",
        "freeze_lm": True,
        "retriever_lora": {"r": 8, "target_modules": ["q_proj"]},
        "lm_lora": {"r": 4},
        "save_backbones": False,
        "retriever_name_or_path": "somewhere/retriever",
        "lm_name_or_path": "somewhere/lm",
    }
    config = RevelaConfig(lm_config=FAMILIES["gemma3"](), retriever_config=BertConfig(hidden_size=48), **options)
    config.save_pretrained(tmp_path)
    for loaded in (RevelaConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(loaded) is RevelaConfig
        assert {name: getattr(loaded, name) for name in options} == options
        assert loaded.lm_config.to_dict() == config.lm_config.to_dict()
        assert isinstance(loaded.retriever_config, BertConfig) and loaded.retriever_config.hidden_size == 48


def test_every_field_has_a_documented_default():
    # The paper's setting: float32 similarities, 1e-4, V-normalisation, no gate.
    config = RevelaConfig()
    assert (config.v_norm, config.in_batch_gate, config.similarity_temperature) == (True, False, 1e-4)
    assert (config.similarity_dtype, config.similarity_span) == ("float32", "first_half")
    assert (config.query_prompt, config.document_prompt) == ("query: ", "passage: ")
    fields = set(inspect.signature(RevelaConfig.__init__).parameters) - {"self", "kwargs"}
    assert len(fields) > 20
    for name in fields:
        assert f"{name} (`" in RevelaConfig.__doc__, name


@pytest.mark.parametrize("dims", [[], [0], [-8], [8, 8], [16, 8], [8.0], [True], ["8"]])
def test_sizes_that_are_none_are_refused(dims):
    with pytest.raises(ValueError, match="`matryoshka_dims` are .*whole numbers above 0, each once and rising"):
        RevelaConfig(matryoshka_dims=dims)


def test_sizes_lie_below_the_embeddings():
    with pytest.raises(ValueError, match="`matryoshka_dims` has 48, but the embedding has 48 dimensions"):
        RevelaConfig(retriever_config=BertConfig(hidden_size=48), matryoshka_dims=[8, 48])
    RevelaConfig(retriever_config=BertConfig(hidden_size=48), matryoshka_dims=[8, 47])


def test_text_config_is_the_lms():
    config = RevelaConfig(lm_config=LlamaConfig(vocab_size=77), retriever_config=BertConfig(vocab_size=5))
    assert config.get_text_config().vocab_size == 77
    assert RevelaConfig().get_text_config().model_type == "revela"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pooling", "last"),
        ("similarity_span", "half"),
        ("similarity_dtype", "fp32"),
        ("similarity_temperature", 0.0),
        ("similarity_temperature", -1.0),
        ("similarity_temperature", float("nan")),
        ("similarity_span_ratio", 0.0),
        ("similarity_span_ratio", 1.0),
        ("embed_batch_size", 0),
        ("weight_floor", -1e-9),
        ("weight_floor", 0.5),
    ],
)
def test_values_out_of_range_are_named(field, value):
    with pytest.raises(ValueError, match=f"`{field}` must"):
        RevelaConfig(**{field: value})
