"""The script under `accelerate launch`, from a recipe, somewhere else; several processes are in test_strategies.py."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from trainers.revela import main

ROOT = Path(__file__).parents[2]
OPTIONS = {
    "similarity_temperature": 0.01,
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


def test_accelerate_launch_of_the_script_resumes_a_run(tiny_lm_folder, prepared_folder, tmp_path):
    """The script itself, from a recipe, in another process than the one that saved, somewhere else."""
    here = OPTIONS | {"retriever_name_or_path": tiny_lm_folder, "train_sets": prepared_folder}
    here |= {"output_dir": tmp_path / "first", "per_device_train_batch_size": 2}
    main([str(part) for name, value in here.items() for part in (f"--{name}", value)])
    recipe = tmp_path / "recipe.yaml"
    lines = [f"{name}: {value}" for name, value in OPTIONS.items()]
    lines += [f"retriever_name_or_path: {tiny_lm_folder}", f"train_sets: [{prepared_folder}]"]
    recipe.write_text("\n".join(lines))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", str(ROOT / "trainers" / "revela.py")]
    command += [str(recipe), "--output_dir", "out", "--per_device_train_batch_size", "2"]
    command += ["--resume_from_checkpoint", str(tmp_path / "first" / "checkpoint-2")]
    environment = os.environ | {"HF_DATASETS_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    expected = load_file(tmp_path / "first" / "model.safetensors")
    for name, value in load_file(tmp_path / "out" / "model.safetensors").items():
        assert torch.equal(value, expected[name]), name
