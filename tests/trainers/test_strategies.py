"""DDP, ZeRO and FSDP2 in two processes do what one process does, and their checkpoints are one process' own."""

import importlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, BertModel

from modeling_revela import RevelaForPreTraining
from trainers.launching import Launch

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "trainers" / "accelerate_configs"
STRATEGIES = {
    "ddp": ["--config_file", CONFIGS / "ddp.yaml"],
    "zero1": ["--config_file", CONFIGS / "zero1.yaml"],
    "zero2": ["--use_deepspeed", "--deepspeed_config_file", ROOT / "trainers" / "deepspeed" / "zero2.json"],
    # The tiny models' weights would all stay whole under the threshold of the shipped file.
    "zero3": ["--use_deepspeed", "--deepspeed_config_file", "zero3-all-split.json"],
    "fsdp2": ["--config_file", CONFIGS / "fsdp2.yaml"],
}
COMMON = {
    "max_steps": 4, "logging_steps": 1, "report_to": "none", "disable_tqdm": "true",
    "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "lr_scheduler_type": "cosine",
}  # fmt: skip
REVELA = COMMON | {
    "similarity_temperature": 0.01, "in_batch_gate": "true", "max_length": 96, "validation_groups": 4,
    "embed_batch_size": 7,
}  # fmt: skip
# Of Adam with a large epsilon an update is as near as the gradients are.
ADAM = {"learning_rate": 2e-2, "adam_epsilon": 1e-3, "weight_decay": 0.01}
SGD = {"optim": "sgd", "learning_rate": 0.05}


@pytest.fixture(scope="module")
def bert_folder(tiny_bert_folder, tmp_path_factory) -> Path:
    """The tiny BERT without dropout, whose masks depend on the process."""
    folder = tmp_path_factory.mktemp("bert")
    config = AutoConfig.from_pretrained(tiny_bert_folder, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    BertModel.from_pretrained(tiny_bert_folder, config=config).save_pretrained(folder)
    for path in tiny_bert_folder.glob("tokenizer*"):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.fixture(scope="module")
def jobs(tiny_lm_folder, bert_folder, mlm_folder, prepared_folder, sequences_folder):
    """Method and options of each run."""
    two = {"retriever_name_or_path": bert_folder, "lm_name_or_path": tiny_lm_folder, "pooling": "mean"}
    lora = {"retriever_lora_r": 4, "lm_lora_r": 4, "trainable_temperature": "true", "gradient_checkpointing": "true"}
    return {
        "full": ("revela", REVELA | SGD | {"retriever_name_or_path": tiny_lm_folder, "train_sets": prepared_folder}),
        "lora": ("revela", REVELA | ADAM | two | lora | {"train_sets": prepared_folder}),
        "retromae": (
            "retromae",
            COMMON | ADAM | {"encoder_name_or_path": mlm_folder["plain"], "train_sets": sequences_folder,
                             "max_seq_length": 48, "validation_sequences": 8},
        ),
    }  # fmt: skip


def arguments(method: str, options: dict, processes: int, out: Path, **more) -> list[str]:
    # Steps of as many groups or sequences in all; no epoch ends within the four, where its rest is shared unevenly.
    batch = (4 if method == "revela" else 6) // processes
    options = options | {"output_dir": out, "per_device_train_batch_size": batch} | more
    return [str(part) for name, value in options.items() for part in (f"--{name}", value)]


def run_alone(method: str, options: dict, out: Path, **more) -> Path:
    main = importlib.import_module(f"trainers.{method}").main
    main(arguments(method, options, 1, out, use_cpu="true", **more))
    return out


@pytest.fixture(scope="module")
def alone(jobs, tmp_path_factory):
    """Each run in one process: the pytest process itself."""
    return {name: run_alone(*job, tmp_path_factory.mktemp("alone") / name) for name, job in jobs.items()}


def launch(strategy: str, runs: list, folder: Path, killed: str | None = None) -> None:
    """Run all of (method, arguments) in two processes, of which one may be killed, which has to end them all."""
    if strategy.startswith("zero"):
        pytest.importorskip("deepspeed")
    split = json.loads((ROOT / "trainers" / "deepspeed" / "zero3.json").read_text())
    split["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    (folder / "zero3-all-split.json").write_text(json.dumps(split))
    (folder / "jobs.json").write_text(json.dumps(runs))
    command = [sys.executable, "-m", "accelerate.commands.launch", *STRATEGIES[strategy], "--num_processes", 2]
    command += ["--main_process_port", 0, ROOT / "tests" / "trainers" / "launched.py", "jobs.json"]
    environment = os.environ | {"HF_DATASETS_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    if strategy == "fsdp2":
        environment["FSDP_ON_CPU"] = "1"
    if killed is not None:
        environment["KILLED"] = killed
    done = subprocess.run(
        list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode == 0) == (killed is None), done.stderr[-6000:]


def log_of(out: Path) -> dict[int, dict]:
    merged: dict[int, dict] = {}
    for entry in json.loads((out / "trainer_state.json").read_text())["log_history"]:
        merged.setdefault(entry["step"], {}).update(entry)
    return merged


def assert_same_run(expected: Path, found: Path, first_step: int = 1) -> None:
    """Losses, measures and weights of two runs, the weights to a thousandth of the largest step that one made."""
    logs = log_of(expected), log_of(found)
    exact = ("loss", "grad_norm", "learning_rate", "in_batch_loss", "next_token_loss", "encoder_loss", "decoder_loss")
    measured = ("eval_retrieval_gain", "eval_in_batch_loss", "eval_sibling_ndcg_at_10", "eval_loss", "gate")
    for step in range(first_step, 5):
        for name in exact + measured + ("temperature",):
            assert (name in logs[0][step]) == (name in logs[1][step]), (step, name)
            if name in logs[0][step]:
                assert logs[1][step][name] == pytest.approx(logs[0][step][name], rel=1e-4, abs=2e-6), (step, name)
    weights = [load_file(out / "model.safetensors") for out in (expected, found)]
    start = load_file(expected / "checkpoint-2" / "model.safetensors")
    assert weights[0].keys() == weights[1].keys() == start.keys()
    moved = max((weights[0][name] - start[name]).abs().max().item() for name in start)
    assert moved > 1e-3
    for name, value in weights[0].items():
        assert weights[1][name].dtype == value.dtype == torch.float32, name
        assert (value - weights[1][name]).abs().max() < 1e-3 * moved, name


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_processes_and_their_checkpoints_are_one_process_own(strategy, jobs, alone, tmp_path):
    """Both ways: what one process wrote goes on in two under the strategy, and what those wrote in one."""
    runs = [(name, job, tmp_path / name, {}) for name, job in jobs.items()]
    runs += [
        (name, jobs[name], tmp_path / f"{name}-resumed", {"resume_from_checkpoint": alone[name] / "checkpoint-2"})
        for name in ("lora", "retromae")
    ]
    cpu = {} if strategy == "fsdp2" else {"use_cpu": "true"}
    launch(strategy, [(job[0], arguments(*job, 2, out, **cpu, **more)) for _, job, out, more in runs], tmp_path)
    for name, _, out, more in runs:
        assert_same_run(alone[name], out, first_step=3 if more else 1)
        if name == "full":
            # Of split weights no picture is taken: a process that left it out would keep the others waiting.
            is_split = strategy in ("zero3", "fsdp2")
            assert bool(json.loads((out / "training_record.json").read_text())["in_batch_attention"]) != is_split
        names = {path.name for path in (alone[name] / "checkpoint-2").iterdir()}
        found = {path.name for path in (out / "checkpoint-4").iterdir()}
        assert found - {"rng_state_0.pth", "rng_state_1.pth"} == names - {"rng_state.pth"}
        assert not (out / ".saving").exists()
    for name in ("lora", "retromae"):
        resumed = run_alone(
            *jobs[name], tmp_path / f"{name}-alone", resume_from_checkpoint=tmp_path / name / "checkpoint-2"
        )
        assert_same_run(alone[name], resumed, first_step=3)


def test_zero3_in_bfloat16_keeps_what_is_trained_in_float32(jobs, tmp_path):
    method, options = jobs["lora"]
    runs = []
    for out, more in (("first", {}), ("resumed", {"resume_from_checkpoint": tmp_path / "first" / "checkpoint-2"})):
        runs.append((method, arguments(method, options, 2, tmp_path / out, use_cpu="true", bf16="true", **more)))
    launch("zero3", runs, tmp_path)
    first, resumed = (load_file(tmp_path / out / "model.safetensors") for out in ("first", "resumed"))
    for name, value in first.items():
        if ("lora_" in name and "pooler" not in name) or name in ("lm.in_batch_gate", "log_temperature"):
            assert value.dtype == torch.float32, name
        # Read back rounded, what was trained would part ways.
        assert torch.equal(value, resumed[name]), name
    assert any((value != value.bfloat16().float()).any() for value in first.values() if value.dtype == torch.float32)


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "fsdp2"])
def test_run_goes_on_after_a_process_was_killed_within_a_step(strategy, jobs, alone, tmp_path):
    cpu = {} if strategy == "fsdp2" else {"use_cpu": "true"}
    out = tmp_path / "out"
    launch(strategy, [("revela", arguments(*jobs["lora"], 2, out, **cpu))], tmp_path, killed="1:4")
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-2"]
    assert not (out / "config.json").exists()
    again = arguments(*jobs["lora"], 2, out, resume_from_checkpoint="true", **cpu)
    launch(strategy, [("revela", again)], tmp_path)
    assert_same_run(alone["lora"], out, first_step=3)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_two_machines_do_what_one_process_does(jobs, alone, tmp_path):
    port = free_port()
    command = [sys.executable, "-m", "revela_hub", "train", "revela", "--launch-config", "cpu"]
    command += ["--num-processes", "2", "--num-machines", "2", "--main-process-ip", "127.0.0.1"]
    command += ["--main-process-port", str(port), *arguments(*jobs["lora"], 2, tmp_path / "out")]
    environment = os.environ | {"HF_DATASETS_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    machines = [
        subprocess.Popen(
            [*command, "--machine-rank", rank], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
        )
        for rank in "01"
    ]
    for machine in machines:
        _, errors = machine.communicate(timeout=300)
        assert machine.returncode == 0, errors[-6000:]
    assert_same_run(alone["lora"], tmp_path / "out")


def on_two_machines(runs: list, folder: Path, **more: str) -> list[int]:
    """Run all of (method, arguments) on two machines of a process each; their exit codes, a minute apart at most."""
    (folder / "jobs.json").write_text(json.dumps(runs))
    environment = os.environ | {"HF_DATASETS_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"} | more
    port, machines = free_port(), []
    for rank in (0, 1):
        launch = Launch("cpu", 2, 2, rank, "127.0.0.1", port).command(ROOT / "tests" / "trainers" / "launched.py")[0]
        command = [sys.executable, "-m", "accelerate.commands.launch", *launch[2:], "jobs.json"]
        machines.append(subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.DEVNULL))
    try:
        end = time.monotonic() + 300
        while all(machine.poll() is None for machine in machines):
            assert time.monotonic() < end
            time.sleep(0.1)
        return [machine.wait(timeout=60) for machine in machines]
    finally:
        for machine in machines:
            machine.kill()


@pytest.mark.slow
def test_a_machine_whose_other_lost_its_process_ends_too_and_the_run_goes_on(jobs, alone, tmp_path):
    out = tmp_path / "out"
    runs = [("revela", arguments(*jobs["lora"], 2, out, use_cpu="true"))]
    codes = on_two_machines(runs, tmp_path, KILLED="1:4")
    assert all(codes), codes
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-2"]
    again = arguments(*jobs["lora"], 2, out, use_cpu="true", resume_from_checkpoint="true")
    assert on_two_machines([("revela", again)], tmp_path) == [0, 0]
    assert_same_run(alone["lora"], out, first_step=3)


def test_adapters_are_moved_and_read_back(alone):
    """What the strategies are compared with is no run in which nothing happens."""
    model = RevelaForPreTraining.from_pretrained(alone["lora"])
    adapters = {name: value for name, value in model.named_parameters() if "lora_B" in name and "pooler" not in name}
    assert len(adapters) > 10 and all(value.abs().max() > 1e-4 for value in adapters.values())
