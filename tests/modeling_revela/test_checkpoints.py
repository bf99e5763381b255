"""Saving and loading the training classes where the package is installed."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForPreTraining,
    AutoTokenizer,
    LlamaForCausalLM,
    pipeline,
)

from modeling_revela import RevelaForCausalLM, RevelaForPreTraining
from tests.modeling_revela.tiny import FAMILIES, make_chunks, make_lm, pad_chunks, random_weights

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
BERT_LORA = {"r": 4, "target_modules": ["query", "value"]}

VARIANTS = {
    "full": ("llama", {}),
    "lora": ("llama", {"retriever_lora": LORA, "lm_lora": LORA}),
    "gate and temperature": ("llama", {"in_batch_gate": True, "trainable_temperature": True}),
    "bert mean": ("bert", {"pooling": "mean"}),
    "bert cls lora": ("bert", {"pooling": "cls", "retriever_lora": BERT_LORA, "freeze_lm": True}),
    "adapters only": ("llama", {"retriever_lora": LORA, "lm_lora": LORA, "save_backbones": False}),
    "adapters and biases only": (
        "bert",
        {"retriever_lora": {**BERT_LORA, "bias": "all"}, "lm_lora": LORA, "save_backbones": False},
    ),
    "adapter and frozen lm": (
        "bert",
        {"retriever_lora": BERT_LORA, "freeze_lm": True, "in_batch_gate": True, "save_backbones": False},
    ),
    "one half whole": ("llama", {"lm_lora": LORA, "save_backbones": False}),
}


def train_a_little(model: torch.nn.Module) -> None:
    """Move every trainable weight, so that nothing equals its initial value."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


@pytest.fixture
def make_trained(tiny_lm_folder, tiny_bert_folder):
    def make(variant: str, **changes) -> RevelaForPreTraining:
        retriever, options = VARIANTS[variant]
        folder = {"llama": tiny_lm_folder, "bert": tiny_bert_folder}[retriever]
        options = {"similarity_temperature": 0.1, **options, **changes}
        model = RevelaForPreTraining.from_backbones(folder, tiny_lm_folder, **options).eval()
        train_a_little(model)
        return model

    return make


@torch.no_grad()
def run(model) -> list[torch.Tensor]:
    batch = pad_chunks(make_chunks((9, 6, 8)))
    documents = pad_chunks(make_chunks((5, 7, 6), seed=1))
    output = model(
        **batch, document_input_ids=documents["input_ids"], document_attention_mask=documents["attention_mask"]
    )
    return [output.loss, output.next_token_loss, output.document_embeddings, output.in_batch_weights]


def trainable(model) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("variant", VARIANTS)
def test_pretraining_checkpoint_comes_back_equal(make_trained, tmp_path, variant):
    model = make_trained(variant)
    model.save_pretrained(tmp_path)
    loaded = RevelaForPreTraining.from_pretrained(tmp_path)
    assert not loaded.training
    expected = model.state_dict()
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, expected[name]), name
    assert trainable(loaded) == trainable(model)
    for value, reference in zip(run(loaded), run(model), strict=True):
        assert torch.equal(value, reference)


def test_files_of_a_checkpoint(make_trained, tmp_path):
    make_trained("full").save_pretrained(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    code = {
        "configuration_revela.py",
        "in_batch_attention.py",
        "linear_cross_entropy.py",
        "modeling_revela.py",
        "modeling_revela_lm.py",
        "modeling_revela_pretraining.py",
    }
    assert names == code | {"config.json", "model.safetensors"}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "revela"
    assert config["auto_map"] == {
        "AutoConfig": "configuration_revela.RevelaConfig",
        "AutoModelForPreTraining": "modeling_revela_pretraining.RevelaForPreTraining",
    }
    # The attention function is the wrapper's business: stock code must not meet its name.
    assert "revela_in_batch" not in (tmp_path / "config.json").read_text()


def test_without_backbones_only_what_was_trained_is_stored(make_trained, tmp_path):
    for variant in ("adapters only", "adapters and biases only", "adapter and frozen lm", "one half whole"):
        model = make_trained(variant)
        model.save_pretrained(tmp_path)
        assert set(load_file(tmp_path / "model.safetensors")) == trainable(model), variant


def test_a_frozen_adapter_is_stored_all_the_same(make_trained, tmp_path):
    # As while the LM learns alone at first.
    model = make_trained("adapters only")
    expected = trainable(model)
    model.retriever.requires_grad_(False)
    model.save_pretrained(tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == expected


def test_a_whole_checkpoint_needs_no_backbone(make_trained, tmp_path):
    model = make_trained("lora")
    model.config.retriever_name_or_path = model.config.lm_name_or_path = str(tmp_path / "moved-away")
    model.save_pretrained(tmp_path)
    assert torch.equal(run(RevelaForPreTraining.from_pretrained(tmp_path))[0], run(model)[0])


def test_auto_class_needs_no_trust_where_the_package_is_installed(make_trained, tmp_path):
    model = make_trained("lora")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForPreTraining.from_pretrained(tmp_path)
    assert type(loaded) is RevelaForPreTraining
    assert torch.equal(run(loaded)[0], run(model)[0])


@pytest.mark.parametrize("options", [{}, {"lm_lora": LORA, "in_batch_gate": True}], ids=["full", "lora and gate"])
@pytest.mark.parametrize("family", ["llama-mha", "gemma3"])  # tied embeddings, both
def test_causal_lm_comes_back_equal(tmp_path, family, options):
    model = RevelaForCausalLM.from_backbone(make_lm(family, torch.float32), **options)
    train_a_little(model)
    model.save_pretrained(tmp_path)
    batch = pad_chunks(make_chunks((9, 6, 8)))
    weights = random_weights(3, torch.float32)
    expected = model(**batch, in_batch_weights=weights).loss
    for auto_class in (RevelaForCausalLM, AutoModelForCausalLM):
        loaded = auto_class.from_pretrained(tmp_path)
        assert type(loaded) is RevelaForCausalLM
        assert loaded(**batch, in_batch_weights=weights).loss.item() == expected.item()
        assert loaded.backbone.lm_head.weight is loaded.backbone.get_input_embeddings().weight


def test_causal_lm_generates_as_it_was_told(tiny_lm_folder, tmp_path):
    stock = AutoModelForCausalLM.from_pretrained(tiny_lm_folder)
    stock.generation_config.max_new_tokens = 3
    stock.generation_config.pad_token_id = 1
    model = RevelaForCausalLM.from_backbone(stock)
    assert model.can_generate() and model.generation_config.max_new_tokens == 3
    model.generation_config.max_new_tokens = 5
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (loaded.generation_config.max_new_tokens, loaded.generation_config.pad_token_id) == (5, 1)
    ids = torch.tensor([[5, 6, 7]])
    assert loaded.generate(ids, eos_token_id=None, do_sample=False).shape == (1, 8)
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm_folder)
    generate = pipeline("text-generation", model=loaded, tokenizer=tokenizer)
    options = {"do_sample": False, "return_full_text": False}
    expected = pipeline("text-generation", model=stock, tokenizer=tokenizer)("the boat", max_new_tokens=5, **options)
    assert generate("the boat", **options) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gates_and_temperature_stay_float32_whatever_the_precision(make_trained, tmp_path, dtype):
    model = make_trained("gate and temperature")
    model.save_pretrained(tmp_path)
    loaded = RevelaForPreTraining.from_pretrained(tmp_path, dtype=dtype)
    found = dict(loaded.named_parameters())
    for name in ("lm.in_batch_gate", "log_temperature"):
        assert torch.equal(found.pop(name), dict(model.named_parameters())[name]), name
    assert {value.dtype for value in found.values()} == {dtype}
    assert torch.isfinite(run(loaded)[0])


def test_the_co_trained_lm_is_a_stock_model(make_trained, tmp_path):
    model = make_trained("gate and temperature")
    model.lm.backbone.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is LlamaForCausalLM and loaded.config._attn_implementation == "sdpa"
    batch = pad_chunks(make_chunks((9, 6, 8)))
    assert torch.equal(loaded(**batch).loss, model.lm(**batch).loss)


class TestErrors:
    def test_a_checkpoint_without_its_adapters(self, make_trained, tmp_path):
        make_trained("lora").save_pretrained(tmp_path)
        weights = load_file(tmp_path / "model.safetensors")
        kept = {name: value for name, value in weights.items() if "lora_" not in name}
        save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match="lacks 16 weights of RevelaForPreTraining, .*lora_A"):
            RevelaForPreTraining.from_pretrained(tmp_path)

    def test_a_checkpoint_of_the_other_class(self, make_trained, tmp_path):
        make_trained("full").save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="another class"):
            RevelaForCausalLM.from_pretrained(tmp_path)

    def test_backbones_left_out_and_gone(self, make_trained, tmp_path):
        model = make_trained("adapters only")
        other = LlamaForCausalLM(FAMILIES["llama-gqa"]())
        other.save_pretrained(tmp_path / "other")
        model.config.lm_name_or_path = str(tmp_path / "other")
        model.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="leaves 'lm.backbone.*has no such"):
            RevelaForPreTraining.from_pretrained(tmp_path)

    def test_backbones_left_out_that_came_from_nowhere(self, tiny_bert_folder):
        with pytest.raises(ValueError, match="`save_backbones=False` leaves `lm.backbone.` out"):
            RevelaForPreTraining.from_backbones(tiny_bert_folder, make_lm(), lm_lora=LORA, save_backbones=False)
