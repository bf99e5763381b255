"""What a run leaves word of for its model card: all of it, also over a resumption, and nothing of this machine."""

import json
import shutil
from pathlib import Path

import pytest
from datasets import Dataset

from hub_cards.card import TRAINING_RECORD
from trainers.record import describe_run
from trainers.revela import DataArguments, ModelArguments
from trainers.revela_trainer import PICTURED_STEPS, RevelaTrainingArguments


def record_of(folder: Path) -> dict:
    return json.loads((folder / TRAINING_RECORD).read_text())


def rows_of(source: str) -> Dataset:
    return Dataset.from_dict({"texts": [["a", "b"]], "doc_ids": [["1", "2"]], "source": [source]})


@pytest.fixture(scope="module")
def run(run_training, tmp_path_factory):
    """Six steps, a checkpoint every second."""
    folder = tmp_path_factory.mktemp("record") / "run"
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "logging_steps": 4}
    run_training(folder, eval_strategy="steps", eval_steps=6, **options)
    return folder, options


def test_record_grows_with_the_run(run):
    folder, _ = run
    records = [record_of(folder / f"checkpoint-{step}") for step in (2, 4, 6)] + [record_of(folder)]
    assert [record["step"] for record in records] == [2, 4, 6, 6]
    tokens = [record["tokens"] for record in records]
    assert 0 < tokens[0] < tokens[1] < tokens[2] == tokens[3]
    assert records[3]["seconds"] >= records[2]["seconds"] > records[0]["seconds"] > 0
    assert [picture["step"] for picture in records[0]["in_batch_attention"]] == [0, 2]
    assert [picture["step"] for picture in records[3]["in_batch_attention"]] == [0, 2, 4, 6]


def test_resumed_run_counts_what_was_before(run, run_training):
    folder, options = run
    whole = record_of(folder)
    checkpoint = folder / "checkpoint-4"
    run_training(folder, eval_strategy="steps", eval_steps=6, resume_from_checkpoint=str(checkpoint), **options)
    again = record_of(folder)
    assert again["tokens"] == whole["tokens"]
    assert again["seconds"] > record_of(checkpoint)["seconds"]
    assert again["in_batch_attention"] == whole["in_batch_attention"]


def test_picture_is_of_one_group_and_its_losses_are_those_of_the_model(run):
    pictures = record_of(run[0])["in_batch_attention"]
    first, last = pictures[0], pictures[-1]
    assert first["held_out"] and first["documents"] == last["documents"]
    for picture in pictures:
        count = len(picture["documents"])
        assert count == len(picture["weights"]) == len(picture["losses"]) == 4
        assert all(sum(row) == pytest.approx(1, abs=1e-3) for row in picture["weights"])
        assert all(picture["weights"][at][at] == 0 for at in range(count))
    mean = [sum(map(sum, picture["losses"])) / sum(map(len, picture["losses"])) for picture in (first, last)]
    assert mean[1] < mean[0], "six steps at this learning rate teach the LM something"


def test_pictures_of_a_long_run_are_thinned_and_keep_the_first(run_training, tmp_path):
    steps = PICTURED_STEPS + 3
    run_training(tmp_path / "run", max_steps=steps, save_strategy="steps", save_steps=1, save_total_limit=1)
    kept = [picture["step"] for picture in record_of(tmp_path / "run")["in_batch_attention"]]
    assert kept[0] == 0 and kept[-1] == steps and len(kept) <= PICTURED_STEPS


def test_names_are_kept_where_they_are_of_the_hub_alone(prepared_folder, tmp_path):
    (tmp_path / "runs" / "base").mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        described = describe_run(
            (
                ModelArguments("org/retriever", "runs/base", retriever_lora_r=8, lm_lora_alpha=4),
                DataArguments([str(prepared_folder)], max_length=77),
                RevelaTrainingArguments(output_dir="out", use_cpu=True, hub_model_id="me/x", run_name="a/b", seed=7),
            ),
            rows_of("texts"),
        )
    assert described["base_models"] == {"retriever_name_or_path": "org/retriever"}
    assert described["local_models"] == ["lm_name_or_path"]
    assert described["options"] == {
        "retriever_name_or_path": "org/retriever", "retriever_lora_r": 8, "lm_lora_alpha": 4, "max_length": 77,
        "seed": 7,
    }  # fmt: skip
    (data,) = described["data"]
    account = json.loads((prepared_folder / "prepare.json").read_text())
    assert data["dataset"] is None and data["groups"] == account["groups"] and len(data["sha256"]) == 64
    assert str(prepared_folder) not in json.dumps(described)


def test_source_on_the_hub_is_named(prepared_folder, tmp_path):
    folder = Path(shutil.copytree(prepared_folder, tmp_path / "prepared"))
    summary = json.loads((folder / "prepare.json").read_text())
    summary["settings"]["source"] = "org/text"
    (folder / "prepare.json").write_text(json.dumps(summary))
    arguments = (ModelArguments("x/y"), DataArguments([str(folder)]))
    for source, expected in (("org/text", "org/text"), ("text", None)):  # `prepare` writes a local folder's last part
        assert describe_run(arguments, rows_of(source))["data"][0]["dataset"] == expected
