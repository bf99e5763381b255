"""What `export` writes of a RetroMAE checkpoint: the stock encoder, through the same doors and one more."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from transformers import AutoTokenizer

from hub_cards.evaluation import evaluate_groups
from hub_cards.export import export
from modeling_retromae import RetroMAEForPreTraining
from tests.modeling_retromae.encoders import ENCODERS
from trainers.finetune_model import ModelArguments, load_model

TEXTS = ["the boat", "a river bank holds a fisher who sells fish. " * 30, "naive words", "x"]
NAMES = ("bert", "roberta", "modernbert")
CODE = """
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer

for name, folder in folders.items():
    model = SentenceTransformer(folder, device="cpu")
    assert model.similarity_fn_name == "cosine"
    found[f"{name} sentence-transformers"] = torch.tensor(model.encode(texts))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    stock = AutoModel.from_pretrained(folder)
    assert type(stock).__module__.startswith("transformers."), type(stock)
    masked = AutoModelForMaskedLM.from_pretrained(folder)
    assert type(masked).__module__.startswith("transformers."), type(masked)
    rows, logits = [], []
    with torch.no_grad():
        for text in texts:
            batch = tokenizer(text, truncation=True, return_tensors="pt")
            state = stock(batch["input_ids"], batch["attention_mask"]).last_hidden_state[0, 0]
            rows.append(state / state.norm())
            logits.append(masked(batch["input_ids"], batch["attention_mask"]).logits[0, 0])
    found[f"{name} AutoModel"] = torch.stack(rows)
    found[f"{name} logits"] = torch.stack(logits)
    remote = AutoModel.from_pretrained(folder, trust_remote_code=True)
    assert type(remote).__name__ == "RevelaModel"
    found[f"{name} remote"] = remote.encode_query(texts)
    assert torch.equal(remote.encode_document(texts), remote.encode_query(texts))
"""


@pytest.fixture(scope="module")
def trained(tiny_bert_folder, tmp_path_factory):
    """Per family: a pre-training model and its checkpoint, with the tiny BERT's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert_folder)
    made = {}
    for name in NAMES:
        model_class, config_class, options = ENCODERS[name]
        sizes = {**options, "vocab_size": len(tokenizer), "max_position_embeddings": 40, "pad_token_id": 0}
        torch.manual_seed(2)
        encoder = model_class(config_class(**sizes))
        model = RetroMAEForPreTraining.from_encoder(encoder).eval()
        folder = tmp_path_factory.mktemp(name) / "run"
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        made[name] = model, folder
    return made


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory) -> dict[str, Path]:
    return {name: export(trained[name][1], tmp_path_factory.mktemp("exports") / name) for name in NAMES}


@pytest.fixture(scope="module")
def through_the_doors(exported, elsewhere) -> dict[str, torch.Tensor]:
    return elsewhere(CODE, TEXTS, {name: str(folder) for name, folder in exported.items()})


@pytest.mark.parametrize("name", NAMES)
def test_all_doors_give_the_embeddings_and_the_head_of_the_training(trained, through_the_doors, name):
    model, folder = trained[name]
    # RoBERTa's positions begin behind the padding token's; of 40 rows 39 are left (its padding is token 0 here).
    length = 39 if name == "roberta" else 40
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows, logits = [], []
    with torch.no_grad():
        for text in TEXTS:
            batch = tokenizer(text, truncation=True, max_length=length, return_tensors="pt")
            rows.append(model.embed(batch["input_ids"], batch["attention_mask"])[0])
            logits.append(model.encoder(batch["input_ids"], batch["attention_mask"]).logits[0, 0])
    expected = torch.nn.functional.normalize(torch.stack(rows), dim=-1)
    for door in ("sentence-transformers", "AutoModel", "remote"):
        assert (through_the_doors[f"{name} {door}"] - expected).abs().max() < 1e-5, door
    assert (through_the_doors[f"{name} logits"] - torch.stack(logits)).abs().max() < 1e-4
    assert torch.pdist(expected).min() > 1e-4


def test_mean_pooling_may_be_chosen(trained, tmp_path):
    model, folder = trained["bert"]
    published = SentenceTransformer(str(export(folder, tmp_path / "out", pooling="mean")), device="cpu")
    batch = AutoTokenizer.from_pretrained(folder)(TEXTS[0], return_tensors="pt")
    with torch.no_grad():
        hidden = model.encoder.base_model(batch["input_ids"]).last_hidden_state[0].mean(0)
    found = torch.tensor(published.encode(TEXTS[0]))
    assert (found - hidden / hidden.norm()).abs().max() < 1e-5


def test_checkpoint_stays_whole_and_loadable(trained, exported):
    again = RetroMAEForPreTraining.from_pretrained(trained["bert"][1])
    for name, value in trained["bert"][0].state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    config = json.loads((exported["bert"] / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("bert", ["BertForMaskedLM"])
    assert not any(name.startswith("decoder.") for name in load_file(exported["bert"] / "model.safetensors"))


def test_export_is_what_fine_tuning_starts_from_and_a_checkpoint_is_not(trained, exported):
    model = load_model(ModelArguments(str(exported["bert"])))
    published = SentenceTransformer(str(exported["bert"]), device="cpu")
    assert (model.encode(TEXTS) == published.encode(TEXTS)).all()
    with pytest.raises(ValueError, match="pre-training checkpoint: publish its encoder with `revela-hub export"):
        load_model(ModelArguments(str(trained["bert"][1])))


def test_exported_encoder_is_measured_without_labels(exported):
    rows = [{"texts": ["the boat one two", "a river one two"], "doc_ids": ["a", "a"], "source": "s"}]
    (row,) = evaluate_groups({"it": str(exported["bert"])}, rows, show=False)["rows"]
    assert row["scores"]["ndcg_at_10"] == 1


def test_what_cannot_be_is_refused(trained, tmp_path):
    folder = trained["bert"][1]
    with pytest.raises(ValueError, match="there is no adapter to write"):
        export(folder, tmp_path / "out", adapter_only=True)
    with pytest.raises(ValueError, match="was trained without an LM"):
        export(folder, tmp_path / "out", part="lm")
    with pytest.raises(ValueError, match="No pooling 'eos': choose one of cls, mean"):
        export(folder, tmp_path / "out", pooling="eos")
    shutil.copytree(folder, tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"broken/model\.safetensors is no whole safetensors file"):
        export(tmp_path / "broken", tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))
