"""`regroup_every`: neighbours by the current retriever take the place of prepared groups; a run resumes exactly."""

import json

import pytest
import torch
from safetensors.torch import load_file

from trainers.arguments import parse_recipe
from trainers.data.prepared import load_groups
from trainers.replug_trainer import ReplugTrainingArguments
from trainers.revela import DataArguments, ModelArguments, make_trainer, train
from trainers.revela_trainer import RevelaTrainingArguments

CLASSES = (ModelArguments, DataArguments, RevelaTrainingArguments)


def arguments(lm_folder, prepared_folder, out, *options: str):
    return parse_recipe(
        CLASSES,
        [
            *("--retriever_name_or_path", str(lm_folder), "--train_sets", str(prepared_folder), "--max_length", "32"),
            *("--similarity_temperature", "0.1", "--learning_rate", "1e-3", "--max_steps", "9", "--use_cpu", "true"),
            *("--per_device_train_batch_size", "2", "--save_strategy", "steps", "--save_steps", "5"),
            *("--regroup_every", "3", "--regroup_groups", "16", "--logging_steps", "1", "--disable_tqdm", "true"),
            *("--gradient_accumulation_steps", "2", "--report_to", "none", "--output_dir", str(out), *options),
        ],
    )


def losses(state) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in state.log_history if "loss" in entry}


@pytest.fixture(scope="module")
def run(tiny_lm_folder, prepared_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("regrouping") / "run"
    return train(*arguments(tiny_lm_folder, prepared_folder, out)), out


def test_it_groups_anew_each_time_and_says_what_it_cost(run):
    entries = [entry for entry in run[0].state.log_history if "neighbour_cosine" in entry]
    assert [entry["step"] for entry in entries] == [3, 6]
    assert all(entry["regroup_seconds"] > 0 and -1 <= entry["neighbour_cosine"] <= 1 for entry in entries)


def test_a_resumed_run_goes_on_with_the_groups_of_the_checkpoint(run, tiny_lm_folder, prepared_folder, tmp_path):
    trainer, out = run
    record = json.loads((out / "checkpoint-5" / "training_record.json").read_text())
    assert record["neighbours"]["step"] == 3 and len(record["neighbours"]["groups"]) == 16
    resumed = train(
        *arguments(
            *(tiny_lm_folder, prepared_folder, tmp_path / "run"),
            *("--resume_from_checkpoint", str(out / "checkpoint-5")),
        )
    )
    expected = losses(trainer.state)
    assert {step: loss for step, loss in losses(resumed.state).items() if step > 5} == {
        step: expected[step] for step in range(6, 10)
    }
    weights, again = (load_file(folder / "model.safetensors") for folder in (out, tmp_path / "run"))
    assert all(torch.equal(weights[name], again[name]) for name in weights)


def test_forward_passes_are_on_neighbours_by_their_share(tiny_lm_folder, prepared_folder, tmp_path):
    options = ("--regroup_share", "1", "--gradient_accumulation_steps", "1", "--save_strategy", "no")
    trainer = make_trainer(*arguments(tiny_lm_folder, prepared_folder, tmp_path / "run", *options))
    seen = []
    collate = trainer.data_collator.__class__.__call__

    class Watched(trainer.data_collator.__class__):
        def __call__(self, rows):
            seen.append([list(zip(row["texts"], row["doc_ids"], strict=True)) for row in rows])
            return collate(self, rows)

    trainer.data_collator.__class__ = Watched
    trainer.train()
    rows = load_groups(prepared_folder, "train")
    prepared = {tuple(zip(row["texts"], row["doc_ids"], strict=True)) for row in rows}
    chunks = {chunk for group in prepared for chunk in group}
    made = [group for batch in seen for group in batch if tuple(group) not in prepared]
    # Steps 4 to 9, of two groups; a chunk keeps its document.
    assert len(made) == 12 and {chunk for group in made for chunk in group} <= chunks


def test_without_the_option_nothing_is_regrouped(tiny_lm_folder, prepared_folder, tmp_path):
    made = arguments(tiny_lm_folder, prepared_folder, tmp_path / "run", "--max_steps", "4", "--save_steps", "4")
    made[-1].regroup_every = None
    trainer = train(*made)
    assert not any("neighbour_cosine" in entry for entry in trainer.state.log_history)
    record = json.loads((tmp_path / "run" / "checkpoint-4" / "training_record.json").read_text())
    assert "neighbours" not in record


@pytest.mark.parametrize("kind", [RevelaTrainingArguments, ReplugTrainingArguments])
@pytest.mark.parametrize("options", [{"regroup_every": 0}, {"regroup_groups": 0}, {"regroup_share": 0.0}])
def test_values_that_mean_nothing_are_refused(kind, options, tmp_path):
    with pytest.raises(ValueError, match=next(iter(options))):
        kind(output_dir=str(tmp_path), use_cpu=True, **options)
