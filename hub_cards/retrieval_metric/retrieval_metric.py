"""nDCG@10, MRR@10 and Recall@10, 50, 100 and 1000 as an `evaluate` metric, computed by `ir_measures`.

This file is self-contained, because `evaluate.load` copies it alone into its cache.
"""

from collections.abc import Mapping

import datasets
import evaluate
import ir_measures
from ir_measures import RR, R, nDCG

MEASURES = {
    "ndcg_at_10": nDCG @ 10,
    "mrr_at_10": RR @ 10,
    **{f"recall_at_{depth}": R @ depth for depth in (10, 50, 100, 1000)},
}

_DESCRIPTION = """
Retrieval quality of ranked lists: nDCG@10 (linear gain, log2 discount, as trec_eval), MRR@10, and Recall@10, 50, 100
and 1000, each the mean over the queries that have at least one relevant document. Computed by `ir_measures`.
"""

_KWARGS_DESCRIPTION = """
One row is one query; predictions and references are aligned by position.

Args:
    predictions: list of `{"doc_ids": list[str], "scores": list[float]}`, in any order, higher score = better.
        A query for which nothing was retrieved has empty lists.
    references: list of `{"doc_ids": list[str], "relevance": list[int]}`; relevance 0 or below = judged not relevant,
        1 and above = relevant, with the grade as the gain of nDCG.

Returns:
    `ndcg_at_10`, `mrr_at_10`, `recall_at_10`, `recall_at_50`, `recall_at_100`, `recall_at_1000` (floats in 0..1),
    `num_queries` (queries averaged over) and `num_without_relevant` (queries left out, since no ranking of theirs can
    be right or wrong).

Equal scores are ranked by document id, larger id first (the rule of trec_eval), the same for all measures.

Example:
    >>> metric = evaluate.load("path/to/hub_cards/retrieval_metric")
    >>> metric.compute(
    ...     predictions=[{"doc_ids": ["a", "b"], "scores": [0.9, 0.1]}],
    ...     references=[{"doc_ids": ["b"], "relevance": [1]}],
    ... )["mrr_at_10"]
    0.5
"""

_CITATION = """
@inproceedings{macavaney2022streamlining,
  author = {MacAvaney, Sean and Macdonald, Craig and Ounis, Iadh},
  title = {Streamlining Evaluation with ir-measures},
  booktitle = {ECIR},
  year = {2022}
}
"""


def score_run(run: Mapping[str, Mapping[str, float]], qrels: Mapping[str, Mapping[str, int]]) -> dict:
    """Scores a run against relevance judgements.

    Args:
        run: query id -> document id -> score, higher = better. A query of `qrels` that is missing here scores 0.
        qrels: query id -> document id -> relevance; 1 and above is relevant.

    Returns:
        The measures as floats in 0..1, `num_queries` and `num_without_relevant`.

    Raises:
        ValueError: if no query has a relevant document, or a score is NaN.
    """
    judged = {query: docs for query, docs in qrels.items() if any(grade > 0 for grade in docs.values())}
    if not judged:
        raise ValueError("No query has a relevant document (relevance 1 or above) in the qrels: nothing to score.")
    # The two engines behind ir_measures break ties in opposite orders and one of them rounds scores to float32, so
    # each gets the ranking itself: ranks as scores, ties by document id, larger first (trec_eval's rule).
    ranked = {}
    for query in judged:
        docs = run.get(query, {})
        if any(score != score for score in docs.values()):
            raise ValueError(f"The run has a NaN score for query {query!r}: the embeddings are not finite.")
        order = sorted(docs, key=lambda doc: (docs[doc], doc), reverse=True)
        ranked[query] = {doc: float(len(order) - rank) for rank, doc in enumerate(order)}
    values = ir_measures.calc_aggregate(MEASURES.values(), judged, ranked)
    scores = {name: float(values[measure]) for name, measure in MEASURES.items()}
    return {**scores, "num_queries": len(judged), "num_without_relevant": len(qrels) - len(judged)}


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _KWARGS_DESCRIPTION)
class RetrievalMetric(evaluate.Metric):
    def _info(self):
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_KWARGS_DESCRIPTION,
            features=datasets.Features(
                {
                    "predictions": {
                        "doc_ids": datasets.List(datasets.Value("string")),
                        "scores": datasets.List(datasets.Value("float64")),
                    },
                    "references": {
                        "doc_ids": datasets.List(datasets.Value("string")),
                        "relevance": datasets.List(datasets.Value("int64")),
                    },
                }
            ),
            reference_urls=["https://ir-measur.es"],
        )

    def _compute(self, predictions, references):
        run, qrels = {}, {}
        for row, (prediction, reference) in enumerate(zip(predictions, references, strict=True)):
            run[str(row)] = _as_dict(prediction["doc_ids"], prediction["scores"], f"prediction {row}")
            qrels[str(row)] = _as_dict(reference["doc_ids"], reference["relevance"], f"reference {row}")
        return score_run(run, qrels)


def _as_dict(doc_ids, values, name):
    if len(doc_ids) != len(values):
        raise ValueError(f"{name} has {len(doc_ids)} doc_ids but {len(values)} values; give one value a document.")
    if len(set(doc_ids)) != len(doc_ids):
        raise ValueError(f"{name} names a document twice; give each document once.")
    return dict(zip(doc_ids, values, strict=True))
