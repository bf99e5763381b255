"""Hard negatives: what the model itself ranks high and is not relevant (ANCE, arXiv 2007.00808), and draws from it."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from tqdm import tqdm

from hub_cards.encoding import encode
from trainers.finetune_data import TrainingSet

# Documents encoded before they are compared, and queries compared with them at once: 1024 x 16,384 scores are 64 MiB.
_DOCUMENTS, _QUERIES = 16_384, 1024


@dataclass
class MiningOptions:
    """
    Which documents are taken for hard negatives.

    Args:
        depth: how many at most a query, best first.
        skip: the first so many that are not relevant are left out.
        margin: documents that do not score at least so much below the query's lowest positive are left out, as they
            may be relevant and just not judged; -inf keeps them.
    """

    depth: int = 200
    skip: int = 0
    margin: float = 0.0


@torch.no_grad()
def mine(model: SentenceTransformer, data: TrainingSet, options: MiningOptions, batch_size: int = 32) -> torch.Tensor:
    """
    Rank the whole corpus for every query with the model, exactly, and keep the best of what is not relevant.

    Each process encodes and searches its share of the documents, so all processes must call this together. Embeddings
    are kept of the queries and their positives only.

    Returns:
        (queries, depth) int32 positions of documents, best first, -1 where there are no more; on the CPU, the same in
        all processes.
    """
    state = PartialState()
    was_training = model.training
    model.eval()
    pairs = torch.tensor(data.pairs)
    queries = _encode_share(model, data.queries, "query", batch_size, state)
    limits = _lowest_positive(model, data, queries, pairs, batch_size, state) - options.margin
    k = min(options.depth + options.skip, len(data.documents))
    scores = torch.full((len(queries), k), -torch.inf, device=queries.device)
    found = torch.full((len(queries), k), -1, dtype=torch.int64, device=queries.device)

    first, last = _share(len(data.documents), state)
    starts = range(first, last, _DOCUMENTS)
    for start in tqdm(starts, desc="Mining hard negatives", disable=not state.is_main_process or len(starts) < 2):
        stop = min(start + _DOCUMENTS, last)
        documents = encode(model, data.documents[start:stop], "document", batch_size, progress=False)
        documents = documents.to(queries.device)
        relevant = pairs[(pairs[:, 1] >= start) & (pairs[:, 1] < stop)].to(queries.device)
        for row in range(0, len(queries), _QUERIES):
            rows = slice(row, row + _QUERIES)
            block = queries[rows] @ documents.T
            block = block.masked_fill(block >= limits[rows, None], -torch.inf)
            known = relevant[(relevant[:, 0] >= row) & (relevant[:, 0] < row + _QUERIES)]
            block[known[:, 0] - row, known[:, 1] - start] = -torch.inf
            values, indices = block.topk(min(k, stop - start), dim=1)
            scores[rows], found[rows] = _best(
                torch.cat([scores[rows], values], dim=1), torch.cat([found[rows], indices + start], dim=1), k
            )
    model.train(was_training)

    negatives = torch.full((len(queries), options.depth), -1, dtype=torch.int32)
    for row in range(0, len(queries), _QUERIES):
        rows = slice(row, row + _QUERIES)
        values, positions = scores[rows], found[rows]
        if state.num_processes > 1:
            # (processes, rows, k), as rows of all that the processes found.
            values, positions = (
                gather(each.contiguous()).view(-1, len(each), k).transpose(0, 1).flatten(1)
                for each in (values, positions)
            )
            values, positions = _best(values, positions, k)
        positions = positions.masked_fill(values.isinf(), -1)[:, options.skip :]
        negatives[rows, : positions.shape[1]] = positions.to("cpu", torch.int32)
    return negatives


def _best(values: torch.Tensor, positions: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of (rows, n) values in falling order, and what stands at their places."""
    values, order = values.topk(k, dim=1)
    return values, positions.gather(1, order)


def _lowest_positive(model, data, queries, pairs, batch_size, state) -> torch.Tensor:
    """The score of each query's lowest positive, (queries,)."""
    used, places = pairs[:, 1].unique(return_inverse=True)
    texts = [data.documents[position] for position in used.tolist()]
    positives = _encode_share(model, texts, "document", batch_size, state)
    lowest = torch.full((len(queries),), torch.inf, device=queries.device)
    for chosen in torch.arange(len(pairs)).split(_DOCUMENTS):
        query, place = pairs[chosen, 0].to(queries.device), places[chosen].to(queries.device)
        lowest.scatter_reduce_(0, query, (queries[query] * positives[place]).sum(1), "amin")
    return lowest


def pad_negatives(negatives: list[list[int]]) -> torch.Tensor:
    """Given negatives as (queries, most of them) int32 positions, filled up with -1."""
    width = max(map(len, negatives), default=0)
    return torch.tensor([row + [-1] * (width - len(row)) for row in negatives], dtype=torch.int32).view(-1, width)


def draw_negatives(candidates: torch.Tensor, data: TrainingSet, count: int, seed: list[int]) -> torch.Tensor:
    """
    Draw negatives for each pair of a query and a positive.

    Args:
        candidates: (queries, depth) positions of documents, -1 where there is none.
        data: whose pairs they are drawn for.
        count: how many a pair.
        seed: numbers that decide the draw.

    Returns:
        (pairs, count) int32, different ones in a row. Where a query has too few candidates, random documents that are
        not relevant to it fill up.

    Raises:
        ValueError: if the corpus has too few documents for that.
    """
    if len(data.documents) < count + max(map(len, data.positives)):
        raise ValueError(
            f"The corpus has {len(data.documents)} documents, too few for {count} negatives a query: lower "
            "num_negatives."
        )
    generator = np.random.default_rng(seed)
    drawn = np.empty((len(data.pairs), count), dtype=np.int32)
    sizes = (candidates >= 0).sum(1).tolist()
    table = candidates.numpy()
    for row, (query, _) in enumerate(data.pairs):
        pool = table[query, : sizes[query]]
        picks = generator.choice(pool, min(count, len(pool)), replace=False).tolist() if len(pool) and count else []
        barred = {*picks, *data.positives[query]}
        while len(picks) < count:
            pick = int(generator.integers(len(data.documents)))
            if pick not in barred:
                barred.add(pick)
                picks.append(pick)
        drawn[row] = picks
    return torch.from_numpy(drawn)


def save_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write tensors whole or not at all; in several processes, once."""
    state = PartialState()
    if state.is_main_process:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp")
        save_file({name: value.contiguous() for name, value in tensors.items()}, temporary)
        temporary.replace(path)
    state.wait_for_everyone()


def is_written(path: Path) -> bool:
    """Whether `path` is there, asked by all processes before any of them goes on to write it."""
    there = path.exists()
    PartialState().wait_for_everyone()
    return there


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """What `save_tensors` wrote."""
    return load_file(path)


def spread(count: int, compute, state: PartialState | None = None) -> torch.Tensor:
    """
    Compute rows 0 to count - 1, each process its share, and give every process all of them.

    Args:
        compute: called with the first row and the one behind the last; gives (rows, d), or (0, d) for no rows.
    """
    state = PartialState() if state is None else state
    first, last = _share(count, state)
    own = compute(first, last).to(state.device)
    if state.num_processes == 1:
        return own
    size = -(-count // state.num_processes)
    own = torch.nn.functional.pad(own, (0, 0, 0, size - len(own)))
    return gather(own)[:count]


def _share(count: int, state: PartialState) -> tuple[int, int]:
    size = -(-count // state.num_processes)
    return min(state.process_index * size, count), min((state.process_index + 1) * size, count)


def _encode_share(model, texts: list[str], side: str, batch_size: int, state: PartialState) -> torch.Tensor:
    def compute(first, last):
        if first == last:
            return torch.empty(0, model.encode_query("").shape[-1])
        return encode(model, texts[first:last], side, batch_size, progress=state.is_main_process and None)

    return spread(len(texts), compute, state)


__all__ = [
    "MiningOptions",
    "draw_negatives",
    "is_written",
    "load_tensors",
    "mine",
    "pad_negatives",
    "save_tensors",
    "spread",
]
