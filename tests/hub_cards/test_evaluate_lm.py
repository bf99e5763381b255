"""lm-evaluation-harness on a task in local files, against accuracies counted by hand."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import revela_hub
from hub_cards.eos_tokenizer import append_eos
from hub_cards.evaluate_lm import TASKS, evaluate_lm
from hub_cards.export import export
from modeling_revela import RevelaForPreTraining
from tests.conftest import WORDS

lm_eval = pytest.importorskip("lm_eval")
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    validation: {data}
output_type: multiple_choice
validation_split: validation
doc_to_text: "{{{{question}}}}"
doc_to_target: label
doc_to_choice: choices
metric_list:
  - metric: acc
metadata:
  version: 1.0
"""
LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}


@pytest.fixture(scope="module")
def questions() -> list[dict]:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(24):
        picks = torch.randint(len(WORDS), (7,), generator=generator).tolist()
        words = [WORDS[index] for index in picks]
        rows.append({"question": " ".join(words[:5]), "choices": words[5:], "label": picks[0] % 2})
    return rows


@pytest.fixture(scope="module")
def task_folder(questions, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "boats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    (folder / "boats.yaml").write_text(TASK.format(name="boats", data=folder / "boats.jsonl"))
    (folder / "gone.yaml").write_text(TASK.format(name="gone", data=folder / "gone.jsonl"))
    return folder


@pytest.fixture(scope="module")
def checkpoint(tiny_lm_folder, tmp_path_factory) -> Path:
    torch.manual_seed(0)
    model = RevelaForPreTraining.from_backbones(tiny_lm_folder, tiny_lm_folder, retriever_lora=LORA, lm_lora=LORA)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.2 * torch.randn_like(parameter)
    folder = tmp_path_factory.mktemp("checkpoint") / "run"
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_lm_folder).save_pretrained(folder / "lm_tokenizer")
    append_eos(AutoTokenizer.from_pretrained(tiny_lm_folder)).save_pretrained(folder)
    return folder


@torch.no_grad()
def accuracy(folder: Path, questions: list[dict]) -> float:
    """How often the right choice has the higher log-likelihood behind the question."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    right = 0
    for row in questions:
        scores = []
        for choice in row["choices"]:
            start = len(tokenizer(row["question"])["input_ids"])
            ids = torch.tensor([tokenizer(f"{row['question']} {choice}")["input_ids"]])
            logs = model(ids).logits.log_softmax(-1)[0, start - 1 : -1]
            scores.append(float(logs.gather(-1, ids[0, start:, None]).sum()))
        right += scores.index(max(scores)) == row["label"]
    return right / len(questions)


def test_before_and_after_side_by_side(tiny_lm_folder, checkpoint, task_folder, questions, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "lm.json"
    words = [str(checkpoint), "--baseline", str(tiny_lm_folder), "--tasks", "boats", "--out", str(out)]
    done = CliRunner().invoke(revela_hub.app, ["evaluate-lm", *words, "--include-path", str(task_folder)])
    assert done.exit_code == 0, done.output
    results = json.loads(out.read_text())
    before = accuracy(tiny_lm_folder, questions)
    after = accuracy(export(checkpoint, tmp_path / "lm", part="lm"), questions)
    assert before != after
    rows = results["rows"]
    assert [row["model"] for row in rows] == [str(tiny_lm_folder), str(checkpoint)]
    assert [row["scores"] for row in rows] == [{"boats": before}, {"boats": after}]
    assert [row["mean"] for row in rows] == [before, after]
    expected = (before * (1 - before) / (len(questions) - 1)) ** 0.5
    assert rows[0]["stderr"]["boats"] == pytest.approx(expected)
    assert results["settings"]["tasks"] == ["boats"] and results["versions"]["lm_eval"]
    assert f"{100 * before:.1f} ± {100 * expected:.1f}" in done.output and "mean" in done.output


def test_limit_and_adapter(tiny_lm_folder, checkpoint, task_folder, tmp_path):
    adapter = export(checkpoint, tmp_path / "adapter", part="lm", adapter_only=True)
    whole = export(checkpoint, tmp_path / "whole", part="lm")
    options = {"tasks": ["boats"], "include_path": task_folder, "show": False}
    with pytest.raises(ValueError, match="adapter_config.json names no base model"):
        evaluate_lm([str(adapter)], limit=7, **options)
    settings = json.loads((adapter / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = str(tiny_lm_folder)
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    found = evaluate_lm([str(adapter), str(whole), str(tiny_lm_folder)], limit=7, **options)
    scores = [row["scores"]["boats"] for row in found["rows"]]
    assert scores[0] == scores[1] and all(score * 7 == pytest.approx(round(score * 7)) for score in scores)


def run(task_folder: Path, *words: str) -> str:
    done = CliRunner().invoke(revela_hub.app, ["evaluate-lm", *words, "--include-path", str(task_folder)])
    assert done.exit_code == 2
    return done.output.strip().splitlines()[-1]


@pytest.mark.slow  # the harness reads thousands of YAML files
def test_the_paper_s_tasks_are_known_and_their_data_is_asked_for_first(task_folder, tmp_path, monkeypatch):
    from lm_eval.tasks import TaskManager

    assert set(TASKS) <= set(TaskManager().all_tasks)
    # Hub data that is not in the cache, as without a connection.
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "empty")
    assert "The data of the task 'arc_easy' does not load" in run(task_folder, "no/model")
    assert "knows no task 'cheese'" in run(task_folder, "no/model", "--tasks", "boats,cheese")


def test_errors_are_one_line_and_come_before_a_model_is_loaded(task_folder, tmp_path, tiny_bert_folder, monkeypatch):
    assert "The data of the task 'gone' does not load" in run(task_folder, "no/model", "--tasks", "boats,gone")
    assert "no/model does not load as a causal LM" in run(task_folder, "no/model", "--tasks", "boats")
    pickled = Path(shutil.copytree(tiny_bert_folder, tmp_path / "pickled"))
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    assert "is a pickle" in run(task_folder, str(pickled), "--tasks", "boats")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert "pip install 'revela-hub[lm-eval]'" in run(task_folder, "no/model")
