"""Exact nearest neighbours of embeddings, and embeddings standardised per dimension."""

import numpy as np
import torch


def as_tensor(embeddings) -> torch.Tensor:
    """Float32 CPU tensor (N, d) of a (N, d) array or tensor; raises ValueError on other shapes and on NaN."""
    tensor = torch.as_tensor(np.asarray(embeddings) if isinstance(embeddings, list) else embeddings)
    tensor = tensor.detach().to("cpu", torch.float32)
    if tensor.ndim != 2:
        raise ValueError(f"Embeddings must be of shape (texts, dimensions), not {tuple(tensor.shape)}.")
    if not torch.isfinite(tensor).all():
        raise ValueError("The model gave embeddings with NaN or infinite values; nothing can be ranked with them.")
    return tensor


def standardise(queries, documents) -> tuple[torch.Tensor, torch.Tensor]:
    """Standardises embeddings per dimension with the documents' mean and deviation, then L2-normalises them.

    A free repair of an untrained backbone, whose embeddings share one large direction and so have cosines near 1:
    the baseline that training must beat.

    Args:
        queries: (Q, d) embeddings.
        documents: (N, d) embeddings, N >= 2; mean and standard deviation are theirs alone.

    Returns:
        Two float32 tensors of the same shapes, rows of length 1.
    """
    queries, documents = as_tensor(queries), as_tensor(documents)
    if len(documents) < 2:
        raise ValueError("Standardising needs the embeddings of at least two documents.")
    mean, std = documents.mean(0), documents.std(0)
    # A dimension that never varies holds no information; left in, rounding noise would be blown up to unit scale.
    scale = torch.where(std > 1e-6 * documents.abs().max(), 1 / std, torch.zeros_like(std))
    return tuple(torch.nn.functional.normalize((side - mean) * scale, dim=-1) for side in (queries, documents))


def top_k(queries, documents, k: int, chunk_size: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    """The k documents of largest inner product for each query, exactly, by matrix products in chunks of queries.

    Args:
        queries: (Q, d) embeddings.
        documents: (N, d) embeddings.
        k: how many; min(k, N) are returned.
        chunk_size: queries a matrix product; the largest matrix held is chunk_size x N float32.

    Returns:
        Scores (Q, k) float32 in falling order and document indices (Q, k) int64.
    """
    queries, documents = as_tensor(queries), as_tensor(documents)
    k = min(k, len(documents))
    scores, indices = torch.empty(len(queries), k), torch.empty(len(queries), k, dtype=torch.long)
    for start in range(0, len(queries), chunk_size):
        chunk = slice(start, start + chunk_size)
        scores[chunk], indices[chunk] = (queries[chunk] @ documents.T).topk(k, dim=1)
    return scores, indices
