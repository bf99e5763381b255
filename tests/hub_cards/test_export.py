"""What `export` writes opens through four doors, each with the embeddings of the training."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoTokenizer, LlamaForCausalLM, LlamaModel

from hub_cards.checkpoints import EXPORT_RECORD
from hub_cards.encoding import load_model
from hub_cards.eos_tokenizer import append_eos, save_tokenizer
from hub_cards.export import export
from hub_cards.recorded import open_doors, read_record
from modeling_revela import RevelaForPreTraining, RevelaModel

TEXTS = ["the boat", "A river bank holds a fisher who sells fish. " * 30, "naïve 東京", "<|user|>x"]
LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
PROMPTS = {"query_prompt": "Frage: ", "document_prompt": "Text: "}
# name -> (backbone, options of `from_backbones`)
CHECKPOINTS = {
    "lora": ("llama", {"retriever_lora": LORA, "lm_lora": LORA}),
    "full": ("llama", {**PROMPTS, "in_batch_gate": True, "trainable_temperature": True}),
    "no-backbones": ("llama", {"retriever_lora": LORA, "lm_lora": LORA, "save_backbones": False}),
    "bert-mean": ("bert", {"pooling": "mean"}),
    "bert-cls-lora": ("bert", {"pooling": "cls", "retriever_lora": LORA}),
}


@pytest.fixture(scope="module")
def backbones(tiny_lm_folder, tiny_bert_folder, tmp_path_factory) -> dict[str, Path]:
    """The tiny BERT, and a Llama that has what files of one release hide from another."""
    folder = tmp_path_factory.mktemp("backbone")
    lm = LlamaForCausalLM.from_pretrained(tiny_lm_folder)
    rope = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    lm.config.rope_parameters = {**rope, "original_max_position_embeddings": 64}
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm_folder, extra_special_tokens=["<|user|>"])
    lm.resize_token_embeddings(len(tokenizer))
    lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {"llama": folder, "bert": tiny_bert_folder}


@pytest.fixture(scope="module")
def trained(backbones, tmp_path_factory):
    """Per name: a model whose trained weights are far from the backbone's, and its checkpoint."""
    made = {}

    def get(name: str) -> tuple[RevelaForPreTraining, Path]:
        if name not in made:
            backbone, options = CHECKPOINTS[name]
            torch.manual_seed(0)
            model = RevelaForPreTraining.from_backbones(backbones[backbone], backbones["llama"], **options).eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.requires_grad and parameter.ndim:
                        parameter += 0.1 * torch.randn_like(parameter)
            folder = tmp_path_factory.mktemp(name) / "run"
            model.save_pretrained(folder)
            tokenizer = AutoTokenizer.from_pretrained(backbones[backbone])
            save_tokenizer(append_eos(tokenizer) if model.config.pooling == "eos" else tokenizer, folder)
            made[name] = model, folder
        return made[name]

    return get


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    made = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = export(trained(name)[1], tmp_path_factory.mktemp("exports") / name)
        return made[name]

    return get


@torch.no_grad()
def training_embeddings(model: RevelaForPreTraining, checkpoint: Path, prompt: str, max_length: int = 256):
    """One by one, as the trainer's model and tokenizer make them."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    options = {"truncation": True, "max_length": max_length, "return_tensors": "pt"}
    batches = (tokenizer(prompt + text, **options) for text in TEXTS)
    return torch.cat([model.embed(batch["input_ids"], batch["attention_mask"]) for batch in batches])


def expected_of(trained, name: str) -> torch.Tensor:
    model, checkpoint = trained(name)
    prompts = (model.config.query_prompt, model.config.document_prompt)
    return torch.cat([training_embeddings(model, checkpoint, prompt) for prompt in prompts])


# The doors, in a process of their own

DOORS = """
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoTokenizer

for name, (folder, pooling) in folders.items():
    for trust in (False, True):
        model = SentenceTransformer(folder, device="cpu", trust_remote_code=trust)
        both = [model.encode_query(texts), model.encode_document(texts)]
        found[f"{name} sentence-transformers {trust}"] = torch.cat([torch.tensor(part) for part in both])
        assert model.similarity_fn_name == "cosine" and model.max_seq_length == 256, model.max_seq_length
    prompts = model.prompts

    model = AutoModel.from_pretrained(folder)
    assert type(model).__module__.startswith("transformers."), type(model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = []
    for text in [prompts[side] + text for side in ("query", "document") for text in texts]:
        with torch.no_grad():
            hidden = model(**tokenizer(text, truncation=True, return_tensors="pt")).last_hidden_state[0]
        row = {"eos": hidden[-1], "cls": hidden[0], "mean": hidden.mean(0)}[pooling]
        rows.append(row / row.norm())
    found[f"{name} AutoModel False"] = torch.stack(rows)

    model = AutoModel.from_pretrained(folder, trust_remote_code=True)
    assert type(model).__name__ == "RevelaModel", type(model)
    both = [model.encode_query(texts), model.encode_document(texts)]
    found[f"{name} AutoModel True"] = torch.cat(both)
    batch = tokenizer([prompts["query"] + text for text in texts], padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        output = model(batch["input_ids"], batch["attention_mask"])
    assert (output.pooler_output - both[0]).abs().max() < 1e-5
"""


@pytest.fixture(scope="module")
def through_the_doors(trained, exported, elsewhere) -> dict[str, torch.Tensor]:
    folders = {name: (str(exported(name)), trained(name)[0].config.pooling) for name in CHECKPOINTS}
    return elsewhere(DOORS, TEXTS, folders)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_four_doors_give_the_embeddings_of_the_training(through_the_doors, trained, name):
    expected = expected_of(trained, name)
    doors = [f"{name} {door} {trust}" for door in ("sentence-transformers", "AutoModel") for trust in (False, True)]
    for door in doors:
        assert (through_the_doors[door] - expected).abs().max() < 1e-5, door
    # A text's two sides, and two texts, must not be the same by an accident of the tiny model.
    assert torch.pdist(expected).min() > 1e-4


# What the folder holds


def test_folder_is_a_stock_model_with_its_tokenizer_and_the_code(exported, trained):
    folder = exported("lora")
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("llama", ["LlamaModel"])
    assert config["auto_map"] == {"AutoModel": "modeling_revela.RevelaModel"}
    model, info = LlamaModel.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert not any("lora" in name for name in load_file(folder / "model.safetensors"))
    assert [path.name for path in folder.glob("*.py")] == ["modeling_revela.py"]
    assert not list(folder.parent.glob(".*")) and not list(folder.rglob("*.bin"))


def test_backbone_and_checkpoint_stay_as_they_were(trained, tmp_path):
    _, checkpoint = trained("lora")
    before = {path: path.read_bytes() for path in checkpoint.rglob("*") if path.is_file()}
    export(checkpoint, tmp_path / "out")
    assert {path: path.read_bytes() for path in checkpoint.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", ["lora", "full"])
def test_prompts_of_the_training_are_those_of_the_folder(exported, trained, name):
    config = trained(name)[0].config
    expected = {"query": config.query_prompt, "document": config.document_prompt}
    published = SentenceTransformer(str(exported(name)), device="cpu")
    assert {side: published.prompts[side] for side in expected} == expected
    settings = RevelaModel.from_pretrained(exported(name)).settings
    assert (settings["query_prompt"], settings["document_prompt"]) == tuple(expected.values())
    assert published.default_prompt_name is None


def test_pooled_token_of_a_text_that_is_cut_is_eos(exported):
    published = SentenceTransformer(str(exported("lora")), device="cpu")
    batch = published.preprocess(TEXTS) if hasattr(published, "preprocess") else published.tokenize(TEXTS)
    last = batch["attention_mask"].sum(1) - 1
    assert batch["input_ids"].shape[1] == 256
    assert batch["input_ids"][range(len(TEXTS)), last].tolist() == [1] * len(TEXTS)


def test_files_say_what_older_releases_and_servers_look_for(exported):
    folder = exported("lora")
    config = json.loads((folder / "config.json").read_text())
    # For transformers 4, vLLM and text-embeddings-inference; by hand it was checked that transformers 4.57 with
    # sentence-transformers 5.1 give the same embeddings.
    assert config["rope_theta"] == 500.0 == config["rope_parameters"]["rope_theta"]
    assert config["rope_scaling"]["rope_type"] == "llama3" and config["rope_scaling"]["factor"] == 4.0
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert tokenizer["additional_special_tokens"] == ["<|user|>"] and "extra_special_tokens" not in tokenizer
    assert AutoTokenizer.from_pretrained(folder).extra_special_tokens == ["<|user|>"]
    types = [module["type"] for module in json.loads((folder / "modules.json").read_text())]
    assert types == [f"sentence_transformers.models.{name}" for name in ("Transformer", "Pooling", "Normalize")]
    pooling = json.loads((folder / "1_Pooling" / "config.json").read_text())
    assert [name for name, value in pooling.items() if value is True] == ["include_prompt", "pooling_mode_lasttoken"]
    raw = json.loads((folder / "tokenizer.json").read_text())
    assert raw["truncation"] is None and raw["padding"] is None


@pytest.mark.parametrize(("asked", "own", "expected"), [(2048, None, 256), (32, None, 32), (2048, 100, 100)])
def test_length_is_what_was_asked_or_what_backbone_and_tokenizer_take(trained, tmp_path, asked, own, expected):
    checkpoint = tmp_path / "run"
    shutil.copytree(trained("lora")[1], checkpoint)
    if own is not None:
        save_tokenizer(AutoTokenizer.from_pretrained(checkpoint, model_max_length=own), checkpoint)
    folder = export(checkpoint, tmp_path / "out", max_length=asked)
    assert SentenceTransformer(str(folder), device="cpu").max_seq_length == expected
    assert RevelaModel.from_pretrained(folder).settings["max_length"] == expected
    assert AutoTokenizer.from_pretrained(folder)(TEXTS[1], truncation=True)["input_ids"][-1] == 1
    assert len(AutoTokenizer.from_pretrained(folder)(TEXTS[1], truncation=True)["input_ids"]) == expected


def test_bfloat16_folder_is_half_the_size_and_near_the_float32_one(trained, exported, tmp_path):
    folder = export(trained("lora")[1], tmp_path / "out", dtype="bfloat16")
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    model = SentenceTransformer(str(folder), device="cpu")
    assert next(model.parameters()).dtype == torch.bfloat16
    found = model.encode_query(TEXTS, convert_to_tensor=True).float()
    precise = SentenceTransformer(str(exported("lora")), device="cpu").encode_query(TEXTS, convert_to_tensor=True)
    assert (found * precise).sum(-1).min() > 0.99
    remote = AutoModel.from_pretrained(folder, dtype="auto", trust_remote_code=True).encode_query(TEXTS)
    assert (remote * precise).sum(-1).min() > 0.99 and not torch.equal(remote, precise)


# Embeddings depend on the text alone


@pytest.mark.parametrize("name", ["lora", "bert-mean", "bert-cls-lora"])
def test_embedding_does_not_depend_on_the_batch(exported, name):
    published = SentenceTransformer(str(exported(name)), device="cpu")
    remote = RevelaModel.from_pretrained(exported(name)).eval()
    alone = torch.cat([published.encode_query([text], convert_to_tensor=True) for text in TEXTS])
    for batch_size in (1, 3, 4):
        together = published.encode_query(TEXTS, batch_size=batch_size, convert_to_tensor=True)
        assert (together - alone).abs().max() < 1e-5
        assert (remote.encode_query(TEXTS, batch_size=batch_size) - alone).abs().max() < 1e-5
    shuffled = remote.encode_query(TEXTS[::-1])
    assert (shuffled.flip(0) - alone).abs().max() < 1e-5


def test_embedding_does_not_depend_on_the_padding_side(exported):
    folder = exported("lora")
    expected = RevelaModel.from_pretrained(folder).encode_query(TEXTS)
    published = SentenceTransformer(str(folder), device="cpu", processor_kwargs={"padding_side": "left"})
    assert published.tokenizer.padding_side == "left"
    assert (published.encode_query(TEXTS, convert_to_tensor=True) - expected).abs().max() < 1e-5
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    batch = tokenizer(["query: " + text for text in TEXTS], padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        output = RevelaModel.from_pretrained(folder)(batch["input_ids"], batch["attention_mask"])
    assert batch["attention_mask"][0, 0] == 0 and (output.pooler_output - expected).abs().max() < 1e-5


# Adapters


@pytest.mark.parametrize("name", ["lora", "bert-cls-lora"])
def test_adapter_on_its_base_is_the_merged_model_and_not_the_base(trained, exported, backbones, tmp_path, name):
    folder = export(trained(name)[1], tmp_path / "adapter", adapter_only=True)
    backbone = backbones[CHECKPOINTS[name][0]]
    assert {path.name for path in folder.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    assert not (folder / "model.safetensors").exists()
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] is None  # a local folder, which nobody else has
    assert (settings["task_type"], settings["inference_mode"]) == ("FEATURE_EXTRACTION", True)
    base = AutoModel.from_pretrained(backbone).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(TEXTS[0], return_tensors="pt")
    with torch.no_grad():
        untrained = base(**batch).last_hidden_state
        adapted = PeftModel.from_pretrained(base, folder)(**batch).last_hidden_state
        merged = AutoModel.from_pretrained(exported(name)).eval()(**batch).last_hidden_state
    assert (adapted - merged).abs().max() < 1e-5
    assert (adapted - untrained).abs().max() > 1e-2


def test_adapter_on_bfloat16_weights_has_the_tolerance_that_a_float32_base_needs(backbones, trained, tmp_path):
    model = RevelaForPreTraining.from_backbones(
        backbones["llama"], backbones["llama"], retriever_lora=LORA, dtype=torch.bfloat16
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "run")
    save_tokenizer(append_eos(AutoTokenizer.from_pretrained(backbones["llama"])), tmp_path / "run")
    adapter = export(tmp_path / "run", tmp_path / "adapter", adapter_only=True)
    settings = json.loads((adapter / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = str(backbones["llama"])  # whose weights are float32
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    (distance,) = open_doors(adapter, read_record(adapter)).values()
    assert 1e-3 < distance
    # No curve was logged, so that there is no picture to look for.
    assert not [name for name in json.loads((adapter / EXPORT_RECORD).read_text())["files"] if "figures" in name]


def test_adapter_without_its_base_is_told_when_it_is_to_encode(trained, tmp_path):
    adapter = export(trained("lora")[1], tmp_path / "adapter", adapter_only=True)
    with pytest.raises(ValueError, match="names no base model, as an export leaves local paths out"):
        load_model(adapter)


def test_adapter_of_a_fully_trained_retriever_is_refused(trained, tmp_path):
    with pytest.raises(ValueError, match="without LoRA.*export it whole"):
        export(trained("full")[1], tmp_path / "out", adapter_only=True)
    assert not list(tmp_path.iterdir())


def test_adapter_that_was_never_trained_is_refused(backbones, tmp_path):
    model = RevelaForPreTraining.from_backbones(backbones["llama"], backbones["llama"], retriever_lora=LORA)
    model.save_pretrained(tmp_path / "run")
    save_tokenizer(append_eos(AutoTokenizer.from_pretrained(backbones["llama"])), tmp_path / "run")
    with pytest.raises(ValueError, match="every B matrix is zero"):
        export(tmp_path / "run", tmp_path / "out", adapter_only=True)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


# Refusals


def test_existing_folder_is_refused_and_replaced_only_where_it_is_an_export(trained, exported, tmp_path):
    _, checkpoint = trained("lora")
    out = tmp_path / "out"
    shutil.copytree(exported("full"), out)
    with pytest.raises(FileExistsError, match="is there already: pass --overwrite"):
        export(checkpoint, out)
    export(checkpoint, out, overwrite=True)
    assert json.loads((out / "config.json").read_text())["revela"]["query_prompt"] == "query: "
    export(checkpoint, out, overwrite=True, adapter_only=True)
    assert not (out / "modules.json").exists()
    export(checkpoint, out, overwrite=True)
    (tmp_path / "empty").mkdir()
    assert (export(checkpoint, tmp_path / "empty", overwrite=True) / "modules.json").exists()


@pytest.mark.parametrize("what", ["run", "thesis", "file"])
def test_folder_of_something_else_is_never_deleted(trained, tmp_path, what):
    run = tmp_path / "run"
    shutil.copytree(trained("lora")[1], run / "checkpoint-3")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "main.tex").touch()
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(FileExistsError, match="no earlier export"):
        export(run / "checkpoint-3", tmp_path / what, overwrite=True)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("added", ["checkpoint-3/config.json", "finetune.json", "1_Pooling/notes.txt"])
def test_export_to_which_something_was_added_is_not_deleted(trained, exported, tmp_path, added):
    out = Path(shutil.copytree(exported("lora"), tmp_path / "out"))
    (out / added).parent.mkdir(exist_ok=True)
    (out / added).write_text("{}")
    with pytest.raises(FileExistsError, match=rf"holds {added.partition('/config')[0]}, which no export wrote"):
        export(trained("lora")[1], out, overwrite=True)
    assert (out / added).exists() and (out / "model.safetensors").exists()


@pytest.mark.parametrize("record", [None, "", "[]", '{"files": 3}'])
def test_retriever_that_no_export_wrote_is_not_deleted(trained, exported, tmp_path, record):
    # What fine-tuning writes holds all that an export does, but for the record.
    out = Path(shutil.copytree(exported("lora"), tmp_path / "out"))
    (out / EXPORT_RECORD).unlink()
    if record is not None:
        (out / EXPORT_RECORD).write_text(record)
    with pytest.raises(FileExistsError):
        export(trained("lora")[1], out, overwrite=True)
    assert (out / "model.safetensors").exists()


@pytest.mark.parametrize("kind", [{}, {"adapter_only": True}, {"part": "lm"}])
def test_weights_that_are_not_finite_are_refused(trained, backbones, tmp_path, kind):
    checkpoint = Path(shutil.copytree(trained("lora")[1], tmp_path / "run"))
    save_tokenizer(AutoTokenizer.from_pretrained(backbones["llama"]), checkpoint / "lm_tokenizer")
    weights = load_file(checkpoint / "model.safetensors")
    half = "lm." if kind.get("part") else "retriever."
    name = next(name for name in weights if name.startswith(half) and "layers.1.mlp.up_proj.lora_B" in name)
    weights[name][1, 1] = torch.nan
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"'.*layers\.1\.mlp\.up_proj\..*weight' has values that are not finite in float32"
    ):
        export(checkpoint, tmp_path / "out", **kind)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_weights_too_large_for_float16_are_refused_in_it(trained, tmp_path):
    checkpoint = Path(shutil.copytree(trained("full")[1], tmp_path / "run"))
    weights = load_file(checkpoint / "model.safetensors")
    weights["retriever.norm.weight"][0] = 1e5
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    export(checkpoint, tmp_path / "wide", dtype="bfloat16")
    with pytest.raises(ValueError, match="'norm.weight' has values that are not finite in float16"):
        export(checkpoint, tmp_path / "narrow", dtype="float16")


def test_retriever_is_read_without_the_lm(trained, exported, tmp_path):
    # Neither the LM's weights nor an LM of its config: what is not there cannot have been read.
    checkpoint = Path(shutil.copytree(trained("lora")[1], tmp_path / "run"))
    weights = load_file(checkpoint / "model.safetensors")
    weights = {name: value for name, value in weights.items() if name.startswith("retriever.")}
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((checkpoint / "config.json").read_text())
    config["lm_config"] |= {"hidden_size": 12, "num_hidden_layers": 7}
    (checkpoint / "config.json").write_text(json.dumps(config))
    found = load_file(export(checkpoint, tmp_path / "out") / "model.safetensors")
    expected = load_file(exported("lora") / "model.safetensors")
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    weights.pop("retriever.norm.weight")
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="lacks 1 weights of .*'retriever.norm.weight'"):
        export(checkpoint, tmp_path / "again")


@pytest.mark.parametrize("content", [b"", b"half of it", None])
def test_broken_weights_are_named(trained, tmp_path, content):
    checkpoint = Path(shutil.copytree(trained("lora")[1], tmp_path / "run"))
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100] if content is None else content)
    with pytest.raises(ValueError, match=r"run/model\.safetensors is no whole safetensors file"):
        export(checkpoint, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_what_is_no_checkpoint_is_refused_with_a_hint(trained, exported, tmp_path):
    run = tmp_path / "run"
    for step in (9, 10):
        shutil.copytree(trained("lora")[1], run / f"checkpoint-{step}")
    (run / "checkpoint-11").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no config.json. Did you mean .*checkpoint-10\?"):
        export(run, tmp_path / "out")
    with pytest.raises(FileNotFoundError, match="nowhere is no checkpoint: it has no config.json.$"):
        export(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(ValueError, match="was exported already: push it as it is"):
        export(exported("lora"), tmp_path / "out")
    with pytest.raises(ValueError, match="No precision 'int8': choose one of float32, bfloat16, float16"):
        export(run / "checkpoint-9", tmp_path / "out", dtype="int8")
    assert not (tmp_path / "out").exists()


def test_tokenizer_without_eos_is_refused(trained, backbones, tmp_path):
    shutil.copytree(trained("lora")[1], tmp_path / "run")
    AutoTokenizer.from_pretrained(backbones["llama"]).save_pretrained(tmp_path / "run")
    with pytest.raises(ValueError, match="appends no EOS"):
        export(tmp_path / "run", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_leftover_of_a_killed_export_is_cleared_away(trained, tmp_path):
    leftover = tmp_path / ".out.partial"
    leftover.mkdir()
    (leftover / "model.safetensors").write_text("half of it")
    (leftover / "adapter_model.safetensors").write_text("of another kind")
    out = export(trained("lora")[1], tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and not (out / leftover.name).exists()
    assert not (out / "adapter_model.safetensors").exists()
