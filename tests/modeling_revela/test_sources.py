"""Where models are read from: commits of the Hub, for both halves, and again where a checkpoint leaves them out."""

import json
import shutil

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from modeling_revela import RevelaForCausalLM, RevelaForPreTraining, RevelaModel
from tests.hub_cache import NEW, OLD, put_in_cache

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
ADAPTERS = {"retriever_lora": LORA, "lm_lora": LORA, "save_backbones": False}


@pytest.fixture(scope="module")
def cache(tiny_lm_folder, tmp_path_factory):
    """`us/lm`, whose old commit has other weights."""
    cache, old = tmp_path_factory.mktemp("cache"), tmp_path_factory.mktemp("old")
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_lm_folder)).save_pretrained(old)
    put_in_cache(cache, "us/lm", old=old, new=tiny_lm_folder)
    return cache


def weights_of(cache, revision: str) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained("us/lm", revision=revision, cache_dir=cache)
    return model.get_input_embeddings().weight


def test_each_half_is_read_of_the_commit_that_is_asked_for(cache):
    model = RevelaForPreTraining.from_backbones(
        "us/lm", "us/lm", retriever_revision=OLD, lm_revision="main", cache_dir=cache
    )
    assert torch.equal(model.retriever.get_input_embeddings().weight, weights_of(cache, OLD))
    assert torch.equal(model.lm.get_input_embeddings().weight, weights_of(cache, NEW))
    assert (model.config.retriever_revision, model.config.lm_revision) == (OLD, NEW)
    with pytest.raises(ValueError, match="pass `retriever_revision` and `lm_revision`"):
        RevelaForPreTraining.from_backbones("us/lm", "us/lm", revision=OLD, cache_dir=cache)


def test_an_lm_alone_has_one_revision(cache):
    model = RevelaForCausalLM.from_backbone("us/lm", revision=OLD, cache_dir=cache)
    assert torch.equal(model.get_input_embeddings().weight, weights_of(cache, OLD))
    assert model.config.lm_revision == OLD
    with pytest.raises(ValueError, match="LlamaForCausalLM is loaded already, so no revision"):
        RevelaForCausalLM.from_backbone(model.backbone, revision=OLD)


def test_folders_have_no_commit(tiny_lm_folder):
    config = RevelaForPreTraining.from_backbones(tiny_lm_folder, tiny_lm_folder).config
    assert config.retriever_revision is None and config.lm_revision is None


def test_what_a_checkpoint_leaves_out_is_read_of_the_same_commit_with_the_same_options(cache, tmp_path):
    # The branch moves on between training and loading; what is found offline and in this cache alone proves the rest.
    repo = cache / "models--us--lm" / "refs" / "main"
    repo.write_text(OLD)
    model = RevelaForPreTraining.from_backbones("us/lm", "us/lm", cache_dir=cache, **ADAPTERS)
    repo.write_text(NEW)
    model.save_pretrained(tmp_path)
    loaded = RevelaForPreTraining.from_pretrained(tmp_path, cache_dir=cache)
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_a_published_retriever_reads_its_tokenizer_as_it_was_read(published_folder, tmp_path):
    texts = ["the boat", "a fisher sells fish"]
    expected = RevelaModel.from_pretrained(published_folder).encode_query(texts)
    inside, cache = tmp_path / "inside", tmp_path / "cache"
    shutil.copytree(published_folder, inside)
    assert torch.equal(RevelaModel.from_pretrained(tmp_path, subfolder="inside").encode_query(texts), expected)
    # The newest commit's tokenizer appends no EOS.
    put_in_cache(cache, "us/retriever", old=published_folder, new=inside)
    path = cache / "models--us--retriever" / "snapshots" / NEW / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"post_processor": None}))
    for revision, equal in ((OLD, True), ("main", False)):
        model = RevelaModel.from_pretrained("us/retriever", revision=revision, cache_dir=cache)
        assert torch.equal(model.encode_query(texts), expected) == equal
