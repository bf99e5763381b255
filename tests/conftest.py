"""Tiny models and texts that the whole suite shares; made once a session, never downloaded."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from pathlib import Path  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402
from transformers import (  # noqa: E402
    BertConfig,
    BertModel,
    BertTokenizerFast,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

WORDS = (
    "the river bank holds a boat and the boat holds a fisher who sells fish at the market near the old bridge while "
    "a train crosses the bridge to the city where the library keeps books on rivers boats trains and markets"
).split()


def make_text(seed: int, sentences: int = 40) -> str:
    """Prose of short sentences over a small vocabulary, the same for a seed."""
    generator = torch.Generator().manual_seed(seed)
    lines = []
    for _ in range(sentences):
        picks = torch.randint(len(WORDS), (9,), generator=generator).tolist()
        lines.append(" ".join(WORDS[index] for index in picks).capitalize() + ".")
    return " ".join(lines)


@pytest.fixture(scope="session")
def tiny_lm_folder(tmp_path_factory) -> Path:
    """A Llama of two layers with its byte-level tokenizer (BOS none, EOS `</s>`, no pad token), as a folder."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator([make_text(seed) for seed in range(5)], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_bert_folder(tmp_path_factory) -> Path:
    """A BERT of two layers with a WordPiece tokenizer, as a folder."""
    folder = tmp_path_factory.mktemp("tiny-bert")
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)] + list(".:,")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(set(WORDS)), *letters]
    vocabulary += [f"##{letter}" for letter in letters]
    vocabulary = list(dict.fromkeys([*vocabulary, "query", "passage"]))
    BertTokenizerFast(vocab={token: index for index, token in enumerate(vocabulary)}).save_pretrained(folder)
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=24,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=256,
        initializer_range=0.1,
    )
    BertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory) -> Path:
    """Forty text files of prose, each a document of about 360 words."""
    folder = tmp_path_factory.mktemp("texts")
    for seed in range(40):
        (folder / f"doc{seed:02d}.txt").write_text(make_text(seed), encoding="utf-8")
    return folder
