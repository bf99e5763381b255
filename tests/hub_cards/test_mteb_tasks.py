import json

import pytest

pytest.importorskip("mteb")

from hub_cards.evaluation import evaluate  # noqa: E402
from hub_cards.mteb_tasks import dataset_of_task, mean_of_tasks, resolve  # noqa: E402
from tests.hub_cards.local_task import make_task  # noqa: E402


def test_mteb_and_the_local_folder_agree(tiny_model, minilm, beir_folder, tmp_path, capsys):
    models = {"tiny": tiny_model, "minilm": minilm}
    ours = evaluate(models, beir_folder, bm25=False, show=False)
    theirs = evaluate(models, make_task(beir_folder), out=tmp_path / "r.json")
    for mine, row in zip(ours["rows"], theirs["rows"], strict=True):
        for measure, value in row["scores"].items():
            # mteb rounds to five digits.
            assert value == pytest.approx(mine["scores"][measure], abs=1e-5)
        assert row["prompts"] == mine["prompts"] and row["task"] == "FruitRetrieval"
        assert row["dataset"] == {"path": "local/fruit", "revision": "1"}
    options = {"bm25": False, "show": False, "truncate_dims": [5]}
    cut = [evaluate({"tiny": tiny_model}, task, **options) for task in (beir_folder, make_task(beir_folder))]
    assert [row["model"] for row in cut[1]["rows"]] == ["tiny", "tiny (5 dimensions)"]
    for measure, value in cut[1]["rows"][1]["scores"].items():
        assert value == pytest.approx(cut[0]["rows"][1]["scores"][measure], abs=1e-5)
    assert tiny_model.truncate_dim is None
    assert json.loads((tmp_path / "r.json").read_text()) == theirs
    assert not (tmp_path / "r.json.partial").exists()
    assert "FruitRetrieval" in capsys.readouterr().out


def test_several_tasks_are_averaged(tiny_model, beir_folder, capsys):
    tasks = [make_task(beir_folder, "FirstRetrieval"), make_task(beir_folder, "SecondRetrieval")]
    results = evaluate({"tiny": tiny_model}, tasks)
    assert [row["task"] for row in results["rows"]] == ["FirstRetrieval", "SecondRetrieval", "mean"]
    assert results["rows"][2]["scores"] == pytest.approx(results["rows"][0]["scores"])
    assert "mean" in capsys.readouterr().out


def test_a_task_that_does_not_load_leaves_what_was_done(tiny_model, beir_folder, tmp_path):
    tasks = [make_task(beir_folder), make_task(beir_folder, "BrokenRetrieval", fails=True)]
    with pytest.raises(RuntimeError, match=r"BrokenRetrieval does not load.*\(no network\)$"):
        evaluate({"tiny": tiny_model}, tasks, out=tmp_path / "r.json", show=False)
    assert not (tmp_path / "r.json").exists()
    partial = json.loads((tmp_path / "r.json.partial").read_text())
    assert [row["task"] for row in partial["rows"]] == ["FruitRetrieval"]


def test_standardised_needs_a_local_folder(tiny_model, beir_folder):
    with pytest.raises(ValueError, match="only for a local folder"):
        evaluate([], make_task(beir_folder), standardise=[tiny_model])


@pytest.mark.parametrize(
    "name, label, tasks",
    [
        ("NanoBEIR", "NanoBEIR", 13),
        ("nanobeir", "NanoBEIR", 13),
        ("BEIR", "BEIR", 15),
        ("CoIR", "CoIR", 10),
        ("BRIGHT", "BRIGHT", 1),
        ("scifact", "SciFact", 1),
    ],
)
def test_names(name, label, tasks):
    found, resolved = resolve([name])
    assert found == label and len(resolved) == tasks


def test_a_mixed_benchmark_gives_its_retrieval_tasks():
    _, tasks = resolve(["MTEB(eng, v2)"])
    assert tasks and all(task.metadata.simplified_task_type == "retrieval" for task in tasks)


@pytest.mark.parametrize("name, near", [("NanoBIER", "NanoBEIR"), ("scifct", "SciFact"), ("co-ir", "CoIR")])
def test_an_unknown_name_suggests_near_ones(tiny_model, name, near):
    with pytest.raises(ValueError, match=rf"'{name}' is neither a folder nor a task .*Near names: .*{near}"):
        evaluate(tiny_model, name)


def test_other_kinds_of_task_are_refused():
    with pytest.raises(ValueError, match="STS12 is no text retrieval task"):
        resolve(["STS12"])


def test_sets_of_retromaes_table_are_one_name_and_those_that_are_missing_are_named():
    with pytest.warns(UserWarning, match="leaves out BioASQ, Signal-1M, TREC-NEWS, Robust04"):
        label, tasks = resolve(["RetroMAE-BEIR"])
    names = {task.metadata.name: task.metadata.eval_splits for task in tasks}
    assert label == "retromae-beir" and len(names) == 15
    assert names["MSMARCO"] == ["dev"] and names["NQ"] == ["test"] and "Touche2020" in names


def test_mean_of_several_forums_names_none_of_their_datasets():
    _, (aggregate,) = resolve(["CQADupstackRetrieval"])
    assert aggregate.is_aggregate and dataset_of_task(aggregate) is None
    assert dataset_of_task(aggregate.tasks[0])["path"].startswith("mteb/")


def test_mean_of_retromaes_sets_is_without_what_it_was_trained_on():
    scores = {"MSMARCO": {"ndcg_at_10": 0.9}, "NQ": {"ndcg_at_10": 0.2}, "SciFact": {"ndcg_at_10": 0.4}}
    assert mean_of_tasks("retromae-beir", scores) == {"ndcg_at_10": pytest.approx(0.3)}
    assert mean_of_tasks("BEIR", scores) == {"ndcg_at_10": pytest.approx(0.5)}
