"""Groups of chunks that resemble each other, which are harder to tell apart than chunks drawn at random."""

import torch


def neighbour_groups(embeddings: torch.Tensor, group_size: int, seed: int) -> torch.Tensor:
    """
    Cut chunks into groups of nearest neighbours: one drawn at random with those nearest to it, of what is left.

    Args:
        embeddings: (N, d) float32, L2-normalised.
        group_size: chunks a group, B.
        seed: of the order in which chunks are drawn.

    Returns:
        (N // B, B) int64 positions, each at most once, the drawn chunk first and its nearest next.
    """
    order = torch.randperm(len(embeddings), generator=torch.Generator().manual_seed(seed)).tolist()
    taken = torch.zeros(len(embeddings), dtype=torch.bool)
    groups = []
    for first in order:
        if len(groups) == len(embeddings) // group_size:
            break
        if taken[first]:
            continue
        cosines = (embeddings @ embeddings[first]).masked_fill(taken, -torch.inf)
        cosines[first] = torch.inf
        group = cosines.topk(group_size).indices
        taken[group] = True
        groups.append(group)
    return torch.stack(groups) if groups else torch.empty(0, group_size, dtype=torch.int64)


__all__ = ["neighbour_groups"]
