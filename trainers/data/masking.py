"""Texts -> the tensors of a RetroMAE step: whole words hidden from the encoder (arXiv 2205.12035, §3.1)."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase


class NumberedExamples(Dataset):
    """
    A dataset whose row i also says its `position`, epoch · rows + i.

    [`RetroMAECollator`] seeds an example's masks with it: a text is masked anew in every epoch, and alike in whatever
    order, batch, worker or process it is read, so that a resumed run or one of more processes sees the same masks.

    Args:
        rows: a `datasets.Dataset`, or a list of dicts; each must be a mapping without the key `position`.
    """

    def __init__(self, rows):
        self.rows = rows
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Has positions count from `epoch` · rows on; the trainer calls it before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self.rows[index], "position": self.epoch * len(self.rows) + index}


@dataclass
class RetroMAECollator:
    """
    Tokenise texts for `RetroMAEForPreTraining` and hide words from its encoder.

    The words are those of the tokenizer (its `word_ids`, so of any fast tokenizer); each has the same chance, and a
    text of W words has ratio · W of them hidden, rounded up or down at random, but at least one. Of the hidden tokens
    80% become the mask token, 10% a random one and 10% stay, as in the authors' collator, which counts tokens where
    this counts words. What the decoder sees is drawn from `decoder_seed` by the model: all that is sent here is O(L).

    Args:
        tokenizer: a fast one, with a mask token.
        max_length: tokens a text may have, special tokens included.
        encoder_mask_ratio: share of the words hidden.
        seed: with an example's `position` it fixes every draw, whichever worker makes it.

    Raises:
        ValueError: for a tokenizer that is not fast or has no mask token, or a ratio outside (0, 1).
    """

    tokenizer: PreTrainedTokenizerBase
    max_length: int = 512
    encoder_mask_ratio: float = 0.3
    seed: int = 0

    def __post_init__(self):
        name = type(self.tokenizer).__name__
        if not self.tokenizer.is_fast:
            raise ValueError(
                f"{name} is no fast tokenizer, so it cannot say which tokens make a word: load a fast one."
            )
        if self.tokenizer.mask_token_id is None:
            raise ValueError(f"{name} has no mask token: RetroMAE starts from an encoder trained as a masked LM.")
        if not 0 < self.encoder_mask_ratio < 1:
            raise ValueError(
                f"`encoder_mask_ratio` must lie between 0 and 1, both excluded, not {self.encoder_mask_ratio}."
            )
        # Some tokenizers do not cut at blanks before they look for tokens: to them a text is one word.
        self._knows_words = len(set(self.tokenizer("one two three", add_special_tokens=False).word_ids())) > 1
        self._special = np.array(self.tokenizer.all_special_ids)
        self._ordinary = np.setdiff1d(np.arange(len(self.tokenizer)), self._special)
        # Padding is masked wherever it matters, so any token will do.
        self._padding = self.tokenizer.pad_token_id or 0

    def __call__(self, examples: list[dict]) -> dict[str, torch.Tensor]:
        """
        Args:
            examples: each with `text`, or with `input_ids` (special tokens included; each token is then a word of its
                own), and with `position`, its number in the training stream ([`NumberedExamples`]).

        Returns:
            `input_ids` (masked), `attention_mask`, `labels`, `decoder_input_ids` (the text), `special_tokens_mask`,
            `word_ids` (-1 at special tokens and padding): (B, L), padded on the right; `decoder_seed` (B,); all int64.
        """
        encoded = self._encode(examples)
        shape = len(encoded), max(len(ids) for ids, _ in encoded)
        batch = {
            "input_ids": np.full(shape, self._padding),
            "attention_mask": np.zeros(shape, dtype=np.int64),
            "labels": np.full(shape, -100),
            "decoder_input_ids": np.full(shape, self._padding),
            "special_tokens_mask": np.ones(shape, dtype=np.int64),
            "word_ids": np.full(shape, -1),
            "decoder_seed": np.zeros(len(encoded), dtype=np.int64),
        }
        for row, ((ids, words), example) in enumerate(zip(encoded, examples, strict=True)):
            random = np.random.default_rng((self.seed, example["position"]))
            hidden = hide_words(words, self.encoder_mask_ratio, random)
            place = np.s_[row, : len(ids)]
            batch["input_ids"][place] = self._replace(ids, hidden, random)
            batch["attention_mask"][place] = 1
            batch["labels"][place] = np.where(hidden, ids, -100)
            batch["decoder_input_ids"][place] = ids
            batch["special_tokens_mask"][place] = words < 0
            batch["word_ids"][place] = words
            batch["decoder_seed"][row] = random.integers(2**63 - 1)
        return {name: torch.from_numpy(values) for name, values in batch.items()}

    def _encode(self, examples: list[dict]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Token ids (n,) of each example, and which of its words each belongs to (n,), -1 at special tokens."""
        if "input_ids" in examples[0]:
            tokens = [np.asarray(example["input_ids"])[: self.max_length] for example in examples]
            words = [np.arange(len(ids)) for ids in tokens]
        else:
            encoded = self.tokenizer(
                [example["text"] for example in examples], truncation=True, max_length=self.max_length
            )
            tokens = [np.asarray(ids) for ids in encoded["input_ids"]]
            words = [
                np.array([-1 if word is None else word for word in encoded.word_ids(row)])
                if self._knows_words
                else np.arange(len(ids))
                for row, ids in enumerate(tokens)
            ]
        # A special token's name may also stand in the text itself.
        return [
            (ids, np.where(np.isin(ids, self._special), -1, word)) for ids, word in zip(tokens, words, strict=True)
        ]

    def _replace(self, ids: np.ndarray, hidden: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """80% of the hidden tokens become the mask token, 10% a random one that is not special, the rest stay."""
        kind = random.random(len(ids))
        strangers = self._ordinary[random.integers(len(self._ordinary), size=len(ids))]
        replaced = np.where(kind < 0.8, self.tokenizer.mask_token_id, np.where(kind < 0.9, strangers, ids))
        return np.where(hidden, replaced, ids)


def hide_words(words: np.ndarray, ratio: float, random: np.random.Generator) -> np.ndarray:
    """
    Choose words of one text, each with the same chance.

    Args:
        words: (n,), the word of each token, -1 where there is none to hide.
        ratio: share of the words to choose; at least one is.

    Returns:
        (n,) bool, true at every token of a chosen word.
    """
    names = np.unique(words[words >= 0])
    if not len(names):
        return np.zeros(len(words), dtype=bool)
    # Rounded at random, so that short texts meet the ratio on average.
    count = max(1, int(ratio * len(names) + random.random()))
    chosen = np.zeros(names[-1] + 2, dtype=bool)  # The last place, where -1 points, stays false.
    chosen[random.permutation(names)[:count]] = True
    return chosen[words]


__all__ = ["NumberedExamples", "RetroMAECollator", "hide_words"]
