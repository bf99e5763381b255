"""From raw text to a retriever that is measured and searched with, by the commands that a user types."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sentence_transformers import SentenceTransformer
from typer.testing import CliRunner

import revela_hub

ROOT = Path(__file__).parent.parent.parent
COMMAND = [sys.executable, "-m", "revela_hub"]
RECIPE = """\
similarity_temperature: 1e-2
in_batch_gate: true
learning_rate: 1e-2
max_steps: 4
logging_steps: 2
eval_strategy: steps
eval_steps: 2
save_steps: 2
validation_groups: 1000
report_to: none
"""


@pytest.fixture(scope="module")
def task_folder(text_folder, tmp_path_factory) -> Path:
    """A BEIR folder: the first words of each document are to find it."""
    folder = tmp_path_factory.mktemp("task")
    (folder / "qrels").mkdir()
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(text_folder.iterdir())[:12]}
    corpus = [{"_id": name, "title": "", "text": text[:400]} for name, text in texts.items()]
    queries = [{"_id": f"q-{name}", "text": " ".join(text.split()[:12])} for name, text in texts.items()]
    for name, rows in (("corpus", corpus), ("queries", queries)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    lines = ["query-id\tcorpus-id\tscore", *(f"q-{name}\t{name}\t1" for name in texts)]
    (folder / "qrels" / "test.tsv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def in_process(monkeypatch, tmp_path):
    """Runs a command of `revela-hub` here, which saves the import of everything."""
    runner = CliRunner(env={"COLUMNS": "200"})

    def run(*arguments: object) -> str:
        done = runner.invoke(revela_hub.app, list(map(str, arguments)))
        assert done.exit_code == 0, done.output
        return done.stdout

    return run


@pytest.fixture
def in_processes(tmp_path):
    """Runs a command in a process of its own, away from the repository, which is found as an installed package is."""
    environment = os.environ | {"HF_DATASETS_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}

    def run(*arguments: object, command=COMMAND) -> str:
        line = [*command, *map(str, arguments)]
        done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    return run


def follow_the_chain(run, train, text_folder: Path, task_folder: Path, folder: Path, options: tuple) -> None:
    """Prepare, train, export, evaluate both ways, search; `train` takes the arguments of the script."""
    prepared, out, retriever = folder / "prepared", folder / "run", folder / "retriever"
    shown = run("prepare", text_folder, "--out", prepared, "--group-size", 4, "--max-words", 30,
                "--validation-share", 0.2)  # fmt: skip
    assert "40 kept (32 train, 8 validation)" in shown and f"--train_sets {prepared}" in shown

    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE)
    train(recipe, "--train_sets", prepared, "--output_dir", out, *options)
    log = json.loads((out / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in log if "in_batch_loss" in entry] == [2, 4]

    run("export", out / "checkpoint-2", folder / "earlier")
    assert f"Wrote {retriever}" in run("export", out, retriever)

    # What training measured on its last step is what the command measures on the checkpoint.
    results = folder / "groups.json"
    shown = run("evaluate", out, "--baseline", folder / "earlier", "--groups", prepared, "--gain-groups", 1000,
                "--out", results)  # fmt: skip
    assert "sibling retrieval" in shown
    rows = {Path(row["model"]).name: row["scores"] for row in json.loads(results.read_text())["rows"]}
    measured = {entry["step"]: entry for entry in log if "eval_sibling_ndcg_at_10" in entry}
    assert measured.keys() == {2, 4}
    for name, step in (("run", 4), ("earlier", 2)):
        for measure in ("ndcg_at_10", "mrr_at_10", "mean_cosine", "num_queries", "num_chunks"):
            assert rows[name][measure] == pytest.approx(measured[step][f"eval_sibling_{measure}"], rel=1e-4), measure
    for measure in ("retrieval_gain", "in_batch_loss", "uniform_loss", "num_target_tokens"):
        assert rows["run"][measure] == pytest.approx(measured[4][f"eval_{measure}"], rel=1e-4, abs=1e-6), measure

    results = folder / "task.json"
    shown = run("evaluate", retriever, "--baseline", folder / "earlier", "--task", task_folder, "--out", results)
    assert "BM25" in shown and "nDCG@10" in shown
    rows = {Path(row["model"]).name: row["scores"] for row in json.loads(results.read_text())["rows"]}
    assert rows.keys() == {"BM25", "retriever", "earlier"}
    assert rows["BM25"]["ndcg_at_10"] > 0.5 and 0 <= rows["retriever"]["ndcg_at_10"] <= 1

    query = "the boat holds a fisher"
    shown = run("search", retriever, text_folder, query, "--top-k", 3)
    assert re.findall(r"^\s*(\d+)\. ", shown, flags=re.MULTILINE)[:3] == ["1", "2", "3"] and ".txt" in shown
    assert SentenceTransformer(str(retriever), device="cpu").encode_query([query]).shape[0] == 1


def test_raw_text_to_search(in_process, text_folder, task_folder, tiny_lm_folder, tmp_path, monkeypatch):
    """With the Llama as both halves and adapters on both; `revela-hub train` starts accelerate."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))

    def train(*arguments: object) -> None:
        command = [*COMMAND, "train", "revela", *map(str, arguments)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-4000:]
        assert done.stderr.startswith("accelerate launch ") and "trainers/revela.py" in done.stderr

    options = ("--retriever_name_or_path", tiny_lm_folder, "--retriever_lora_r", 4, "--lm_lora_r", 4)
    follow_the_chain(in_process, train, text_folder, task_folder, tmp_path, options)


@pytest.mark.slow
def test_raw_text_to_search_with_the_script_itself(
    in_processes, text_folder, task_folder, tiny_bert_folder, tiny_lm_folder, tmp_path
):
    """With BERT as the retriever, all weights trained; each command in a process of its own."""
    script = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", str(ROOT / "trainers" / "revela.py")]

    def train(*arguments: object) -> None:
        in_processes(*arguments, "--use_cpu", "true", command=script)

    options = ("--retriever_name_or_path", tiny_bert_folder, "--pooling", "mean")
    options += ("--lm_name_or_path", tiny_lm_folder)
    follow_the_chain(in_processes, train, text_folder, task_folder, tmp_path, options)
