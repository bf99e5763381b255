import pytest

from trainers.data.pseudo_pairs import pseudo_pairs

PROSE = [
    "The ferry stops at the old bank. It leaves again at noon. Nobody waits for it there.",
    "A fisher sells his catch. The market closes early on Sundays.",
]
CODE = ["def add(a, b):\n    total = a + b\n    return total", "def no():\n    raise ValueError('no such thing')"]


def groups(texts, copies=40):
    return [{"texts": [*texts, "Elsewhere."], "doc_ids": ["d"] * len(texts) + ["e"]}] * copies


def test_inverse_cloze_takes_a_sentence_out_of_a_chunk():
    pairs = list(pseudo_pairs(groups(PROSE), seed=0, inverse_cloze=1))
    assert len(pairs) == 40  # the document of one short sentence gives none
    for query, passage in pairs:
        source = next(text for text in PROSE if query in text)
        assert query not in passage and query.endswith(".")
        assert sorted((query + " " + passage).split()) == sorted(source.split())
    assert len(set(pairs)) == 5  # each sentence of either chunk


def test_inverse_cloze_takes_whole_lines_of_code_and_leaves_the_indentation():
    pairs = set(pseudo_pairs(groups(CODE), seed=0, inverse_cloze=1, unit="line"))
    assert ("total = a + b", "def add(a, b):\n    return total") in pairs
    assert all("\n" not in query for query, _ in pairs)


def test_cropping_takes_two_chunks_of_one_document():
    pairs = set(pseudo_pairs(groups(PROSE), seed=0, inverse_cloze=0))
    assert pairs == {(PROSE[0], PROSE[1]), (PROSE[1], PROSE[0])}


def test_the_share_is_kept_and_what_cannot_be_cut_one_way_is_cut_the_other():
    pairs = list(pseudo_pairs(groups(PROSE, 1000), seed=0, inverse_cloze=0.3))
    assert 250 < sum(query not in PROSE for query, _ in pairs) < 350
    alone = [{"texts": PROSE[:1], "doc_ids": ["d"]}] * 20
    assert len(list(pseudo_pairs(alone, seed=0, inverse_cloze=0.01))) == 20
    assert not list(pseudo_pairs(alone, seed=0, inverse_cloze=0))


def test_the_choice_depends_on_the_seed_and_the_groups_place_alone():
    assert list(pseudo_pairs(groups(PROSE), seed=1)) == list(pseudo_pairs(groups(PROSE), seed=1))
    assert list(pseudo_pairs(groups(PROSE), seed=1)) != list(pseudo_pairs(groups(PROSE), seed=2))
    assert list(pseudo_pairs(groups(PROSE), seed=1))[:10] == list(pseudo_pairs(groups(PROSE, 10), seed=1))


@pytest.mark.parametrize("options, message", [({"inverse_cloze": 2}, "inverse_cloze"), ({"unit": "word"}, "unit")])
def test_what_is_no_option_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        list(pseudo_pairs(groups(PROSE), seed=0, **options))
