import ast
import importlib.metadata
import inspect
import json
import math

import pytest

from hub_cards import report
from hub_cards.evaluation import evaluate, evaluate_groups


def rows_by_model(results):
    return {row["model"]: row for row in results["rows"]}


def test_scores_equal_a_ranking_done_by_hand(tiny_model, beir_folder, tmp_path, capsys):
    results = evaluate({"tiny": tiny_model}, beir_folder, out=tmp_path / "results" / "r.json")
    corpus = {}
    for line in (beir_folder / "corpus.jsonl").read_text().splitlines():
        record = json.loads(line)
        corpus[record["_id"]] = f"{record['title']} {record['text']}".strip()
    documents = tiny_model.encode(["passage: " + text for text in corpus.values()])
    ndcg, mrr = [], []
    for query, grades in (
        ("round fruit on a tree", {"apple": 2, "banana": 1}),
        ("something that flies", {"plane": 1}),
    ):
        scores = documents @ tiny_model.encode("query: " + query)
        ranked = [doc for _, doc in sorted(zip(scores.tolist(), corpus, strict=True), reverse=True)]
        gains = [grades.get(doc, 0) / math.log2(rank + 1) for rank, doc in enumerate(ranked, 1)]
        best = [grade / math.log2(rank + 1) for rank, grade in enumerate(sorted(grades.values(), reverse=True), 1)]
        ndcg.append(sum(gains) / sum(best))
        mrr.append(1 / min(rank for rank, doc in enumerate(ranked, 1) if doc in grades))
    row = rows_by_model(results)["tiny"]
    assert row["scores"]["ndcg_at_10"] == pytest.approx(sum(ndcg) / 2)
    assert row["scores"]["mrr_at_10"] == pytest.approx(sum(mrr) / 2)
    assert row["scores"]["recall_at_100"] == 1 and row["scores"]["num_queries"] == 2

    assert json.loads((tmp_path / "results" / "r.json").read_text()) == results
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["r.json"]
    assert row["prompts"] == {"query": "query: ", "document": "passage: "} and row["max_seq_length"] == 64
    assert (
        results["versions"]["torch"] == importlib.metadata.version("torch") and results["settings"]["batch_size"] == 32
    )
    assert results["task"]["num_documents"] == 5 and row["seconds"]["encode_documents"] >= 0
    printed = capsys.readouterr().out
    assert "tiny" in printed and "BM25" in printed and f"{row['scores']['ndcg_at_10']:.3f}" in printed


def test_rows_in_order_with_the_standardised_beside(tiny_path, tiny_model, beir_folder):
    results = evaluate(
        {"after": tiny_model}, beir_folder, baselines={"before": tiny_path}, standardise=[tiny_path], show=False
    )
    assert [(row["model"], row["role"]) for row in results["rows"]] == [
        ("BM25", "baseline"),
        ("before", "baseline"),
        ("before (standardised)", "baseline"),
        ("after", "model"),
    ]
    rows = rows_by_model(results)
    assert rows["before"]["scores"] == rows["after"]["scores"]
    assert rows["before (standardised)"]["standardised"] and not rows["before"]["standardised"]


@pytest.mark.parametrize("task", ["folder", "groups"])
def test_a_row_a_dimension_is_what_truncate_dim_gives(tiny_path, tiny_model, beir_folder, task):
    from sentence_transformers import SentenceTransformer

    # Trained for it or not: a model of random weights ranks otherwise when cut.
    cut = SentenceTransformer(tiny_path, device="cpu", truncate_dim=3)
    models, options = {"whole": tiny_model}, {"truncate_dims": [3, 8], "show": False}
    if task == "folder":
        found = evaluate(models, beir_folder, bm25=False, standardise=[tiny_model], **options)["rows"]
        expected = evaluate({"cut": cut}, beir_folder, bm25=False, standardise=[cut], show=False)["rows"]
    else:
        texts = [f"fruit {number} on a tree" for number in range(6)]
        groups = [{"texts": texts, "doc_ids": ["a", "a", "b", "b", "c", "c"]}]
        found = evaluate_groups(models, groups, standardise=[tiny_model], **options)["rows"]
        expected = evaluate_groups({"cut": cut}, groups, standardise=[cut], show=False)["rows"]
    names = ["whole", "whole (standardised)"]
    names += [f"whole ({dim} dimensions{kind})" for dim in (3, 8) for kind in ("", ", standardised")]
    assert [row["model"] for row in found] == names
    assert [row["truncate_dim"] for row in found] == [None, None, 3, 3, 8, 8]
    for mine, theirs in zip(found[2:4], expected, strict=True):
        assert mine["scores"] == pytest.approx(theirs["scores"], abs=1e-5)
    if task == "groups":  # whose mean cosine tells any two embeddings apart
        assert found[0]["scores"]["mean_cosine"] != pytest.approx(found[2]["scores"]["mean_cosine"], abs=1e-3)
    assert tiny_model.truncate_dim is None
    with pytest.raises(ValueError, match="whole have 32 dimensions and cannot be cut to 33"):
        evaluate({"whole": tiny_model}, beir_folder, truncate_dims=[33])


def test_only_standardised(tiny_model, beir_folder):
    results = evaluate([], beir_folder, standardise=tiny_model, bm25=False, show=False)
    assert [row["model"] for row in results["rows"]] == ["model 1 (standardised)"]


def test_a_query_that_is_in_the_corpus_does_not_find_itself(make_beir_folder, tiny_model, tmp_path):
    documents = {"x": ("", "alpha beta gamma"), "y": ("", "alpha beta delta"), "z": ("", "epsilon")}
    # x is the same text under the same id; z has a document's id but another text.
    queries = {"x": "alpha beta gamma", "z": "alpha beta delta"}
    folder = make_beir_folder(tmp_path / "self", documents, queries, [("x", "y", 1), ("z", "y", 1)])
    bm25 = evaluate(tiny_model, folder, show=False)["rows"][0]
    assert bm25["scores"]["mrr_at_10"] == 1
    # Where the judgements want it, it counts.
    folder = make_beir_folder(tmp_path / "judged", documents, queries, [("x", "x", 1), ("z", "y", 1)])
    assert evaluate(tiny_model, folder, show=False)["rows"][0]["scores"]["mrr_at_10"] == 1


def test_bm25_finds_stems_and_nothing_without_a_shared_word(make_beir_folder, tiny_model, tmp_path):
    documents = {"a": ("", "runners were running"), "b": ("", "swimming pools"), "c": ("", "the")}
    folder = make_beir_folder(
        tmp_path / "bm25", documents, {"q1": "run", "q2": "zebra"}, [("q1", "a", 1), ("q2", "b", 1)]
    )
    scores = evaluate(tiny_model, folder, show=False)["rows"][0]["scores"]
    assert (scores["mrr_at_10"], scores["recall_at_100"]) == (0.5, 0.5)


def test_bm25_on_texts_without_any_word(make_beir_folder, tiny_model, tmp_path):
    folder = make_beir_folder(tmp_path / "odd", {"a": ("", "?!"), "b": ("", "the")}, {"q": "..."}, [("q", "a", 1)])
    assert evaluate(tiny_model, folder, show=False)["rows"][0]["scores"]["mrr_at_10"] == 0


def test_errors_come_before_work_and_leave_no_file(tiny_model, beir_folder, tmp_path):
    out = tmp_path / "r.json"
    with pytest.raises(ValueError, match="No model to evaluate"):
        evaluate([], beir_folder, out=out)
    with pytest.raises(ValueError, match="Two models have the same name"):
        evaluate({"x": tiny_model}, beir_folder, baselines={"x": str(tmp_path)}, out=out)
    with pytest.raises(FileNotFoundError, match="no BEIR-format folder"):
        evaluate(tiny_model, tmp_path / "nothing", out=out)
    with pytest.raises(FileNotFoundError, match="no BEIR-format folder"):
        evaluate(tiny_model, "./nothing", out=out)
    with pytest.raises(FileNotFoundError, match="There is no file or folder .*no-model"):
        evaluate(str(tmp_path / "no-model"), beir_folder, out=out, show=False)
    assert not out.exists()


def test_a_failed_write_keeps_the_old_file(tmp_path):
    out = tmp_path / "r.json"
    report.write_json({"old": 1}, out)
    with pytest.raises(TypeError):
        report.write_json({"new": object()}, out)
    assert json.loads(out.read_text()) == {"old": 1} and [path.name for path in tmp_path.iterdir()] == ["r.json"]


@pytest.mark.parametrize("out", ["taken", "file/results.json"])
def test_results_that_cannot_be_written_are_refused_before_measuring(tmp_path, capsys, out):
    (tmp_path / "taken").mkdir()
    (tmp_path / "file").touch()
    # Neither the model nor the task is there: the place to write to is looked at first.
    with pytest.raises(OSError, match=f"cannot be written to .*{out}.* pass another --out"):
        evaluate("no-model", tmp_path / "nothing", out=tmp_path / out)
    with pytest.raises(OSError, match="pass another --out"):
        evaluate_groups("no-model", [], out=tmp_path / out)
    assert not list(tmp_path.glob(".*"))


def test_a_tiny_gain_is_not_shown_as_nought(capsys):
    rows = [{"model": "m", "task": "t", "scores": {"retrieval_gain": -0.000123, "ndcg_at_10": 0.5, "mrr_at_10": 0}}]
    report.print_table({"task": {"name": "t"}, "rows": rows})
    shown = capsys.readouterr().out
    assert "-0.00012" in shown and "0.500" in shown and " 0.000 " in shown


def test_groups_side_by_side(tiny_model, minilm, tmp_path, capsys):
    texts = {
        "ships": [
            "The ship left the harbour at dawn.",
            "Sailors on the ship saw the harbour fade.",
            "A harbour full.",
        ],
        "bread": ["Knead the dough and let it rise.", "Bake the bread until the crust is brown."],
        "stars": ["The telescope shows a distant galaxy.", "Galaxies hold billions of stars and planets."],
    }
    groups = [
        {"texts": [t for ts in texts.values() for t in ts], "doc_ids": [d for d, ts in texts.items() for _ in ts]}
    ]
    results = evaluate_groups(
        {"minilm": minilm},
        groups,
        baselines={"tiny": tiny_model},
        standardise=[tiny_model],
        gains={"minilm": {"retrieval_gain": 0.125}},
        out=tmp_path / "groups.json",
    )
    rows = rows_by_model(results)
    assert list(rows) == ["tiny", "tiny (standardised)", "minilm"]
    assert rows["minilm"]["scores"]["ndcg_at_10"] > rows["tiny"]["scores"]["ndcg_at_10"]
    assert rows["tiny (standardised)"]["scores"] != rows["tiny"]["scores"]
    assert json.loads((tmp_path / "groups.json").read_text()) == results
    printed = capsys.readouterr().out
    assert "sibling retrieval (7 queries, 7 documents)" in printed and "0.125" in printed


def functions_with_docstrings():
    """Summary line -> source without the docstring, from small modules of the standard library."""
    found = {}
    for name in ("textwrap", "shutil", "statistics", "bisect", "heapq", "fnmatch", "glob", "calendar", "random"):
        for node in ast.walk(ast.parse(inspect.getsource(importlib.import_module(name)))):
            if isinstance(node, ast.FunctionDef) and (summary := (ast.get_docstring(node) or "").split("\n")[0]):
                node.body = node.body[1:] or [ast.Pass()]
                found.setdefault(summary, ast.unparse(node))
    return dict(list(found.items())[:60])


def test_a_real_model_beats_chance(minilm, tiny_model, make_beir_folder, tmp_path):
    functions = functions_with_docstrings()
    assert len(functions) == 60
    numbered = list(enumerate(functions.items()))
    folder = make_beir_folder(
        tmp_path / "docstrings",
        {f"d{i}": ("", source[:300]) for i, (_, source) in numbered},
        {f"q{i}": summary for i, (summary, _) in numbered},
        [(f"q{i}", f"d{i}", 1) for i, _ in numbered],
    )
    rows = rows_by_model(evaluate({"minilm": minilm}, folder, baselines={"tiny": tiny_model}, show=False))
    chance = sum(1 / math.log2(rank + 1) for rank in range(1, 11)) / 60
    assert rows["minilm"]["scores"]["ndcg_at_10"] > 0.6 > 5 * chance
    assert rows["tiny"]["scores"]["ndcg_at_10"] < 0.3
    assert rows["BM25"]["scores"]["ndcg_at_10"] > 0.4
