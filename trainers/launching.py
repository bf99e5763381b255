"""Starts a script with `accelerate launch`, and stops all of what it started."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

LAUNCH_CONFIGS = Path(__file__).resolve().parent / "accelerate_configs"


@dataclass
class Launch:
    """How `accelerate launch` is to start a script."""

    launch_config: str | None = field(
        default=None,
        metadata={
            "help": "Launching: a shipped config (cpu, ddp, zero3, fsdp2, …) or an accelerate YAML file; left out, "
            "your own accelerate config where there is one, otherwise what fits this machine."
        },
    )
    num_processes: int | None = field(
        default=None, metadata={"help": "Launching: processes in all, one a device, on all machines together."}
    )
    num_machines: int | None = field(
        default=None, metadata={"help": "Launching: machines; the same command on each, with a --machine-rank."}
    )
    machine_rank: int | None = field(default=None, metadata={"help": "Launching: the number of this machine, from 0."})
    main_process_ip: str | None = field(default=None, metadata={"help": "Launching: the address of machine 0."})
    main_process_port: int | None = field(default=None, metadata={"help": "Launching: a free port of machine 0."})

    def __post_init__(self) -> None:
        for name, least in {"num_processes": 1, "num_machines": 1, "machine_rank": 0, "main_process_port": 0}.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}; it must be at least {least}.")

    def command(self, script: Path) -> tuple[list[str], bool]:
        """The command of `accelerate launch` up to the script, and whether the run is on the CPU."""
        options, on_cpu = _launch_options(self.launch_config, self.num_processes)
        for name in ("num_machines", "machine_rank", "main_process_ip", "main_process_port"):
            if (value := getattr(self, name)) is not None:
                options += [f"--{name}", str(value)]
        # A path, not `-m trainers.…`: a folder called `trainers` where the user happens to stand must not win.
        return ["accelerate", "launch", *options, str(script)], on_cpu

    def run(self, script: Path, arguments: list[str]) -> int:
        """Launch a script that chooses its device by `ACCELERATE_USE_CPU`; returns the exit code."""
        command, on_cpu = self.command(script)
        return run_launched([*command, *arguments], {"ACCELERATE_USE_CPU": "true"} if on_cpu else {})


def is_launched() -> bool:
    """Whether this process is one that `accelerate launch` started."""
    return "ACCELERATE_MIXED_PRECISION" in os.environ  # set by every launcher of accelerate


def run_launched(command: list[str], environment: Mapping[str, str] | None = None) -> int:
    """Run an `accelerate launch …`, with further environment variables; returns its exit code."""
    print(" ".join(command), file=sys.stderr)
    # torch's launcher kills what still runs 30 seconds after SIGTERM: a longer step would lose its checkpoint.
    environment = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600", **os.environ, **(environment or {})}
    command[:2] = [sys.executable, "-m", "accelerate.commands.launch", "--quiet"]
    return _run_group(command, environment)


def _run_group(command: list[str], environment: Mapping[str, str]) -> int:
    """
    Run a command as a group of processes that gets the signals we get, and wait for all of the group.

    accelerate starts a single process as a child of its own and hands it no signal on: stopped alone, it would leave
    the training running. Where we are killed outright, a watcher sends the group SIGTERM: it would write on beside the
    run that takes its place.
    """
    told: list[int] = []
    leaders: list[int] = []

    def hand_on(number, _frame=None) -> None:
        told.append(number)
        for leader in leaders:
            with suppress(ProcessLookupError):
                # A terminal that is closed means the run to end as SIGTERM does: with a checkpoint.
                os.killpg(leader, signal.SIGTERM if number == signal.SIGHUP else number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, hand_on) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        leaders.append(process.pid)
        if told:  # while it was being started
            hand_on(told[0])
        # Its input ends when we do, and bears a line where nothing is left to stop.
        watch = ["sh", "-c", 'read -r _ || kill -s TERM -- "-$0"', str(process.pid)]
        watcher = subprocess.Popen(watch, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
        code = process.wait()
        with suppress(ProcessLookupError):
            while True:
                os.killpg(process.pid, 0)
                time.sleep(0.2)
        watcher.communicate(b"\n")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 + told[0] if told else code if code >= 0 else 128 - code


def _launch_options(launch_config: str | None, num_processes: int | None) -> tuple[list[str], bool]:
    """The options of `accelerate launch`, and whether the run is on the CPU."""
    import torch
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file
    from accelerate.utils import DistributedType

    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if launch_config is None and Path(default_config_file).is_file():
        return [] if num_processes is None else ["--num_processes", str(num_processes)], devices == 0
    if launch_config is None:
        wanted = devices if num_processes is None else num_processes
        launch_config = "cpu" if devices == 0 else "single" if wanted == 1 else "ddp"
        num_processes = max(wanted, 1)
    path = Path(launch_config)
    if not path.is_file():
        path = LAUNCH_CONFIGS / f"{launch_config.removesuffix('.yaml')}.yaml"
    if not path.is_file():
        names = ", ".join(sorted(path.stem for path in LAUNCH_CONFIGS.glob("*.yaml")))
        raise FileNotFoundError(f"No launch config {launch_config!r}: it is neither a file nor one of {names}.")
    config = load_config_from_file(str(path))
    options = ["--config_file", str(path)]
    if num_processes is not None:
        options += ["--num_processes", str(num_processes)]
        if config.use_cpu and num_processes > 1 and config.distributed_type == DistributedType.NO:
            # accelerate starts several processes on a CPU under MPI only; its multi-GPU launcher is plain torchrun.
            options += ["--multi_gpu"]
    return options, config.use_cpu or devices == 0


__all__ = ["LAUNCH_CONFIGS", "Launch", "is_launched", "run_launched"]
