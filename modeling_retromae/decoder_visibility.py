"""What RetroMAE's decoder sees (arXiv 2205.12035, §3.2-3.3), sampled on the device that trains.

Each example is drawn from a seed of its own and over its own length, so that what it sees depends neither on the
other examples of its batch, nor on their padding, nor on who loaded it.
"""

import torch

# Draws are 16 bits of a generator's 64: a ratio is met to 1/65536, with a quarter of the generator's work.
_LEVELS = 2**16


def sample_visibility(
    attention_mask: torch.Tensor,
    ratio: float,
    seeds: torch.Tensor,
    special_tokens_mask: torch.Tensor,
    word_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    M of Eq. 7: for every row its own sample of the other tokens.

    Each word is hidden from each row with probability `ratio`, all of its tokens together (the authors' collator
    hides a fixed number of words, and lets rows share 128 samples). Special tokens are never hidden by the draw. Then:
    no row sees itself or padding, the first does not see position 0, and every other row does.

    Args:
        attention_mask: (B, L), 1 at real tokens, which come first.
        ratio: share of the words hidden from a row.
        seeds: (B,) int64, one an example.
        special_tokens_mask: (B, L), true at special tokens; what it holds at padding does not matter.
        word_ids: (B, L), equal for neighbours of one word; `None` makes each token a word.

    Returns:
        (B, L, L) bool on the device of `attention_mask`: whether row i sees position j. Padding rows see position 0.
    """
    batch, length = attention_mask.shape
    visible = torch.zeros(batch, length, length, dtype=torch.bool, device=attention_mask.device)
    for row, kept in enumerate(_draws(attention_mask, ratio, seeds, word_ids, per_token=True)):
        real = kept.shape[0]
        # Drawn with words first, so that copying a word to its tokens moves whole rows.
        visible[row, :real, :real] = kept.T
    visible |= special_tokens_mask.bool()[:, None, :]
    visible &= attention_mask.bool()[:, None, :]
    visible[:, :, 0] = True
    visible.diagonal(dim1=1, dim2=2).fill_(False)
    return visible


def sample_hidden(
    attention_mask: torch.Tensor,
    ratio: float,
    seeds: torch.Tensor,
    special_tokens_mask: torch.Tensor,
    word_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    The one mask of basic decoding (§3.2); arguments as in [`sample_visibility`].

    Returns:
        (B, L) bool: whether the decoder's input hides the token, which it is then to predict.
    """
    hidden = torch.zeros(attention_mask.shape, dtype=torch.bool, device=attention_mask.device)
    for row, kept in enumerate(_draws(attention_mask, ratio, seeds, word_ids, per_token=False)):
        hidden[row, : kept.shape[0]] = ~kept[:, 0]
    return hidden & ~special_tokens_mask.bool()


def _draws(attention_mask, ratio, seeds, word_ids, per_token):
    """Per example (n, n) or (n, 1) bool, n its real tokens: whether token j (first) is kept for row i (second)."""
    device = attention_mask.device
    generator = torch.Generator(device=device)
    lengths = attention_mask.sum(-1)
    groups = counts = None
    if word_ids is not None:
        starts = torch.ones_like(word_ids)
        starts[:, 1:] = word_ids[:, 1:] != word_ids[:, :-1]
        groups = starts.cumsum(-1) - 1
        counts = groups.gather(1, (lengths - 1).clamp(min=0)[:, None])[:, 0] + 1
    # One wait for the device, not three an example.
    numbers = torch.stack((lengths, lengths if counts is None else counts, seeds.to(lengths))).tolist()
    threshold = round(ratio * _LEVELS) - _LEVELS // 2
    for row, (length, words, seed) in enumerate(zip(*numbers, strict=True)):
        columns = length if per_token else 1
        bits = torch.empty(-(-words * columns // 4), dtype=torch.int64, device=device)
        bits.random_(torch.iinfo(torch.int64).min, None, generator=generator.manual_seed(seed))
        kept = (bits.view(torch.int16)[: words * columns] >= threshold).view(words, columns)
        yield kept if groups is None else kept.index_select(0, groups[row, :length])


__all__ = ["sample_hidden", "sample_visibility"]
