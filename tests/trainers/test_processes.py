"""Training in processes of its own: through accelerate, in two processes, and resumed by another."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.slow
# Plain gradient descent, so that an update is as near as the gradients are.
OPTIONS = {
    "temperature": 0.01,
    "in_batch_gate": "true",
    "max_length": 96,
    "max_steps": 4,
    "logging_steps": 1,
    "optim": "sgd",
    "learning_rate": 0.05,
    "report_to": "none",
    "use_cpu": "true",
    "validation_groups": 4,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_steps": 2,
    # With it torch hands on the model's own output, without it a copy.
    "gradient_checkpointing": "true",
}


@pytest.fixture(scope="module")
def launch(tiny_lm_folder, prepared_folder, tmp_path_factory):
    """Runs `revela-hub train revela` with a number of processes; returns the output folder."""
    cache = tmp_path_factory.mktemp("cache")

    def run(out: Path, processes: int, **options) -> Path:
        options = OPTIONS | {
            "retriever_name_or_path": tiny_lm_folder,
            "train_sets": prepared_folder,
            "output_dir": out,
        } | options  # fmt: skip
        argv = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
        command = [sys.executable, "-m", "revela_hub", "train", "revela", "--launch-config", "cpu"]
        command += ["--num-processes", str(processes), *argv]
        environment = os.environ | {"HF_DATASETS_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-4000:]
        return out

    return run


def log_of(out: Path) -> dict[int, dict]:
    """What was logged, by step."""
    merged: dict[int, dict] = {}
    for entry in json.loads((out / "trainer_state.json").read_text())["log_history"]:
        merged.setdefault(entry["step"], {}).update(entry)
    return merged


@pytest.fixture(scope="module")
def one_process(launch, tmp_path_factory) -> Path:
    return launch(tmp_path_factory.mktemp("runs") / "one", 1, per_device_train_batch_size=2)


@pytest.fixture(scope="module")
def two_processes(launch, tmp_path_factory) -> Path:
    return launch(tmp_path_factory.mktemp("runs") / "two", 2)


def test_two_processes_do_what_one_does(one_process, two_processes):
    expected, found = load_file(one_process / "model.safetensors"), load_file(two_processes / "model.safetensors")
    start = load_file(one_process / "checkpoint-2" / "model.safetensors")
    moved = max((expected[name] - start[name]).abs().max().item() for name in expected)
    assert moved > 1e-3
    for name, value in expected.items():
        assert (value - found[name]).abs().max() < 1e-3 * moved, name


def test_two_processes_log_and_measure_what_one_does(one_process, two_processes):
    expected, found = log_of(one_process), log_of(two_processes)
    for step in range(1, 5):
        assert found[step]["loss"] == pytest.approx(expected[step]["loss"], rel=1e-5)
        assert found[step]["grad_norm"] == pytest.approx(expected[step]["grad_norm"], rel=1e-3)
        for name in ("in_batch_loss", "next_token_loss", "max_weight", "learning_chunks", "mean_cosine"):
            assert found[step][name] == pytest.approx(expected[step][name], rel=1e-4), name
        assert 2 * found[step]["pairs"] == expected[step]["pairs"]
    for step in (2, 4):
        for name in ("eval_retrieval_gain", "eval_in_batch_loss", "eval_sibling_ndcg_at_10"):
            assert found[step][name] == pytest.approx(expected[step][name], rel=1e-3, abs=1e-5), name


def test_two_processes_leave_whole_checkpoints_and_resume_from_them(launch, two_processes, tmp_path):
    assert sorted(path.name for path in two_processes.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    assert not (two_processes / ".saving").exists()
    checkpoint = two_processes / "checkpoint-2"
    assert {path.name for path in checkpoint.glob("rng_state*")} == {"rng_state_0.pth", "rng_state_1.pth"}
    resumed = launch(tmp_path / "resumed", 2, resume_from_checkpoint=checkpoint)
    expected = load_file(two_processes / "model.safetensors")
    for name, value in load_file(resumed / "model.safetensors").items():
        assert torch.equal(value, expected[name]), name
    assert [log_of(resumed)[step]["loss"] for step in (3, 4)] == [
        log_of(two_processes)[step]["loss"] for step in (3, 4)
    ]


def test_accelerate_launch_of_the_script_resumes_a_run(launch, one_process, tiny_lm_folder, prepared_folder, tmp_path):
    """The script itself, from a recipe, in another process than the one that saved, somewhere else."""
    recipe = tmp_path / "recipe.yaml"
    lines = [f"{name}: {value}" for name, value in OPTIONS.items()]
    lines += [f"retriever_name_or_path: {tiny_lm_folder}", f"train_sets: [{prepared_folder}]"]
    recipe.write_text("\n".join(lines))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", str(ROOT / "trainers" / "revela.py")]
    command += [str(recipe), "--output_dir", "out", "--per_device_train_batch_size", "2"]
    command += ["--resume_from_checkpoint", str(one_process / "checkpoint-2")]
    environment = os.environ | {"HF_DATASETS_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    expected = load_file(one_process / "model.safetensors")
    for name, value in load_file(tmp_path / "out" / "model.safetensors").items():
        assert torch.equal(value, expected[name]), name
