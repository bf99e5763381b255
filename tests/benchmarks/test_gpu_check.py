"""The prepared script for a GPU runs whole on a CPU, at small sizes."""

import json
import math

import pytest

from benchmarks import gpu_check


def test_steps_and_encoding_run_and_what_is_known_is_kept(tmp_path):
    results = gpu_check.main(["--out", str(tmp_path), "--parts", "attention", "encode", "--groups", "2", "4"])
    assert [row["chunks"] for row in results["attention"]["rows"]] == [2, 4]
    assert json.loads((tmp_path / "gpu_check.json").read_text(encoding="utf-8")) == results


@pytest.mark.slow
def test_all_parts_run_and_are_kept(tiny_lm_folder, tmp_path):
    arguments = ["--out", str(tmp_path), "--minutes", "0.1", "--model", str(tiny_lm_folder)]
    results = gpu_check.main(arguments)
    assert results == json.loads((tmp_path / "gpu_check.json").read_text(encoding="utf-8"))
    rows = results["attention"]["rows"]
    assert [row["chunks"] for row in rows] == [4, 8] and rows[1]["TFLOP"] > rows[0]["TFLOP"] > 0
    assert 0 <= results["retromae"]["loader's share"] <= 1
    assert results["encode"]["passages a second"] > 0
    assert results["learn"]["steps"] > 0 and math.isfinite(results["learn"]["rows"]["Revela"]["docstring -> function"])
    shown = (tmp_path / "gpu_check.md").read_text(encoding="utf-8")
    assert all(f"## {part}" in shown for part in gpu_check.PARTS) and "| Revela |" in shown
