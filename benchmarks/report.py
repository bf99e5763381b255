"""What the tables of the benchmarks say beside their numbers, and where they are written."""

import platform
import sys
from pathlib import Path

import torch


def machine() -> str:
    """CPU and versions that numbers were measured with."""
    with open("/proc/cpuinfo") as lines:
        cpu = next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.machine())
    return f"{cpu}, torch {torch.__version__}, Python {platform.python_version()}"


def report(title: str, text: str, out: str | None) -> None:
    """Print a text and, where `out` names a Markdown file, write it there below the title and the command."""
    print(text)
    if out:
        Path(out).write_text(f"# {title}\n\n    python {' '.join(sys.argv)}\n\n{text}\n", encoding="utf-8")
