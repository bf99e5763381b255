from pathlib import Path

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
