"""Groups of nearest neighbours: what is near ends up together, each chunk once."""

import torch

from trainers.data.neighbours import neighbour_groups


def test_clusters_become_groups():
    centres = torch.eye(6)
    embeddings = torch.nn.functional.normalize(centres.repeat(4, 1) + 0.05 * torch.randn(24, 6), dim=-1)
    groups = neighbour_groups(embeddings, 4, seed=0)
    assert sorted(groups.flatten().tolist()) == list(range(24))
    assert all(len({position % 6 for position in group}) == 1 for group in groups.tolist())


def test_the_nearest_come_first_and_the_seed_decides():
    embeddings = torch.nn.functional.normalize(torch.randn(50, 8), dim=-1)
    groups = neighbour_groups(embeddings, 8, seed=3)
    assert groups.shape == (6, 8) and groups.unique().numel() == 48  # two are left over
    first = groups[0]
    expected = (embeddings @ embeddings[first[0]]).argsort(descending=True)[:8]
    assert first.tolist() == expected.tolist()
    assert torch.equal(groups, neighbour_groups(embeddings, 8, seed=3))
    assert not torch.equal(groups, neighbour_groups(embeddings, 8, seed=4))


def test_too_few_chunks_make_no_group():
    assert neighbour_groups(torch.eye(3), 4, seed=0).shape == (0, 4)
