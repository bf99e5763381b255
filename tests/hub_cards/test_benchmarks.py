import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sentence_transformers import SentenceTransformer

pytest.importorskip("mteb")

import mteb  # noqa: E402

from hub_cards.benchmarks import BENCHMARKS, _resolve, run_benchmark  # noqa: E402
from hub_cards.card import write_card  # noqa: E402
from hub_cards.evaluation import evaluate  # noqa: E402
from hub_cards.tables import load_tables  # noqa: E402
from tests.hub_cards.local_task import make_task  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
NAMES = ["FirstRetrieval", "SecondRetrieval", "ThirdRetrieval"]


@pytest.fixture
def tasks(beir_folder):
    return [make_task(beir_folder, name) for name in NAMES]


def scores(results):
    return [(row["model"], row["task"], row["scores"]) for row in results["rows"]]


def written(folder: Path) -> dict[str, int]:
    files = (file for file in folder.rglob("*Retrieval.json") if "mteb" not in file.relative_to(folder).parts)
    return {file.stem: file.stat().st_mtime_ns for file in files}


def test_scores_are_those_of_evaluate_and_more(tiny_path, tasks, tmp_path, capsys):
    results = run_benchmark([tiny_path], tasks, tmp_path / "results", out=tmp_path / "r.json")
    assert [row["task"] for row in results["rows"]] == [*NAMES, "mean"]
    assert json.loads((tmp_path / "r.json").read_text()) == results
    assert "FirstRetrieval" in capsys.readouterr().out
    row = results["rows"][0]
    (expected,) = evaluate(tiny_path, tasks[0], show=False)["rows"]
    assert expected["scores"].items() < row["scores"].items()
    assert 0 < row["scores"]["recall_at_20"] <= row["scores"]["recall_at_30"] and row["scores"]["mrr_at_100"] > 0
    assert row["prompts"] == {"query": "query: ", "document": "passage: "} and row["max_seq_length"] == 64


def test_a_benchmark_that_broke_off_goes_on_to_the_same_result(tiny_path, tasks, beir_folder, tmp_path):
    whole = run_benchmark({"tiny": tiny_path}, tasks, tmp_path / "whole", show=False)
    broken = [tasks[0], make_task(beir_folder, NAMES[1], fails=True), tasks[2]]
    with pytest.raises(RuntimeError, match="SecondRetrieval does not load"):
        run_benchmark({"tiny": tiny_path}, broken, tmp_path / "broken", out=tmp_path / "r.json", show=False)
    before = written(tmp_path / "broken")
    assert list(before) == [NAMES[0]] and not (tmp_path / "r.json").exists()
    resumed = run_benchmark({"tiny": tiny_path}, tasks, tmp_path / "broken", show=False)
    assert scores(resumed) == scores(whole)
    after = written(tmp_path / "broken")
    assert set(after) == set(NAMES) and after[NAMES[0]] == before[NAMES[0]]
    run_benchmark({"tiny": tiny_path}, tasks, tmp_path / "broken", show=False)
    assert written(tmp_path / "broken") == after


def test_what_changed_is_measured_again_and_what_did_not_is_not(tiny_path, tasks, beir_folder, tmp_path):
    model, folder = shutil.copytree(tiny_path, tmp_path / "model"), tmp_path / "results"

    def run(tasks=tasks):
        """Which of the results' files the run wrote."""
        before = written(folder) if folder.exists() else {}
        run_benchmark([str(model)], tasks, folder, show=False)
        files = [file for file in folder.rglob("*Retrieval.json") if "mteb" not in file.relative_to(folder).parts]
        return {file.stem for file in files if file.stat().st_mtime_ns > max(before.values(), default=0)}

    assert run() == set(NAMES)
    write_card(model, name="me/tiny", license="apache-2.0")
    assert (model / "README.md").is_file() and run() == set()
    changed = [make_task(beir_folder, NAMES[0], revision="2"), *tasks[1:]]
    assert run(changed) == {NAMES[0]}

    for change in (
        lambda it: it.prompts.update(query="other: "),
        lambda it: it[0].auto_model.norm.weight.data.mul_(2),
    ):
        published = SentenceTransformer(str(model), device="cpu")
        change(published)
        published.save(str(model))
        assert run(changed) == set(NAMES)


def test_mteb_reads_the_results_as_its_own(tiny_path, tasks, tmp_path):
    model = shutil.copytree(tiny_path, tmp_path / "model")
    card = {"language": ["en", "de"], "license": "apache-2.0", "base_model": "org/base"}
    card["datasets"] = ["mteb/nfcorpus", "org/pages"]
    (model / "README.md").write_text(f"---\n{json.dumps(card)}\n---\n")
    run = run_benchmark([str(model)], tasks, tmp_path / "results", mteb_name="me/tiny", show=False)
    fingerprint = run["rows"][0]["fingerprint"]
    folder = tmp_path / "results" / "mteb" / "results" / "me__tiny" / fingerprint
    assert {file.name for file in folder.iterdir()} == {f"{name}.json" for name in NAMES} | {
        "model_meta.json",
        "run_settings.jsonl",
    }
    found = mteb.ResultCache(tmp_path / "results" / "mteb").load_results(tasks=tasks, validate_and_filter=False)
    (of_model,) = found.model_results
    assert (of_model.model_name, of_model.model_revision) == ("me/tiny", fingerprint)
    assert {one.task_name: one.main_score for one in of_model.task_results} == {
        row["task"]: pytest.approx(row["scores"]["ndcg_at_10"]) for row in run["rows"] if row["task"] != "mean"
    }
    meta = mteb.models.ModelMeta.model_validate_json_resolved(
        json.dumps({key: value for key, value in json.loads((folder / "model_meta.json").read_text()).items()
                    if key != "is_cross_encoder"})
    )  # fmt: skip
    loaded = SentenceTransformer(tiny_path, device="cpu")
    size = sum(parameter.numel() for parameter in loaded.parameters())
    assert (meta.n_parameters, meta.embed_dim, meta.max_tokens) == (size, 32, 64)
    assert meta.memory_usage_mb == pytest.approx(size * 4 / 2**20, abs=1e-3)
    assert meta.languages == ["eng-Latn"] and meta.license == "apache-2.0" and meta.adapted_from == "org/base"
    # mteb has several tasks of NFCorpus's data, and none of org/pages.
    assert "NFCorpus" in meta.training_datasets and "SciFact" not in meta.training_datasets
    assert meta.use_instructions and meta.similarity_fn_name == "cosine" and meta.open_weights


def test_a_model_without_a_card_has_unknown_training_data(tiny_path, tasks, tmp_path):
    run_benchmark([tiny_path], tasks[:1], tmp_path, show=False)
    (file,) = tmp_path.rglob("model_meta.json")
    meta = json.loads(file.read_text())
    assert meta["name"] == "local/retriever"
    assert all(meta[key] is None for key in ("training_datasets", "license", "languages", "adapted_from"))


def test_the_papers_length_is_set_as_far_as_the_positions_reach(tiny_path, beir_folder, tmp_path, monkeypatch):
    (task,) = [make_task(beir_folder)]
    monkeypatch.setattr("hub_cards.benchmarks.mteb_tasks.resolve", lambda names: ("CoIR", [task]))
    results = run_benchmark([tiny_path], "coir", tmp_path, show=False)
    assert results["rows"][0]["max_seq_length"] == 128 and results["task"]["name"] == "coir"


def test_benchmarks_hold_the_tasks_of_the_papers_tables():
    tables = load_tables()
    of_table = {
        name: {column["task"] for column in table["columns"] if "task" in column} for name, table in tables.items()
    }
    with pytest.warns(UserWarning, match="leaves out BioASQ"):
        tasks = {name: {task.metadata.name for task in _resolve(name)[1]} for name in BENCHMARKS}
    for benchmark, table in {"coir": "revela-1", "beir": "revela-6", "bright": "revela-7"}.items():
        assert tasks[benchmark] == of_table[table]
    assert of_table["retromae-1"] < tasks["retromae-beir"]
    assert tasks["msmarco"] | tasks["nq"] == of_table["retromae-2"]
    assert [task.eval_splits for task in _resolve("msmarco")[1]] == [["dev"]]


def test_bad_input(tiny_path, tiny_lm_folder, tasks, tmp_path):
    with pytest.raises(ValueError, match="no benchmark 'ciro'; choose one of coir, "):
        run_benchmark([tiny_path], "ciro", tmp_path)
    for name, models in (("tiny", [tiny_path]), ("me/tiny", [tiny_path, "org/other"])):
        with pytest.raises(ValueError, match="must be org/name, and there must be one model"):
            run_benchmark(models, tasks, tmp_path, mteb_name=name)
    with pytest.raises(OSError, match="is a folder; pass another --out"):
        run_benchmark([tiny_path], tasks, tmp_path, out=tmp_path)
    checkpoint = tmp_path / "run"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text('{"model_type": "revela"}')
    with pytest.raises(ValueError, match="is a checkpoint of training; give what `revela-hub export`"):
        run_benchmark([str(checkpoint)], tasks, tmp_path)


# Each process says in a file which tasks' data it loaded.
SCRIPT = """
import os
import sys
from pathlib import Path
from hub_cards.benchmarks import run_benchmark
from tests.hub_cards.local_task import make_task

model, data, out = map(Path, sys.argv[1:])
tasks = [make_task(data, name) for name in ("FirstRetrieval", "SecondRetrieval", "ThirdRetrieval")]


def logged(load_data, name):
    def load(*args, **kwargs):
        with open(out / f"rank{os.environ['RANK']}.txt", "a") as log:
            log.write(f"{name} ")
        load_data(*args, **kwargs)

    return load


for task in tasks:
    task.load_data = logged(task.load_data, task.metadata.name)
run_benchmark({"tiny": str(model)}, tasks, out / "results", out=out / "r.json", show=False)
"""


@pytest.mark.slow
def test_two_processes_share_the_tasks(tiny_path, tasks, beir_folder, tmp_path):
    one = run_benchmark({"tiny": tiny_path}, tasks, tmp_path / "one", show=False)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    command += [str(ROOT / "trainers" / "accelerate_configs" / "cpu.yaml"), "--multi_gpu", "--num_processes", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        [*command, script, tiny_path, beir_folder, tmp_path], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert scores(json.loads((tmp_path / "r.json").read_text())) == scores(one)
    loaded = [set((tmp_path / f"rank{rank}.txt").read_text().split()) for rank in range(2)]
    assert loaded == [{NAMES[0], NAMES[2]}, {NAMES[1]}]


@pytest.mark.slow
def test_the_command_launches_itself_and_hands_back_the_failure(tiny_path, tmp_path):
    command = [sys.executable, ROOT / "revela_hub.py", "evaluate", tiny_path, "--benchmark", "nq"]
    command += ["--launch-config", "cpu", "--results", tmp_path / "results", "--out", tmp_path / "r.json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {"HF_HOME": str(tmp_path / "empty")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "error: The data of the mteb task NQ does not load" in done.stderr, done.stderr[-3000:]
    assert not (tmp_path / "r.json").exists()
