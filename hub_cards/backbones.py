"""What a backbone and its tokenizer can take, the same for training, publishing and evaluation."""

from transformers import PreTrainedModel, PreTrainedTokenizerBase


def positions(model: PreTrainedModel) -> int | None:
    """
    How many tokens a model has positions for; `None` where it names no limit.

    RoBERTa's table counts from behind the padding token's row, so its config promises more than it has.
    """
    count = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if count is None or count < 1:
        return None
    table = getattr(getattr(model.base_model, "embeddings", None), "position_embeddings", None)
    padding = getattr(table, "padding_idx", None)
    return count if padding is None else count - padding - 1


def set_pad_token(tokenizer: PreTrainedTokenizerBase) -> None:
    """Give a tokenizer without a padding token one of its own: any will do, since padding is masked."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)


__all__ = ["positions", "set_pad_token"]
