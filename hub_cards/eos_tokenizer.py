"""Tokenizers that append EOS by themselves, which an EOS-pooled retriever depends on."""

import json
import os

from tokenizers.processors import ByteLevel, Sequence, TemplateProcessing
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


def append_eos(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """
    Make a fast tokenizer end every text with EOS, truncated text included, and keep doing so after a reload.

    EOS goes into the tokenizer's own post-processor, so that sentence-transformers, vLLM and plain transformers all
    append it without being told. What it adds already, BOS for one, stays. Padding goes to the right, with EOS where
    there is no padding token, and truncation cuts on the right, as prompts stand on the left.

    Args:
        tokenizer: changed in place where it already is a plain fast tokenizer.

    Returns:
        The tokenizer to use and to save.

    Raises:
        ValueError: for a tokenizer without EOS, or one that is not fast.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} is no fast tokenizer, and only those carry EOS in their file: convert it, or "
            "use a backbone that has one (a `tokenizer.json`)."
        )
    if tokenizer.eos_token is None:
        raise ValueError("The tokenizer has no EOS token: set `tokenizer.eos_token`, or choose cls or mean pooling.")
    if ends_with_eos(tokenizer):
        return _finish(tokenizer)
    backend = tokenizer.backend_tokenizer
    backend.post_processor = _with_eos(tokenizer)
    # A model's own tokenizer class rebuilds its post-processor when loaded; the plain class keeps what the file says.
    special = {name: value for name, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
    if tokenizer.extra_special_tokens:
        special["extra_special_tokens"] = list(tokenizer.extra_special_tokens)
    plain = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=tokenizer.model_max_length,
        model_input_names=[name for name in tokenizer.model_input_names if name != "token_type_ids"],
        **special,
    )
    plain.chat_template = getattr(tokenizer, "chat_template", None)
    plain.name_or_path = tokenizer.name_or_path
    return _finish(plain)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: str | os.PathLike) -> None:
    """Write a tokenizer without the truncation and padding of its last call, which its file would carry on."""
    if tokenizer.is_fast:
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
    # What an earlier file carried on.
    for name in ("max_length", "stride", "truncation_strategy", "is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(name, None)
    tokenizer.save_pretrained(folder)


def _with_eos(tokenizer: PreTrainedTokenizerBase) -> Sequence:
    """A post-processor that adds what the tokenizer's own adds, and EOS."""
    # One template for all: of two in a row the second takes the first one's BOS for the text.
    probe = tokenizer("a", return_special_tokens_mask=True)
    ids, added = probe["input_ids"], probe["special_tokens_mask"]
    first, last = added.index(0), len(added) - added[::-1].index(0)
    before = list(zip(tokenizer.convert_ids_to_tokens(ids[:first]), ids[:first], strict=True))
    after = list(zip(tokenizer.convert_ids_to_tokens(ids[last:]), ids[last:], strict=True))
    after.append((tokenizer.eos_token, tokenizer.eos_token_id))
    single, second = (
        [*(f"{token}:{kind}" for token, _ in before), f"{text}:{kind}", *(f"{token}:{kind}" for token, _ in after)]
        for kind, text in enumerate(("$A", "$B"))
    )
    template = TemplateProcessing(single=single, pair=[*single, *second], special_tokens=[*before, *after])
    return Sequence([*_byte_level(tokenizer.backend_tokenizer.post_processor), template])


def _byte_level(post_processor) -> list[ByteLevel]:
    """The parts of a post-processor that add no token but correct the offsets of byte-level tokens."""
    state = {} if post_processor is None else json.loads(post_processor.__getstate__())
    parts = state.get("processors", [state])
    return [ByteLevel(trim_offsets=part["trim_offsets"]) for part in parts if part.get("type") == "ByteLevel"]


def ends_with_eos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer appends EOS by itself."""
    ids = tokenizer("a")["input_ids"]
    return bool(ids) and ids[-1] == tokenizer.eos_token_id


def _finish(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    tokenizer.padding_side = tokenizer.truncation_side = "right"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


__all__ = ["append_eos", "ends_with_eos", "save_tokenizer"]
