"""The metric against values worked out by hand."""

import math
import subprocess
import sys

import evaluate
import pytest

from hub_cards.evaluation import METRIC_PATH
from hub_cards.retrieval_metric.retrieval_metric import MEASURES, score_run


def discount(rank: int) -> float:
    return 1 / math.log2(rank + 1)


def test_graded_relevance():
    # Ranking b(1), x(not judged), a(2); the best order is a, b.
    scores = score_run({"q": {"b": 0.9, "x": 0.8, "a": 0.7}}, {"q": {"a": 2, "b": 1, "c": 0}})
    dcg = 1 * discount(1) + 2 * discount(3)
    best = 2 * discount(1) + 1 * discount(2)
    assert scores["ndcg_at_10"] == pytest.approx(dcg / best)
    assert scores["mrr_at_10"] == 1
    assert scores["recall_at_10"] == 1
    assert (scores["num_queries"], scores["num_without_relevant"]) == (1, 0)


def test_cutoffs():
    run = {"q": {f"d{rank:03}": 200.0 - rank for rank in range(1, 121)}}
    scores = score_run(run, {"q": {"d010": 1, "d011": 1, "d100": 1, "d101": 1}})
    best = sum(discount(rank) for rank in (1, 2, 3, 4))
    assert scores["ndcg_at_10"] == pytest.approx(discount(10) / best)
    assert scores["mrr_at_10"] == pytest.approx(1 / 10)
    assert scores["recall_at_10"] == pytest.approx(1 / 4)
    assert scores["recall_at_50"] == pytest.approx(2 / 4)
    assert scores["recall_at_100"] == pytest.approx(3 / 4)
    assert scores["recall_at_1000"] == 1
    assert score_run(run, {"q": {"d011": 1}})["mrr_at_10"] == 0


def test_negative_grades_are_not_relevant():
    scores = score_run({"q": {"a": 1.0, "b": 0.5}}, {"q": {"a": -1, "b": 1}})
    assert scores["mrr_at_10"] == 0.5
    assert scores["ndcg_at_10"] == pytest.approx(discount(2))


@pytest.mark.parametrize("gap", [0.0, 1e-12])
def test_ties_are_broken_alike_in_all_measures(gap):
    # Equal scores: the larger id first. A gap below float32's resolution is a gap all the same.
    scores = score_run({"q": {"a": 0.5 + gap, "b": 0.5}}, {"q": {"a": 1}})
    rank = 2 if gap == 0 else 1
    assert scores["mrr_at_10"] == pytest.approx(1 / rank)
    assert scores["ndcg_at_10"] == pytest.approx(discount(rank))


def test_query_without_relevant_document_is_left_out():
    scores = score_run(
        {"q1": {"a": 1.0}, "q2": {"a": 1.0}, "q3": {"a": 1.0}}, {"q1": {"a": 1}, "q2": {"a": 0}, "q3": {}}
    )
    assert scores["mrr_at_10"] == 1
    assert (scores["num_queries"], scores["num_without_relevant"]) == (1, 2)


def test_query_missing_from_the_run_scores_zero():
    scores = score_run({"q1": {"a": 1.0}}, {"q1": {"a": 1}, "q2": {"a": 1}})
    assert [scores[name] for name in MEASURES] == [0.5] * 6
    assert scores["num_queries"] == 2
    assert score_run({"q1": {}}, {"q1": {"a": 1}})["ndcg_at_10"] == 0


def test_nothing_relevant_and_nan_are_errors():
    with pytest.raises(ValueError, match="No query has a relevant document"):
        score_run({"q": {"a": 1.0}}, {"q": {"a": 0}})
    with pytest.raises(ValueError, match="NaN score for query 'q'"):
        score_run({"q": {"a": float("nan")}}, {"q": {"a": 1}})


def test_evaluate_loads_it_from_our_folder(tmp_path):
    metric = evaluate.load(str(METRIC_PATH), cache_dir=str(tmp_path))
    predictions = [{"doc_ids": ["b", "a"], "scores": [0.1, 0.9]}, {"doc_ids": [], "scores": []}]
    references = [{"doc_ids": ["b"], "relevance": [3]}, {"doc_ids": ["a", "b"], "relevance": [1, 0]}]
    scores = metric.compute(predictions=predictions, references=references)
    assert scores["mrr_at_10"] == pytest.approx((1 / 2 + 0) / 2)
    assert scores["ndcg_at_10"] == pytest.approx((discount(2) + 0) / 2)
    for prediction, reference in zip(predictions, references, strict=True):
        metric.add(prediction=prediction, reference=reference)
    assert metric.compute() == scores


def test_evaluate_reports_bad_rows(tmp_path):
    metric = evaluate.load(str(METRIC_PATH), cache_dir=str(tmp_path))
    good = [{"doc_ids": ["a"], "relevance": [1]}]
    with pytest.raises(ValueError, match="prediction 0 has 2 doc_ids but 1 values"):
        metric.compute(predictions=[{"doc_ids": ["a", "b"], "scores": [1.0]}], references=good)
    with pytest.raises(ValueError, match="prediction 0 names a document twice"):
        metric.compute(predictions=[{"doc_ids": ["a", "a"], "scores": [1.0, 0.5]}], references=good)


@pytest.mark.slow
def test_it_loads_where_our_package_is_not_importable(tmp_path):
    code = (
        f"import evaluate; m = evaluate.load({str(METRIC_PATH)!r}, cache_dir={str(tmp_path)!r});"
        "print(m.compute(predictions=[{'doc_ids': ['a'], 'scores': [1.0]}],"
        " references=[{'doc_ids': ['a'], 'relevance': [1]}])['ndcg_at_10'])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.strip().endswith("1.0"), done.stderr
