"""Broken files in folders of weights: one error that names the file, before anything is loaded."""

import json

import pytest
import torch
from safetensors.torch import save_file

from hub_cards.checkpoints import check_folder, model_type


def test_model_type_is_what_the_config_says(tmp_path):
    assert model_type(tmp_path) is None and model_type("org/name") is None
    (tmp_path / "config.json").write_text('{"model_type": "revela"}')
    assert model_type(tmp_path) == "revela"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[]", "holds no JSON object"),
        (b'"revela"', "holds no JSON object"),
        (b"", "is no JSON"),
        (b'{"model_type": "rev', "is no JSON"),
        (b"\xff\xfe\x00", "is no JSON"),
        (b"[" * 100_000, "is no JSON"),
    ],
)
def test_config_that_is_no_json_object_is_named(tmp_path, content, message):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=rf"config\.json {message}.*copy it or write it again"):
        model_type(tmp_path)


@pytest.mark.parametrize("damage", ["empty", "header cut", "weights cut", "no safetensors", "longer"])
def test_weights_that_are_not_whole_are_named(tmp_path, damage):
    file = tmp_path / "model-00002-of-00002.safetensors"
    save_file({"weight": torch.ones(100)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"weight": torch.ones(100)}, file)
    check_folder(tmp_path)
    content = file.read_bytes()
    broken = {
        "empty": b"",
        "header cut": content[:20],
        "weights cut": content[:-1],
        "no safetensors": b"version https://git-lfs.github.com/spec/v1\n",
        "longer": content + b"x",
    }
    file.write_bytes(broken[damage])
    with pytest.raises(ValueError, match=r"model-00002-of-00002\.safetensors is no whole safetensors file"):
        check_folder(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([], "holds no JSON object"),
        ({}, "has no `weight_map`"),
        ({"weight_map": ["a"]}, "has no `weight_map`"),
        ({"weight_map": {"weight": "model-2.safetensors"}}, "names model-2.safetensors, which is missing"),
        ({"weight_map": {"weight": "\ud800.safetensors"}}, "names .*, which is missing"),
        ({"weight_map": {"weight": f"{'x' * 300}.safetensors"}}, "names x*.safetensors, which is missing"),
    ],
)
def test_index_that_does_not_fit_is_named(tmp_path, index, message):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=rf"index\.json {message}"):
        check_folder(tmp_path)


@pytest.mark.parametrize("path", ["\ud800", "a\0b"])
def test_module_whose_path_is_none_is_named(tmp_path, path):
    module = {"type": "sentence_transformers.models.Pooling", "path": path}
    (tmp_path / "modules.json").write_text(json.dumps([module]))
    with pytest.raises(ValueError, match=r"modules\.json names .*, which is no path"):
        check_folder(tmp_path)
