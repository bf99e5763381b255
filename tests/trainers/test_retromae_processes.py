"""RetroMAE in processes of its own: two do what one does, and resume in a later epoch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def launch(mlm_folder, sequences_folder, tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")

    def run(out: Path, processes: int, **options) -> Path:
        options = {
            "encoder_name_or_path": mlm_folder["plain"], "train_sets": sequences_folder, "output_dir": out,
            "max_seq_length": 48, "max_steps": 9, "logging_steps": 1, "optim": "sgd", "learning_rate": 0.1,
            "report_to": "none", "use_cpu": "true", "validation_sequences": 8, "eval_strategy": "steps",
            "eval_steps": 5, "save_steps": 1, "per_device_train_batch_size": 8 // processes,
        } | options  # fmt: skip
        argv = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
        command = [sys.executable, "-m", "revela_hub", "train", "retromae", "--launch-config", "cpu"]
        command += ["--num-processes", str(processes), *argv]
        environment = os.environ | {"HF_DATASETS_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-4000:]
        return out

    return run


@pytest.fixture(scope="module")
def one_process(launch, tmp_path_factory) -> Path:
    return launch(tmp_path_factory.mktemp("runs") / "one", 1)


@pytest.fixture(scope="module")
def two_processes(launch, tmp_path_factory) -> Path:
    return launch(tmp_path_factory.mktemp("runs") / "two", 2)


def log_of(out: Path) -> dict[int, dict]:
    merged: dict[int, dict] = {}
    for entry in json.loads((out / "trainer_state.json").read_text())["log_history"]:
        merged.setdefault(entry["step"], {}).update(entry)
    return merged


def test_two_processes_do_and_log_what_one_does(one_process, two_processes):
    expected, found = log_of(one_process), log_of(two_processes)
    assert expected[9]["epoch"] > 2
    names = ["loss", "grad_norm", "encoder_loss", "decoder_loss", "encoder_accuracy", "decoder_accuracy"]
    # The last batch of an epoch is smaller than the others, which processes share out differently.
    steps = [step for step in range(1, 10) if expected[step]["epoch"] < 1]
    assert len(steps) >= 3
    for step in steps:
        for name in names:
            assert found[step][name] == pytest.approx(expected[step][name], rel=1e-4), (step, name)
    for name in ("eval_encoder_loss", "eval_decoder_accuracy", "eval_sibling_ndcg_at_10"):
        assert name in found[5]
    weights = [load_file(run / "checkpoint-2" / "model.safetensors") for run in (one_process, two_processes)]
    start = load_file(one_process / "checkpoint-1" / "model.safetensors")
    moved = max((weights[0][name] - start[name]).abs().max().item() for name in start)
    assert moved > 1e-3
    assert max((weights[0][name] - weights[1][name]).abs().max().item() for name in start) < 1e-3 * moved


def test_two_processes_resume_in_a_later_epoch(launch, two_processes, tmp_path):
    epochs = {step: entry["epoch"] for step, entry in log_of(two_processes).items()}
    step = next(step for step, epoch in sorted(epochs.items()) if epoch > 1 and epoch != int(epoch))
    resumed = launch(tmp_path / "resumed", 2, resume_from_checkpoint=two_processes / f"checkpoint-{step}")
    expected = load_file(two_processes / "model.safetensors")
    for name, value in load_file(resumed / "model.safetensors").items():
        assert torch.equal(value, expected[name]), name
    assert log_of(resumed)[9]["loss"] == log_of(two_processes)[9]["loss"]
