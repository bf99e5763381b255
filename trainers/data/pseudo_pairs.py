"""Pseudo queries with their passages, from raw text alone: what Contriever learns from (Revela, §5 and C.1)."""

import random
from collections.abc import Iterable, Iterator, Mapping

from trainers.data.chunking import trim, units

UNITS = ("sentence", "line")
# A sentence of fewer words ("See below.") says nothing of where it comes from.
_LEAST_WORDS = 3


def pseudo_pairs(
    groups: Iterable[Mapping], seed: int, inverse_cloze: float = 0.5, unit: str = "sentence", language: str = "en"
) -> Iterator[tuple[str, str]]:
    """
    Cut a query and its passage out of each document of each group.

    *Inverse cloze* takes one unit out of a chunk: the unit is the query, what is left of the chunk the passage.
    *Independent cropping* takes two spans of the document, which here are two of its chunks. A document whose chunks
    are too few or too short for one gets the other, or nothing.

    Args:
        groups: rows of a prepared set, with `texts` and `doc_ids`, and perhaps a `cloze_unit` of their own.
        seed: with a group's place, all that the choice depends on.
        inverse_cloze: the share of pairs made by inverse cloze.
        unit: what inverse cloze takes out: `"sentence"` (prose) or `"line"` (code).
        language: ISO 639 code for the sentences' ends.

    Yields:
        (query, passage), neither of them blank.

    Raises:
        ValueError: for a share that is none, or another unit.
    """
    if not 0 <= inverse_cloze <= 1:
        raise ValueError(f"`inverse_cloze` is the share of pairs made that way, from 0 to 1, not {inverse_cloze}.")
    if unit not in UNITS:
        raise ValueError(f"No unit {unit!r}: choose one of {', '.join(UNITS)}.")
    for number, group in enumerate(groups):
        kind = "code" if group.get("cloze_unit", unit) == "line" else "prose"
        draw = random.Random(f"{seed} {number}")
        documents: dict[str, list[str]] = {}
        for doc_id, text in zip(group["doc_ids"], group["texts"], strict=True):
            if text.strip():
                documents.setdefault(doc_id, []).append(text)
        for chunks in documents.values():
            ways = [_crop, _cloze] if draw.random() >= inverse_cloze else [_cloze, _crop]
            if inverse_cloze in (0, 1):
                ways = ways[:1]  # nothing but what was asked for
            pair = next(filter(None, (way(chunks, draw, kind, language) for way in ways)), None)
            if pair is not None:
                yield pair


def _crop(chunks: list[str], draw: random.Random, *_) -> tuple[str, str] | None:
    return tuple(draw.sample(chunks, 2)) if len(chunks) > 1 else None


def _cloze(chunks: list[str], draw: random.Random, kind: str, language: str) -> tuple[str, str] | None:
    text = draw.choice(chunks)
    # No unit is longer than the text has words, so none is split.
    spans = list(units(text, kind, len(text), language))
    wordy = [span for span in spans if span[2] >= _LEAST_WORDS]
    if len(wordy) < 2:
        return None
    start, end, _ = draw.choice(wordy)
    return text[start:end].strip(), trim(text[:start] + text[end:], kind)


__all__ = ["UNITS", "pseudo_pairs"]
