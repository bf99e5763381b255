"""The script under `accelerate launch`, from a recipe, somewhere else; several processes are in test_strategies.py."""

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
