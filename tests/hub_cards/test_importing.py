"""Released checkpoints made small: what `import` writes of them embeds as plain peft and transformers code does."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Normalize, Pooling, Transformer
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertForMaskedLM,
)
from typer.testing import CliRunner

import revela_hub
from hub_cards.importing import import_model
from hub_cards.recorded import open_doors, read_record
from modeling_revela import RevelaModel

TEXTS = ["the boat", "A river bank holds a fisher who sells fish. " * 12, "naïve 東京", "<code> x"]
LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
# name -> (class of the base, options of LoraConfig, changes to the base's tokenizer, tokens that the adapter adds)
ADAPTERS = {
    "revela": (AutoModel, {**LORA, "task_type": "FEATURE_EXTRACTION"}, {}, ()),
    "repllama": (AutoModel, {"r": 2, "target_modules": ["q_proj", "v_proj"]}, {"padding_side": "left"}, ()),
    "tevatron on a causal LM": (AutoModelForCausalLM, {**LORA, "task_type": "CAUSAL_LM"}, {"pad_token": "<s>"}, ()),
    "added tokens": (AutoModel, {**LORA, "modules_to_save": ["embed_tokens"]}, {"padding_side": "left"}, ["<code>"]),
    "lora on embeddings": (AutoModel, {"r": 2, "target_modules": ["embed_tokens", "v_proj"]}, {}, ()),
    "saved norm": (AutoModel, {**LORA, "modules_to_save": ["norm"]}, {"pad_token": "</s>"}, ()),
    "dora": (AutoModel, {**LORA, "use_dora": True}, {}, ()),
}


def make_adapter(root: Path, base: Path, name: str) -> tuple[Path, Path]:
    """(base, adapter): an adapter whose weights are far from doing nothing, as peft's `save_pretrained` writes it."""
    auto_class, options, changes, added = ADAPTERS[name]
    backbone = Path(shutil.copytree(base, root / "base"))
    tokenizer = AutoTokenizer.from_pretrained(backbone, **changes)
    tokenizer.save_pretrained(backbone)
    model = auto_class.from_pretrained(backbone, dtype=torch.float32)
    folder = root / "adapter"
    if added:
        tokenizer.add_tokens(list(added))
        model.resize_token_embeddings(len(tokenizer))
        tokenizer.save_pretrained(folder)
    torch.manual_seed(3)
    wrapped = get_peft_model(model, LoraConfig(**options))
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    wrapped.save_pretrained(folder)
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(backbone)
    return backbone, folder


@torch.no_grad()
def by_hand(auto_class, base: Path, adapter: Path, prompt: str, max_length: int = 256) -> torch.Tensor:
    """Text by text: the base with the adapter on it, EOS put after the tokens, its last hidden state."""
    own = adapter if (adapter / "tokenizer.json").exists() else base
    tokenizer = AutoTokenizer.from_pretrained(own)
    model = auto_class.from_pretrained(base, dtype=torch.float32)
    if own is adapter:
        model.resize_token_embeddings(len(tokenizer))
    model = PeftModel.from_pretrained(model, adapter).eval()
    rows = []
    for text in TEXTS:
        ids = tokenizer(prompt + text, truncation=True, max_length=max_length - 1)["input_ids"]
        ids = torch.tensor([[*ids, tokenizer.eos_token_id]])
        rows.append(model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0, -1])
    return torch.nn.functional.normalize(torch.stack(rows), dim=-1)


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_embed_as_plain_peft_code_does(tiny_lm_folder, tmp_path, name):
    base, adapter = make_adapter(tmp_path, tiny_lm_folder, name)
    out = import_model(str(adapter), tmp_path / "out")
    published = SentenceTransformer(str(out), device="cpu")
    assert published.similarity_fn_name == "cosine" and published.prompts["query"] == "query: "
    remote = RevelaModel.from_pretrained(out)
    auto_class = ADAPTERS[name][0]
    plain = AutoModel.from_pretrained(base)
    for side, prompt in (("query", "query: "), ("document", "passage: ")):
        expected = by_hand(auto_class, base, adapter, prompt)
        # Together, so that short texts are padded.
        found = getattr(published, f"encode_{side}")(TEXTS, convert_to_tensor=True)
        assert (found - expected).abs().max() < 1e-5, side
        assert (getattr(remote, f"encode_{side}")(TEXTS) - expected).abs().max() < 1e-5, side
    # The adapter does something, and the folder is stock.
    norm = torch.nn.functional.normalize
    with torch.no_grad():
        ids = AutoTokenizer.from_pretrained(out)("passage: " + TEXTS[0], return_tensors="pt")["input_ids"]
        assert (norm(plain(ids).last_hidden_state[0, -1], dim=-1) - expected[0]).abs().max() > 1e-2
    assert json.loads((out / "config.json").read_text())["architectures"] == ["LlamaModel"]
    assert len(open_doors(out, read_record(out))) == 3
    weights = load_file(out / "model.safetensors")
    assert not any("lora" in key or "base_layer" in key or "original_module" in key for key in weights)
    if ADAPTERS[name][3]:
        assert published.tokenizer.tokenize("<code>") == ["<code>"]


# Encoders


@pytest.fixture(scope="module")
def retromae(tiny_bert_folder, tmp_path_factory) -> Path:
    """As the authors released it: the state of a `BertForMaskedLM` and its tokenizer."""
    folder = tmp_path_factory.mktemp("retromae")
    torch.manual_seed(4)
    BertForMaskedLM(AutoModel.from_pretrained(tiny_bert_folder).config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_bert_folder).save_pretrained(folder)
    return folder


@torch.no_grad()
def cls_by_hand(folder: Path) -> torch.Tensor:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, add_pooling_layer=False).eval()
    batches = (tokenizer(text, truncation=True, max_length=256, return_tensors="pt") for text in TEXTS)
    return torch.cat([model(**batch).last_hidden_state[:, 0] for batch in batches])


def test_retromae_embeds_at_cls_without_prompts_and_keeps_norms_and_head(retromae, tmp_path):
    out = import_model(retromae, tmp_path / "out")
    expected = cls_by_hand(retromae)
    published = SentenceTransformer(str(out), device="cpu")
    assert published.similarity_fn_name == "dot" and len(published) == 2
    remote = RevelaModel.from_pretrained(out)
    for side in ("query", "document"):
        assert (getattr(published, f"encode_{side}")(TEXTS, convert_to_tensor=True) - expected).abs().max() < 1e-5
        assert (getattr(remote, f"encode_{side}")(TEXTS) - expected).abs().max() < 1e-5
    assert (expected.norm(dim=-1) - 1).abs().min() > 0.1
    masked, info = AutoModelForMaskedLM.from_pretrained(out, output_loading_info=True)
    original = load_file(retromae / "model.safetensors")
    assert len(open_doors(out, read_record(out))) == 4
    assert not info["missing_keys"] and all(torch.equal(masked.state_dict()[key], original[key]) for key in original)


def test_what_is_asked_for_takes_the_place_of_the_kind_s_own(retromae, tmp_path):
    words = [str(retromae), str(tmp_path / "out"), "--normalize", "--pooling", "mean", "--query-prompt", "query: "]
    done = CliRunner().invoke(revela_hub.app, ["import", *words, "--max-length", "9", "--dtype", "bfloat16"])
    assert done.exit_code == 0, done.output
    settings = RevelaModel.from_pretrained(tmp_path / "out").settings
    assert settings == {
        **{"pooling": "mean", "query_prompt": "query: ", "document_prompt": "", "normalize": True, "max_length": 9}
    }
    published = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert published.similarity_fn_name == "cosine" and published.encode("boat").dtype is not None
    assert {value.dtype for value in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}
    done = CliRunner().invoke(revela_hub.app, ["import", *words])
    assert done.exit_code == 2 and "is there already" in done.output
    assert CliRunner().invoke(revela_hub.app, ["import", *words, "--overwrite"]).exit_code == 0


@pytest.mark.parametrize("normalised", [True, False])
def test_folder_of_sentence_transformers_embeds_as_its_modules_say(tiny_bert_folder, tmp_path, normalised):
    transformer = Transformer(str(tiny_bert_folder), max_seq_length=20)
    modules = [transformer, Pooling(24, pooling_mode="mean"), *([Normalize()] if normalised else [])]
    prompts = {"query": "query: ", "document": "passage: "}
    similarity = "cosine" if normalised else "dot"
    source = SentenceTransformer(modules=modules, prompts=prompts, similarity_fn_name=similarity, device="cpu")
    source.save(str(tmp_path / "source"))
    out = SentenceTransformer(str(import_model(tmp_path / "source", tmp_path / "out")), device="cpu")
    assert out.similarity_fn_name == similarity and out.max_seq_length == 20 and out.prompts == prompts
    for encode in ("encode_query", "encode_document"):
        assert abs(getattr(out, encode)(TEXTS) - getattr(source, encode)(TEXTS)).max() < 1e-5
    # Of E5 the prompts stand in the card alone.
    other = import_model(tmp_path / "source", tmp_path / "other", query_prompt="boat: ", max_length=9)
    other = SentenceTransformer(str(other), device="cpu")
    assert other.prompts == {"query": "boat: ", "document": "passage: "} and other.max_seq_length == 9
    with pytest.raises(ValueError, match="has a modules.json, which says how it pools and normalises: leave --pool"):
        import_model(tmp_path / "source", tmp_path / "more", pooling="cls")


def test_llm_that_was_trained_whole_is_pooled_at_eos(tiny_lm_folder, tmp_path):
    out = import_model(tiny_lm_folder, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm_folder)
    ids = torch.tensor([[*tokenizer("query: the boat")["input_ids"], tokenizer.eos_token_id]])
    with torch.no_grad():
        expected = AutoModel.from_pretrained(tiny_lm_folder)(ids).last_hidden_state[0, -1]
    found = SentenceTransformer(str(out), device="cpu").encode_query("the boat", convert_to_tensor=True)
    assert (found - expected / expected.norm()).abs().max() < 1e-5


# The Hub


@pytest.fixture
def hub(tiny_lm_folder, tmp_path, monkeypatch):
    """Puts folders into an empty cache of the Hub, as a download leaves them."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))

    def put(repo: str, folder: Path, revision: str = "main") -> None:
        place = tmp_path / "cache" / f"models--{repo.replace('/', '--')}"
        commit = "c" * 40
        (place / "refs").mkdir(parents=True)
        (place / "refs" / revision).write_text(commit)
        shutil.copytree(folder, place / "snapshots" / commit)

    return put


def test_hub_ids_of_adapter_and_base_are_read_and_named_in_the_card(hub, tiny_lm_folder, tmp_path, monkeypatch):
    base, adapter = make_adapter(tmp_path, tiny_lm_folder, "revela")
    expected = import_model(adapter, tmp_path / "expected")
    settings = json.loads((adapter / "adapter_config.json").read_text())
    settings = {**settings, "base_model_name_or_path": "us/llm", "revision": "v1"}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    hub("us/llm", base, "v1")
    hub("us/adapter", adapter, "first")
    shutil.rmtree(base)
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"), raising=False)
    out = import_model("us/adapter", tmp_path / "out", revision="first")
    assert (out / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()
    card = (out / "README.md").read_text()
    assert (
        "base_model: us/llm" in card and "[us/adapter](https://huggingface.co/us/adapter) (revision `first`)" in card
    )
    for text in ((out / "README.md").read_text(), (expected / "README.md").read_text()):
        assert str(tmp_path) not in text and "import" in text


# What cannot be


def test_adapter_of_another_base_is_refused_and_not_dropped_in_silence(tiny_lm_folder, tiny_bert_folder, tmp_path):
    _, adapter = make_adapter(tmp_path, tiny_lm_folder, "revela")
    path = adapter / "adapter_model.safetensors"
    weights = load_file(path)
    save_file({key.replace("layers.1.", "layers.7."): value for key, value in weights.items()}, path)
    with pytest.raises(ValueError, match=r"does not fit .*have no counterpart, .*layers\.7\..*--base"):
        import_model(adapter, tmp_path / "out")
    save_file({key: value for key, value in weights.items() if "layers.1.mlp.up" not in key}, path)
    with pytest.raises(ValueError, match=r"2 weights have no counterpart, .*layers\.1\.mlp\.up_proj"):
        import_model(adapter, tmp_path / "out")
    save_file({key: value[..., :3].contiguous() for key, value in weights.items()}, path)
    with pytest.raises(ValueError, match="does not fit"):
        import_model(adapter, tmp_path / "out")
    with pytest.raises(ValueError, match="does not fit"):
        import_model(adapter, tmp_path / "out", base=str(tiny_bert_folder))
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


def test_base_that_is_missing_is_one_error_and_another_may_be_passed(tiny_lm_folder, tmp_path):
    base, adapter = make_adapter(tmp_path, tiny_lm_folder, "revela")
    base.rename(tmp_path / "moved")
    done = CliRunner().invoke(revela_hub.app, ["import", str(adapter), str(tmp_path / "out")])
    assert done.exit_code == 2 and len(done.output.strip().splitlines()) == 1
    assert done.output.startswith(f"error: The adapter's base model {base} does not load") and "--base" in done.output
    assert import_model(adapter, tmp_path / "out", base=str(tmp_path / "moved")).is_dir()


def test_code_that_comes_with_a_base_is_not_run(tiny_lm_folder, tmp_path):
    base, adapter = make_adapter(tmp_path, tiny_lm_folder, "revela")
    config = json.loads((base / "config.json").read_text())
    auto_map = {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}
    (base / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (base / "config.json").write_text(json.dumps({**config, "auto_map": auto_map}))
    assert import_model(adapter, tmp_path / "out").is_dir()  # it is a stock Llama all the same
    (base / "config.json").write_text(json.dumps({**config, "model_type": "evil", "auto_map": auto_map}))
    with pytest.raises(ValueError, match="of the architecture 'evil', which this transformers has no code for"):
        import_model(adapter, tmp_path / "again")
    assert not (tmp_path / "ran").exists()


def test_padding_token_without_an_embedding_gives_way_and_another_token_is_refused(tiny_lm_folder, tmp_path):
    base, adapter = make_adapter(tmp_path, tiny_lm_folder, "revela")
    expected = import_model(adapter, tmp_path / "expected")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.save_pretrained(adapter)
    out = import_model(adapter, tmp_path / "out")
    rows = [SentenceTransformer(str(folder), device="cpu").encode_query(TEXTS) for folder in (expected, out)]
    assert abs(rows[0] - rows[1]).max() < 1e-5
    tokenizer.add_tokens(["<code>"])
    tokenizer.save_pretrained(adapter)
    with pytest.raises(
        ValueError, match="1 tokens for which the model's 399 embeddings have no row, such as '<code>'"
    ):
        import_model(adapter, tmp_path / "again")


def test_sources_that_are_no_retriever_are_named(retromae, tiny_lm_folder, tmp_path):
    pickled = Path(shutil.copytree(retromae, tmp_path / "pickled"))
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    empty = tmp_path / "empty"
    empty.mkdir()
    headless = Path(shutil.copytree(retromae, tmp_path / "headless"))
    weights = load_file(retromae / "model.safetensors")
    save_file(
        {key: value for key, value in weights.items() if "layer.1." not in key},
        headless / "model.safetensors",
        metadata={"format": "pt"},
    )
    for source, options, message in (
        (pickled, {}, "is a pickle"),
        (empty, {}, "has no weights in safetensors"),
        (headless, {}, r"lacks \d+ weights of BertForMaskedLM, 'bert\.encoder\.layer\.1\."),
        (retromae, {"base": "x"}, "is no adapter"),
        (retromae, {"revision": "x"}, "of which there is no revision 'x'"),
        (retromae, {"pooling": "max"}, "No pooling 'max'"),
        (retromae, {"pooling": "eos"}, "no EOS token"),
        (retromae, {"dtype": "int8"}, "No precision 'int8'"),
    ):
        with pytest.raises(ValueError, match=message):
            import_model(source, tmp_path / "out", **options)
    with pytest.raises(
        OSError, match="us/none is no folder here, and does not come from the Hub: HF_HUB_OFFLINE is set"
    ):
        import_model("us/none", tmp_path / "out")
    assert not (tmp_path / "out").exists()
