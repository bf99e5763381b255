import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from trainers.launching import LAUNCH_CONFIGS, Launch


def test_launch_options_fit_config_and_machine(tmp_path, monkeypatch):
    import accelerate.commands.config.config_args as config_args

    def command(*settings):
        command, on_cpu = Launch(*settings).command(Path("script.py"))
        assert (command[:2], command[-1]) == (["accelerate", "launch"], "script.py")
        return command[2:-1], on_cpu

    monkeypatch.setattr(config_args, "default_config_file", str(tmp_path / "none.yaml"))
    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    # Without a device every launch is on the CPU, whatever the config was written for.
    without = devices == 0
    assert command("zero3") == (["--config_file", str(LAUNCH_CONFIGS / "zero3.yaml")], without)
    own = tmp_path / "own.yaml"
    for launcher in ("ddp", "zero3"):
        # Neither is overridden by a launcher of another kind.
        own.write_text((LAUNCH_CONFIGS / f"{launcher}.yaml").read_text() + "use_cpu: true\n")
        options, on_cpu = command(str(own), 8)
        assert options == ["--config_file", str(own), "--num_processes", "8"] and on_cpu

    options, on_cpu = command()
    expected = {0: "cpu", 1: "single"}.get(devices, "ddp")
    assert options == [
        "--config_file",
        str(LAUNCH_CONFIGS / f"{expected}.yaml"),
        "--num_processes",
        str(max(devices, 1)),
    ]
    assert on_cpu == (devices == 0)

    # Someone who has run `accelerate config` has said how to launch on this machine.
    monkeypatch.setattr(config_args, "default_config_file", str(own))
    assert command() == ([], without)


JOB = """
import pathlib, signal, time

def end(*_):
    pathlib.Path("saved").touch()
    raise SystemExit(143)

signal.signal(signal.SIGTERM, end)
pathlib.Path("started").touch()
time.sleep(300)
"""


def start(folder: Path, job: str, processes: int) -> subprocess.Popen:
    """A process that launches a job, which says so of each process that has begun."""
    (folder / "job.py").write_text(job)
    options = f"Launch('cpu', {processes}, main_process_port=0).command({str(folder / 'job.py')!r})[0]"
    code = f"import sys; from trainers.launching import *; sys.exit(run_launched({options}))"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.Popen([sys.executable, "-c", code], cwd=folder, env=environment)
    while len(list(folder.glob("started*"))) < processes:
        assert run.poll() is None
        time.sleep(0.1)
    return run


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
def test_a_closed_terminal_and_a_killed_launcher_end_the_job_as_sigterm_does(tmp_path, number):
    run = start(tmp_path, JOB, 1)
    run.send_signal(number)
    assert run.wait(timeout=60) == (-number if number == signal.SIGKILL else 128 + number)
    end = time.time() + 20
    while not (tmp_path / "saved").exists():
        assert time.time() < end, "the job runs on"
        time.sleep(0.1)


LONG_STEP = """
import os, pathlib, signal, time

def end(*_):
    time.sleep(40)
    pathlib.Path(f"saved-{os.environ['RANK']}").touch()
    raise SystemExit(143)

signal.signal(signal.SIGTERM, end)
pathlib.Path(f"started-{os.environ['RANK']}").touch()
time.sleep(300)
"""


@pytest.mark.slow  # waits longer than the 30 seconds that torch's launcher gives
def test_a_step_of_more_than_half_a_minute_is_waited_for(tmp_path):
    run = start(tmp_path, LONG_STEP, 2)
    run.send_signal(signal.SIGTERM)
    assert run.wait(timeout=120) == 143
    assert {path.name for path in tmp_path.glob("saved-*")} == {"saved-0", "saved-1"}
