"""Folders made to harm whoever loads them: refused, or loaded without doing what they were made for."""

import json
import os
import pickle
import resource
import shutil
from pathlib import Path

import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from typer.testing import CliRunner

import revela_hub
import trainers.retromae
import trainers.revela
from hub_cards.checkpoints import check_folder
from hub_cards.encoding import load_model
from hub_cards.eos_tokenizer import append_eos
from hub_cards.export import export
from modeling_retromae import RetroMAEConfig, RetroMAEForPreTraining
from modeling_revela import RevelaConfig, RevelaForCausalLM, RevelaForPreTraining, RevelaModel

TEXTS = ["the river bank", "a train crosses the bridge"]


@pytest.fixture(scope="module")
def safe(tiny_lm_folder, tiny_bert_folder, tmp_path_factory) -> dict[str, Path]:
    """A checkpoint of either method, and what is published of it: a retriever, an encoder."""
    root = tmp_path_factory.mktemp("safe")
    RevelaForPreTraining.from_backbones(tiny_lm_folder, tiny_lm_folder).save_pretrained(root / "revela")
    append_eos(AutoTokenizer.from_pretrained(tiny_lm_folder)).save_pretrained(root / "revela")
    AutoTokenizer.from_pretrained(tiny_lm_folder).save_pretrained(root / "revela" / "lm_tokenizer")
    with pytest.warns(UserWarning, match="no trained masked-LM head"):
        RetroMAEForPreTraining.from_encoder(tiny_bert_folder).save_pretrained(root / "retromae")
    AutoTokenizer.from_pretrained(tiny_bert_folder).save_pretrained(root / "retromae")
    export(root / "revela", root / "retriever")
    export(root / "retromae", root / "encoder")
    return {path.name: path for path in root.iterdir()}


@pytest.fixture
def copy(safe, tmp_path):
    """A copy of one of the safe folders, to be spoilt."""
    return lambda name: Path(shutil.copytree(safe[name], tmp_path / name))


@pytest.fixture
def trace(tmp_path):
    """The file that hostile pickles and code write; it must not be there in the end."""
    yield tmp_path / "it-ran"
    assert not (tmp_path / "it-ran").exists()


class Writes:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def write_code(folder: Path, trace: Path) -> None:
    """What a folder's config would have the loaders run, under every name that they look for."""
    (folder / "evil.py").write_text(f"open({str(trace)!r}, 'w')\nclass Evil: pass\n")


# Pickles


def test_the_pickle_of_these_tests_does_write_its_file(tmp_path):
    pickle.loads(pickle.dumps(Writes(tmp_path / "it-ran"))).close()
    assert (tmp_path / "it-ran").exists()


LOADERS = {
    "export of Revela": ("revela", lambda folder: export(folder, folder.with_name("out"))),
    "export of the LM": ("revela", lambda folder: export(folder, folder.with_name("out"), part="lm")),
    "export of RetroMAE": ("retromae", lambda folder: export(folder, folder.with_name("out"))),
    "evaluate and search": ("retriever", load_model),
    "RevelaForPreTraining": ("revela", RevelaForPreTraining.from_pretrained),
    "RetroMAEForPreTraining": ("retromae", RetroMAEForPreTraining.from_pretrained),
    "RevelaModel": ("retriever", RevelaModel.from_pretrained),
    "a retriever to train": ("retriever", lambda folder: RevelaForPreTraining.from_backbones(folder, folder)),
    "an LM to train": ("retriever", RevelaForCausalLM.from_backbone),
    "an encoder to train": ("encoder", RetroMAEForPreTraining.from_encoder),
}


@pytest.mark.parametrize("loader", LOADERS)
def test_pickled_weights_are_not_read(copy, trace, loader):
    name, load = LOADERS[loader]
    folder = copy(name)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Writes(trace)))
    with pytest.raises((ValueError, OSError), match=r"is a pickle|no file named model\.safetensors"):
        load(folder)


def test_pickled_weights_of_a_module_are_not_read(copy, trace):
    folder = copy("retriever")
    modules = json.loads((folder / "modules.json").read_text())
    modules.append({"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.models.Dense"})
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "3_Dense").mkdir()
    settings = {"in_features": 32, "out_features": 8, "activation_function": "torch.nn.modules.linear.Identity"}
    (folder / "3_Dense" / "config.json").write_text(json.dumps(settings))
    # Weights that torch would read without a word.
    torch.save(
        {"linear.weight": torch.ones(8, 32), "linear.bias": torch.ones(8)}, folder / "3_Dense/pytorch_model.bin"
    )
    with pytest.raises(ValueError, match=r"3_Dense/pytorch_model\.bin is a pickle.*save the model again"):
        load_model(folder)
    (folder / "3_Dense" / "pytorch_model.bin").write_bytes(pickle.dumps(Writes(trace)))
    with pytest.raises(ValueError, match="is a pickle"):
        load_model(folder)


def test_pickle_beside_safetensors_is_left_alone(copy, trace):
    folder = copy("retriever")
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt"):
        (folder / name).write_bytes(pickle.dumps(Writes(trace)))
    assert load_model(folder).encode(TEXTS).shape == (2, 32)


def test_base_that_a_checkpoint_leaves_out_is_not_read_from_a_pickle(tiny_lm_folder, tmp_path, trace):
    base = Path(shutil.copytree(tiny_lm_folder, tmp_path / "base"))
    options = {"retriever_lora": {"r": 2}, "freeze_lm": True, "save_backbones": False}
    RevelaForPreTraining.from_backbones(base, base, **options).save_pretrained(tmp_path / "run")
    append_eos(AutoTokenizer.from_pretrained(base)).save_pretrained(tmp_path / "run")
    (base / "model.safetensors").unlink()
    (base / "pytorch_model.bin").write_bytes(pickle.dumps(Writes(trace)))
    for load in (export, lambda folder, _: RevelaForPreTraining.from_pretrained(folder)):
        with pytest.raises(OSError, match="no file named model.safetensors"):
            load(tmp_path / "run", tmp_path / "out")


# Code


@pytest.mark.parametrize("name", ["revela", "retromae", "retriever"])
def test_code_that_a_config_names_is_not_run(copy, trace, name):
    folder = copy(name)
    write_code(folder, trace)
    doors = ("AutoConfig", "AutoModel", "AutoModelForPreTraining", "AutoModelForCausalLM", "AutoModelForMaskedLM")
    auto_map = dict.fromkeys(doors, "evil.Evil")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = auto_map
    for half in ("retriever_config", "lm_config", "encoder_config"):
        if half in config:
            config[half]["auto_map"] = auto_map
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer["auto_map"] = {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    retriever = folder if name == "retriever" else export(folder, folder.with_name("out"))
    assert load_model(retriever).encode(TEXTS).shape[0] == 2
    if name == "retriever":
        RevelaForPreTraining.from_backbones(folder, AutoModelForCausalLM.from_config(LlamaConfig(**TINY)))


TINY = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}


def test_module_of_the_folder_is_not_run(copy, trace, monkeypatch):
    folder = copy("retriever")
    write_code(folder, trace)
    modules = json.loads((folder / "modules.json").read_text())
    modules[1]["type"] = "evil.Evil"
    (folder / "modules.json").write_text(json.dumps(modules))
    # Where the folder itself is on the path, its module would be found by its plain name.
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(ValueError, match=r"modules\.json names the module 'evil\.Evil'.*is not run"):
        load_model(folder)
    for module in ("no mapping", {"type": None, "path": ""}, {}):
        (folder / "modules.json").write_text(json.dumps([module]))
        with pytest.raises(ValueError, match=r"modules\.json names the module"):
            load_model(folder)


def test_backbone_whose_code_comes_with_it_is_refused_before_training(tiny_lm_folder, tmp_path, trace):
    folder = Path(shutil.copytree(tiny_lm_folder, tmp_path / "odd"))
    write_code(folder, trace)
    config = {"model_type": "oddity", "auto_map": {"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil"}}
    (folder / "config.json").write_text(json.dumps(config))
    message = "architecture 'oddity', which this transformers has no code for.*choose"
    revela, retromae = trainers.revela, trainers.retromae
    with pytest.raises(ValueError, match=message):
        revela.load_model(revela.ModelArguments(str(folder), str(tiny_lm_folder)))
    with pytest.raises(ValueError, match=message):
        revela.load_model(revela.ModelArguments(str(tiny_lm_folder), str(folder)))
    with pytest.raises(ValueError, match=message):
        tokenizer = AutoTokenizer.from_pretrained(tiny_lm_folder)
        retromae.load_model(retromae.ModelArguments(str(folder)), tokenizer)
    # Nor is it of use to load it oneself.
    for config_class, field in ((RevelaConfig, "lm_config"), (RevelaConfig, "retriever_config")):
        with pytest.raises(ValueError, match=message):
            config_class(**{field: config})


def test_backbone_that_was_loaded_with_its_code_is_refused(tmp_path):
    (tmp_path / "odd.py").write_text(
        "from transformers import PreTrainedConfig\nclass OddConfig(PreTrainedConfig):\n    model_type = 'oddity'\n"
    )
    config = {"model_type": "oddity", "auto_map": {"AutoConfig": "odd.OddConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)
    for config_class, field in ((RevelaConfig, "lm_config"), (RetroMAEConfig, "encoder_config")):
        for given in (loaded, config):
            with pytest.raises(ValueError, match="architecture 'oddity'.*no checkpoint of it could be opened again"):
                config_class(**{field: given})


# Files elsewhere


@pytest.mark.parametrize("name", ["revela", "retriever"])
def test_shards_elsewhere_are_not_read(copy, safe, name):
    folder = copy(name)
    os.replace(folder / "model.safetensors", folder.with_name("elsewhere.safetensors"))
    (folder / "pytorch_model.bin").touch()
    index = folder / "model.safetensors.index.json"
    for shard in ("../elsewhere.safetensors", str(folder.with_name("elsewhere.safetensors")), "pytorch_model.bin"):
        index.write_text(json.dumps({"metadata": {}, "weight_map": {"embed_tokens.weight": shard}}))
        with pytest.raises(ValueError, match=r"index\.json names .*, which is no safetensors file beside it"):
            load_model(folder) if name == "retriever" else export(folder, folder.with_name("out"))


def test_links_that_lead_out_of_the_folder_are_not_followed(copy):
    folder, away = copy("retriever"), copy("revela")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(away / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors leads to .*revela.* outside of its own folder"):
        load_model(folder)
    folder = Path(shutil.copytree(folder, folder.with_name("again")))
    modules = json.loads((folder / "modules.json").read_text())
    for path in ("../revela", str(away)):
        modules[1]["path"] = path
        (folder / "modules.json").write_text(json.dumps(modules))
        with pytest.raises(ValueError, match="outside of its own folder"):
            load_model(folder)


@pytest.mark.parametrize("name", ["revela", "retriever"])
def test_links_of_the_hub_cache_are_followed(safe, tmp_path, name):
    # As huggingface_hub lays it out: snapshots of links to blobs that are named by their hashes.
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0123abc"
    blobs = tmp_path / "models--org--name" / "blobs"
    blobs.mkdir(parents=True)
    for number, file in enumerate(path for path in safe[name].rglob("*") if path.is_file()):
        shutil.copy(file, blobs / str(number))
        link = snapshot / file.relative_to(safe[name])
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blobs / str(number), link.parent))
    found = load_model(snapshot if name == "retriever" else export(snapshot, tmp_path / "out")).encode(TEXTS)
    expected = SentenceTransformer(str(safe["retriever"])).encode(TEXTS)
    assert abs(found - expected).max() < 1e-6
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(safe[name] / "model.safetensors")
    with pytest.raises(ValueError, match="outside of its own folder"):
        check_folder(snapshot)


def test_folder_reached_by_a_link_is_one_as_any(safe, tmp_path):
    (tmp_path / "link").symlink_to(safe["retriever"])
    assert load_model(tmp_path / "link").encode(TEXTS).shape == (2, 32)


# Sizes


@pytest.mark.parametrize("name", ["revela", "retromae", "retriever"])
def test_header_of_a_gigabyte_is_refused_without_memory_for_it(copy, name):
    folder = copy(name)
    with open(folder / "model.safetensors", "wb") as file:
        file.write((2**30).to_bytes(8, "little") + b"{")
        file.truncate(2**30 + 4096)  # takes no room on the disk
    (folder / "texts").mkdir()
    (folder / "texts" / "a.txt").write_text("a boat")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    out = folder.with_name("out")
    arguments = ("search", folder, folder / "texts", "x") if name == "retriever" else ("export", folder, out)
    done = CliRunner().invoke(revela_hub.app, [str(argument) for argument in arguments])
    assert done.exit_code == 2 and len(done.output.splitlines()) == 1, done.output
    assert "model.safetensors is no whole safetensors file" in done.output
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB
