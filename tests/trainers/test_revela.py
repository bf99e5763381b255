"""From arguments to data, models and tokenizers."""

import json

import pytest
import torch
from datasets import Dataset

from trainers.data.prepare import PrepareConfig, prepare
from trainers.data.prepared import FEATURES, load_groups
from trainers.revela import (
    DataArguments,
    ModelArguments,
    drop_blank_groups,
    load_model,
    load_tokenizers,
    load_train_set,
    load_validation_set,
    main,
    split_groups,
)


def groups_of(*sizes: int, source: str = "s") -> Dataset:
    rows = [
        {"texts": [f"{row}.{i}" for i in range(n)], "doc_ids": [f"d{i}" for i in range(n)], "source": source}
        for row, n in enumerate(sizes)
    ]
    return Dataset.from_list(rows, features=FEATURES)


# Data


def test_groups_are_split_and_what_is_left_over_is_dropped():
    split = split_groups(groups_of(4, 5, 2, 1, 8), 2)
    assert [len(row["texts"]) for row in split] == [2] * (2 + 2 + 1 + 0 + 4)
    assert split[3] == {"texts": ["1.2", "1.3"], "doc_ids": ["d2", "d3"], "source": "s"}


def test_a_larger_group_far_behind_is_split_too():
    assert {len(row["texts"]) for row in split_groups(groups_of(*[4] * 300, 8), 4)} == {4}


def test_groups_of_the_right_size_stay_as_they_are():
    groups = groups_of(4, 4)
    assert split_groups(groups, 4) is groups and split_groups(groups, None) is groups


@pytest.mark.parametrize(
    ("size", "message"), [(1, "at least 2, not 1"), (8, "have 4 chunks, fewer than group_size 8")]
)
def test_group_sizes_that_cannot_be_had_are_errors(size, message):
    with pytest.raises(ValueError, match=message):
        split_groups(groups_of(4, 4), size)


@pytest.fixture
def sets(tmp_path):
    """Two files of groups, of 30 and 10."""
    for name, count in (("a", 30), ("b", 10)):
        lines = [json.dumps({"src": name, "text": [f"{name} {row} {i}" for i in range(4)]}) for row in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]


def sources(groups) -> list[str]:
    return [row["source"] for row in groups]


def test_sets_mix_by_their_sizes_or_by_weight(sets):
    by_size = sources(load_train_set(DataArguments(train_sets=sets), seed=0))
    assert (by_size.count("a"), by_size.count("b")) == (30, 10) and by_size != sorted(by_size)
    by_weight = sources(load_train_set(DataArguments(train_sets=sets, train_weights=[1, 1]), seed=0))
    assert (by_weight.count("a"), by_weight.count("b")) == (10, 10)
    other_seed = load_train_set(DataArguments(train_sets=sets), seed=1)
    assert sources(other_seed) != by_size
    split = load_train_set(DataArguments(train_sets=sets, group_size=2), seed=0)
    assert len(split) == 80 and {len(row["texts"]) for row in split} == {2}


def test_groups_that_blank_chunks_leave_nothing_to_attend_to_are_left_out_and_counted(tmp_path, no_accents, caplog):
    # An accent alone is a character, but no token to a tokenizer that strips accents; a dash is one.
    groups = [["a b", "c d"], ["words", " "], ["", "\u3000\n"], ["e", " ", "f"], ["g", "h", "", " "], ["i", "\u0301"]]
    groups += [["-.-", "\u0301", "é"]]
    path = tmp_path / "groups.jsonl"
    path.write_text("\n".join(map(json.dumps, groups)))
    with caplog.at_level("WARNING", logger="trainers"):
        kept = drop_blank_groups(load_train_set(DataArguments(train_sets=[str(path)]), seed=0), no_accents)
    assert [row["texts"] for row in kept] == [groups[0], *groups[3:5], groups[6]]
    assert "3 of 7 groups are left out" in caplog.text
    # What splitting leaves is looked at, and sets that are mixed.
    split = load_train_set(DataArguments(train_sets=[str(path)] * 2, group_size=2), seed=0)
    assert sorted(row["texts"] for row in drop_blank_groups(split, no_accents)) == sorted(
        [groups[0], groups[4][:2]] * 2
    )
    path.write_text(json.dumps(["words", " "]))
    with pytest.raises(ValueError, match="No group has two chunks"):
        drop_blank_groups(load_groups(path), no_accents)


def test_a_whole_set_is_not_copied(sets, no_accents):
    groups = load_groups(sets[0])
    assert drop_blank_groups(groups, no_accents) is groups


def test_full_span_sources_must_be_there(sets):
    assert load_train_set(DataArguments(train_sets=sets, full_span_sources=["b"]), seed=0)
    with pytest.raises(ValueError, match="`full_span_sources` names 'bb', but the train sets' sources are a, b"):
        load_train_set(DataArguments(train_sets=sets, full_span_sources=["b", "bb"]), seed=0)


def test_sets_that_are_missing_are_an_error(sets):
    with pytest.raises(ValueError, match="`train_sets` is empty"):
        load_train_set(DataArguments(), seed=0)


def test_validation_groups_are_the_held_out_ones_in_the_size_of_the_training(prepared_folder, sets):
    held_out = load_groups(prepared_folder, "validation")
    options = {"train_sets": [str(prepared_folder)]}
    assert len(load_validation_set(DataArguments(**options))) == len(held_out)
    some = load_validation_set(DataArguments(**options, validation_groups=3, group_size=2))
    assert len(some) == 3 and some[1]["texts"] == held_out[0]["texts"][2:]
    named = DataArguments(train_sets=sets, validation_set=str(prepared_folder))
    assert load_validation_set(named)[0] == held_out[0]


# Models and tokenizers


def test_model_arguments_reach_the_config(tiny_lm_folder, tiny_bert_folder):
    arguments = ModelArguments(
        retriever_name_or_path=str(tiny_bert_folder),
        lm_name_or_path=str(tiny_lm_folder),
        pooling="mean",
        retriever_lora_r=2,
        retriever_lora_alpha=8,
        lm_lora_r=4,
        lm_lora_dropout=0.3,
        v_norm=False,
        in_batch_gate=True,
        in_batch_gate_init=0.2,
        include_diagonal=True,
        dual_loss=True,
        similarity_temperature=0.1,
        trainable_temperature=True,
        similarity_dtype="bfloat16",
        similarity_span="full",
        similarity_span_ratio=0.3,
        weight_floor=0.0,
        embed_batch_size=3,
        query_prompt="q ",
        document_prompt="d ",
        save_backbones=False,
    )
    config = load_model(arguments).config
    for name in (
        "v_norm", "in_batch_gate", "in_batch_gate_init", "include_diagonal", "dual_loss", "trainable_temperature",
        "similarity_dtype", "similarity_span", "similarity_span_ratio", "weight_floor", "query_prompt",
        "document_prompt", "save_backbones", "freeze_lm", "embed_batch_size",
    ):  # fmt: skip
        assert getattr(config, name) == getattr(arguments, name), name
    assert (config.pooling, config.similarity_temperature) == ("mean", 0.1)
    assert (config.retriever_lora["r"], config.retriever_lora["lora_alpha"]) == (2, 8)
    assert (config.lm_lora["r"], config.lm_lora["lora_alpha"], config.lm_lora["lora_dropout"]) == (4, 4, 0.3)


def test_frozen_lm_gets_no_adapters(tiny_lm_folder):
    model = load_model(ModelArguments(str(tiny_lm_folder), freeze_lm=True, retriever_lora_r=4))
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    assert trained and all(name.startswith("retriever.") and "lora_" in name for name in trained)


def test_trained_weights_are_float32_whatever_the_backbone_was_saved_in(tiny_lm_folder, tmp_path):
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(tiny_lm_folder, dtype=torch.bfloat16).save_pretrained(tmp_path)
    model = load_model(ModelArguments(str(tmp_path)))
    assert {value.dtype for value in model.parameters()} == {torch.float32}


def test_only_an_eos_pooled_retriever_gets_a_tokenizer_that_appends_eos(tiny_lm_folder, tiny_bert_folder):
    retriever, lm = load_tokenizers(ModelArguments(str(tiny_lm_folder)))
    assert retriever("a boat")["input_ids"] == [*lm("a boat")["input_ids"], 1]
    arguments = ModelArguments(str(tiny_bert_folder), str(tiny_lm_folder), pooling="mean")
    retriever, lm = load_tokenizers(arguments)
    assert retriever("a boat")["input_ids"][::3] == [retriever.cls_token_id, retriever.sep_token_id]
    assert lm.eos_token == "</s>"


# The script


def test_main_trains_from_a_recipe_and_overrides(tiny_lm_folder, text_folder, tmp_path):
    prepare(PrepareConfig(source=str(text_folder), out=str(tmp_path / "p"), group_size=4, max_words=30))
    (tmp_path / "r.yaml").write_text(
        f"retriever_name_or_path: {tiny_lm_folder}\nretriever_lora_r: 4\nlm_lora_r: 4\nsimilarity_temperature: 1e-2\n"
        "max_steps: 50\nsave_strategy: no\nreport_to: none\nuse_cpu: true\n"
    )
    out = tmp_path / "out"
    main([str(tmp_path / "r.yaml"), "--train_sets", str(tmp_path / "p"), "--output_dir", str(out), "--max_steps", "1"])
    config = json.loads((out / "config.json").read_text())
    assert (config["model_type"], config["similarity_temperature"]) == ("revela", 0.01)
    assert json.loads((out / "trainer_state.json").read_text())["global_step"] == 1
    assert (out / "model.safetensors").exists() and not list(out.glob("checkpoint-*"))


def test_missing_data_stops_before_anything_is_written(tiny_lm_folder, tmp_path):
    out = tmp_path / "out"
    needed = ["--retriever_name_or_path", str(tiny_lm_folder), "--output_dir", str(out), "--use_cpu", "true"]
    with pytest.raises(ValueError, match="does not exist"):
        main([*needed, "--train_sets", str(tmp_path / "not" / "there")])
    assert not out.exists()
