"""Revela's causal LM with in-batch attention, and what it shares with the class that trains both halves."""

import inspect
import os
from dataclasses import dataclass

import torch
from huggingface_hub import try_to_load_from_cache
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.utils import CONFIG_NAME, ModelOutput

from .configuration_revela import RevelaConfig, require_stock
from .in_batch_attention import IN_BATCH_ATTENTION, InBatchContext
from .linear_cross_entropy import linear_cross_entropy

# What a checkpoint's loading passes on to that of the backbones it left out.
_SOURCE_OPTIONS = ("cache_dir", "force_download", "local_files_only", "token")
_LOADING_OPTIONS = ("cache_dir", "dtype", "local_files_only", "token")


@dataclass
class RevelaCausalLMOutput(ModelOutput):
    """
    Output of [`RevelaForCausalLM`] with `in_batch_weights`.

    Args:
        loss: in-batch loss (h stream), plus `next_token_loss` with `dual_loss`; nats a target token, scalar.
        in_batch_loss: the loss of the h stream alone, detached.
        next_token_loss: the loss of the e stream, which is the LM's own; detached unless `dual_loss`.
        logits: (B, L, V) of the h stream, only without labels or with `return_logits`.
        next_token_logits: (B, L, V) of the e stream, only with `return_logits`.
        num_target_tokens: tokens that the losses are averaged over, int64 scalar.
        num_pairs: pairs of chunks whose cross-chunk attention was computed.
    """

    loss: torch.Tensor | None = None
    in_batch_loss: torch.Tensor | None = None
    next_token_loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    next_token_logits: torch.Tensor | None = None
    num_target_tokens: torch.Tensor | None = None
    num_pairs: int | None = None


class RevelaPreTrainedModel(PreTrainedModel):
    """What the training classes share: configuration, checkpointing flags, the initial values of their own weights."""

    config_class = RevelaConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_attention_backend = True
    # The retriever says by itself whether it does.
    _supports_flash_attn = True
    _supports_flex_attn = True
    # Their small updates would round away.
    _keep_in_fp32_modules_strict = ["in_batch_gate", "log_temperature"]

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, output_loading_info: bool = False, **kwargs):
        """
        As in transformers, except that a weight which the checkpoint lacks is an error and not drawn at random, and
        that backbones left out (`save_backbones=False`) are read from where the checkpoint says, with the same
        `cache_dir` and `token`. `attn_implementation` is the retriever's.

        Raises:
            ValueError: naming the first weight that is missing.
        """
        kwargs.setdefault("use_safetensors", True)
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        missing = sorted(set(info["missing_keys"]) - model._left_out())
        if missing:
            raise ValueError(
                f"{pretrained_model_name_or_path} lacks {len(missing)} weights of {cls.__name__}, {missing[0]!r} "
                "first: it is not whole, or a checkpoint of another class."
            )
        model._read_left_out({name: kwargs[name] for name in _SOURCE_OPTIONS if name in kwargs})
        for name, parameter in model.named_parameters():
            # transformers' loading makes every parameter trainable, those below adapters too.
            parameter.requires_grad_(name in model._trainable)
        return (model, info) if output_loading_info else model

    def post_init(self):
        super().post_init()
        self._trainable = {name for name, parameter in self.named_parameters() if parameter.requires_grad}

    def _left_out(self) -> set[str]:
        """Weights that a checkpoint does not carry, since training leaves them as their source has them."""
        return set()

    def _read_left_out(self, loading: dict) -> None:
        pass

    def _init_weights(self, module: nn.Module) -> None:
        # The backbones initialise themselves.
        if isinstance(module, RevelaForCausalLM) and module.in_batch_gate is not None:
            init.constant_(module.in_batch_gate, module.config.in_batch_gate_init)

    def get_output_embeddings(self):
        # Resizing and tying are the backbones' own business.
        return None


class RevelaForCausalLM(RevelaPreTrainedModel, GenerationMixin):
    """
    A causal LM with in-batch attention (§3.1-3.2). Without `in_batch_weights` it is exactly its backbone.

    Make one from any decoder that uses transformers' attention interface:

    ```python
    model = RevelaForCausalLM.from_backbone("HuggingFaceTB/SmolLM2-135M", v_norm=True)
    output = model(input_ids, attention_mask, labels=labels, in_batch_weights=weights)
    ```
    """

    def __init__(self, config: RevelaConfig, backbone: PreTrainedModel | None = None):
        _require_in_batch_attention(config._attn_implementation)
        super().__init__(config)
        if backbone is None:
            backbone = AutoModelForCausalLM.from_config(
                config.lm_config, dtype=torch.get_default_dtype(), trust_remote_code=False
            )
        _require_attention_interface(backbone)
        backbone.set_attn_implementation(IN_BATCH_ATTENTION)
        if backbone.can_generate():
            stored = config.lm_generation_config
            self.generation_config = (
                backbone.generation_config if stored is None else GenerationConfig.from_dict(stored)
            )
        self.backbone = add_lora(backbone, config.lm_lora)
        if config.freeze_lm:
            self.backbone.requires_grad_(False)
        self.in_batch_gate = None
        if config.in_batch_gate:
            text_config = config.lm_config.get_text_config()
            shape = (text_config.num_hidden_layers, text_config.num_attention_heads)
            self.in_batch_gate = nn.Parameter(torch.full(shape, config.in_batch_gate_init))
        self.post_init()

    @classmethod
    def from_backbone(cls, model: PreTrainedModel | str | os.PathLike, **options) -> "RevelaForCausalLM":
        """
        Wrap a causal LM.

        Args:
            model: a loaded model, which is used as it is and not copied, or a path or Hub id.
            options: fields of [`RevelaConfig`]; with a path or id, `cache_dir`, `dtype`, `local_files_only`,
                `revision` and `token` go to `from_pretrained`.

        Raises:
            ValueError: if the model is not transformers' own, by-passes its attention interface, or makes its logits
                in a way that is not known here.
        """
        loading, revision = take_loading_options(options), options.pop("revision", None)
        refuse_unknown_options(options)
        backbone, name, revision = load_backbone(AutoModelForCausalLM, model, revision, loading)
        config = RevelaConfig(lm_config=backbone.config, lm_name_or_path=name, lm_revision=revision, **options)
        model = cls(config, backbone=backbone)
        model._check_head()
        return model

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        in_batch_weights: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        return_next_token_loss: bool = True,
        return_logits: bool = False,
        **kwargs,
    ) -> RevelaCausalLMOutput:
        """
        Args:
            input_ids: (B, L).
            attention_mask: (B, L), 1 at real tokens; padding may be on either side.
            labels: (B, L), -100 where nothing is predicted; shifted here, as usual.
            in_batch_weights: (B, B) float32. Row i weighs the chunks that chunk i attends to (Eq. 6): zero on the
                diagonal, zero between groups. Gradients flow into it.
            num_items_in_batch: target tokens of the whole optimisation step; the losses are divided by it instead of
                by the tokens of this call, so that accumulation changes nothing.
            return_next_token_loss: whether to score the e stream as well (always scored with `dual_loss`).
            return_logits: whether to return logits of both streams, which takes B·L·V numbers each.

        Raises:
            ValueError: for weights of the wrong shape or with values that are not finite, a chunk without tokens,
                reentrant activation checkpointing, a backbone whose layers never reach the attention interface.
        """
        if in_batch_weights is None:
            if num_items_in_batch is not None:
                kwargs["num_items_in_batch"] = num_items_in_batch
            return self.backbone(input_ids=input_ids, attention_mask=attention_mask, labels=labels, **kwargs)
        rows, length = input_ids.shape
        self._check_in_batch(rows, in_batch_weights)
        padded = attention_mask is not None and not bool(attention_mask.all())
        if padded and not bool(attention_mask.any(-1).all()):
            empty = int(attention_mask.any(-1).int().argmin())
            raise ValueError(
                f"Row {empty} of `attention_mask` has no real token: leave empty chunks out of the batch."
            )
        context = InBatchContext(
            weights=in_batch_weights,
            key_mask=attention_mask.bool() if padded else None,
            v_norm=self.config.v_norm,
            v_norm_eps=self.config.v_norm_eps,
            gate=self.in_batch_gate,
            floor=self.config.weight_floor,
        )
        mask = positions = None
        if padded and not bool(attention_mask[:, 0].all()):
            # Left padding. Positions count real tokens: rotary embeddings compare positions across chunks.
            mask = attention_mask
            positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
        # On the right no real token ever sees padding through a causal mask: leave it out and keep the fast kernels.
        decoder = self.backbone.get_decoder()

        def run(stream: str) -> torch.Tensor:
            context.stream = stream
            copies = 2 if stream == "both" else 1
            return decoder(
                input_ids=input_ids.repeat(copies, 1),
                attention_mask=None if mask is None else mask.repeat(copies, 1),
                position_ids=None if positions is None else positions.repeat(copies, 1),
                use_cache=False,
                in_batch=context,
                **kwargs,
            ).last_hidden_state

        if any(parameter.requires_grad for parameter in self.backbone.parameters()):
            hidden = run("both")
        else:
            with torch.no_grad():
                plain = run("e")
            hidden = torch.cat((plain, run("h")))
        if not context.layers_seen:
            used = decoder.config._attn_implementation
            if used != IN_BATCH_ATTENTION:
                raise ValueError(
                    f"The LM's attention was switched to {used!r}, which has no in-batch attention: switch it back "
                    f"with `backbone.set_attn_implementation({IN_BATCH_ATTENTION!r})`."
                )
            raise ValueError(
                f"No layer of {type(decoder).__name__} reached in-batch attention: it does not pass its keyword "
                "arguments on to the attention interface. Choose a backbone that does, such as Llama or Qwen."
            )
        output = RevelaCausalLMOutput(num_pairs=context.num_pairs)
        if labels is None or return_logits:
            output["logits"] = self._logits(hidden[rows:])
        if return_logits:
            output["next_token_logits"] = self._logits(hidden[:rows])
        if labels is not None:
            self._score(output, hidden, attention_mask, labels, num_items_in_batch, return_next_token_loss)
        return output

    def _score(self, output, hidden, attention_mask, labels, num_items_in_batch, return_next_token_loss) -> None:
        rows = labels.shape[0]
        scored = labels[:, 1:] != -100
        if attention_mask is not None:
            # The token after left padding would be predicted from padding.
            scored = scored & attention_mask[:, :-1].bool()
        targets = labels[:, 1:][scored]
        output["num_target_tokens"] = scored.sum()
        if targets.numel() == 0 and num_items_in_batch is None:
            raise ValueError("`labels` leave no token to predict: every one is -100 or the first of its chunk.")
        # A part of a step may have nothing to predict, such as chunks of one token: it adds nothing.
        count = targets.numel() if num_items_in_batch is None else max(num_items_in_batch, 1)
        in_batch_loss = self._summed_loss(hidden[rows:, :-1][scored], targets) / count
        # A copy: Trainer scales the loss in place.
        output["in_batch_loss"] = in_batch_loss.detach().clone()
        output["loss"] = in_batch_loss
        if self.config.dual_loss:
            output["next_token_loss"] = self._summed_loss(hidden[:rows, :-1][scored], targets) / count
            output["loss"] = in_batch_loss + output.next_token_loss
        elif return_next_token_loss:
            with torch.no_grad():
                output["next_token_loss"] = self._summed_loss(hidden[:rows, :-1][scored], targets) / count

    def _summed_loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        head = self.backbone.get_output_embeddings()
        scale, softcap = self._logit_transform()
        return linear_cross_entropy(hidden, head.weight, getattr(head, "bias", None), targets, scale, softcap)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        scale, softcap = self._logit_transform()
        logits = self.backbone.get_output_embeddings()(hidden) * scale
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    def _logit_transform(self) -> tuple[float, float | None]:
        """What some architectures do to their logits after the head: (factor, soft cap)."""
        config = self.backbone.config.get_text_config()
        scale = getattr(config, "logit_scale", None) or 1.0  # Cohere
        scale = scale / (getattr(config, "logits_scaling", None) or 1.0)  # Granite
        return scale, getattr(config, "final_logit_softcapping", None)  # Gemma 2

    @torch.no_grad()
    def _check_head(self) -> None:
        """Compare our logits with the backbone's own on two tokens: some architectures do more than is known here."""
        name = type(self.backbone).__name__
        head, decoder = self.backbone.get_output_embeddings(), self.backbone.get_decoder()
        if type(head).forward is not nn.Linear.forward:
            raise ValueError(
                f"The head of {name} is a {type(head).__name__}, not a plain linear map: choose another backbone, or "
                "leave the head out of LoRA's `target_modules`."
            )
        if head.weight.is_meta or hasattr(head.weight, "ds_id"):
            return  # Nothing to compute with: on no device, or partitioned by ZeRO-3.
        training = self.backbone.training
        self.backbone.eval()
        tokens = torch.tensor([[1, 2]], device=head.weight.device)
        hidden = None
        if isinstance(decoder, PreTrainedModel):
            hidden = getattr(decoder(input_ids=tokens, use_cache=False), "last_hidden_state", None)
        expected = self.backbone(input_ids=tokens, use_cache=False).logits.float()
        self.backbone.train(training)
        if hidden is None or (self._logits(hidden).float() - expected).norm() > 1e-2 * expected.norm():
            raise ValueError(
                f"{name} makes its logits by more than a linear head, a scale and a soft cap, so its loss would be "
                "another here: choose another backbone, such as Llama or Qwen."
            )

    def _check_in_batch(self, rows: int, weights: torch.Tensor) -> None:
        if weights.shape != (rows, rows):
            raise ValueError(
                f"`in_batch_weights` must be ({rows}, {rows}), one row and column a chunk of `input_ids`, "
                f"not {tuple(weights.shape)}."
            )
        if rows < 2:
            raise ValueError("In-batch attention needs at least two chunks: a group of one has nothing to attend to.")
        if not bool(torch.isfinite(weights.detach()).all()):
            raise ValueError(
                "`in_batch_weights` has values that are not finite: look at the retriever's embeddings (a row of "
                "zeros, an overflow in half precision) and at the temperature."
            )
        for module in self.backbone.modules():
            function = getattr(module, "_gradient_checkpointing_func", None)
            if getattr(module, "gradient_checkpointing", False) and function is not None:
                # Left out, torch takes the reentrant way.
                if getattr(function, "keywords", {}).get("use_reentrant", True):
                    raise ValueError(
                        "Reentrant activation checkpointing gives the in-batch weights no gradient. Pass "
                        'activation_checkpointing_kwargs={"use_reentrant": False} (gradient_checkpointing_kwargs in '
                        "older releases of transformers)."
                    )
                break

    def generate(self, *args, **kwargs):
        """The backbone's own `generate`, by this model's `generation_config`."""
        self.backbone.generation_config = self.generation_config
        return self.backbone.generate(*args, **kwargs)

    def set_attn_implementation(self, attn_implementation: str | dict, *args, **kwargs) -> None:
        """Raises ValueError for any but the one it has; see `_require_in_batch_attention`."""
        _require_in_batch_attention(attn_implementation)

    def get_input_embeddings(self):
        return self.backbone.get_input_embeddings()


def take_loading_options(options: dict) -> dict:
    """What goes to `from_pretrained`, taken out of `options`."""
    return {name: options.pop(name) for name in _LOADING_OPTIONS if name in options}


def load_backbone(
    auto_class, model, revision: str | None, loading: dict
) -> tuple[PreTrainedModel, str | None, str | None]:
    """
    A loaded model as it is, or one read from a path or Hub id.

    Returns:
        The model, where it came from, and of which commit of the Hub.

    Raises:
        ValueError: for a revision of a model that is loaded already.
    """
    if isinstance(model, PreTrainedModel):
        if revision is not None:
            raise ValueError(f"{type(model).__name__} is loaded already, so no revision {revision!r} of it is read.")
        return model, getattr(model, "name_or_path", None) or None, None
    name = os.fspath(model)
    # Trained weights are float32 unless asked: a checkpoint's own dtype would make it pure bf16 in silence.
    where = {key: value for key, value in loading.items() if key != "dtype"}
    require_stock(PreTrainedConfig.get_config_dict(name, revision=revision, **where)[0])
    options = {"dtype": torch.float32, **loading, "trust_remote_code": False, "use_safetensors": True}
    model = auto_class.from_pretrained(name, revision=revision, **options)
    if os.path.isdir(name):
        return model, name, None
    # The folder in the cache is named after the commit.
    config = try_to_load_from_cache(name, CONFIG_NAME, loading.get("cache_dir"), revision)
    return model, name, os.path.basename(os.path.dirname(config)) if isinstance(config, str) else revision


def refuse_unknown_options(options: dict) -> None:
    # A config keeps whatever it is given, so a mistyped option would be ignored in silence.
    unknown = sorted(set(options) - set(inspect.signature(RevelaConfig.__init__).parameters))
    if unknown:
        raise ValueError(f"RevelaConfig has no field {', '.join(map(repr, unknown))}.")


def add_lora(model: PreTrainedModel, lora: dict | None) -> PreTrainedModel:
    if lora is None:
        return model
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ImportError("This checkpoint carries LoRA adapters: pip install peft") from error
    model = inject_adapter_in_model(LoraConfig(**lora), model)
    for name, module in model.named_modules():
        # The wrapper's `post_init` would draw new weights for what it does not know: B must stay zero.
        if "lora_" in name and not any(parameter.is_meta for parameter in module.parameters()):
            module._is_hf_initialized = True
    for name, parameter in model.named_parameters():
        # Adapters take the precision of their base, in which small updates would round away.
        if "lora_" in name and parameter.dtype.itemsize < 4:
            parameter.data = parameter.data.float()
    return model


def _require_in_batch_attention(asked: str | dict | None) -> None:
    if asked not in (None, "sdpa", IN_BATCH_ATTENTION):
        raise ValueError(
            f"The LM cannot take the attention implementation {asked!r}: in-batch attention is one itself, built on "
            "SDPA. Only the retriever's can be chosen, through RevelaForPreTraining."
        )


def _require_attention_interface(model: PreTrainedModel) -> None:
    if not type(model)._can_set_attn_implementation():
        raise ValueError(
            f"{type(model).__name__} by-passes transformers' attention interface, so in-batch attention cannot reach "
            "it. Choose a backbone that uses it, such as Llama, Qwen, Mistral, Gemma 3 or GPT-NeoX."
        )
    config: AutoConfig = model.config.get_text_config()
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise ValueError(
            f"{type(model).__name__} caps its attention logits (`attn_logit_softcapping`), which in-batch attention "
            "cannot honour: choose a backbone without it, such as Gemma 3, or set it to None knowingly."
        )


RevelaForCausalLM.register_for_auto_class("AutoModelForCausalLM")

__all__ = [
    "RevelaCausalLMOutput",
    "RevelaForCausalLM",
    "RevelaPreTrainedModel",
    "add_lora",
    "load_backbone",
    "refuse_unknown_options",
    "take_loading_options",
]
