"""Validation without labels: does a retriever help the LM, and does it find the rest of a document?"""

import random
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pyarrow.parquet as parquet
import torch

from hub_cards.ranking import as_tensor, standardise, top_k
from hub_cards.retrieval_metric.retrieval_metric import score_run

__all__ = ["first_part", "read_groups", "retrieval_gain", "sibling_groups", "sibling_retrieval", "standardise"]


def read_groups(path: str | Path, split: str = "validation") -> list[dict]:
    """The groups (`texts`, `doc_ids`, `source`) of one split of a prepared set's folder; raises FileNotFoundError.

    Those of a set prepared for RetroMAE are its documents (`sibling_groups`).
    """
    files = sorted(Path(path).glob(f"{split}-*.parquet"))
    if not files:
        raise FileNotFoundError(
            f"{path} has no {split}-*.parquet: it is no prepared set, or no documents were held out for {split}; "
            "run `revela-hub prepare` with a held-out share."
        )
    rows = [row for file in files for row in parquet.read_table(file).to_pylist()]
    return rows if "texts" in rows[0] else sibling_groups(rows)


def sibling_groups(rows: Iterable[Mapping]) -> list[dict]:
    """
    The sequences of a set prepared for RetroMAE as `sibling_retrieval` takes them.

    Args:
        rows: `text`, `doc_id`, `source` each.

    Returns:
        One group a document. A document of one sequence, such as a passage of MS MARCO, would have nothing to be
        found: it is cut in two halves.
    """
    documents: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        documents.setdefault((row["source"], row["doc_id"]), []).append(row["text"])
    groups = []
    for (source, doc_id), texts in documents.items():
        if len(texts) == 1:
            texts = _halves(texts[0])
        groups.append({"texts": texts, "doc_ids": [doc_id] * len(texts), "source": source})
    return groups


def first_part(text: str, ratio: float = 0.5) -> str:
    """The first `ratio` of a text's words (rounded up), spaces and line breaks as they were.

    A text of fewer than four words, as in scripts written without spaces, is cut by characters instead.
    """
    words = list(re.finditer(r"\S+", text))
    if len(words) < 4:
        text = text.strip()
        return text[: max(1, round(len(text) * ratio))]
    keep = max(1, -(-len(words) * ratio // 1))
    return text[words[0].start() : words[int(keep) - 1].end()]


def _halves(text: str) -> list[str]:
    half = first_part(text)
    return [part for part in (half, text.strip()[len(half) :].strip()) if part]


def _pairs(groups: Iterable[Mapping]) -> list[tuple[str, tuple]]:
    """(chunk, document) of all; halves of chunks where every document is a single chunk, as posts and titles are."""
    pairs = [
        (text, (group.get("source"), doc_id))
        for group in groups
        for text, doc_id in zip(group["texts"], group["doc_ids"], strict=True)
    ]
    if len(set(pairs)) == len({document for _, document in pairs}):
        pairs = [(half, document) for text, document in pairs for half in _halves(text)]
    return pairs


def sibling_retrieval(
    groups: Iterable[Mapping],
    encode_query: Callable[[list[str]], object],
    encode_document: Callable[[list[str]], object],
    *,
    span_ratio: float = 0.5,
    num_queries: int | None = None,
    seed: int = 0,
    standardised: bool = False,
) -> dict:
    """How well the first part of a chunk finds the other chunks of its document among all held-out chunks.

    The chunk itself is left out of the ranking. Chunks of identical text count as one, which belongs to every
    document that holds it. Chunks whose document has no other chunk here are candidates but not queries; where that is
    so of all, each chunk is cut in two halves that are to find each other.

    Args:
        groups: rows of a prepared set: `texts` (list of str), `doc_ids` (list of str, as long) and, where several
            sources are mixed, `source`.
        encode_query, encode_document: take a list of N str, return (N, d) L2-normalised embeddings (array or tensor).
        span_ratio: share of a chunk's words that make the query, as the similarity of the training takes them
            (Revela, section 4.1: the first half).
        num_queries: at most so many queries, drawn by `seed`; the candidates stay all chunks.
        standardised: standardise the embeddings per dimension first (`standardise`).

    Returns:
        `ndcg_at_10`, `mrr_at_10` (0..1), `mean_cosine` (of two different chunks; near 1 = collapsed), `num_queries`,
        `num_chunks` (distinct), `num_duplicates`, `num_without_sibling`.

    Raises:
        ValueError: if the groups are empty, or no chunk has a sibling.
    """
    owners: dict[str, set] = {}
    members: dict[tuple, set] = {}
    pairs = _pairs(groups)
    for text, document in pairs:
        owners.setdefault(text, set()).add(document)
        members.setdefault(document, set()).add(text)
    if not owners:
        raise ValueError("The groups hold no chunk; prepare a held-out share of documents for validation.")
    texts = list(owners)
    index = {text: position for position, text in enumerate(texts)}
    siblings = [
        {index[other] for document in owners[text] for other in members[document]} - {position}
        for position, text in enumerate(texts)
    ]
    queries = [position for position, others in enumerate(siblings) if others]
    if not queries:
        raise ValueError(
            f"None of the {len(texts)} held-out chunks has a second chunk of its document beside it, or can be cut in "
            "two, so sibling retrieval has no query; hold out more or longer documents."
        )
    num_without_sibling = len(texts) - len(queries)
    if num_queries is not None and num_queries < len(queries):
        queries = sorted(random.Random(seed).sample(queries, num_queries))

    documents = as_tensor(encode_document(texts))
    spans = as_tensor(encode_query([first_part(texts[position], span_ratio) for position in queries]))
    if standardised:
        spans, documents = standardise(spans, documents)
    # One more than the measures look at: the chunk itself is taken out.
    scores, indices = top_k(spans, documents, 11)
    run = {
        str(position): {str(doc): score for score, doc in zip(row, docs, strict=True) if doc != position}
        for position, row, docs in zip(queries, scores.tolist(), indices.tolist(), strict=True)
    }
    measured = score_run(run, {str(position): {str(doc): 1 for doc in siblings[position]} for position in queries})
    total, count = documents.sum(0).double(), len(documents)
    return {
        "ndcg_at_10": measured["ndcg_at_10"],
        "mrr_at_10": measured["mrr_at_10"],
        "mean_cosine": float((total @ total - (documents.double() ** 2).sum()) / (count * (count - 1))),
        "num_queries": len(queries),
        "num_chunks": count,
        "num_duplicates": len(pairs) - count,
        "num_without_sibling": num_without_sibling,
    }


@torch.no_grad()
def retrieval_gain(model: torch.nn.Module, batches: Iterable[Mapping[str, torch.Tensor]]) -> dict:
    """What the retriever's weights are worth to the LM: in-batch loss with uniform weights minus that with its own.

    Above 0, the retriever points the LM to chunks that help it; at 0 it knows no better than an average.

    Args:
        model: a `RevelaForPreTraining`. Called as `model(**batch)` it gives `in_batch_loss` (mean over
            `num_target_tokens`); `in_batch_weights=` (rows, rows) overrides the retriever's.
        batches: held-out batches of the trainer's collator, on the model's device; `group_ids` (rows,) int says which
            rows see each other. The uniform weight of a row is 1 / (chunks of its group - 1), itself left out.

    Returns:
        `retrieval_gain`, `in_batch_loss`, `uniform_loss` (nats a token, means weighted by tokens) and
        `num_target_tokens`.

    Raises:
        ValueError: if there is no batch, or (from the model) for a group of one chunk.
    """
    was_training = model.training
    model.eval()
    own, uniform, tokens = 0.0, 0.0, 0
    try:
        for batch in batches:
            output = model(**batch, return_next_token_loss=False)
            count = int(output.num_target_tokens)
            own += float(output.in_batch_loss) * count
            visible = batch["group_ids"][:, None] == batch["group_ids"][None, :]
            if not model.config.include_diagonal:
                visible = visible & ~torch.eye(len(visible), dtype=torch.bool, device=visible.device)
            weights = visible.float() / visible.sum(1, keepdim=True)
            output = model(**batch, in_batch_weights=weights, return_next_token_loss=False)
            uniform += float(output.in_batch_loss) * count
            tokens += count
    finally:
        model.train(was_training)
    if tokens == 0:
        raise ValueError("The validation batches hold no token to predict; prepare a larger held-out share.")
    return {
        "retrieval_gain": (uniform - own) / tokens,
        "in_batch_loss": own / tokens,
        "uniform_loss": uniform / tokens,
        "num_target_tokens": tokens,
    }
