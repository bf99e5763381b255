"""Tokenizers that append EOS by themselves, which an EOS-pooled retriever depends on."""

from tokenizers.processors import Sequence, TemplateProcessing
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


def append_eos(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """
    Make a fast tokenizer end every text with EOS, truncated text included, and keep doing so after a reload.

    EOS goes into the tokenizer's own post-processor, so that sentence-transformers, vLLM and plain transformers all
    append it without being told. Padding goes to the right, with EOS where there is no padding token.

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
    eos, eos_id = tokenizer.eos_token, tokenizer.eos_token_id
    if eos is None:
        raise ValueError("The tokenizer has no EOS token: set `tokenizer.eos_token`, or choose cls or mean pooling.")
    if ends_with_eos(tokenizer):
        return _finish(tokenizer)
    backend = tokenizer.backend_tokenizer
    template = TemplateProcessing(single=f"$A {eos}", pair=f"$A {eos} $B:1 {eos}:1", special_tokens=[(eos, eos_id)])
    backend.post_processor = (
        template if backend.post_processor is None else Sequence([backend.post_processor, template])
    )
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


def ends_with_eos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer appends EOS by itself."""
    ids = tokenizer("a")["input_ids"]
    return bool(ids) and ids[-1] == tokenizer.eos_token_id


def _finish(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    tokenizer.padding_side = "right"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


__all__ = ["append_eos", "ends_with_eos"]
