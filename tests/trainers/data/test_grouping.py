import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainers.data.grouping import DigestSet, Grouper, Shuffler, in_validation, text_digest


def group_all(grouper: Grouper, lengths: list[int]) -> list[list[tuple[str, int]]]:
    """Groups of (document, chunk index), each sorted back into document order."""
    groups = []
    for index, length in enumerate(lengths):
        groups += list(grouper.add(f"d{index}", [f"d{index}/{chunk}" for chunk in range(length)]))
    groups += list(grouper.finish())
    for texts, doc_ids in groups:
        assert [text.split("/")[0] for text in texts] == doc_ids
    return [sorted((text.split("/")[0], int(text.split("/")[1])) for text in texts) for texts, _ in groups]


def test_documents_interleave_in_the_order_of_the_paper():
    # (d11, d21, d31, d12, d22, d32, ...), cut into groups: each holds consecutive chunks of all three.
    groups = group_all(Grouper(6, documents=3, seed=0, name="train"), [4, 4, 4])
    assert groups == [
        [("d0", 0), ("d0", 1), ("d1", 0), ("d1", 1), ("d2", 0), ("d2", 1)],
        [("d0", 2), ("d0", 3), ("d1", 2), ("d1", 3), ("d2", 2), ("d2", 3)],
    ]


def test_four_consecutive_chunks_from_each_of_two_documents():
    groups = group_all(Grouper(8, documents=2, seed=0, name="train"), [8, 8])
    assert groups == [[(f"d{d}", c) for d in (0, 1) for c in range(start, start + 4)] for start in (0, 4)]


def test_the_next_document_takes_the_place_of_one_that_ended():
    groups = group_all(Grouper(4, documents=2, seed=0, name="train"), [1, 5, 6])
    assert groups == [
        [("d0", 0), ("d1", 0), ("d1", 1), ("d2", 0)],
        [("d1", 2), ("d1", 3), ("d2", 1), ("d2", 2)],
        [("d1", 4), ("d2", 3), ("d2", 4), ("d2", 5)],
    ]


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30), max_size=30),
    group_size=st.integers(2, 16),
    documents=st.integers(1, 20),
)
def test_every_chunk_is_in_one_group_or_left_over(lengths, group_size, documents):
    grouper = Grouper(group_size, documents, seed=0, name="train")
    groups = group_all(grouper, lengths)
    chunks = Counter(chunk for group in groups for chunk in group)
    assert set(chunks.values()) <= {1}
    assert all(len(group) == group_size for group in groups)
    assert grouper.groups == len(groups)
    assert sum(lengths) == len(chunks) + grouper.left_over
    assert grouper.left_over < group_size
    assert grouper.groups_of_one_document == sum(len({doc for doc, _ in group}) == 1 for group in groups)
    assert grouper.groups_without_siblings == sum(len({doc for doc, _ in group}) == group_size for group in groups)
    for group in groups:  # consecutive chunks of each document
        for doc in {doc for doc, _ in group}:
            indices = [index for name, index in group if name == doc]
            assert indices == list(range(indices[0], indices[0] + len(indices)))


def test_the_shuffle_depends_on_seed_split_and_group_only():
    def order(seed: int, name: str) -> list[list[str]]:
        grouper = Grouper(16, documents=2, seed=seed, name=name)
        groups = [*grouper.add("a", map(str, range(64))), *grouper.add("b", map(str, range(64)))]
        return [texts for texts, _ in groups]

    first = order(1, "train")
    assert first == order(1, "train")
    assert first != order(2, "train")
    assert first != order(1, "validation")
    assert first[0] != sorted(first[0], key=int)
    # Each group has its own order.
    places = [[int(text) - min(map(int, texts)) for text in texts] for texts in first]
    assert places[0] != places[1]


@given(st.lists(st.integers(0, 50) | st.integers(0, 2**64 - 1), max_size=300), st.integers(1, 20))
def test_digest_set_is_a_set(digests, recent_limit):
    seen, ours = set(), DigestSet(recent_limit)
    for digest in digests:
        assert ours.add(digest) == (digest not in seen)
        seen.add(digest)


def test_digest_set_takes_a_few_bytes_a_document():
    ours = DigestSet(recent_limit=1000)
    for index in range(100_000):
        ours.add(text_digest(str(index)))
    assert ours._sorted.nbytes == 800_000
    assert not ours._recent


def test_text_digest_is_of_the_exact_text_without_surrounding_whitespace():
    assert text_digest(" a text\n") == text_digest("a text")
    assert text_digest("a text") != text_digest("A text")
    assert text_digest("a  text") != text_digest("a text")
    assert text_digest("\ud83d") != text_digest("")


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5])
def test_validation_takes_its_share_by_id_and_seed(share):
    ids = [f"corpus.jsonl:{index}" for index in range(20_000)]
    held_out = {doc_id for doc_id in ids if in_validation(doc_id, share, seed=1)}
    deviation = math.sqrt(share * (1 - share) * len(ids))
    assert abs(len(held_out) - share * len(ids)) <= 4 * deviation
    assert held_out == {doc_id for doc_id in reversed(ids) if in_validation(doc_id, share, seed=1)}
    if share:
        assert held_out != {doc_id for doc_id in ids if in_validation(doc_id, share, seed=2)}
        # A larger share holds out the same documents and more.
        assert held_out <= {doc_id for doc_id in ids if in_validation(doc_id, share + 0.1, seed=1)}


def shuffled(lengths: list[int], seed: int = 0, pool: int = 10_000) -> list[tuple[str, list[str]]]:
    shuffler = Shuffler(4, seed, "train", pool)
    pieces = []
    for index, length in enumerate(lengths):
        pieces += list(shuffler.add(f"d{index}", [f"d{index}/{chunk}" for chunk in range(length)]))
    return pieces + list(shuffler.finish())


def test_shuffling_deals_every_piece_once_whole_and_in_another_order():
    lengths = [9, 4, 13, 1, 8] * 6
    pieces = shuffled(lengths)
    in_order = [
        (f"d{i}", [f"d{i}/{c}" for c in range(s, min(s + 4, n))])
        for i, n in enumerate(lengths)
        for s in range(0, n, 4)
    ]
    assert sorted(pieces) == sorted(in_order)
    assert pieces != in_order
    assert pieces == shuffled(lengths)
    assert pieces != shuffled(lengths, seed=1)


def test_the_pool_bounds_how_far_a_piece_travels():
    pieces = shuffled([4] * 100, pool=10)
    # A piece cannot be dealt before the pool, full of what came before it, has taken it in.
    for place, (doc_id, _) in enumerate(pieces):
        assert int(doc_id[1:]) <= place + 10
