"""The race runs whole with a tiny backbone: each method trains, is published, measured, and has its row."""

import json

import pytest
import torch
from transformers import TrainerState

from benchmarks import race, race_clock, race_report


@pytest.fixture
def run(tiny_lm_folder, tmp_path_factory, monkeypatch):
    """Makes runs of a fraction of a minute in one folder, in this process."""
    monkeypatch.setattr(race, "load_backbone", lambda: tiny_lm_folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out = tmp_path_factory.getbasetemp() / "race"

    def make(name: str) -> dict:
        race.main([name, "--minutes", "0.02", "--seeds", "3", "--out", str(out)])
        row = f"| {name} | 0.02 | 3 |" if name != "references" else "| BM25 | – | 3 |"
        assert row in (out / "race.md").read_text(encoding="utf-8")
        folder = f"{name}-0.02-3"
        return json.loads((out / folder / "result.json").read_text(encoding="utf-8"))

    return make


@pytest.mark.parametrize(
    "name",
    [
        "revela-then-contriever",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("replug", "simcse", "tsdae", "regroup")),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("contriever-then-revela", "group-32-documents-16")),
    ],
)
def test_a_run_trains_within_its_time_and_is_measured(run, name):
    result = run(name)
    assert result["steps"] >= 2
    assert 0 < result["scores"]["docstring -> function"] < 1 and 0 < result["scores"]["sibling retrieval"] < 1
    # Of two stages the first may be too short for a measure on its way.
    assert len(result["curve"]) >= 2 and result["curve"][-1] == [0.02, result["scores"]["docstring -> function"]]


def test_learning_rates_fall_over_all_stages_of_a_run():
    def rates(clock: race_clock.Clock) -> list[float]:
        found = []
        for step in range(clock.steps):
            optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
            clock.on_pre_optimizer_step(None, TrainerState(global_step=step), None, optimizer=optimizer)
            found.append(optimizer.param_groups[0]["lr"])
        return found

    stages = [race_clock.Clock(5, lambda: 0.0, begin, 0.5) for begin in (0.0, 0.5)]
    assert rates(stages[0]) + rates(stages[1]) == pytest.approx(rates(race_clock.Clock(10, lambda: 0.0)))
    assert rates(stages[1])[0] == 0.5


@pytest.mark.slow
def test_references_are_measured(run):
    rows = run("references")["rows"]
    assert set(rows) == set(race_report.REFERENCES)
    assert rows["BM25"]["docstring -> function"] > 0.3


def test_the_table_has_means_spreads_and_what_is_missing():
    scores = dict.fromkeys(race_report.COLUMNS, 0.5)
    results = [
        {"name": "revela", "minutes": 1.0, "seed": seed, "steps": 4, "scores": {**scores, "HumanEval": value}}
        for seed, value in ((0, 0.1), (1, 0.4))
    ]
    results.append({**results[0], "name": "simcse", "scores": {**scores, "perlfaq": None}})
    lines = race_report.table(results, ["revela", "simcse"]).splitlines()
    assert (
        "| revela | 1 | 0 1 | 4 | 0.500 ± 0.000 | 0.250 ± 0.150 | 0.500 ± 0.000 | 0.500 ± 0.000 | 0.438 ± 0.037 |"
        in lines[2]
    )
    assert "| simcse | 1 | 0 | 4 | 0.500 | 0.500 | – | 0.500 | – |" in lines[3]
