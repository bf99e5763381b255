"""Fine-tuning in processes of its own: through accelerate, and in two processes as in one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.trainers.finetune_sets import make_encoder, make_task

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.processes
# Plain gradient descent, so that an update is as near as the gradients are.
OPTIONS = {
    "method": "ance",
    "num_negatives": 2,
    "mining_depth": 6,
    "refresh_every": 4,
    "max_steps": 6,
    "logging_steps": 1,
    "optim": "sgd",
    "learning_rate": 0.05,
    "max_grad_norm": 1e9,
    # The other sampler's batches depend on where one ends.
    "batch_sampler": "batch_sampler",
    "report_to": "none",
    "use_cpu": "true",
    "save_strategy": "no",
    "eval_strategy": "steps",
    "eval_steps": 3,
}


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    """Runs the script under `accelerate launch` in a number of processes; returns the output folder."""
    folder = tmp_path_factory.mktemp("processes")
    encoder, task = make_encoder(folder / "encoder", dropout=0.0), make_task(folder / "beir", size=90)

    def run(name: str, processes: int, **options) -> Path:
        out = folder / name
        options = OPTIONS | {"model_name_or_path": encoder, "train_set": task, "output_dir": out} | options
        argv = [str(part) for option, value in options.items() for part in (f"--{option}", value)]
        # As `revela-hub train --launch-config cpu` does: accelerate's multi-GPU launcher is plain torchrun.
        command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(processes)]
        command += ["--config_file", str(ROOT / "trainers" / "accelerate_configs" / "cpu.yaml")]
        command += [*(["--multi_gpu"] if processes > 1 else []), str(ROOT / "trainers" / "finetune.py"), *argv]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr[-4000:]
        return out

    return run


def logs(out: Path, name: str) -> list[float]:
    log = json.loads((out / "trainer_state.json").read_text())["log_history"]
    return [entry[name] for entry in log if name in entry]


@pytest.mark.parametrize("cached", [0, 3])
def test_two_processes_with_each_others_negatives_do_what_one_does(launch, cached):
    one = launch(f"one-{cached}", 1, per_device_train_batch_size=8, grad_cache_batch_size=cached)
    two = launch(f"two-{cached}", 2, per_device_train_batch_size=4, grad_cache_batch_size=cached)
    for file in (one / "negatives").iterdir():
        assert torch.equal(*(load_file(run / "negatives" / file.name)["negatives"] for run in (one, two))), file.name
    assert logs(two, "eval_dev_cosine_ndcg@10") == pytest.approx(logs(one, "eval_dev_cosine_ndcg@10"), abs=1e-6)
    assert logs(two, "loss") == pytest.approx(logs(one, "loss"), rel=1e-4)
    start = load_file(one.parent / "encoder" / "model.safetensors")
    expected, found = load_file(one / "model.safetensors"), load_file(two / "model.safetensors")
    moved = max((expected[name] - start[name]).abs().max().item() for name in expected)
    assert moved > 1e-3
    for name, value in expected.items():
        assert (value - found[name]).abs().max() < 1e-3 * moved, name


def test_two_processes_without_each_others_negatives_do_something_else(launch):
    """The test above would not see it if processes kept to themselves and the loss happened to agree."""
    two = launch("apart", 2, per_device_train_batch_size=4, cross_device_negatives="false", max_steps=1)
    one = launch("together", 1, per_device_train_batch_size=8, max_steps=1)
    assert logs(two, "loss")[0] < logs(one, "loss")[0] - 0.3


def test_distillation_in_two_processes(launch):
    out = launch(
        "distill",
        2,
        method="distill",
        cross_encoder_learning_rate=1e-3,
        max_steps=2,
        refresh_every=0,
        cross_encoder_max_length=64,
    )
    rows = load_file(out / "negatives" / "rows-0.safetensors")
    assert rows["scores"].shape == (67, 3) and rows["scores"].isfinite().all()
    assert (out / "cross_encoder" / "model.safetensors").exists() and (out / "modules.json").exists()
