import pytest
import torch

from hub_cards.ranking import as_tensor, standardise, top_k


def test_top_k_is_exact_in_any_chunk_size():
    generator = torch.Generator().manual_seed(0)
    queries, documents = torch.randn(7, 5, generator=generator), torch.randn(23, 5, generator=generator)
    expected = (queries @ documents.T).sort(dim=1, descending=True)
    for chunk_size in (1, 3, 100):
        scores, indices = top_k(queries, documents, 4, chunk_size=chunk_size)
        torch.testing.assert_close(scores, expected.values[:, :4])
        assert torch.equal(indices, expected.indices[:, :4])


def test_top_k_never_gives_more_than_there_are():
    scores, indices = top_k(torch.eye(3), torch.eye(3), 10, chunk_size=2)
    assert indices.shape == scores.shape == (3, 3)
    assert indices[:, 0].tolist() == [0, 1, 2]


def test_standardise_by_hand():
    documents = [[1.0, 10.0], [3.0, 10.0], [2.0, 16.0]]
    queries = [[4.0, 12.0]]
    # Means 2 and 12; deviations 1 and sqrt(12): the documents become (-1, -2/s), (1, -2/s), (0, 4/s).
    s = 12**0.5
    side = (1 + 4 / 12) ** 0.5
    found_queries, found_documents = standardise(queries, documents)
    expected = [[-1 / side, -2 / s / side], [1 / side, -2 / s / side], [0.0, 1.0]]
    torch.testing.assert_close(found_documents, torch.tensor(expected))
    torch.testing.assert_close(found_queries, torch.tensor([[1.0, 0.0]]))


def test_standardise_drops_a_constant_dimension():
    documents = torch.tensor([[1.0, 0.3], [2.0, 0.3], [4.0, 0.3 + 3e-8]])
    queries, documents = standardise(torch.tensor([[2.0, 9.0]]), documents)
    assert torch.equal(documents[:, 1], torch.zeros(3)) and queries[0, 1] == 0


def test_standardise_repairs_a_shared_direction():
    generator = torch.Generator().manual_seed(1)
    documents = torch.randn(200, 16, generator=generator)
    shared = 30 * torch.ones(16)
    queries = documents + 0.3 * torch.randn(200, 16, generator=generator)
    raw = torch.nn.functional.normalize(documents + shared, dim=1)
    assert (raw @ raw.T).mean() > 0.99
    found = top_k(*standardise(queries + shared, documents + shared), 1)[1][:, 0]
    assert (found == torch.arange(200)).float().mean() > 0.95


def test_bad_embeddings_are_errors():
    with pytest.raises(ValueError, match="NaN or infinite"):
        as_tensor(torch.tensor([[float("nan")]]))
    with pytest.raises(ValueError, match=r"not \(3,\)"):
        as_tensor(torch.zeros(3))
    with pytest.raises(ValueError, match="at least two documents"):
        standardise(torch.zeros(1, 2), torch.zeros(1, 2))
