"""Whether a model, its tokenizer and the lengths that are asked for go together; each error names the setting."""

import logging
from collections.abc import Iterable

from accelerate import PartialState
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hub_cards.backbones import positions


def say_once(message: str) -> None:
    """Log a warning, of all processes in the first."""
    if PartialState().is_main_process:
        logging.getLogger("trainers").warning(message)


def leave_casting_to_autocast(model: nn.Module) -> None:
    """
    Have LoRA's layers take their inputs as they are, in place.

    Autocast casts what a product needs; peft's own cast, to the adapters' float32, would copy every input twice.
    """
    for module in model.modules():
        if hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = False


def room_taken(tokenizer: PreTrainedTokenizerBase, prompts: Iterable[str] = ("",)) -> int:
    """How many tokens the longest of the prompts takes, special tokens included."""
    return max(len(tokenizer(prompt)["input_ids"]) for prompt in prompts)


def check_room(name: str, length: int, taken: int) -> None:
    """Raises ValueError if of `length` tokens, the setting `name`, all are taken by a prompt and special tokens."""
    if length <= taken:
        raise ValueError(
            f"`{name}` is {length}, and prompt and special tokens take {taken} tokens, so nothing of a text would "
            "be left: raise it."
        )


def check_positions(name: str, length: int, model: PreTrainedModel) -> None:
    """Raises ValueError if a model has positions for fewer than `length` tokens, the setting `name`."""
    most = positions(model)
    if most is not None and length > most:
        raise ValueError(f"`{name}` is {length}, but {model.name_or_path} has positions for {most} tokens: lower it.")


def fit_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, is_trained: bool) -> None:
    """
    Give each token of the tokenizer a row of the embeddings; new ones begin near the mean, as in transformers.

    Args:
        model: resized in place, output layer and config included, where it has too few rows.
        tokenizer: its own, perhaps with tokens that were added.
        is_trained: whether its embeddings are trained.

    Raises:
        ValueError: for rows that are missing and would not be trained.
    """
    rows = model.get_input_embeddings().num_embeddings
    tokens = max(tokenizer.get_vocab().values()) + 1
    if tokens <= rows:
        return
    what = f"The tokenizer of {tokenizer.name_or_path} has {tokens} tokens, and the model embeddings for {rows}"
    if not is_trained:
        raise ValueError(
            f"{what}: the rest would stay as it begins, for the embeddings are frozen (LoRA, freeze_lm, a teacher). "
            "Train all weights, or take a model whose embeddings fit."
        )
    model.resize_token_embeddings(tokens)
    say_once(f"{what}: the new ones begin near the mean of the others.")


__all__ = ["check_positions", "check_room", "fit_vocabulary", "room_taken", "say_once"]
