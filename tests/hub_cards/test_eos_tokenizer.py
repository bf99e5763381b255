"""Tokenizers of several kinds end every text with EOS, and go on doing so from their file."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import ByteLevel, Sequence, TemplateProcessing
from transformers import (
    AutoTokenizer,
    GemmaConfig,
    GemmaTokenizer,
    LlamaConfig,
    LlamaTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2Tokenizer,
    XLMRobertaTokenizer,
)

from hub_cards.eos_tokenizer import append_eos, ends_with_eos

TEXTS = [
    "the boat",
    "A river bank holds a boat, and the boat holds a fisher who sells fish.",
    "x",
    "naïve 東京 🚣",
    " two  spaces\n",
]
CORPUS = [text * 3 for text in TEXTS] + ["the library keeps books on rivers boats trains and markets"] * 3


def train_bpe(special: list[str], pre_tokenizer) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    )
    return tokenizer


def vocabulary_and_merges(tokenizer: Tokenizer) -> dict:
    model = json.loads(tokenizer.to_str())["model"]
    return {"vocab": model["vocab"], "merges": [tuple(pair) for pair in model["merges"]]}


def byte_level():
    backend = train_bpe(["<s>", "</s>"], pre_tokenizers.ByteLevel(add_prefix_space=False))
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"), LlamaConfig()


def llama3():
    """As Llama 3's: byte-level, BOS from a template behind a byte-level post-processor, many special tokens."""
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|eot_id|>"]
    backend = train_bpe(special, pre_tokenizers.ByteLevel(add_prefix_space=False))
    backend.decoder = decoders.ByteLevel()
    bos = TemplateProcessing(
        single="<|begin_of_text|> $A",
        pair="<|begin_of_text|> $A <|begin_of_text|>:1 $B:1",
        special_tokens=[("<|begin_of_text|>", 0)],
    )
    backend.post_processor = Sequence([ByteLevel(trim_offsets=True), bos])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|begin_of_text|>",
        eos_token="<|end_of_text|>",
        extra_special_tokens=["<|start_header_id|>", "<|eot_id|>"],
        model_max_length=131072,
    )
    tokenizer.chat_template = "{{ messages[0].content }}"
    return tokenizer, LlamaConfig()


def llama2():
    """A class of its own, which builds its post-processor anew whenever it is loaded."""
    backend = train_bpe(["<unk>", "<s>", "</s>"], pre_tokenizers.Metaspace())
    return LlamaTokenizer(**vocabulary_and_merges(backend), add_bos_token=True), LlamaConfig()


def gemma():
    backend = train_bpe(["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"], pre_tokenizers.Metaspace())
    return GemmaTokenizer(**vocabulary_and_merges(backend), add_bos_token=True), GemmaConfig()


def qwen2():
    backend = train_bpe(["<|endoftext|>", "<|im_end|>"], pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer = Qwen2Tokenizer(**vocabulary_and_merges(backend), pad_token="<|endoftext|>", eos_token="<|im_end|>")
    return tokenizer, Qwen2Config()


def unigram():
    """As sentencepiece makes them."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    special = ["<unk>", "<s>", "</s>"]
    backend.train_from_iterator(
        CORPUS, trainers.UnigramTrainer(vocab_size=120, special_tokens=special, unk_token="<unk>")
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>"), LlamaConfig()


KINDS = [byte_level, llama3, llama2, gemma, qwen2, unigram]


@pytest.fixture(scope="module", params=KINDS, ids=lambda make: make.__name__)
def made(request, tmp_path_factory):
    """(a tokenizer as it comes, the same with EOS, the latter from its file beside the model's config)"""
    tokenizer, config = request.param()
    folder = tmp_path_factory.mktemp(request.param.__name__)
    tokenizer.save_pretrained(folder / "backbone")
    config.save_pretrained(folder / "backbone")
    plain = AutoTokenizer.from_pretrained(folder / "backbone")
    with_eos = append_eos(AutoTokenizer.from_pretrained(folder / "backbone"))
    for name, current in (
        ("once", lambda: with_eos),
        ("twice", lambda: AutoTokenizer.from_pretrained(folder / "once")),
    ):
        current().save_pretrained(folder / name)
        config.save_pretrained(folder / name)
    return plain, with_eos, AutoTokenizer.from_pretrained(folder / "twice")


def test_eos_is_added_to_what_the_tokenizer_made_before_a_reload_and_after(made):
    plain, with_eos, reloaded = made
    assert not ends_with_eos(plain) and ends_with_eos(with_eos) and ends_with_eos(reloaded)
    for text in TEXTS:
        expected = [*plain(text)["input_ids"], plain.eos_token_id]
        assert with_eos(text)["input_ids"] == expected, text
        assert reloaded(text)["input_ids"] == expected, text
        assert reloaded(text)["attention_mask"] == [1] * len(expected)
        mask = plain(text, return_special_tokens_mask=True)["special_tokens_mask"]
        assert reloaded(text, return_special_tokens_mask=True)["special_tokens_mask"] == [*mask, 1]


def test_truncated_text_ends_with_eos_and_begins_as_before(made):
    plain, _, reloaded = made
    for length in (4, 7):
        expected = [*plain(TEXTS[1])["input_ids"][: length - 1], plain.eos_token_id]
        assert reloaded(TEXTS[1], truncation=True, max_length=length)["input_ids"] == expected


def test_last_real_token_of_a_padded_batch_is_eos(made):
    _, with_eos, reloaded = made
    for tokenizer in (with_eos, reloaded):
        batch = tokenizer(TEXTS, padding=True, truncation=True, max_length=9, return_tensors="pt")
        last = batch["attention_mask"].sum(1) - 1
        assert (batch["input_ids"][range(len(TEXTS)), last] == tokenizer.eos_token_id).all()
        assert "token_type_ids" not in batch
        assert tokenizer.pad_token is not None and tokenizer.padding_side == "right"


def test_offsets_and_decoding_are_those_of_before(made):
    plain, _, reloaded = made
    for text in TEXTS:
        before = plain(text, return_offsets_mapping=True)["offset_mapping"]
        assert reloaded(text, return_offsets_mapping=True)["offset_mapping"] == [*before, (0, 0)]
        ids = plain(text)["input_ids"]
        decoded = plain.decode(ids, skip_special_tokens=True)
        assert reloaded.decode([*ids, plain.eos_token_id], skip_special_tokens=True) == decoded


def test_second_time_changes_nothing(made):
    _, with_eos, reloaded = made
    for text in TEXTS:
        assert append_eos(reloaded)(text)["input_ids"] == with_eos(text)["input_ids"]


def test_special_tokens_length_and_chat_template_stay(made):
    plain, _, reloaded = made
    kept = {name: value for name, value in plain.special_tokens_map.items() if name != "pad_token"}
    assert kept.items() <= reloaded.special_tokens_map.items()
    assert reloaded.all_special_ids == [*plain.all_special_ids] or plain.pad_token is None
    assert reloaded.model_max_length == plain.model_max_length
    assert reloaded.get_vocab() == plain.get_vocab()
    assert reloaded.chat_template == plain.chat_template


def test_special_tokens_in_the_middle_stay_one_token():
    tokenizer, _ = llama3()
    ids = append_eos(tokenizer)("a<|eot_id|>b")["input_ids"]
    assert (ids[0], ids[2], ids[-1]) == (0, 3, 1) and len(ids) == 5


def test_added_tokens_are_kept(tmp_path):
    tokenizer, _ = byte_level()
    tokenizer.add_tokens(["<code>", "fisher"])
    expected = [*tokenizer("<code>a fisher")["input_ids"], tokenizer.eos_token_id]
    append_eos(tokenizer).save_pretrained(tmp_path)
    reloaded = AutoTokenizer.from_pretrained(tmp_path)
    assert reloaded("<code>a fisher")["input_ids"] == expected and len(reloaded) == len(tokenizer)


def test_pair_of_texts_ends_both(made):
    _, with_eos, _ = made
    first, second = (with_eos(text)["input_ids"] for text in TEXTS[:2])
    assert with_eos(*TEXTS[:2])["input_ids"] == [*first, *second]


@pytest.mark.parametrize("make", [lambda: byte_level()[0], lambda: LlamaTokenizer(add_eos_token=True)])
def test_what_is_cut_is_the_end_and_not_the_prompt(make):
    tokenizer = make()
    whole = [id for id in tokenizer("query: " + TEXTS[1])["input_ids"] if id != tokenizer.eos_token_id]
    tokenizer.truncation_side = tokenizer.padding_side = "left"
    cut = append_eos(tokenizer)("query: " + TEXTS[1], truncation=True, max_length=8)["input_ids"]
    assert cut == [*whole[:7], tokenizer.eos_token_id]


@pytest.mark.parametrize("make", [lambda: LlamaTokenizer(add_eos_token=True), XLMRobertaTokenizer])
def test_tokenizer_that_ends_with_eos_already_stays_as_it_is(make, tmp_path):
    tokenizer = make()
    expected = tokenizer("a b")["input_ids"]
    assert expected[-1] == tokenizer.eos_token_id
    finished = append_eos(tokenizer)
    assert finished is tokenizer
    finished.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)("a b")["input_ids"] == expected


def test_tokenizers_that_cannot_end_with_eos_are_refused(tiny_bert_folder):
    with pytest.raises(ValueError, match="no EOS token.*cls or mean"):
        append_eos(AutoTokenizer.from_pretrained(tiny_bert_folder))
    from transformers import ByT5Tokenizer

    with pytest.raises(ValueError, match="ByT5Tokenizer is no fast tokenizer"):
        append_eos(ByT5Tokenizer())
