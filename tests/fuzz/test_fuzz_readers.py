"""`make fuzz` runs, and tells when a reader fails."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.fuzz import fuzz_readers

ROOT = Path(__file__).resolve().parents[2]


def test_a_short_run_gives_every_reader_examples_and_finds_nothing():
    environment = os.environ | {"FUZZ_SECONDS": "5"}
    command = [sys.executable, "-m", "tests.fuzz.fuzz_readers"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    ran = dict(re.findall(r"^(.+): (\d+) examples$", done.stdout, re.MULTILINE))
    assert ran.keys() == fuzz_readers.READERS.keys() and all(int(examples) > 0 for examples in ran.values())


def test_a_reader_that_loses_a_line_is_caught_and_the_example_kept(tmp_path, monkeypatch):
    def lose(folder, _):
        if b"\0" in next(folder.iterdir()).read_bytes():
            raise KeyError("lost")

    monkeypatch.setitem(fuzz_readers.READERS, "lines", (lose, *fuzz_readers.READERS["lines"][1:]))
    monkeypatch.setattr(fuzz_readers, "ROOT", tmp_path)
    ran, error = fuzz_readers.fuzz("lines", 30, tmp_path)
    assert ran > 1 and isinstance(error, KeyError)
    again, error = fuzz_readers.fuzz("lines", 30, tmp_path)
    assert isinstance(error, KeyError) and again < ran, "the kept example comes first"
