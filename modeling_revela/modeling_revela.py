"""Revela's models: a causal LM with in-batch attention, the retriever, and both for training."""

import inspect
import math
import os
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import ModelOutput

from .configuration_revela import RevelaConfig
from .in_batch_attention import IN_BATCH_ATTENTION, InBatchContext
from .linear_cross_entropy import linear_cross_entropy


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


@dataclass
class RevelaPreTrainingOutput(RevelaCausalLMOutput):
    """
    Output of [`RevelaForPreTraining`].

    Args:
        in_batch_weights: (B, B) float32, Sim(D_i, D_j); zero on the diagonal and across groups.
        similarities: (B, B) cosines of query i and passage j.
        query_embeddings, document_embeddings: (B, d), L2-normalised.
    """

    in_batch_weights: torch.Tensor | None = None
    similarities: torch.Tensor | None = None
    query_embeddings: torch.Tensor | None = None
    document_embeddings: torch.Tensor | None = None


@dataclass
class RevelaModelOutput(ModelOutput):
    """
    Output of [`RevelaModel`].

    Args:
        last_hidden_state: (B, L, d), the backbone's own.
        pooler_output: (B, d), the L2-normalised embedding.
    """

    last_hidden_state: torch.Tensor | None = None
    pooler_output: torch.Tensor | None = None


class RevelaPreTrainedModel(PreTrainedModel):
    """What the training classes share: configuration, checkpointing flags, the initial values of their own weights."""

    config_class = RevelaConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_attention_backend = True

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, output_loading_info: bool = False, **kwargs):
        """
        As in transformers, except that a weight which the checkpoint lacks is an error and not drawn at random, and
        that backbones left out (`save_backbones=False`) are read from where the checkpoint says.

        Raises:
            ValueError: naming the first weight that is missing.
        """
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        missing = sorted(set(info["missing_keys"]) - model._left_out())
        if missing:
            raise ValueError(
                f"{pretrained_model_name_or_path} lacks {len(missing)} weights of {cls.__name__}, {missing[0]!r} "
                "first: it is not whole, or a checkpoint of another class."
            )
        model._read_left_out()
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

    def _read_left_out(self) -> None:
        pass

    def _init_weights(self, module: nn.Module) -> None:
        # The backbones initialise themselves; what is ours is the gate and the temperature.
        if isinstance(module, RevelaForCausalLM) and module.in_batch_gate is not None:
            init.constant_(module.in_batch_gate, module.config.in_batch_gate_init)
        if isinstance(module, RevelaForPreTraining) and module.log_temperature is not None:
            init.constant_(module.log_temperature, math.log(module.config.similarity_temperature))

    def get_output_embeddings(self):
        # Resizing and tying are the backbones' own business.
        return None


class RevelaForCausalLM(RevelaPreTrainedModel):
    """
    A causal LM with in-batch attention (§3.1-3.2). Without `in_batch_weights` it is exactly its backbone.

    Make one from any decoder that uses transformers' attention interface:

    ```python
    model = RevelaForCausalLM.from_backbone("HuggingFaceTB/SmolLM2-135M", v_norm=True)
    output = model(input_ids, attention_mask, labels=labels, in_batch_weights=weights)
    ```
    """

    def __init__(self, config: RevelaConfig, backbone: PreTrainedModel | None = None):
        super().__init__(config)
        if backbone is None:
            backbone = AutoModelForCausalLM.from_config(config.lm_config, dtype=torch.get_default_dtype())
        _require_attention_interface(backbone)
        backbone.set_attn_implementation(IN_BATCH_ATTENTION)
        self.backbone = _add_lora(backbone, config.lm_lora)
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
            options: fields of [`RevelaConfig`]; with a path or id, `dtype`, `revision`, `token` and
                `trust_remote_code` go to `from_pretrained`.

        Raises:
            ValueError: if the model by-passes transformers' attention interface, or makes its logits in a way that is
                not known here.
        """
        backbone, name = _load_backbone(AutoModelForCausalLM, model, options)
        _refuse_unknown(options)
        config = RevelaConfig(lm_config=backbone.config, lm_name_or_path=name, **options)
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
            mask = attention_mask.repeat(2, 1)
            positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
        # On the right no real token ever sees padding through a causal mask: leave it out and keep the fast kernels.
        decoder = self.backbone.get_decoder()
        hidden = decoder(
            input_ids=input_ids.repeat(2, 1),
            attention_mask=mask,
            position_ids=positions,
            use_cache=False,
            in_batch=context,
            **kwargs,
        ).last_hidden_state
        if not context.layers_seen:
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
        if targets.numel() == 0:
            raise ValueError("`labels` leave no token to predict: every one is -100 or the first of its chunk.")
        count = targets.numel() if num_items_in_batch is None else num_items_in_batch
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
        """The backbone's own `generate`."""
        return self.backbone.generate(*args, **kwargs)

    def get_input_embeddings(self):
        return self.backbone.get_input_embeddings()


class RevelaForPreTraining(RevelaPreTrainedModel):
    """
    Retriever and LM in one module, trained by the LM's loss (§3.3).

    The retriever embeds each chunk twice: as a query (its first half, or all of it) and as a passage. Their cosines,
    softmaxed within the group, are the weights of in-batch attention in the LM.
    """

    def __init__(
        self,
        config: RevelaConfig,
        retriever: PreTrainedModel | None = None,
        backbone: PreTrainedModel | None = None,
    ):
        super().__init__(config)
        if retriever is None:
            retriever = AutoModel.from_config(config.retriever_config, dtype=torch.get_default_dtype())
        self.retriever = _add_lora(retriever, config.retriever_lora)
        for name, parameter in self.retriever.named_parameters():
            # BERT's own pooler is carried along for the export but takes no part in the embedding.
            if name.startswith("pooler."):
                parameter.requires_grad_(False)
        self.lm = RevelaForCausalLM(config, backbone=backbone)
        self.log_temperature = None
        if config.trainable_temperature:
            self.log_temperature = nn.Parameter(torch.tensor(math.log(config.similarity_temperature)))
        self.post_init()

    @classmethod
    def from_backbones(
        cls,
        retriever: PreTrainedModel | str | os.PathLike,
        lm: PreTrainedModel | str | os.PathLike,
        **options,
    ) -> "RevelaForPreTraining":
        """
        Put a retriever and an LM together.

        Args:
            retriever: any `AutoModel` backbone, loaded (used as it is) or a path or Hub id. A causal LM gives its
                decoder.
            lm: any causal LM that uses transformers' attention interface, likewise.
            options: fields of [`RevelaConfig`]; `dtype`, `token` and `trust_remote_code` go to `from_pretrained`.
        """
        loading = {key: options[key] for key in ("dtype", "token", "trust_remote_code") if key in options}
        retriever, retriever_name = _load_backbone(AutoModel, retriever, options)
        if retriever.get_output_embeddings() is not None and hasattr(retriever, "get_decoder"):
            retriever = retriever.get_decoder()
        lm, lm_name = _load_backbone(AutoModelForCausalLM, lm, loading)
        _refuse_unknown(options)
        if retriever is lm or retriever is lm.get_decoder():
            raise ValueError(
                "`retriever` and `lm` are the same object: load the model twice, their weights part ways."
            )
        config = RevelaConfig(
            retriever_config=retriever.config,
            lm_config=lm.config,
            retriever_name_or_path=retriever_name,
            lm_name_or_path=lm_name,
            **options,
        )
        model = cls(config, retriever=retriever, backbone=lm)
        for prefix, *_, source in model._frozen_halves():
            if source is None and not config.save_backbones:
                raise ValueError(
                    f"`save_backbones=False` leaves `{prefix}` out of checkpoints, yet that half is a model that came "
                    "from no path or Hub id to read it from again: save it, and pass its path."
                )
        model.lm._check_head()
        return model

    def save_pretrained(self, save_directory, *args, state_dict=None, **kwargs):
        """As in transformers; without `save_backbones` the frozen weights below the adapters are left out."""
        if not self.config.save_backbones:
            left_out = self._left_out()
            trained = [name for name, value in self.named_parameters() if value.requires_grad and name in left_out]
            if trained:
                raise ValueError(
                    f"`save_backbones=False` would leave out {trained[0]!r}, which is trained: set it to True."
                )
            state_dict = self.state_dict() if state_dict is None else state_dict
            state_dict = {name: value for name, value in state_dict.items() if name not in left_out}
        return super().save_pretrained(save_directory, *args, state_dict=state_dict, **kwargs)

    def tie_weights(self, missing_keys=None, **kwargs):
        if missing_keys is None or self.config.save_backbones:
            return super().tie_weights(missing_keys=missing_keys, **kwargs)
        # What a checkpoint leaves out is read from its source later: neither missing nor a sign of corruption.
        super().tie_weights(**kwargs)
        missing_keys.difference_update(self._left_out(), self.all_tied_weights_keys)

    def _frozen_halves(self) -> list[tuple[str, PreTrainedModel, type, str | None]]:
        """(prefix of its weights, module, auto class, where it came from) of each half whose base is not trained."""
        config = self.config
        halves = []
        if config.retriever_lora is not None:
            halves.append(("retriever.", self.retriever, AutoModel, config.retriever_name_or_path))
        if config.lm_lora is not None or config.freeze_lm:
            halves.append(("lm.backbone.", self.lm.backbone, AutoModelForCausalLM, config.lm_name_or_path))
        return halves

    def _left_out(self) -> set[str]:
        if self.config.save_backbones:
            return set()
        prefixes = tuple(prefix for prefix, *_ in self._frozen_halves())
        frozen = set(self.state_dict()) - self._trainable
        return {name for name in frozen if name.startswith(prefixes) and "lora_" not in name}

    @torch.no_grad()
    def _read_left_out(self) -> None:
        own = self.state_dict()
        left_out = self._left_out()
        for prefix, module, auto_class, source in self._frozen_halves():
            base = auto_class.from_pretrained(source, dtype=module.dtype).state_dict()
            for name in (name for name in left_out if name.startswith(prefix)):
                plain = name.removeprefix(prefix).replace(".base_layer.", ".")
                if plain not in base or base[plain].shape != own[name].shape:
                    raise ValueError(
                        f"The checkpoint leaves {name!r} out (`save_backbones=False`), and {source!r}, which it names "
                        f"as its source, has no such {plain!r}."
                    )
                own[name].copy_(base[plain])

    @property
    def temperature(self) -> torch.Tensor | float:
        """Temperature of the softmax over similarities; a float32 scalar tensor where it is trained."""
        return (
            self.config.similarity_temperature if self.log_temperature is None else self.log_temperature.float().exp()
        )

    def embed(self, input_ids: torch.LongTensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """(B, L) token ids and mask -> (B, d) L2-normalised embeddings, float32 or wider."""
        # A decoder would keep a key-value cache for every chunk otherwise.
        options = {"use_cache": False} if hasattr(self.retriever.config, "use_cache") else {}
        hidden = self.retriever(input_ids=input_ids, attention_mask=attention_mask, **options).last_hidden_state
        return _normalise(pool(hidden, attention_mask, self.config.pooling))

    def similarity_weights(
        self, query_embeddings: torch.Tensor, document_embeddings: torch.Tensor, group_ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Sim(D_i, D_j) of §3.3.

        Args:
            query_embeddings, document_embeddings: (B, d), L2-normalised or not.
            group_ids: (B,), which group each chunk belongs to; all in one where it is `None`.

        Returns:
            (B, B) weights, float32 (float64 for float64 embeddings), and (B, B) cosines.

        Raises:
            ValueError: for a group of one chunk.
        """
        rows = query_embeddings.shape[0]
        device = query_embeddings.device
        visible = torch.ones(rows, rows, dtype=torch.bool, device=device)
        if group_ids is not None:
            visible = group_ids[:, None] == group_ids[None, :]
        if bool((visible.sum(-1) < 2).any()):
            raise ValueError("A group of one chunk has nothing to attend to: every group needs at least two chunks.")
        if not self.config.include_diagonal:
            visible = visible & ~torch.eye(rows, dtype=torch.bool, device=device)
        queries, documents = _normalise(query_embeddings), _normalise(document_embeddings)
        if queries.dtype != torch.float64:
            dtype = getattr(torch, self.config.similarity_dtype)
            queries, documents = queries.to(dtype), documents.to(dtype)
        with torch.autocast(device_type=device.type, enabled=False):
            similarities = queries @ documents.T
            # As in the authors' code the division too happens in the precision of the cosines.
            scaled = similarities / (
                self.temperature if self.log_temperature is None else self.temperature.to(queries)
            )
            scaled = scaled if scaled.dtype == torch.float64 else scaled.float()
            weights = torch.softmax(scaled.masked_fill(~visible, -math.inf), dim=-1)
        return weights, similarities

    def forward(
        self,
        input_ids: torch.LongTensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        query_input_ids: torch.LongTensor | None = None,
        query_attention_mask: torch.Tensor | None = None,
        document_input_ids: torch.LongTensor | None = None,
        document_attention_mask: torch.Tensor | None = None,
        group_ids: torch.LongTensor | None = None,
        in_batch_weights: torch.Tensor | None = None,
        **kwargs,
    ) -> RevelaPreTrainingOutput:
        """
        Args:
            input_ids, attention_mask, labels: (B, L), the chunks in the LM's tokens; see [`RevelaForCausalLM`].
            query_input_ids, query_attention_mask: (B, L_q), the chunks as queries in the retriever's tokens, prompt
                and EOS included. Left out, the passage embeddings serve both sides.
            document_input_ids, document_attention_mask: (B, L_d), the chunks as passages, likewise.
            group_ids: (B,), which group each chunk belongs to; groups never see each other.
            in_batch_weights: (B, B); given, the retriever is not run.
            kwargs: for [`RevelaForCausalLM`]: `num_items_in_batch`, `return_next_token_loss`, `return_logits`.
        """
        queries = documents = similarities = None
        if in_batch_weights is None:
            documents = self.embed(document_input_ids, document_attention_mask)
            queries = documents if query_input_ids is None else self.embed(query_input_ids, query_attention_mask)
            in_batch_weights, similarities = self.similarity_weights(queries, documents, group_ids)
        output = self.lm(
            input_ids=input_ids,
            attention_mask=attention_mask,
            labels=labels,
            in_batch_weights=in_batch_weights,
            **kwargs,
        )
        return RevelaPreTrainingOutput(
            **output,
            in_batch_weights=in_batch_weights,
            similarities=similarities,
            query_embeddings=queries,
            document_embeddings=documents,
        )

    def get_input_embeddings(self):
        return self.lm.get_input_embeddings()


class RevelaModel(PreTrainedModel):
    """
    The retriever of a published folder: stock backbone and weights, and in `config.revela` how its embedding is made.

    ```python
    model = AutoModel.from_pretrained("org/revela", trust_remote_code=True)
    scores = model.encode_query(["..."]) @ model.encode_document(["..."]).T
    ```
    """

    base_model_prefix = "backbone"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        settings = getattr(config, "revela", None)
        if settings is None:
            raise ValueError(
                "The config has no `revela` entry, which says how this retriever pools and prompts: it is no folder "
                "that `revela-hub export` wrote."
            )
        self.settings = dict(settings)
        self.backbone = AutoModel.from_config(config, dtype=torch.get_default_dtype())
        self._tokenizer = None
        self.post_init()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, config: PreTrainedConfig | None = None, **kwargs):
        """As in transformers; the config is the stock backbone's, of whatever architecture."""
        if config is None:
            names = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
            options = {name: kwargs[name] for name in names if name in kwargs}
            config = AutoConfig.from_pretrained(pretrained_model_name_or_path, **options)
        return super().from_pretrained(pretrained_model_name_or_path, *args, config=config, **kwargs)

    def save_pretrained(self, save_directory, *args, **kwargs):
        """Write the stock backbone's weights and config, which any `AutoModel` reads, and this code beside them."""
        os.makedirs(save_directory, exist_ok=True)
        custom_object_save(self, save_directory, config=self.backbone.config)
        self.backbone.save_pretrained(save_directory, *args, **kwargs)

    def forward(
        self, input_ids: torch.LongTensor, attention_mask: torch.Tensor | None = None, **kwargs
    ) -> RevelaModelOutput:
        """(B, L) token ids, EOS included where the tokenizer appends it -> hidden states and (B, d) embedding."""
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        hidden = self.backbone(input_ids=input_ids, attention_mask=attention_mask, **kwargs).last_hidden_state
        embedding = _normalise(pool(hidden, attention_mask, self.settings["pooling"]))
        return RevelaModelOutput(last_hidden_state=hidden, pooler_output=embedding)

    def encode_query(self, texts: list[str], batch_size: int = 32) -> torch.Tensor:
        """Texts -> (N, d) float32 embeddings on the CPU, with the query prompt in front."""
        return self._encode(texts, self.settings["query_prompt"], batch_size)

    def encode_document(self, texts: list[str], batch_size: int = 32) -> torch.Tensor:
        """Texts -> (N, d) float32 embeddings on the CPU, with the passage prompt in front."""
        return self._encode(texts, self.settings["document_prompt"], batch_size)

    @torch.no_grad()
    def _encode(self, texts: list[str], prompt: str, batch_size: int) -> torch.Tensor:
        if isinstance(texts, str):
            raise TypeError("`texts` is one string: pass a list of strings.")
        if self._tokenizer is None:
            self._tokenizer = AutoTokenizer.from_pretrained(self.name_or_path)
        # Batches of like length; the order is restored at the end.
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        embeddings = torch.empty(len(texts), self.config.get_text_config().hidden_size)
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            batch = self._tokenizer(
                [prompt + texts[index] for index in chosen],
                padding=True,
                truncation=True,
                max_length=self.settings["max_length"],
                return_tensors="pt",
            ).to(self.device)
            output = self(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
            embeddings[chosen] = output.pooler_output.float().cpu()
        return embeddings


def pool(hidden: torch.Tensor, attention_mask: torch.Tensor, pooling: str) -> torch.Tensor:
    """
    (B, L, d) hidden states and (B, L) mask -> (B, d).

    `"eos"` takes the last real token, `"cls"` the first, on either padding side; `"mean"` averages the real ones.
    """
    if pooling == "mean":
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return (hidden * mask).sum(1) / mask.sum(1)
    positions = torch.arange(attention_mask.shape[1], device=hidden.device)
    real = attention_mask.bool()
    if pooling == "eos":
        index = torch.where(real, positions, -1).amax(-1)
    else:
        index = torch.where(real, positions, attention_mask.shape[1] - 1).amin(-1)
    return hidden[torch.arange(hidden.shape[0], device=hidden.device), index]


def _normalise(embeddings: torch.Tensor) -> torch.Tensor:
    # Float32 whatever the autocast: at a temperature of 1e-4 the fourth digit of a cosine decides.
    embeddings = embeddings if embeddings.dtype == torch.float64 else embeddings.float()
    return nn.functional.normalize(embeddings, dim=-1)


def _load_backbone(auto_class, model, options: dict) -> tuple[PreTrainedModel, str | None]:
    """A loaded model as it is, or one read from a path or Hub id; takes the loading arguments out of `options`."""
    loading = {key: options.pop(key) for key in ("dtype", "revision", "token", "trust_remote_code") if key in options}
    if isinstance(model, PreTrainedModel):
        return model, getattr(model, "name_or_path", None) or None
    # Trained weights are float32 unless asked: a checkpoint's own dtype would make it pure bf16 in silence.
    loading.setdefault("dtype", torch.float32)
    return auto_class.from_pretrained(model, **loading), os.fspath(model)


def _refuse_unknown(options: dict) -> None:
    # A config keeps whatever it is given, so a mistyped option would be ignored in silence.
    unknown = sorted(set(options) - set(inspect.signature(RevelaConfig.__init__).parameters))
    if unknown:
        raise ValueError(f"RevelaConfig has no field {', '.join(map(repr, unknown))}.")


def _add_lora(model: PreTrainedModel, lora: dict | None) -> PreTrainedModel:
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


RevelaModel.register_for_auto_class("AutoModel")
RevelaForCausalLM.register_for_auto_class("AutoModelForCausalLM")
RevelaForPreTraining.register_for_auto_class("AutoModelForPreTraining")

__all__ = [
    "RevelaCausalLMOutput",
    "RevelaForCausalLM",
    "RevelaForPreTraining",
    "RevelaModel",
    "RevelaModelOutput",
    "RevelaPreTrainedModel",
    "RevelaPreTrainingOutput",
    "pool",
]
