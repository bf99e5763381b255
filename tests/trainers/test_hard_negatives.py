"""Mining against a plain ranking, and draws from it."""

import pytest
import torch

from hub_cards.encoding import encode
from tests.trainers.finetune_sets import make_encoder, make_task
from trainers import hard_negatives
from trainers.finetune_data import TrainingSet, load_training_set
from trainers.finetune_model import ModelArguments, load_model
from trainers.hard_negatives import MiningOptions, draw_negatives, mine, pad_negatives


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> TrainingSet:
    found = load_training_set(str(make_task(tmp_path_factory.mktemp("task") / "beir", size=60)))
    found.positives[3].append(found.positives[4][0])  # a query with two
    return found


@pytest.fixture(scope="module", params=["cosine", "dot"])
def model(request, tmp_path_factory):
    encoder = make_encoder(tmp_path_factory.mktemp("encoder"))
    return load_model(ModelArguments(str(encoder), similarity=request.param, document_prompt="passage : "))


def plain(model, data, options) -> list[list[int]]:
    scores = encode(model, data.queries, "query") @ encode(model, data.documents, "document").T
    rows = []
    for row, positives in zip(scores.tolist(), data.positives, strict=True):
        limit = min(row[position] for position in positives) - options.margin
        ranked = sorted(range(len(row)), key=lambda position: -row[position])
        ranked = [place for place in ranked if place not in positives and row[place] < limit]
        rows.append(ranked[options.skip : options.skip + options.depth])
    return rows


@pytest.mark.parametrize(
    "options",
    [
        MiningOptions(5, 0, -torch.inf),
        MiningOptions(5, 3, -torch.inf),
        MiningOptions(100, 0, 0.0),
        MiningOptions(4, 1, 0.05),
    ],
)
def test_mining_is_the_plain_ranking_without_the_relevant(model, data, options, monkeypatch):
    # Several blocks of documents and queries, the last ones not full.
    monkeypatch.setattr(hard_negatives, "_DOCUMENTS", 17)
    monkeypatch.setattr(hard_negatives, "_QUERIES", 7)
    mined = mine(model, data, options)
    assert mined.shape == (len(data.queries), options.depth) and mined.dtype == torch.int32
    assert [[place for place in row if place >= 0] for row in mined.tolist()] == plain(model, data, options)


def test_draws_are_candidates_first_and_never_relevant(data):
    candidates = pad_negatives([[row + 1, row + 2, row + 3] if row else [] for row in range(len(data.queries))])
    drawn = draw_negatives(candidates, data, 2, [0, 0])
    assert drawn.shape == (len(data.pairs), 2)
    for (query, _), row in zip(data.pairs, drawn.tolist(), strict=True):
        assert len(set(row)) == 2
        if query:
            assert set(row) <= {query + 1, query + 2, query + 3}
        else:
            assert not set(row) & set(data.positives[0])
    assert torch.equal(drawn, draw_negatives(candidates, data, 2, [0, 0]))
    assert not torch.equal(drawn, draw_negatives(candidates, data, 2, [0, 8]))
    filled = draw_negatives(candidates, data, 5, [0, 0])
    for (query, _), row in zip(data.pairs, filled.tolist(), strict=True):
        assert len(set(row)) == 5 and not set(row[3 if query else 0 :]) & set(data.positives[query])
    with pytest.raises(ValueError, match="60 documents, too few for 59 negatives"):
        draw_negatives(candidates, data, 59, [0, 0])
