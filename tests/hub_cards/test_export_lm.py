"""What `export --part lm` writes: the LM that was trained along, as a stock causal LM."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from typer.testing import CliRunner

import revela_hub
from hub_cards.eos_tokenizer import append_eos, save_tokenizer
from hub_cards.export import export
from modeling_revela import RevelaForPreTraining

TEXTS = ["the boat", "a river bank holds a fisher who sells fish"]
LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
CHECKPOINTS = {
    "lora": {"retriever_lora": LORA, "lm_lora": LORA, "in_batch_gate": True},
    "full": {"trainable_temperature": True},
    "no-backbones": {"retriever_lora": LORA, "lm_lora": LORA, "save_backbones": False},
    "frozen": {"freeze_lm": True, "retriever_lora": LORA, "save_backbones": False},
}
CODE = """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

for name, folder in folders.items():
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(model).__module__.startswith("transformers."), type(model)
    assert not any(info.values()), info
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for number, text in enumerate(texts):
        batch = tokenizer(text, return_tensors="pt")
        assert batch["input_ids"][0, -1] != tokenizer.eos_token_id
        with torch.no_grad():
            found[f"{name} {number}"] = model(**batch).logits[0]
    model.generate(**batch, max_new_tokens=2)
    found[f"{name} settings"] = torch.tensor([model.generation_config.top_k, model.generation_config.eos_token_id])
"""


@pytest.fixture(scope="module")
def backbone(tiny_lm_folder, tmp_path_factory) -> Path:
    """The tiny Llama, with generation settings that its config does not tell."""
    folder = Path(shutil.copytree(tiny_lm_folder, tmp_path_factory.mktemp("backbone") / "lm"))
    GenerationConfig(top_k=7, do_sample=True, eos_token_id=5).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trained(backbone, tmp_path_factory):
    """Per name: a model whose trained weights are far from the backbone's, and its checkpoint."""
    made = {}
    tokenizer = AutoTokenizer.from_pretrained(backbone)
    for name, options in CHECKPOINTS.items():
        torch.manual_seed(0)
        model = RevelaForPreTraining.from_backbones(backbone, backbone, **options).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad and parameter.ndim:
                    parameter += 0.1 * torch.randn_like(parameter)
        folder = tmp_path_factory.mktemp(name) / "run"
        model.save_pretrained(folder)
        save_tokenizer(tokenizer, folder / "lm_tokenizer")
        save_tokenizer(append_eos(AutoTokenizer.from_pretrained(backbone)), folder)
        made[name] = model, folder
    return made


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("exports")
    return {name: export(folder, root / name, part="lm") for name, (_, folder) in trained.items()}


@pytest.fixture(scope="module")
def found(exported, elsewhere) -> dict[str, torch.Tensor]:
    return elsewhere(CODE, TEXTS, {name: str(folder) for name, folder in exported.items()})


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_it_is_the_trained_lm_where_the_package_is_not(trained, found, backbone, name):
    tokenizer = AutoTokenizer.from_pretrained(backbone)
    for number, text in enumerate(TEXTS):
        with torch.no_grad():
            expected = trained[name][0].lm(**tokenizer(text, return_tensors="pt")).logits[0]
        assert (found[f"{name} {number}"] - expected).abs().max() < 1e-4
        moved = name == "frozen" or (found[f"{name} {number}"] - found[f"frozen {number}"]).abs().max() > 1e-2
        assert moved
    assert found[f"{name} settings"].tolist() == [7, 5]


def test_folder_is_stock_and_holds_no_more_than_the_lm(exported):
    folder = exported["lora"]
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and not {"auto_map", "revela"} & set(config)
    assert (
        not list(folder.rglob("*.py")) and not list(folder.rglob("*.bin")) and not (folder / "modules.json").exists()
    )
    names = set(load_file(folder / "model.safetensors"))
    assert names and all(name.startswith("model.") and "lora" not in name for name in names)


def test_generation_settings_are_in_the_checkpoint_and_outlive_a_resumption(trained, tmp_path):
    folder = tmp_path / "run"
    RevelaForPreTraining.from_pretrained(trained["lora"][1]).save_pretrained(folder)
    shutil.copytree(trained["lora"][1] / "lm_tokenizer", folder / "lm_tokenizer")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "lm_name_or_path": str(tmp_path / "gone")}))
    done = CliRunner().invoke(revela_hub.app, ["export", str(folder), str(tmp_path / "lm"), "--part", "lm"])
    assert done.exit_code == 0, done.output
    settings = GenerationConfig.from_pretrained(tmp_path / "lm")
    assert (settings.top_k, settings.do_sample, settings.eos_token_id) == (7, True, 5)


def test_settings_that_transformers_does_not_write_give_way_to_those_of_the_config(trained, tmp_path):
    folder = Path(shutil.copytree(trained["lora"][1], tmp_path / "run"))
    config = json.loads((folder / "config.json").read_text())
    config["lm_generation_config"] = {"do_sample": False, "temperature": 0.6, "eos_token_id": 5}
    (folder / "config.json").write_text(json.dumps(config))
    export(folder, tmp_path / "lm", part="lm")
    assert GenerationConfig.from_pretrained(tmp_path / "lm").eos_token_id == 1


def test_the_adapter_alone_is_the_merged_lm_on_its_base(trained, backbone, found, tmp_path):
    folder = Path(shutil.copytree(trained["lora"][1], tmp_path / "run"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "lm_revision": "abc"}))
    adapter = export(folder, tmp_path / "adapter", part="lm", adapter_only=True)
    saved = json.loads((adapter / "adapter_config.json").read_text())
    # The base was a folder of this machine, which is no one's business.
    assert (saved["base_model_name_or_path"], saved["revision"]) == (None, "abc")
    assert saved["task_type"] == "CAUSAL_LM" and not (adapter / "model.safetensors").exists()
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(backbone), adapter).eval()
    batch = AutoTokenizer.from_pretrained(adapter)(TEXTS[1], return_tensors="pt")
    with torch.no_grad():
        assert (model(**batch).logits[0] - found["lora 1"]).abs().max() < 1e-4
    with pytest.raises(ValueError, match="trained without LoRA"):
        export(trained["full"][1], tmp_path / "none", part="lm", adapter_only=True)


def test_dtype_is_that_of_the_file(trained, tmp_path):
    folder = export(trained["lora"][1], tmp_path / "lm", part="lm", dtype="bfloat16")
    assert {value.dtype for value in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}


def test_what_cannot_be_is_refused(trained, tmp_path):
    folder = Path(shutil.copytree(trained["lora"][1], tmp_path / "run"))
    with pytest.raises(ValueError, match="No part 'LM': choose one of retriever, lm"):
        export(folder, tmp_path / "lm", part="LM")
    shutil.rmtree(folder / "lm_tokenizer")
    with pytest.raises(FileNotFoundError, match="run has no folder lm_tokenizer"):
        export(folder, tmp_path / "lm", part="lm")
    assert not (tmp_path / "lm").exists()


def test_evaluation_without_labels_names_the_tokenizer_that_is_missing(trained, text_folder, tmp_path):
    folder = Path(shutil.copytree(trained["lora"][1], tmp_path / "run"))
    shutil.rmtree(folder / "lm_tokenizer")
    prepared = str(tmp_path / "prepared")
    options = ["--out", prepared, "--group-size", "4", "--validation-share", "0.1"]
    assert CliRunner().invoke(revela_hub.app, ["prepare", str(text_folder), *options]).exit_code == 0
    done = CliRunner().invoke(revela_hub.app, ["evaluate", str(folder), "--groups", prepared])
    assert done.exit_code == 2 and done.output.splitlines()[-1].startswith(f"error: {folder} has no folder lm_tok")
