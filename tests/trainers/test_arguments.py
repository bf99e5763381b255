"""Recipes and command lines become the config dataclasses, or an error that names the field."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import trainers.revela as script
from trainers.arguments import RECIPES, parse_recipe, read_recipe, run_script
from trainers.revela import DataArguments, ModelArguments
from trainers.revela_trainer import RevelaTrainingArguments

ROOT = Path(__file__).resolve().parents[2]
CLASSES = (ModelArguments, DataArguments, RevelaTrainingArguments)
NEEDED = ("--retriever_name_or_path", "a", "--output_dir", "b", "--use_cpu", "true")


@pytest.fixture
def recipe(tmp_path):
    """Writes a YAML recipe that has what is required, and returns its path."""

    def write(text: str) -> str:
        path = tmp_path / "mine.yaml"
        path.write_text(f"retriever_name_or_path: a\noutput_dir: b\nuse_cpu: true\n{text}\n", encoding="utf-8")
        return str(path)

    return write


def parse(*argv: str):
    return parse_recipe(CLASSES, list(argv))


def test_without_recipe_the_command_line_is_all():
    model, data, training = parse(
        *NEEDED, "--similarity_temperature", "1e-3", "--train_sets", "x", "y", "--learning-rate", "0.1"
    )
    assert (model.retriever_name_or_path, training.output_dir) == ("a", "b")
    assert (model.similarity_temperature, data.train_sets, training.learning_rate) == (1e-3, ["x", "y"], 0.1)
    assert model.similarity_span == "first_half" and training.per_device_train_batch_size == 1


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        # YAML takes 1e-4 for a string.
        ("similarity_temperature: 1e-4", "similarity_temperature", 1e-4),
        ("learning_rate: '5e-5'", "learning_rate", 5e-5),
        ("learning_rate: 1", "learning_rate", 1.0),
        ("retriever_lora_r: '16'", "retriever_lora_r", 16),
        ("lm_lora_alpha: 32", "lm_lora_alpha", 32),
        ("lm_lora_alpha: null", "lm_lora_alpha", None),
        ("lm_name_or_path:", "lm_name_or_path", None),
        ("v_norm: false", "v_norm", False),
        ("v_norm: no", "v_norm", False),
        ("in_batch_gate: yes", "in_batch_gate", True),
        ("in_batch_gate: 'true'", "in_batch_gate", True),
        ("document_prompt: ''", "document_prompt", ""),
        ("query_prompt: '- a = b: '", "query_prompt", "- a = b: "),
        ("query_prompt: 'Suche: „ü“ '", "query_prompt", "Suche: „ü“ "),
        ("train_sets: [one, two]", "train_sets", ["one", "two"]),
        ("train_sets: one", "train_sets", ["one"]),
        ("train_sets: []", "train_sets", []),
        ("train_weights: [0.8, 1e-1]", "train_weights", [0.8, 0.1]),
        ("train_weights: null", "train_weights", None),
        ("save_strategy: no", "save_strategy", "no"),
        ("eval_strategy: 'no'", "eval_strategy", "no"),
        ("lr_scheduler_type: cosine", "lr_scheduler_type", "cosine"),
        ("lr_scheduler_kwargs: {num_cycles: 2}", "lr_scheduler_kwargs", {"num_cycles": 2}),
        ("logging_steps: 0.1", "logging_steps", 0.1),
        ("report_to: none", "report_to", []),
        ("report_to: [tensorboard]", "report_to", ["tensorboard"]),
    ],
)  # fmt: skip
def test_recipe_value_gets_the_type_of_its_field(recipe, text, name, value):
    (owner,) = (config for config in parse(recipe(text)) if hasattr(config, name))
    found = getattr(owner, name)
    assert found == value and isinstance(found, type(value))


def test_command_line_wins_over_recipe_in_each_form(recipe):
    text = (
        "similarity_temperature: 1e-4\nv_norm: true\ntrain_sets: [one, two]\nmax_length: 9\nsave_steps: 5\nbf16: true"
    )
    model, data, training = parse(
        recipe(text),
        "--similarity_temperature=0.5",
        "--no_v_norm",
        "--train_sets",
        "three",
        "--max-length",
        "7",
        "--bf16",
        "false",
    )
    assert (model.similarity_temperature, model.v_norm, data.train_sets, data.max_length) == (0.5, False, ["three"], 7)
    assert (training.save_steps, training.bf16) == (5, False)


@pytest.mark.parametrize("words", [("--lm_learning_rate", "null"), ("--lm-learning-rate=null",)])
def test_null_on_the_command_line_takes_back_what_the_recipe_sets(recipe, words):
    text = "lm_learning_rate: 1e-3\ntrain_weights: [1, 2]\nquery_prompt: a"
    model, data, training = parse(recipe(text), *words, "--train_weights", "null", "--query_prompt", "null")
    assert training.lm_learning_rate is None and data.train_weights is None
    assert model.query_prompt == "null"  # a field that is never None takes the word


def test_script_ends_with_one_line_for_our_errors_and_a_traceback_for_others(tmp_path):
    def run(*words, **environment):
        command = [sys.executable, str(ROOT / "trainers" / "revela.py"), *map(str, words)]
        return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)

    needed = ("--retriever_name_or_path", tmp_path, "--output_dir", tmp_path / "out", "--use_cpu", "true")
    done = run(*needed, "--train_sets", tmp_path / "nowhere")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith("error: ") and "nowhere" in done.stderr
    assert "Traceback" in run(*needed, "--train_sets", tmp_path / "nowhere", REVELA_DEBUG="1").stderr
    with pytest.raises(ValueError, match="Expecting value"):
        run_script(lambda: json.loads("no JSON"))


def test_shipped_recipe_is_found_by_name_with_and_without_ending(tmp_path, monkeypatch):
    name = "revela-smollm2-135m-wikipedia"
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)  # a folder of the name, such as a run's, is no recipe
    for form in (name, f"{name}.yaml"):
        model, data, training = parse(form, "--use_cpu", "true")
        assert model.retriever_name_or_path == "HuggingFaceTB/SmolLM2-135M" and data.group_size == 16
        assert training.output_dir == f"runs/{name}"


def test_file_wins_over_a_shipped_recipe_of_the_same_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "revela-smollm2-135m-wikipedia.yaml"
    Path(name).write_text("max_length: 3")
    assert read_recipe(name) == {"max_length": 3}
    assert read_recipe(str(RECIPES / name))["max_length"] == 160


def test_missing_recipe_names_the_shipped_ones():
    with pytest.raises(FileNotFoundError, match="'nowhere.yaml'.*revela-llama-3.2-1b-code"):
        parse("nowhere.yaml")


@pytest.mark.parametrize("text", ["- a\n- b", "just words", ""])
def test_recipe_that_is_no_mapping_is_an_error(tmp_path, text):
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(ValueError, match="r.yaml is no recipe: it must be a mapping"):
        parse(str(tmp_path / "r.yaml"))


def test_broken_yaml_names_file_and_line(tmp_path):
    (tmp_path / "r.yaml").write_text("similarity_temperature: 1\n  max_length: [")
    with pytest.raises(ValueError, match=r"r.yaml is no YAML(.|\n)*line 2"):
        parse(str(tmp_path / "r.yaml"))


@pytest.mark.parametrize("text", ["[" * 3000, "max_length: " + "9" * 5000, "v_norm: !!bool x", "a: !!timestamp x"])
def test_what_pyyaml_trips_over_names_the_file(tmp_path, text):
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(ValueError, match="r.yaml is no YAML"):
        parse(str(tmp_path / "r.yaml"))


def test_unknown_recipe_fields_are_all_named(recipe):
    with pytest.raises(ValueError, match="no field 3, 'help', 'temprature'"):
        parse(recipe("temprature: 1\nhelp: true\n3: x"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rate: [1, 2]", r"recipe's `learning_rate` cannot be \[1, 2\]"),
        ("max_length: {a: 1}", "recipe's `max_length` cannot be {'a': 1}"),
        ("similarity_temperature: null", "recipe's `similarity_temperature` cannot be null"),
        ("similarity_span: []", r"recipe's `similarity_span` cannot be \[\]"),
    ],
)
def test_recipe_values_of_another_form_are_errors(recipe, text, message):
    with pytest.raises(ValueError, match=message):
        parse(recipe(text))


@pytest.mark.parametrize(
    ("text", "argv", "message"),
    [
        ("max_length: long", (), "--max_length.*: invalid int value: 'long'"),
        ("max_length: 1.5", (), "--max_length.*: invalid int value: '1.5'"),
        ("v_norm: perhaps", (), "v_norm.*perhaps"),
        ("train_weights: [a]", (), "--train_weights.*: invalid float value: 'a'"),
        ("eval_strategy: sometimes", (), "--eval_strategy.*: invalid choice: 'sometimes'"),
        ("", ("--max_length", "long"), "--max_length.*: invalid int value: 'long'"),
        (
            "",
            ("--similarity_temprature", "1"),
            "no option --similarity_temprature; did you mean --similarity_temperature",
        ),
        ("", ("--lr", "1"), "no option --lr; did you mean --learning_rate?"),
        ("", ("--epochs=3",), "no option --epochs=3; did you mean --num_train_epochs?"),
        ("", ("--batch-size", "3"), "did you mean --embed_batch_size or --per_device_train_batch_size"),
        ("", ("--zzz", "3"), "no option --zzz: see --help"),
        ("", ("--train_set", "x"), "no option --train_set; did you mean --train_sets"),
        ("", ("--similarity_temperature", "1", "second.yaml"), "no option second.yaml"),
    ],
)
def test_wrong_values_and_options_exit_with_2_and_name_the_option(recipe, capsys, text, argv, message):
    with pytest.raises(SystemExit) as stopped:
        parse(recipe(text), *argv)
    assert stopped.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_what_is_required_may_come_from_either(recipe, tmp_path, capsys):
    (tmp_path / "half.yaml").write_text("retriever_name_or_path: a\nuse_cpu: true")
    assert parse(str(tmp_path / "half.yaml"), "--output_dir", "c")[2].output_dir == "c"
    with pytest.raises(SystemExit):
        parse("--output_dir", "c")
    assert "--retriever_name_or_path" in capsys.readouterr().err


def test_best_checkpoint_is_by_sibling_retrieval_unless_said_otherwise():
    best = ("--load_best_model_at_end", "true", "--eval_strategy", "steps", "--eval_steps", "5", "--save_steps", "5")
    training = parse(*NEEDED, *best)[2]
    assert (training.metric_for_best_model, training.greater_is_better) == ("eval_sibling_ndcg_at_10", True)
    training = parse(*NEEDED, *best, "--metric_for_best_model", "eval_in_batch_loss")[2]
    assert (training.metric_for_best_model, training.greater_is_better) == ("eval_in_batch_loss", False)
    assert parse(*NEEDED)[2].metric_for_best_model is None


def test_help_shows_each_option_once_with_its_text(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as stopped:
        script.main(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert re.match(r"usage: \S+ \[RECIPE\] \[--field value ...\]\n", text)
    # The description keeps its lines.
    assert "\n    accelerate launch trainers/revela.py" in text and "\n1. Prepare text first" in text
    assert "--retriever_name_or_path VALUE\n" in text and "--similarity-span" not in text and "--no_v_norm" not in text
    assert "(default: first_half)" in " ".join(text.split()) and "{no,steps,epoch}" in text
    words = " ".join(text.split())
    for cls in CLASSES:
        for field in dataclasses.fields(cls):
            if field.init:
                assert text.count(f"\n  --{field.name} ") == 1, field.name
                if cls is not RevelaTrainingArguments:
                    assert field.metadata["help"] in words, field.name
