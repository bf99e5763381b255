"""
Examples masked a second on one core: ours against a plain Python implementation of the same sampling.

    python benchmarks/masking.py --out benchmarks/masking.md

An example is a row of token ids whose words are known, so that tokenisation is part of neither. Both ways hide whole
words from the encoder, replace them in shares of 80/10/10, and draw for every row of the enhanced decoder which words
it sees (arXiv 2205.12035, §3.1 and Eq. 7): the collator of `trainers/data/masking.py` with `sample_visibility` of
`modeling_retromae`, and loops over the same steps. Both ways run in turns in one process, the fastest turn counts.
"""

import argparse
import random
import time
from functools import partial

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.report import machine, report
from modeling_retromae.decoder_visibility import sample_visibility
from trainers.data.masking import RetroMAECollator

ENCODER_RATIO, DECODER_RATIO, VOCABULARY, BATCH = 0.3, 0.5, 30_522, 16


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A vocabulary of BERT's size; nothing is tokenised with it."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = {word: index for index, word in enumerate([*special, *(f"w{i}" for i in range(VOCABULARY - 5))])}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, mask_token="[MASK]", **names)


def make_examples(length: int, tokenizer) -> list[dict]:
    generator = np.random.default_rng(0)
    middle = generator.integers(5, VOCABULARY, size=(BATCH, length - 2))
    rows = np.pad(middle, ((0, 0), (1, 1)), constant_values=(tokenizer.cls_token_id, 0))
    rows[:, -1] = tokenizer.sep_token_id
    return [{"input_ids": row.tolist(), "position": index} for index, row in enumerate(rows)]


def ours(examples: list[dict], collator: RetroMAECollator) -> int:
    batch = collator(examples)
    visible = sample_visibility(
        batch["attention_mask"],
        DECODER_RATIO,
        batch["decoder_seed"],
        batch["special_tokens_mask"],
        batch["word_ids"],
    )
    return int(visible[:, 1, 0].sum())


def plain(examples: list[dict], tokenizer) -> int:
    """The same sampling, a token and a row at a time."""
    special = set(tokenizer.all_special_ids)
    seen = 0
    for example in examples:
        ids, rng = example["input_ids"], random.Random(example["position"])
        words = [-1 if token in special else index for index, token in enumerate(ids)]
        names = sorted(set(words) - {-1})
        hidden = set(rng.sample(names, max(1, int(ENCODER_RATIO * len(names) + rng.random()))))
        masked, labels = [], []
        for token, word in zip(ids, words, strict=True):
            if word in hidden:
                kind = rng.random()
                labels.append(token)
                token = (
                    tokenizer.mask_token_id if kind < 0.8 else rng.randrange(5, VOCABULARY) if kind < 0.9 else token
                )
            else:
                labels.append(-100)
            masked.append(token)
        visible = []
        for row in range(len(ids)):
            unseen = {name for name in names if rng.random() < DECODER_RATIO}
            sees = []
            for column, word in enumerate(words):
                if column == 0:
                    sees.append(row != 0)
                else:
                    sees.append(column != row and word not in unseen)
            visible.append(sees)
        batch = torch.tensor(masked), torch.tensor(labels), torch.tensor(visible)
        seen += int(batch[2][1, 0])
    return seen


def rate(function, seconds: float) -> float:
    """Examples a second of the fastest of the calls that fit into `seconds`; at least two."""
    function()
    best, end = float("inf"), time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - start)
        if time.perf_counter() > end:
            return BATCH / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[128, 512], help="tokens of an example (%(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=5, help="a turn of either way (%(default)s)")
    parser.add_argument("--out", help="Markdown file to write the table to, with the command")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    collator = RetroMAECollator(tokenizer, encoder_mask_ratio=ENCODER_RATIO)
    lines = ["| tokens | plain Python, examples a second | ours | times faster |", "| --- | --- | --- | --- |"]
    for length in options.lengths:
        examples = make_examples(length, tokenizer)
        ways = {"plain": partial(plain, examples, tokenizer), "ours": partial(ours, examples, collator)}
        rates = dict.fromkeys(ways, 0.0)
        for _ in range(2):
            for name, function in ways.items():
                rates[name] = max(rates[name], rate(function, options.seconds))
        lines.append(
            f"| {length} | {rates['plain']:.1f} | {rates['ours']:.0f} | {rates['ours'] / rates['plain']:.0f} |"
        )
    text = "\n".join(lines) + f"\n\nOne core of {machine()}."
    report("Masking, ours against plain Python", text, options.out)


if __name__ == "__main__":
    main()
