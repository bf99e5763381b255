"""Which documents are held out, which are duplicates, and which chunks see each other in a group."""

import hashlib
import random
from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

Group = tuple[list[str], list[str]]
"""The chunks of a group, and the id of the document each comes from."""


def in_validation(doc_id: str, share: float, seed: int) -> bool:
    """Whether a document is held out: a hash of its id and the seed, so neither order nor processes matter."""
    digest = hashlib.blake2b(f"{seed}\0{doc_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < share * 2**64


def text_digest(text: str) -> int:
    """64-bit hash of a text without its surrounding whitespace: equal for exact duplicates.

    Among 100 million documents, two different ones share a hash with a probability of 0.03 %.
    """
    return int.from_bytes(
        hashlib.blake2b(text.strip().encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little"
    )


class DigestSet:
    """A set of 64-bit integers in 8 bytes each (a Python set takes about 90), for corpora of any size."""

    def __init__(self, recent_limit: int = 2**18) -> None:
        self._sorted = np.empty(0, dtype=np.uint64)
        self._recent: set[int] = set()
        self._recent_limit = recent_limit

    def add(self, digest: int) -> bool:
        """Add; True if it was not there before."""
        if digest in self._recent:
            return False
        if len(self._sorted):
            index = int(self._sorted.searchsorted(np.uint64(digest)))
            if index < len(self._sorted) and int(self._sorted[index]) == digest:
                return False
        self._recent.add(digest)
        if len(self._recent) >= self._recent_limit:
            recent = np.fromiter(self._recent, dtype=np.uint64, count=len(self._recent))
            self._sorted = np.concatenate([self._sorted, recent])
            self._sorted.sort()
            self._recent = set()
        return True


class Shuffler:
    """Deals pieces of documents, a few consecutive chunks each, in random order from a bounded pool.

    A corpus is seldom in random order: files of a folder stand beside their kin. Neighbours make groups whose chunks
    all resemble each other, and a short run then learns little (benchmarks/race.md). With pieces from all
    over the corpus the rest of a chunk's own document stands out.

    Args:
        piece: chunks a piece, at most.
        seed: of the order, which depends on the seed, `name` and the documents only.
        name: tells the order of one split from that of another.
        pool: pieces held; a corpus of more pieces is shuffled within a window of so many.
    """

    def __init__(self, piece: int, seed: int, name: str, pool: int = 10_000) -> None:
        self._piece, self._size = piece, pool
        self._random = random.Random(f"{seed}/shuffle/{name}")
        self._pool: list[tuple[str, list[str]]] = []

    def add(self, doc_id: str, chunks: list[str]) -> Iterator[tuple[str, list[str]]]:
        """Take the next document; yields pieces that the pool has no room for."""
        for start in range(0, len(chunks), self._piece):
            self._pool.append((doc_id, chunks[start : start + self._piece]))
            if len(self._pool) > self._size:
                yield self._draw()

    def finish(self) -> Iterator[tuple[str, list[str]]]:
        """The pieces that are left."""
        while self._pool:
            yield self._draw()

    def _draw(self) -> tuple[str, list[str]]:
        index = self._random.randrange(len(self._pool))
        self._pool[index], self._pool[-1] = self._pool[-1], self._pool[index]
        return self._pool.pop()


class Grouper:
    """Interleaves the chunks of n documents and fills groups with them (section 4.1).

    The paper's order is (d11, d21, ..., dn1, d12, d22, ...), cut into groups of equal size. Documents differ in
    length, and the paper does not say what happens when one ends: here the next document takes its place, so that n
    documents are interleaved to the end of the corpus and no chunk is dropped between them. Only what remains when
    the corpus ends, fewer chunks than a group, is left over: `left_over` counts it.

    With n = 2 and groups of 16, a group holds 8 consecutive chunks of each of two documents (the paper's Figure 7
    shows such a group). Memory: n documents and one group.

    Args:
        group_size: chunks in a group.
        documents: n, the documents interleaved at any time.
        seed: of the shuffle within each group; it depends on the seed, `name` and the group's index only.
        name: tells the groups of one split from those of another.
    """

    def __init__(self, group_size: int, documents: int, seed: int, name: str) -> None:
        self.groups = 0
        self.groups_of_one_document = 0
        self.groups_without_siblings = 0
        self._size, self._seed, self._name = group_size, seed, name
        self._slots: list[tuple[str, deque[str]] | None] = [None] * documents
        self._turn = 0
        self._filling: list[tuple[str, str]] = []  # document id, chunk

    @property
    def left_over(self) -> int:
        """Chunks that have not become part of a group."""
        return len(self._filling) + sum(len(slot[1]) for slot in self._slots if slot is not None)

    def add(self, doc_id: str, chunks: Iterable[str]) -> Iterator[Group]:
        """Take the next document; yields the groups that became full."""
        chunks = deque(chunks)
        if not chunks:
            return
        self._slots[self._slots.index(None)] = (doc_id, chunks)
        while None not in self._slots:
            yield from self._take_turn()

    def finish(self) -> Iterator[Group]:
        """Interleave the documents that are still open, without new ones; yields the last groups."""
        while any(slot is not None for slot in self._slots):
            yield from self._take_turn()

    def _take_turn(self) -> Iterator[Group]:
        slot = self._slots[self._turn]
        if slot is not None:
            doc_id, chunks = slot
            self._filling.append((doc_id, chunks.popleft()))
            if not chunks:
                self._slots[self._turn] = None
        self._turn = (self._turn + 1) % len(self._slots)
        if len(self._filling) == self._size:
            yield self._group()

    def _group(self) -> Group:
        members, self._filling = self._filling, []
        random.Random(f"{self._seed}/{self._name}/{self.groups}").shuffle(members)
        doc_ids = [doc_id for doc_id, _ in members]
        self.groups += 1
        self.groups_of_one_document += len(set(doc_ids)) == 1
        self.groups_without_siblings += len(set(doc_ids)) == len(doc_ids)
        return [chunk for _, chunk in members], doc_ids
