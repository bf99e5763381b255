"""Configuration of a RetroMAE pre-training checkpoint."""

from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

DECODINGS = ("enhanced", "basic")
DECODER_QUERIES = ("position", "embeddings")
POOLINGS = ("cls", "mean")


class RetroMAEConfig(PreTrainedConfig):
    r"""
    Configuration of [`RetroMAEForPreTraining`] (arXiv 2205.12035).

    Args:
        encoder_config (`PreTrainedConfig` or `dict`, *optional*):
            Configuration of the encoder, which is a stock model with a masked-LM head.
        encoder_name_or_path (`str`, *optional*): where the encoder came from.
        decoding (`str`, defaults to `"enhanced"`):
            `"enhanced"` (§3.3): every token is predicted, each from a sample of the others of its own. `"basic"`
            (§3.2): the tokens that one mask hides are predicted from the rest.
        decoder_layers (`int`, defaults to 1): 1 for enhanced decoding, 1 to 3 for basic decoding.
        decoder_query (`str`, defaults to `"position"`):
            What enhanced decoding asks with: `"position"` adds a position embedding to the sentence embedding (Eq. 4);
            `"embeddings"` passes the sentence embedding through the encoder's whole embedding layer, normalisation
            included, as the authors' DupMAE does.
        encoder_mask_ratio (`float`, defaults to 0.3), decoder_mask_ratio (`float`, defaults to 0.5):
            Share of the words hidden from either half; the paper takes 0.15 to 0.3 and 0.5 to 0.7.
        bow_loss_weight (`float`, defaults to 0):
            Weight of DupMAE's bag-of-words loss, which lets the other tokens' states, too, tell what the text says.
            The authors' code takes 0.1.
        pooling (`str`, defaults to `"cls"`): the sentence embedding is the `"cls"` state or the `"mean"` of all.
        mask_token_id (`int`, *optional*): what basic decoding puts in place of a hidden token.

    Raises:
        ValueError: for a value outside its range, naming the field.
    """

    model_type = "retromae"

    def __init__(
        self,
        encoder_config: PreTrainedConfig | dict[str, Any] | None = None,
        encoder_name_or_path: str | None = None,
        decoding: str = "enhanced",
        decoder_layers: int = 1,
        decoder_query: str = "position",
        encoder_mask_ratio: float = 0.3,
        decoder_mask_ratio: float = 0.5,
        bow_loss_weight: float = 0.0,
        pooling: str = "cls",
        mask_token_id: int | None = None,
        **kwargs,
    ):
        if encoder_config is not None:
            require_stock(encoder_config)
        if isinstance(encoder_config, dict):
            encoder_config = dict(encoder_config)
            encoder_config = AutoConfig.for_model(encoder_config.pop("model_type"), **encoder_config)
        self.encoder_config = encoder_config
        self.encoder_name_or_path = encoder_name_or_path
        self.decoding = decoding
        self.decoder_layers = decoder_layers
        self.decoder_query = decoder_query
        self.encoder_mask_ratio = encoder_mask_ratio
        self.decoder_mask_ratio = decoder_mask_ratio
        self.bow_loss_weight = bow_loss_weight
        self.pooling = pooling
        self.mask_token_id = mask_token_id
        self._check()
        super().__init__(**kwargs)

    def get_text_config(self, *args, **kwargs):
        """The encoder's own: what transformers asks for vocabulary and hidden sizes."""
        return self if self.encoder_config is None else self.encoder_config.get_text_config(*args, **kwargs)

    @property
    def hidden_size(self) -> int:
        """The encoder's; DeepSpeed sizes its buffers by it."""
        return self.encoder_config.get_text_config().hidden_size

    def _check(self) -> None:
        choices = {"decoding": DECODINGS, "decoder_query": DECODER_QUERIES, "pooling": POOLINGS}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"`{name}` must be one of {', '.join(allowed)}, not {getattr(self, name)!r}.")
        for name in ("encoder_mask_ratio", "decoder_mask_ratio"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"`{name}` must lie between 0 and 1, both excluded, not {getattr(self, name)}.")
        most = 1 if self.decoding == "enhanced" else 3
        if self.decoder_layers not in range(1, most + 1):
            raise ValueError(
                f"`decoder_layers` must be {'1' if most == 1 else '1 to 3'} for {self.decoding} decoding, "
                f"not {self.decoder_layers}."
            )
        if self.decoding == "basic" and self.mask_token_id is None and self.encoder_config is not None:
            raise ValueError(
                "Basic decoding puts the mask token where it hides one: give its id, `mask_token_id` "
                "(`tokenizer.mask_token_id`)."
            )
        if self.decoding == "basic" and self.decoder_query == "embeddings":
            raise ValueError("`decoder_query` is for enhanced decoding: basic decoding builds no queries.")
        if not self.bow_loss_weight >= 0:
            raise ValueError(f"`bow_loss_weight` must not be negative, as {self.bow_loss_weight} is.")


def require_stock(config: PreTrainedConfig | dict[str, Any]) -> None:
    """
    Refuse an encoder whose architecture is not transformers' own: no checkpoint of it could be opened again.

    Args:
        config: of the encoder, or what its config.json holds.

    Raises:
        ValueError: naming the architecture.
    """
    if isinstance(config, dict):
        name = config.get("model_type")
        is_stock = name is None or name in CONFIG_MAPPING
    else:
        name, is_stock = config.model_type, not type(config).__module__.startswith("transformers_modules")
    if not is_stock:
        raise ValueError(
            f"The encoder is of the architecture {name!r}, which this transformers has no code for, and code that "
            "comes with an encoder is not run, as no checkpoint of it could be opened again: choose an encoder that "
            "transformers has, such as BERT, RoBERTa or ModernBERT."
        )


RetroMAEConfig.register_for_auto_class()

__all__ = ["RetroMAEConfig", "require_stock"]
