"""
The doors that need trust, in fresh processes where the package cannot be imported.

A first process loads what was saved here, runs it and saves it elsewhere; a second, with the first folders gone,
loads that and runs it again.
"""

import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from modeling_revela import RevelaForCausalLM, RevelaForPreTraining, RevelaModel
from tests.modeling_revela.tiny import make_chunks, make_lm, pad_chunks, random_weights

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
TEXTS = ["the boat holds a fisher", "rivers", "trains cross the bridge to the city"]

SCRIPT = """
import json, pathlib, sys

source, target = map(pathlib.Path, sys.argv[1:3])
# What stands for "not installed": the editable install and the working directory would both offer the package.
for package in ("modeling_revela", "hub_cards", "trainers", "revela_hub"):
    sys.modules[package] = None
import torch, transformers
from safetensors.torch import load_file, save_file

inputs = load_file(source / "inputs.safetensors")
weights = inputs.pop("in_batch_weights")
results = {}
for folder in sorted(path for path in source.iterdir() if path.is_dir()):
    door = folder.name.split("-")[0]
    model = getattr(transformers, door).from_pretrained(folder, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    with torch.no_grad():
        if door == "AutoModelForPreTraining":
            output = model(**inputs)
            results[folder.name] = torch.cat([output.loss[None], output.document_embeddings.flatten()])
        elif door == "AutoModelForCausalLM":
            batch = {name: inputs[name] for name in ("input_ids", "attention_mask", "labels")}
            results[folder.name] = model(**batch, in_batch_weights=weights).loss[None]
        else:
            texts = json.loads((source / "texts.json").read_text())
            results[folder.name] = torch.cat((model.encode_query(texts), model.encode_document(texts)))
            transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(target / folder.name)
    model.save_pretrained(target / folder.name)
save_file(results, target / "results.safetensors")
"""


def run_script(source, target, home) -> dict[str, torch.Tensor]:
    target.mkdir()
    environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(source), str(target)],
        cwd=home,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return load_file(target / "results.safetensors")


@pytest.fixture(scope="module")
def expected_and_found(tiny_lm_folder, tiny_bert_folder, published_folder, tmp_path_factory):
    """({folder: our results}, those of the first process, those of the second, where the second saved)."""
    root = tmp_path_factory.mktemp("remote")
    source, target = root / "first", root / "second"
    source.mkdir()
    batch = pad_chunks(make_chunks((9, 6, 8)))
    documents = pad_chunks(make_chunks((5, 7, 6), seed=1))
    inputs = {**batch, **{f"document_{name}": documents[name] for name in ("input_ids", "attention_mask")}}
    weights = random_weights(3, torch.float32).detach()
    save_file({**inputs, "in_batch_weights": weights}, source / "inputs.safetensors")
    (source / "texts.json").write_text(str(TEXTS).replace("'", '"'))

    expected = {}
    torch.manual_seed(0)
    for name, retriever, options in (
        ("lora", tiny_lm_folder, {"retriever_lora": LORA, "lm_lora": LORA, "in_batch_gate": True}),
        ("bert", tiny_bert_folder, {"pooling": "mean", "trainable_temperature": True}),
        ("adapters", tiny_lm_folder, {"retriever_lora": LORA, "lm_lora": LORA, "save_backbones": False}),
    ):
        model = RevelaForPreTraining.from_backbones(
            retriever, tiny_lm_folder, similarity_temperature=0.1, **options
        ).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter += 0.1 * torch.randn_like(parameter)
            output = model(**inputs)
        expected[f"AutoModelForPreTraining-{name}"] = torch.cat(
            [output.loss[None], output.document_embeddings.flatten()]
        )
        model.save_pretrained(source / f"AutoModelForPreTraining-{name}")
    causal = RevelaForCausalLM.from_backbone(make_lm("llama-mha", torch.float32), in_batch_gate=True)  # tied
    with torch.no_grad():
        expected["AutoModelForCausalLM"] = causal(**batch, in_batch_weights=weights).loss[None]
    causal.save_pretrained(source / "AutoModelForCausalLM")
    shutil.copytree(published_folder, source / "AutoModel")
    retriever = RevelaModel.from_pretrained(published_folder)
    expected["AutoModel"] = torch.cat((retriever.encode_query(TEXTS), retriever.encode_document(TEXTS)))

    first = run_script(source, target, tmp_path_factory.mktemp("home1"))
    for name in ("inputs.safetensors", "texts.json"):
        shutil.copy(source / name, target / name)
    shutil.rmtree(source)
    second = run_script(target, root / "third", tmp_path_factory.mktemp("home2"))
    return expected, first, second, root / "third"


FOLDERS = [
    *("AutoModelForPreTraining-lora", "AutoModelForPreTraining-bert", "AutoModelForPreTraining-adapters"),
    *("AutoModelForCausalLM", "AutoModel"),
]


@pytest.mark.parametrize("folder", FOLDERS)
def test_same_numbers_without_the_package(expected_and_found, folder):
    expected, first, _, _ = expected_and_found
    assert (first[folder] - expected[folder]).abs().max() < 1e-6


@pytest.mark.parametrize("folder", FOLDERS)
def test_same_numbers_after_saving_elsewhere(expected_and_found, folder):
    expected, _, second, _ = expected_and_found
    assert (second[folder] - expected[folder]).abs().max() < 1e-6


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_code_file_travels_twice(expected_and_found, folder):
    saved = expected_and_found[3] / folder
    lm = {"configuration_revela.py", "in_batch_attention.py", "linear_cross_entropy.py", "modeling_revela_lm.py"}
    needed = {
        "AutoModel": {"modeling_revela.py"},
        "AutoModelForCausalLM": lm,
        "AutoModelForPreTraining": lm | {"modeling_revela.py", "modeling_revela_pretraining.py"},
    }
    assert {path.name for path in saved.glob("*.py")} - {"__init__.py"} == needed[folder.split("-")[0]]
