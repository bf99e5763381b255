"""Long jobs that are told to stop, meet a loss that is no number, run out of memory or of disk."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

ROOT = Path(__file__).parents[2]


class At(TrainerCallback):
    """Does something before the given step, and something else after it."""

    def __init__(self, step: int, before=lambda model: None, after=lambda model: None):
        self.step, self.before, self.after = step, before, after

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == self.step - 1:
            self.before(model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == self.step:
            self.after(model)


def test_sigterm_writes_a_checkpoint_from_which_the_run_goes_on(run_training, lora, logged, weights, tmp_path, capsys):
    handler = signal.getsignal(signal.SIGTERM)
    told = At(2, before=lambda model: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as stopped:
        run_training(tmp_path / "run", model=lora, max_steps=4, callbacks=[told])
    assert stopped.value.code == 143
    assert f"after step 2, which is in {tmp_path / 'run' / 'checkpoint-2'}" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is handler
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoint-2"]
    resumed = run_training(tmp_path / "run", model=lora, max_steps=4, resume_from_checkpoint="true")
    whole = run_training(tmp_path / "whole", model=lora, max_steps=4)
    assert logged(resumed, "loss") == logged(whole, "loss")
    for name, value in weights(whole).items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


def test_sigterm_to_the_command_reaches_the_training_and_leaves_no_process(tiny_lm_folder, prepared_folder, tmp_path):
    options = {"retriever_name_or_path": tiny_lm_folder, "train_sets": prepared_folder, "max_length": 96}
    options |= {"max_steps": 100000, "save_strategy": "no", "output_dir": tmp_path / "run", "report_to": "none"}
    argv = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    command = [sys.executable, "-m", "revela_hub", "train", "revela", "--launch-config", "cpu", *argv]
    environment = os.environ | {"HF_DATASETS_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    log = tmp_path / "log"
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
        try:
            deadline = time.time() + 120
            while "'loss'" not in log.read_text() and time.time() < deadline and process.poll() is None:
                time.sleep(0.2)
            process.terminate()
            code = process.wait(timeout=60)
        finally:
            process.kill()
    assert code == 143, log.read_text()[-3000:]
    assert "Stopped by SIGTERM after step" in log.read_text()
    assert [path.name.partition("-")[0] for path in (tmp_path / "run").iterdir()] == ["checkpoint"]
    assert not _processes_with(str(tmp_path / "run"))


def _processes_with(text: str) -> list[str]:
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return [line for line in lines if text in line]


@pytest.fixture
def spoilt():
    """Options, and a callback with which the loss of the second step is no number."""
    kept = {}

    def before(model):
        table = model.lm.backbone.get_input_embeddings().weight
        kept["value"] = table.detach().clone()
        table.data.fill_(float("nan"))

    def after(model):
        model.lm.backbone.get_input_embeddings().weight.data.copy_(kept["value"])

    return At(2, before, after)


def test_loss_that_is_no_number_stops_the_run_and_names_its_documents(run_training, lora, spoilt, tmp_path):
    with pytest.raises(ValueError, match="The loss of step 2 is nan; the documents.*not-finite.jsonl.*--skip_nan"):
        run_training(tmp_path, model=lora, max_steps=4, callbacks=[spoilt])
    line = json.loads((tmp_path / "not-finite.jsonl").read_text())
    assert (line["step"], line["loss"]) == (2, "nan")
    assert len(line["doc_ids"]) == 1 and len(line["doc_ids"][0]) == 4
    assert all(name.startswith("doc") for name in line["doc_ids"][0])


def test_skip_nan_leaves_the_step_out_counts_it_and_goes_on(run_training, lora, spoilt, logged, weights, tmp_path):
    trainer = run_training(tmp_path / "skipped", model=lora, max_steps=4, skip_nan=True, callbacks=[spoilt])
    assert logged(trainer, "skipped_steps") == [0, 1, 1, 1]
    # The second step has none.
    assert len(logged(trainer, "in_batch_loss")) == 3
    assert all(torch.isfinite(value).all() for value in weights(trainer).values())
    one = run_training(tmp_path / "one", model=lora, max_steps=1, lr_scheduler_type="constant")
    two = run_training(
        tmp_path / "two", model=lora, max_steps=2, lr_scheduler_type="constant", skip_nan=True, callbacks=[spoilt]
    )
    for name, value in weights(one).items():
        assert torch.equal(value, two.model.state_dict()[name]), name


def test_out_of_memory_says_what_to_lower(run_training, lora, tmp_path):
    def grow(model):
        # What no machine has: torch's own allocator says so.
        model.register_forward_pre_hook(lambda *_: torch.empty(2**60, dtype=torch.uint8))

    with pytest.raises(MemoryError, match="Step 2 ran out of memory. Lower per_device_train_batch_size.*max_length"):
        run_training(tmp_path, model=lora, max_steps=4, callbacks=[At(2, before=grow)])


def test_full_disk_leaves_the_earlier_checkpoint_and_says_so(run_training, lora, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(model):
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))

    try:
        with pytest.raises(OSError, match="after step 4 could not be written to .*GiB are free.*--resume_from"):
            run_training(
                tmp_path, model=lora, max_steps=4, save_strategy="steps", save_steps=2,
                callbacks=[At(4, before=fill)],
            )  # fmt: skip
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]
    run_training(tmp_path, model=lora, max_steps=4, resume_from_checkpoint="true")
