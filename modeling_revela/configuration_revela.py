"""Configuration of a Revela pre-training checkpoint."""

from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

POOLINGS = ("eos", "cls", "mean")
SIMILARITY_SPANS = ("first_half", "full")
SIMILARITY_DTYPES = ("float32", "bfloat16", "float16")


class RevelaConfig(PreTrainedConfig):
    r"""
    Configuration of [`RevelaForCausalLM`] and [`RevelaForPreTraining`] (arXiv 2506.16552).

    Args:
        lm_config (`PreTrainedConfig` or `dict`, *optional*):
            Configuration of the causal LM that in-batch attention is added to.
        retriever_config (`PreTrainedConfig` or `dict`, *optional*):
            Configuration of the retriever's backbone; `None` for a [`RevelaForCausalLM`] on its own.
        v_norm (`bool`, defaults to `True`):
            V-normalisation (Eq. 8): divide each cross-chunk output by the attention-weighted norm of the values.
            On for prose, off for code in the paper (B.5).
        v_norm_eps (`float`, defaults to 1e-6): the constant of Eq. 8.
        in_batch_gate (`bool`, defaults to `False`):
            Scale the cross-chunk output of each layer and head by a learned gate g before it is added:
            h = s + g · b instead of Eq. 7. Not in the paper: it lets a pre-trained LM start undisturbed.
        in_batch_gate_init (`float`, defaults to 0.05): where every gate starts.
        include_diagonal (`bool`, defaults to `False`):
            Let a chunk also attend, in full, to its own e stream. An option of the authors' code; it shows the LM the
            tokens that it is to predict, so it is an ablation, not a setting to train with.
        dual_loss (`bool`, defaults to `False`): add the next-token loss of the plain (e) stream to the loss.
        weight_floor (`float`, defaults to 1e-7):
            In-batch weights at or below this share of the largest runner-up (the second weight of a row) are not
            computed, which leaves loss and gradients alone. 0 drops only what is exactly zero.
        similarity_temperature (`float`, defaults to 1e-4):
            Temperature of the softmax over similarities (§3.3). (`temperature` alone is a generation setting to
            transformers, which refuses it in a model config.)
        trainable_temperature (`bool`, defaults to `False`): learn the logarithm of the temperature.
        similarity_dtype (`str`, defaults to `"float32"`):
            Precision of the cosines and of their division by the temperature; the softmax is always float32.
            `"bfloat16"` is what the authors train in: at 1e-4 near cosine 0.9 several chunks then tie and share the
            weight, where float32 gives one chunk everything and the retriever almost no gradient.
        similarity_span (`str`, defaults to `"first_half"`):
            Which part of a chunk its query embedding sees: `"first_half"` (prose) or `"full"` (code), B.5.
        similarity_span_ratio (`float`, defaults to 0.5): the share of the tokens that `"first_half"` keeps.
        pooling (`str`, defaults to `"eos"`): `"eos"` (last real token), `"cls"` or `"mean"`.
        matryoshka_dims (`list[int]`, *optional*):
            Sizes, rising, that an embedding may be cut to: so many of its first dimensions are to serve as one (arXiv
            2205.13147). The weights of in-batch attention are then the mean, over these and the whole size, of the
            softmax over the cosines of embeddings so cut: one forward pass of the LM, whose loss reaches every size.
        embed_batch_size (`int`, *optional*):
            Chunks that the retriever embeds in a forward pass; `None` for all at once. Memory for its activations then
            no longer grows with the group, for one forward pass more of the retriever; the gradients stay the same.
        query_prompt (`str`, defaults to `"query: "`), document_prompt (`str`, defaults to `"passage: "`):
            Put before the text of either side; lower-case, as in the authors' code and released checkpoints.
        freeze_lm (`bool`, defaults to `False`): leave the LM as it is and train the retriever (and gates) only.
        retriever_lora (`dict`, *optional*), lm_lora (`dict`, *optional*):
            Arguments of `peft.LoraConfig` for either half; `None` trains all of its weights.
        save_backbones (`bool`, defaults to `True`):
            Whether a checkpoint carries the frozen weights below the adapters. `False` leaves them out, and
            `from_pretrained` reads them from `retriever_name_or_path` and `lm_name_or_path`.
        retriever_name_or_path (`str`, *optional*), lm_name_or_path (`str`, *optional*): where the backbones came from.
        retriever_revision (`str`, *optional*), lm_revision (`str`, *optional*): of which commit, from the Hub.
        lm_generation_config (`dict`, *optional*):
            The LM's `GenerationConfig`, which its own config does not hold and its export writes; `None` for what
            follows from `lm_config`.

    Raises:
        ValueError: for a value outside its range, naming the field.
    """

    model_type = "revela"

    def __init__(
        self,
        lm_config: PreTrainedConfig | dict[str, Any] | None = None,
        retriever_config: PreTrainedConfig | dict[str, Any] | None = None,
        v_norm: bool = True,
        v_norm_eps: float = 1e-6,
        in_batch_gate: bool = False,
        in_batch_gate_init: float = 0.05,
        include_diagonal: bool = False,
        dual_loss: bool = False,
        weight_floor: float = 1e-7,
        similarity_temperature: float = 1e-4,
        trainable_temperature: bool = False,
        similarity_dtype: str = "float32",
        similarity_span: str = "first_half",
        similarity_span_ratio: float = 0.5,
        pooling: str = "eos",
        matryoshka_dims: list[int] | None = None,
        embed_batch_size: int | None = None,
        query_prompt: str = "query: ",
        document_prompt: str = "passage: ",
        freeze_lm: bool = False,
        retriever_lora: dict[str, Any] | None = None,
        lm_lora: dict[str, Any] | None = None,
        save_backbones: bool = True,
        retriever_name_or_path: str | None = None,
        lm_name_or_path: str | None = None,
        retriever_revision: str | None = None,
        lm_revision: str | None = None,
        lm_generation_config: dict[str, Any] | None = None,
        **kwargs,
    ):
        self.lm_config = _as_config(lm_config)
        self.retriever_config = _as_config(retriever_config)
        self.v_norm = v_norm
        self.v_norm_eps = v_norm_eps
        self.in_batch_gate = in_batch_gate
        self.in_batch_gate_init = in_batch_gate_init
        self.include_diagonal = include_diagonal
        self.dual_loss = dual_loss
        self.weight_floor = weight_floor
        self.similarity_temperature = similarity_temperature
        self.trainable_temperature = trainable_temperature
        self.similarity_dtype = similarity_dtype
        self.similarity_span = similarity_span
        self.similarity_span_ratio = similarity_span_ratio
        self.pooling = pooling
        self.matryoshka_dims = None if matryoshka_dims is None else list(matryoshka_dims)
        self.embed_batch_size = embed_batch_size
        self.query_prompt = query_prompt
        self.document_prompt = document_prompt
        self.freeze_lm = freeze_lm
        self.retriever_lora = retriever_lora
        self.lm_lora = lm_lora
        self.save_backbones = save_backbones
        self.retriever_name_or_path = retriever_name_or_path
        self.lm_name_or_path = lm_name_or_path
        self.retriever_revision = retriever_revision
        self.lm_revision = lm_revision
        self.lm_generation_config = lm_generation_config
        self._check()
        super().__init__(**kwargs)

    def get_text_config(self, *args, **kwargs):
        """The LM's own: what transformers asks for vocabulary and hidden sizes."""
        return self if self.lm_config is None else self.lm_config.get_text_config(*args, **kwargs)

    @property
    def hidden_size(self) -> int:
        """The wider half's; DeepSpeed sizes its buffers by it."""
        configs = [config for config in (self.lm_config, self.retriever_config) if config is not None]
        return max(config.get_text_config().hidden_size for config in configs)

    def _check(self) -> None:
        choices = {
            "pooling": POOLINGS,
            "similarity_span": SIMILARITY_SPANS,
            "similarity_dtype": SIMILARITY_DTYPES,
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"`{name}` must be one of {', '.join(allowed)}, not {getattr(self, name)!r}.")
        if not self.similarity_temperature > 0:
            raise ValueError(f"`similarity_temperature` must be above 0, not {self.similarity_temperature}.")
        if not 0 < self.similarity_span_ratio < 1:
            raise ValueError(f"`similarity_span_ratio` must lie between 0 and 1, not {self.similarity_span_ratio}.")
        size = None if self.retriever_config is None else self.retriever_config.get_text_config().hidden_size
        check_matryoshka_dims(self.matryoshka_dims, size)
        if self.embed_batch_size is not None and not self.embed_batch_size >= 1:
            raise ValueError(f"`embed_batch_size` must be at least 1, or None, not {self.embed_batch_size}.")
        if not 0 <= self.weight_floor < 1e-2:
            raise ValueError(
                f"`weight_floor` must lie between 0 and 0.01, not {self.weight_floor}: a higher floor shows."
            )


def check_matryoshka_dims(dims: list[int] | None, size: int | None = None) -> None:
    """
    Raises ValueError for `matryoshka_dims` that are not whole numbers above 0, rising, and below `size`.

    Args:
        dims: or `None`, which passes.
        size: of the embedding, where it is known.
    """
    if dims is None:
        return
    if not dims or not all(type(dim) is int and dim > 0 for dim in dims) or sorted(set(dims)) != list(dims):
        raise ValueError(
            f"`matryoshka_dims` are {list(dims)}: give whole numbers above 0, each once and rising, such as [64, 128]."
        )
    if size is not None and dims[-1] >= size:
        raise ValueError(
            f"`matryoshka_dims` has {dims[-1]}, but the embedding has {size} dimensions, which are trained in any "
            "case: name smaller ones only."
        )


def _as_config(config: PreTrainedConfig | dict[str, Any] | None) -> PreTrainedConfig | None:
    if config is not None:
        require_stock(config)
    if config is None or isinstance(config, PreTrainedConfig):
        return config
    config = dict(config)
    return AutoConfig.for_model(config.pop("model_type"), **config)


def require_stock(config: PreTrainedConfig | dict[str, Any]) -> None:
    """
    Refuse a backbone whose architecture is not transformers' own: no checkpoint of it could be opened again.

    Args:
        config: of the backbone, or what its config.json holds.

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
            f"The backbone is of the architecture {name!r}, which this transformers has no code for, and code that "
            "comes with a backbone is not run, as no checkpoint of it could be opened again: choose a backbone that "
            "transformers has, such as Llama, Qwen or BERT."
        )


RevelaConfig.register_for_auto_class()

__all__ = ["RevelaConfig", "check_matryoshka_dims", "require_stock"]
