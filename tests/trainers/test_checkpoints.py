"""Checkpoints: what they hold, that they resume exactly, and that none is left half-written or deleted by mistake."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer
from transformers.trainer import safe_globals

from modeling_revela import RevelaForPreTraining
from trainers.checkpoints import clear_output, last_checkpoint
from trainers.revela_trainer import RevelaTrainingArguments

ROOT = Path(__file__).parent.parent.parent
# Of both, whatever draws at random: dropout, and the order of the data over the end of an epoch.
LORA = {"retriever_lora_r": 4, "lm_lora_r": 4, "retriever_lora_dropout": 0.1, "lm_lora_dropout": 0.1}


@pytest.fixture(scope="module", params=["lora", "full"])
def model_options(request) -> dict:
    return LORA if request.param == "lora" else {}


@pytest.fixture(scope="module")
def whole_run(run_training, model_options, tmp_path_factory):
    """Seven steps of four groups: over the end of the first epoch, at 23 groups, with checkpoints at 2, 4 and 6."""
    return run_training(
        tmp_path_factory.mktemp("whole"),
        model=model_options,
        max_steps=7,
        gradient_accumulation_steps=4,
        save_strategy="steps",
        save_steps=2,
    )


@pytest.fixture(scope="module")
def checkpoint(whole_run) -> Path:
    return Path(whole_run.args.output_dir) / "checkpoint-4"


# What a checkpoint holds


def test_checkpoint_is_safetensors_two_tokenizers_and_states_that_are_no_code(checkpoint, model_options):
    names = {path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()}
    assert {name for name in names if not name.endswith((".json", ".py", ".safetensors", ".jinja"))} == {
        "optimizer.pt",
        "scheduler.pt",
        "rng_state.pth",
    }
    for name in ("optimizer.pt", "scheduler.pt"):
        torch.load(checkpoint / name, weights_only=True)
    with safe_globals():
        torch.load(checkpoint / "rng_state.pth", weights_only=True)
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        assert any("lora_A" in name for name in file.keys()) == bool(model_options)
    assert AutoTokenizer.from_pretrained(checkpoint)("a boat")["input_ids"][-1] == 1
    assert AutoTokenizer.from_pretrained(checkpoint / "lm_tokenizer")("a boat")["input_ids"][-1] != 1
    for folder in (checkpoint, checkpoint / "lm_tokenizer"):
        raw = json.loads((folder / "tokenizer.json").read_text())
        assert raw["truncation"] is None and raw["padding"] is None, "carries the last batch's"
    arguments = json.loads((checkpoint / "training_args.json").read_text())
    assert (arguments["learning_rate"], arguments["gradient_accumulation_steps"]) == (1e-2, 4)


def test_checkpoint_loads_as_the_model_that_was_trained(whole_run):
    loaded = RevelaForPreTraining.from_pretrained(whole_run.args.output_dir)
    assert loaded.config.similarity_temperature == 0.01 and loaded.config.in_batch_gate
    batch = whole_run.data_collator([whole_run.train_dataset[0]])
    with torch.no_grad():
        expected, found = whole_run.model.eval()(**batch), loaded.eval()(**batch)
    assert torch.equal(expected.loss, found.loss) and torch.equal(expected.similarities, found.similarities)


def test_checkpoint_of_adapters_may_leave_out_the_backbones(run_training, lora, tmp_path):
    trainer = run_training(tmp_path, model=lora | {"save_backbones": False}, save_strategy="steps", save_steps=2)
    with safe_open(tmp_path / "checkpoint-2" / "model.safetensors", "pt") as file:
        assert all("lora_" in name or name == "lm.in_batch_gate" for name in file.keys())
    resumed = run_training(
        tmp_path / "resumed", model=lora | {"save_backbones": False},
        resume_from_checkpoint=str(tmp_path / "checkpoint-2"),
    )  # fmt: skip
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


def test_output_folder_holds_the_final_model_whole(whole_run):
    out = Path(whole_run.args.output_dir)
    assert not list(out.rglob(".saving*"))
    inside = {path.name for path in (out / "checkpoint-6").iterdir()}
    assert inside - {path.name for path in out.iterdir()} == {
        "optimizer.pt",
        "scheduler.pt",
        "rng_state.pth",
        "manifest.json",
    }


# Resuming


def test_resumed_run_equals_the_uninterrupted_one(
    run_training, whole_run, checkpoint, model_options, weights, tmp_path
):
    resumed = run_training(
        tmp_path,
        model=model_options,
        max_steps=7,
        gradient_accumulation_steps=4,
        resume_from_checkpoint=str(checkpoint),
    )

    def losses(trainer):
        return {
            entry["step"]: {name: entry[name] for name in ("loss", "next_token_loss", "grad_norm", "learning_rate")}
            for entry in trainer.state.log_history
            if "loss" in entry
        }

    assert losses(resumed) == losses(whole_run)
    expected = weights(whole_run)
    for name, value in weights(resumed).items():
        assert torch.equal(value, expected[name]), name
    moments = [trainer.optimizer.state_dict()["state"] for trainer in (whole_run, resumed)]
    for key, state in moments[0].items():
        assert torch.equal(state["exp_avg_sq"], moments[1][key]["exp_avg_sq"])


def test_a_run_that_has_ended_does_not_go_on(checkpoint, run_training, model_options, tmp_path):
    options = {"max_steps": 4, "gradient_accumulation_steps": 4, "resume_from_checkpoint": str(checkpoint)}
    with pytest.raises(ValueError, match="checkpoint-4 is at step 4, and the run ends at 4: export it as it is"):
        run_training(tmp_path / "more", model=model_options, **options)


def test_resume_takes_the_newest_whole_checkpoint(finished_run, tmp_path):
    for step in (2, 10, 9):
        shutil.copytree(finished_run / "checkpoint-2", tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-99").mkdir()
    (tmp_path / "checkpoint-99" / "model.safetensors").touch()
    assert last_checkpoint(arguments(tmp_path, resume_from_checkpoint="true")) == str(tmp_path / "checkpoint-10")


@pytest.mark.parametrize("where", ["output folder", "nothing", "weights only"])
def test_what_cannot_be_resumed_exactly_is_refused(finished_run, tmp_path, where):
    path = {"output folder": finished_run, "nothing": tmp_path / "nothing"}.get(where)
    if path is None:
        path = tmp_path / "checkpoint-2"
        shutil.copytree(
            finished_run / "checkpoint-2", path, ignore=shutil.ignore_patterns("optimizer.pt", "rng_state.pth")
        )
    with pytest.raises(FileNotFoundError, match="no checkpoint to resume from"):
        last_checkpoint(arguments(tmp_path, resume_from_checkpoint=str(path)))


def cut(name: str):
    def spoil(checkpoint: Path) -> None:
        os.truncate(checkpoint / name, (checkpoint / name).stat().st_size // 2)

    return spoil


def cut_unsealed(checkpoint: Path) -> None:
    """As a checkpoint of other trainers is: without word of its files' sizes."""
    (checkpoint / "manifest.json").unlink()
    cut("model.safetensors")(checkpoint)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (cut("model.safetensors"), "model.safetensors has .* bytes, and .* were written"),
        (cut("optimizer.pt"), "optimizer.pt has .* bytes"),
        (cut("trainer_state.json"), "trainer_state.json has .* bytes"),
        (cut_unsealed, "model.safetensors is no whole safetensors file"),
        (lambda checkpoint: (checkpoint / "optimizer.pt").unlink(), "lacks optimizer.pt"),
        (lambda checkpoint: (checkpoint / "lm_tokenizer" / "tokenizer.json").unlink(), "lacks lm_tokenizer/"),
        (lambda checkpoint: (checkpoint / "pytorch_model.bin").touch(), "holds pytorch_model.bin, a pickle"),
    ],
    ids=["weights", "optimizer", "state", "unsealed", "no-optimizer", "no-tokenizer", "pickle"],
)
def test_damaged_checkpoint_is_found_and_the_one_before_offered(finished_run, tmp_path, spoil, message):
    for step in (1, 2):
        shutil.copytree(finished_run / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    spoil(tmp_path / "checkpoint-2")
    offer = f"go on from the one before with --resume_from_checkpoint {tmp_path / 'checkpoint-1'}"
    for resume in ("true", str(tmp_path / "checkpoint-2")):
        with pytest.raises(ValueError, match=f"checkpoint-2 (is broken: )?{message}.*{offer}"):
            last_checkpoint(arguments(tmp_path, resume_from_checkpoint=resume))
    assert last_checkpoint(arguments(tmp_path, resume_from_checkpoint=str(tmp_path / "checkpoint-1")))


def test_checkpoint_that_lacks_a_weight_is_not_gone_on_from(finished_run, run_training, lora, tmp_path):
    checkpoint = shutil.copytree(finished_run / "checkpoint-2", tmp_path / "checkpoint-2")
    weights = load_file(checkpoint / "model.safetensors")
    name = next(name for name in sorted(weights) if "lora_A" in name)
    del weights[name]
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    (checkpoint / "manifest.json").unlink()
    with pytest.raises(ValueError, match=f"lacks 1 weights.*{name}"):
        run_training(tmp_path / "out", model=lora, resume_from_checkpoint=str(checkpoint))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"per_device_train_batch_size": 2}, "written with 1 rows a step .*this run has 2"),
        ({"seed": 7}, "42 seed, and this run has 7"),
    ],
)
def test_resuming_at_another_place_in_the_data_is_refused(
    finished_run, run_training, lora, tmp_path, options, message
):
    with pytest.raises(ValueError, match=message):
        run_training(tmp_path, model=lora, resume_from_checkpoint=str(finished_run / "checkpoint-2"), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"similarity_temperature": 0.5}, "trained with `similarity_temperature` 0.01, not 0.5: "),
        (
            {"query_prompt": "foo: ", "pooling": "mean"},
            "with `pooling` 'eos', not 'mean', `query_prompt` 'query: ', not 'foo: ': .* another --output_dir",
        ),
        ({"in_batch_gate": False, "v_norm": False}, "`v_norm` True, not False, `in_batch_gate` True, not False"),
        ({"retriever_lora_r": 8}, "with `retriever_lora_alpha` 4, not 8, `retriever_lora_r` 4, not 8: "),
        ({"retriever_lora_r": 0}, "with `retriever_lora_r` 4, not 0: "),
        ({"lm_lora_r": 0, "freeze_lm": True}, "`freeze_lm` False, not True, `lm_lora_r` 4, not 0"),
    ],
)
def test_resuming_with_other_options_of_the_model_is_refused(
    finished_run, run_training, lora, tmp_path, options, message
):
    with pytest.raises(ValueError, match=f"checkpoint-1 was .*{message}"):
        run_training(tmp_path, model=lora | options, resume_from_checkpoint=str(finished_run / "checkpoint-1"))
    assert not list(tmp_path.iterdir())


def test_another_backbone_is_refused_and_a_moved_one_is_not(
    finished_run, run_training, lora, tiny_lm_folder, tmp_path
):
    moved = shutil.copytree(tiny_lm_folder, tmp_path / "moved")
    model = lora | {"retriever_name_or_path": str(moved), "embed_batch_size": 2, "dtype": "bfloat16"}
    checkpoint = str(finished_run / "checkpoint-1")
    run_training(tmp_path / "out", model=model, resume_from_checkpoint=checkpoint, max_steps=2)
    config = json.loads((moved / "config.json").read_text()) | {"rms_norm_eps": 1e-3}
    (moved / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="`lm_config.rms_norm_eps` 1e-06, not 0.001"):
        run_training(tmp_path / "out", model=model, resume_from_checkpoint=checkpoint)


def test_resume_without_a_checkpoint_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint to resume from"):
        last_checkpoint(arguments(tmp_path, resume_from_checkpoint="true"))


# The folder of an earlier run


def arguments(folder: Path, **options) -> RevelaTrainingArguments:
    return RevelaTrainingArguments(output_dir=str(folder), use_cpu=True, **options)


@pytest.fixture(scope="module")
def finished_run(run_training, lora, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("finished")
    run_training(out, model=lora, max_steps=2, save_strategy="steps", save_steps=1)
    return out


@pytest.fixture
def earlier_run(finished_run, tmp_path) -> Path:
    """A copy of a whole run's folder, with files of the user's between."""
    folder = tmp_path / "run"
    shutil.copytree(finished_run, folder)
    for name in ("notes.txt", "checkpoint-notes.md", "data/my.safetensors", "runs/events"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("mine")
    return folder


def test_earlier_run_is_refused_unless_resumed_or_overwritten(earlier_run):
    before = sorted(earlier_run.rglob("*"))
    with pytest.raises(FileExistsError, match="--resume_from_checkpoint true.*--overwrite_output true"):
        last_checkpoint(arguments(earlier_run))
    assert last_checkpoint(arguments(earlier_run, resume_from_checkpoint="true")).endswith("checkpoint-2")
    assert sorted(earlier_run.rglob("*")) == before


def test_earlier_run_without_checkpoints_is_refused_too(earlier_run):
    for path in earlier_run.glob("checkpoint-?"):
        shutil.rmtree(path)
    with pytest.raises(FileExistsError, match="earlier run"):
        last_checkpoint(arguments(earlier_run))


def test_overwriting_deletes_what_the_run_wrote_and_nothing_else(earlier_run):
    before = sorted(earlier_run.rglob("*"))
    assert last_checkpoint(arguments(earlier_run, overwrite_output=True)) is None
    assert sorted(earlier_run.rglob("*")) == before, "the run might yet fail to start"
    clear_output(earlier_run)
    for name in ("notes.txt", "checkpoint-notes.md", "data/my.safetensors", "runs/events"):
        assert (earlier_run / name).read_text() == "mine"
    assert not list(earlier_run.glob("checkpoint-?")) and not (earlier_run / "model.safetensors").exists()
    assert not (earlier_run / "config.json").exists() and not (earlier_run / "trainer_state.json").exists()
    # So that a second start, with nothing saved yet, finds no earlier run.
    assert last_checkpoint(arguments(earlier_run)) is None


def test_overwriting_writes_a_new_run(earlier_run, run_training, lora):
    run_training(earlier_run, model=lora, max_steps=1, overwrite_output=True)
    assert not list(earlier_run.glob("checkpoint-?"))
    assert json.loads((earlier_run / "trainer_state.json").read_text())["global_step"] == 1
    RevelaForPreTraining.from_pretrained(earlier_run)


def test_a_run_that_cannot_start_deletes_nothing(earlier_run, run_training, lora):
    before = sorted(earlier_run.rglob("*"))
    with pytest.raises(ValueError, match="no-such-set"):
        run_training(earlier_run, model=lora, data={"train_sets": ["no-such-set"]}, overwrite_output=True)
    assert sorted(earlier_run.rglob("*")) == before


def test_output_that_cannot_be_written_is_found_out_at_the_start(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(PermissionError, match="file is no folder that can be written .*another --output_dir"):
        last_checkpoint(arguments(tmp_path / "file" / "run"))
    last_checkpoint(arguments(tmp_path / "new" / "run"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    if Path("/proc/self").exists():  # where nobody may write, root included
        with pytest.raises(PermissionError, match="/proc is no folder that can be written .*another --output_dir"):
            last_checkpoint(arguments(Path("/proc/x/run")))


def test_checkpoints_of_another_model_are_not_overwritten(tiny_bert_folder, tmp_path):
    shutil.copytree(tiny_bert_folder, tmp_path / "checkpoint-4")
    with pytest.raises(FileExistsError, match="checkpoint-4 holds a model that is no Revela run"):
        last_checkpoint(arguments(tmp_path, overwrite_output=True))


@pytest.mark.parametrize("overwrite", [False, True])
def test_folder_of_another_model_is_refused_whatever_is_asked(tiny_lm_folder, tmp_path, overwrite):
    folder = tmp_path / "backbone"
    shutil.copytree(tiny_lm_folder, folder)
    before = sorted(folder.iterdir())
    with pytest.raises(FileExistsError, match="no Revela run"):
        last_checkpoint(arguments(folder, overwrite_output=overwrite))
    assert sorted(folder.iterdir()) == before


# Killed while saving

KILLED = """
import os, sys
import trainers.revela as script
from trainers.arguments import parse_recipe
from trainers.revela_trainer import RevelaTrainer, RevelaTrainingArguments

class Killed(RevelaTrainer):
    def {method}(self, *args, **kwargs):
        if self.state.global_step == {step}:
            {before}
            os.kill(os.getpid(), 9)
        return super().{method}(*args, **kwargs)

classes = (script.ModelArguments, script.DataArguments, RevelaTrainingArguments)
script.train(*parse_recipe(classes, sys.argv[1:]), trainer_class=Killed)
"""


def run_until_killed(out: Path, lm: Path, prepared: Path, method: str, step: int, before: str = "pass") -> None:
    options = {
        "retriever_name_or_path": lm,
        "train_sets": prepared,
        "output_dir": out,
        "max_steps": 4,
        "save_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "similarity_temperature": 0.01,
        "in_batch_gate": "true",
        "max_length": 96,
        "retriever_lora_r": 4,
        "lm_lora_r": 4,
        "use_cpu": "true",
        "report_to": "none",
    }
    argv = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    command = [sys.executable, "-c", KILLED.format(method=method, step=step, before=before), *argv]
    environment = os.environ | {"HF_DATASETS_CACHE": str(out.parent / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr


def test_kill_while_saving_leaves_the_earlier_checkpoint_which_another_process_resumes(
    run_training, tiny_lm_folder, prepared_folder, lora, logged, weights, tmp_path
):
    """The weights are written and the optimizer is not when the process dies."""
    out = tmp_path / "killed"
    run_until_killed(out, tiny_lm_folder, prepared_folder, "_save_optimizer_and_scheduler", step=4)
    assert (out / ".saving" / "checkpoint-4" / "model.safetensors").exists(), "nothing was half-written"
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-2"]
    assert not (out / "config.json").exists()
    with pytest.raises(FileExistsError, match="earlier run"):
        run_training(out, model=lora, max_steps=4)
    resumed = run_training(
        out, model=lora, max_steps=4, save_strategy="steps", save_steps=2, resume_from_checkpoint="true"
    )
    whole = run_training(tmp_path / "whole", model=lora, max_steps=4)
    assert logged(resumed, "loss") == logged(whole, "loss")
    for name, value in weights(whole).items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    assert sorted(path.name for path in out.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    assert not (out / ".saving").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "before"),
    [
        ("_save", "pass"),
        ("_save_rng_state", "pass"),
        # In the middle of a file: half of the weights, under their name.
        (
            "_save_optimizer_and_scheduler",
            "p = args[0] + '/model.safetensors'; os.truncate(p, os.path.getsize(p) // 2)",
        ),
    ],
    ids=["before-the-weights", "before-the-random-state", "half-the-weights"],
)
def test_kill_at_any_point_of_a_save_leaves_the_earlier_checkpoint(
    tiny_lm_folder, prepared_folder, tmp_path, method, before
):
    out = tmp_path / "killed"
    run_until_killed(out, tiny_lm_folder, prepared_folder, method, 4, before)
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-2"]
    assert last_checkpoint(arguments(out, resume_from_checkpoint="true")) == str(out / "checkpoint-2")
    RevelaForPreTraining.from_pretrained(out / "checkpoint-2")


@pytest.mark.slow
def test_kill_in_the_final_save_leaves_no_model_in_the_output_folder(tiny_lm_folder, prepared_folder, tmp_path):
    out = tmp_path / "killed"
    final = "args[0].endswith('.saving')"
    before = f"if {final}: super()._save(*args, **kwargs)\n            if not {final}: return super()._save(*args)"
    run_until_killed(out, tiny_lm_folder, prepared_folder, "_save", 4, before)
    assert (out / ".saving" / "model.safetensors").exists(), "nothing was half-written"
    left = sorted(path.name for path in out.iterdir())
    assert left == [".saving", "checkpoint-2", "checkpoint-4", "trainer_state.json"]
