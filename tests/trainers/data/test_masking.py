"""What RetroMAE's collator hides: whole words, at the ratio, and the same whoever loads it."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.conftest import make_text
from trainers.data.masking import NumberedExamples, RetroMAECollator, hide_words


def bpe_tokenizer(pre_tokenizer) -> PreTrainedTokenizerFast:
    """A byte-level BPE with RoBERTa's special tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<pad>", "<mask>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=special, initial_alphabet=alphabet)
    backend.train_from_iterator([make_text(0)], trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    names = {"cls_token": "<s>", "sep_token": "</s>", "pad_token": "<pad>", "mask_token": "<mask>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


@pytest.fixture(scope="module", params=["wordpiece", "byte-level", "no words"])
def tokenizer(request, tiny_bert_folder):
    if request.param == "wordpiece":
        return AutoTokenizer.from_pretrained(tiny_bert_folder)
    if request.param == "byte-level":
        return bpe_tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=True))
    # Blanks are part of the tokens, so the tokenizer takes a text for one word.
    return bpe_tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False))


TEXTS = [make_text(seed)[:400] for seed in range(30)] + ["one", "naïve 東京 [MASK] <mask> text"]


def numbered(texts=TEXTS) -> list[dict]:
    return [{"text": text, "position": index} for index, text in enumerate(texts)]


def test_whole_words_are_hidden_and_special_tokens_never(tokenizer):
    collator = RetroMAECollator(tokenizer, max_length=40)
    batch = collator(numbered())
    special = torch.isin(batch["decoder_input_ids"], torch.tensor(tokenizer.all_special_ids))
    hidden = batch["labels"] != -100
    assert not (hidden & (special | (batch["attention_mask"] == 0))).any()
    assert torch.equal(batch["special_tokens_mask"].bool(), special | (batch["attention_mask"] == 0))
    # What is not hidden is as it was, and the labels are the text.
    assert torch.equal(batch["input_ids"][~hidden], batch["decoder_input_ids"][~hidden])
    assert torch.equal(batch["labels"][hidden], batch["decoder_input_ids"][hidden])
    several = 0
    for row in range(len(TEXTS)):
        words = batch["word_ids"][row]
        for word in set(words.tolist()) - {-1}:
            tokens = hidden[row][words == word]
            assert tokens.all() or not tokens.any()
            several += len(tokens) > 1
    assert (several > 0) == collator._knows_words
    assert hidden.any(1).all(), "each text has a word hidden, that of one word as well"
    assert batch["attention_mask"].sum(1).max() == 40


def test_words_are_those_of_the_tokenizer(tiny_bert_folder):
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert_folder)
    text = "boats, unknownword river"
    batch = RetroMAECollator(tokenizer)([{"text": text, "position": 0}])
    expected = [-1 if word is None else word for word in tokenizer(text).word_ids()]
    assert batch["word_ids"][0].tolist() == expected and len(set(expected)) < len(expected)


RATIOS = st.floats(0, 1, exclude_min=True, exclude_max=True)
SEEDS = st.integers(0, 2**63 - 1)


@settings(max_examples=300, deadline=None)
@given(words=st.lists(st.integers(-1, 12), max_size=40), ratio=RATIOS, seed=SEEDS)
@example(words=[-1, -1], ratio=0.5, seed=0)
@example(words=[3, -1, 3, 0], ratio=0.999, seed=1)
def test_any_words_are_hidden_whole_at_the_ratio(words, ratio, seed):
    hidden = hide_words(np.array(words, dtype=int), ratio, np.random.default_rng(seed))
    chosen = {word for word, is_hidden in zip(words, hidden, strict=True) if is_hidden}
    assert [bool(value) for value in hidden] == [word in chosen for word in words]
    assert -1 not in chosen
    count = len(set(words) - {-1})
    assert len(chosen) in ({max(1, math.floor(ratio * count)), max(1, math.ceil(ratio * count))} if count else {0})
    again = hide_words(np.array(words, dtype=int), ratio, np.random.default_rng(seed))
    assert (again == hidden).all()


@pytest.fixture(scope="module")
def wordpiece(tiny_bert_folder):
    return AutoTokenizer.from_pretrained(tiny_bert_folder)


@settings(max_examples=150, deadline=None)
@given(st.data(), RATIOS, st.integers(0, 2**31), st.integers(1, 20))
def test_any_batch_of_token_ids_is_masked_as_promised(wordpiece, data, ratio, seed, max_length):
    """Special tokens may stand anywhere, the mask token among them, and a row may hold nothing else."""
    ids = st.lists(
        st.integers(0, len(wordpiece) - 1) | st.sampled_from(wordpiece.all_special_ids), min_size=1, max_size=30
    )
    examples = data.draw(
        st.lists(st.fixed_dictionaries({"input_ids": ids, "position": SEEDS}), min_size=1, max_size=4)
    )
    collator = RetroMAECollator(wordpiece, max_length, ratio, seed)
    batch = collator(examples)
    text, real = batch["decoder_input_ids"], batch["attention_mask"].bool()
    lengths = [min(len(row["input_ids"]), max_length) for row in examples]
    assert real.sum(1).tolist() == lengths and text.shape == (len(examples), max(lengths))
    assert [row[keep].tolist() for row, keep in zip(text, real, strict=True)] == [
        row["input_ids"][:max_length] for row in examples
    ]
    special = torch.isin(text, torch.tensor(wordpiece.all_special_ids)) | ~real
    assert torch.equal(batch["special_tokens_mask"].bool(), special)
    hidden = batch["labels"] != -100
    assert not (hidden & special).any()
    assert torch.equal(batch["labels"][hidden], text[hidden])
    assert torch.equal(batch["input_ids"][~hidden & real], text[~hidden & real])
    for row, words in zip(hidden, (~special).sum(1).tolist(), strict=True):
        allowed = {max(1, math.floor(ratio * words)), max(1, math.ceil(ratio * words))} if words else {0}
        assert int(row.sum()) in allowed
    for row, one in enumerate(examples):
        alone = collator([one])
        for name, value in alone.items():
            together = batch[name][row]
            assert torch.equal(value[0], together[: lengths[row]] if together.ndim else together), name


@pytest.mark.parametrize("ratio", [0.15, 0.3, 0.5])
def test_ratio_is_met_alike_at_every_position(ratio):
    random, draws = np.random.default_rng(0), 3000
    words = np.array([-1, *range(10), 10, 10, 10, *range(11, 23), -1])
    hidden = np.stack([hide_words(words, ratio, random) for _ in range(draws)])
    share = hidden[:, words >= 0].mean(0)
    deviation = math.sqrt(ratio * (1 - ratio) / draws)
    assert abs(hidden[:, [1, 14, 24]].mean() - ratio) < 3 * deviation
    assert np.abs(share - ratio).max() < 4.5 * deviation
    # A text's own share is the ratio, to a word.
    counts = np.array([len(set(words[row])) for row in hidden])
    assert set(counts) <= {math.floor(ratio * 23), math.ceil(ratio * 23)}
    assert abs(counts.mean() - ratio * 23) < 3 * 0.5 / math.sqrt(draws)


def test_hidden_tokens_are_replaced_in_shares_of_80_10_10(tiny_bert_folder):
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert_folder)
    collator = RetroMAECollator(tokenizer, max_length=100, encoder_mask_ratio=0.5)
    shares, total = np.zeros(3), 0
    for epoch in range(12):
        examples = [{**example, "position": example["position"] + 1000 * epoch} for example in numbered()]
        batch = collator(examples)
        hidden = batch["labels"] != -100
        given, true = batch["input_ids"][hidden], batch["labels"][hidden]
        mask = given == tokenizer.mask_token_id
        shares += [mask.sum(), (~mask & (given != true)).sum(), (given == true).sum()]
        total += len(given)
        others = given[~mask]
        assert not torch.isin(others, torch.tensor(tokenizer.all_special_ids)).any()
    deviations = np.sqrt(np.array([0.16, 0.09, 0.09]) / total)
    # A stranger may happen to be the token itself.
    expected = np.array([0.8, 0.1 * (1 - 1 / len(tokenizer)), 0.1 * (1 + 1 / len(tokenizer))])
    assert (np.abs(shares / total - expected) < 4 * deviations).all(), shares / total


def test_draws_depend_on_seed_and_position_and_not_on_batch_order_or_worker(tiny_bert_folder):
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert_folder)
    collator = RetroMAECollator(tokenizer, max_length=40, seed=3)
    rows = [{"text": text} for text in TEXTS]

    def load(dataset, collate=collator, **options) -> dict[int, tuple]:
        found = {}
        for batch in DataLoader(
            dataset, collate_fn=lambda rows: [(row["position"], collate([row])) for row in rows], **options
        ):
            found |= {position: (one["input_ids"].tolist(), int(one["decoder_seed"])) for position, one in batch}
        return found

    alone = load(NumberedExamples(rows))
    assert load(NumberedExamples(rows), batch_size=5, num_workers=2) == alone
    assert load(NumberedExamples(rows), batch_size=3, shuffle=True) == alone
    together = collator(numbered())
    for index, (ids, seed) in alone.items():
        assert together["input_ids"][index, : len(ids[0])].tolist() == ids[0]
        assert int(together["decoder_seed"][index]) == seed
    other = load(NumberedExamples(rows), RetroMAECollator(tokenizer, max_length=40, seed=4))
    assert sum(other[index] != alone[index] for index in alone) > 25
    later = NumberedExamples(rows)
    later.set_epoch(1)
    assert set(load(later)) == set(range(len(TEXTS), 2 * len(TEXTS)))
    assert sum(a[0] != b[0] for a, b in zip(load(later).values(), alone.values(), strict=True)) > 25


def test_token_ids_may_be_given_in_place_of_texts(tiny_bert_folder):
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert_folder)
    ids = tokenizer("river bank boat river bank")["input_ids"]
    batch = RetroMAECollator(tokenizer, max_length=50)([{"input_ids": ids, "position": 0}])
    assert batch["decoder_input_ids"][0].tolist() == ids
    assert batch["word_ids"][0].tolist() == [-1, *range(1, len(ids) - 1), -1]


def test_what_goes_to_the_device_grows_with_the_length_only(tiny_bert_folder):
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert_folder)
    batch = RetroMAECollator(tokenizer, max_length=200)(numbered())
    shape = batch["input_ids"].shape
    assert {value.shape for value in batch.values()} == {shape, shape[:1]}


def test_tokenizers_and_ratios_that_cannot_be_are_refused(tiny_lm_folder, tiny_bert_folder):
    with pytest.raises(ValueError, match="has no mask token"):
        RetroMAECollator(AutoTokenizer.from_pretrained(tiny_lm_folder))
    with pytest.raises(ValueError, match="`encoder_mask_ratio` must lie between 0 and 1"):
        RetroMAECollator(AutoTokenizer.from_pretrained(tiny_bert_folder), encoder_mask_ratio=1)
