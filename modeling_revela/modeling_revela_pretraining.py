"""Revela's pre-training model: retriever and LM together."""

import math
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers import initialization as init

from .configuration_revela import RevelaConfig

# The next two for transformers 5.6 alone, which copies of a checkpoint's code only what this file itself imports.
from .in_batch_attention import InBatchContext  # noqa: F401
from .linear_cross_entropy import linear_cross_entropy  # noqa: F401
from .modeling_revela import last_real, normalise, pool
from .modeling_revela_lm import (
    RevelaCausalLMOutput,
    RevelaForCausalLM,
    RevelaPreTrainedModel,
    add_lora,
    load_backbone,
    refuse_unknown_options,
    take_loading_options,
)


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
        asked = config._attn_implementation
        super().__init__(config)
        # What was asked for is the retriever's: the LM has in-batch attention.
        config._attn_implementation_internal = "sdpa"
        if retriever is None:
            options = {} if asked is None else {"attn_implementation": asked}
            options |= {"dtype": torch.get_default_dtype(), "trust_remote_code": False}
            retriever = AutoModel.from_config(config.retriever_config, **options)
        self.retriever = add_lora(retriever, config.retriever_lora)
        for name, parameter in self.retriever.named_parameters():
            # BERT's own pooler is carried along for the export but takes no part in the embedding.
            if name.startswith("pooler."):
                parameter.requires_grad_(False)
        self.lm = RevelaForCausalLM(config, backbone=backbone)
        self.log_temperature = None
        if config.trainable_temperature:
            # Of one element, not a scalar: neither DeepSpeed nor FSDP2 takes those.
            self.log_temperature = nn.Parameter(torch.tensor([math.log(config.similarity_temperature)]))
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
            options: fields of [`RevelaConfig`], `retriever_revision` and `lm_revision` among them, of which the models
                are read; `cache_dir`, `dtype`, `local_files_only` and `token` go to `from_pretrained`.

        Raises:
            ValueError: for an option that there is not, and what [`RevelaForCausalLM.from_backbone`] refuses.
        """
        if "revision" in options:
            raise ValueError("`revision` could mean either model: pass `retriever_revision` and `lm_revision`.")
        loading = take_loading_options(options)
        refuse_unknown_options(options)
        revisions = [options.pop(f"{half}_revision", None) for half in ("retriever", "lm")]
        retriever, retriever_name, retriever_revision = load_backbone(AutoModel, retriever, revisions[0], loading)
        if retriever.get_output_embeddings() is not None and hasattr(retriever, "get_decoder"):
            retriever = retriever.get_decoder()
        lm, lm_name, lm_revision = load_backbone(AutoModelForCausalLM, lm, revisions[1], loading)
        if retriever is lm or retriever is lm.get_decoder():
            raise ValueError(
                "`retriever` and `lm` are the same object: load the model twice, their weights part ways."
            )
        if lm.can_generate():
            options.setdefault("lm_generation_config", lm.generation_config.to_diff_dict())
        config = RevelaConfig(
            retriever_config=retriever.config,
            lm_config=lm.config,
            retriever_name_or_path=retriever_name,
            retriever_revision=retriever_revision,
            lm_name_or_path=lm_name,
            lm_revision=lm_revision,
            **options,
        )
        model = cls(config, retriever=retriever, backbone=lm)
        for prefix, _, _, source, _ in model._frozen_halves():
            if source is None and not config.save_backbones:
                raise ValueError(
                    f"`save_backbones=False` leaves `{prefix}` out of checkpoints, yet that half is a model that came "
                    "from no path or Hub id to read it from again: save it, and pass its path."
                )
        model.lm._check_head()
        return model

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self and self.log_temperature is not None:
            init.constant_(self.log_temperature, math.log(self.config.similarity_temperature))

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

    def _frozen_halves(self) -> list[tuple[str, PreTrainedModel, type, str | None, str | None]]:
        """(prefix of its weights, module, auto class, where it came from, of which commit) of each half whose base is
        not trained."""
        config = self.config
        halves = []
        if config.retriever_lora is not None:
            source = config.retriever_name_or_path, config.retriever_revision
            halves.append(("retriever.", self.retriever, AutoModel, *source))
        if config.lm_lora is not None or config.freeze_lm:
            source = config.lm_name_or_path, config.lm_revision
            halves.append(("lm.backbone.", self.lm.backbone, AutoModelForCausalLM, *source))
        return halves

    def _left_out(self) -> set[str]:
        if self.config.save_backbones:
            return set()
        prefixes = tuple(prefix for prefix, *_ in self._frozen_halves())
        frozen = set(self.state_dict()) - self._trainable
        return {name for name in frozen if name.startswith(prefixes) and "lora_" not in name}

    @torch.no_grad()
    def _read_left_out(self, loading: dict) -> None:
        own = self.state_dict()
        left_out = self._left_out()
        for prefix, module, auto_class, source, revision in self._frozen_halves() if left_out else ():
            options = {**loading, "dtype": module.dtype, "trust_remote_code": False, "use_safetensors": True}
            base = auto_class.from_pretrained(source, revision=revision, **options).state_dict()
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
        """Temperature of the softmax over similarities; a float32 tensor (1,) where it is trained."""
        return (
            self.config.similarity_temperature if self.log_temperature is None else self.log_temperature.float().exp()
        )

    def embed(self, input_ids: torch.LongTensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """
        (B, L) token ids and mask (left out, all are real) -> (B, d) L2-normalised embeddings, float32 or wider.

        With `embed_batch_size` in slices of chunks of like length, each a forward pass of the retriever of its own:
        the same embeddings and gradients, while only one slice's activations are held.
        """
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        if self.config.embed_batch_size is None:
            return self._embed(input_ids, attention_mask)
        rows = len(input_ids)
        count = -(-rows // self.config.embed_batch_size)
        if torch.is_grad_enabled() and dist.is_available() and dist.is_initialized():
            # ZeRO-3 and FSDP2 gather weights at each forward pass, so all processes must make as many.
            most = torch.tensor(count, device=input_ids.device)
            dist.all_reduce(most, dist.ReduceOp.MAX)
            count = int(most)
        lengths = last_real(attention_mask) + 1
        order = lengths.argsort(descending=True, stable=True)
        # Where another process has more slices than this one chunks, what one chunk gives again is left out below.
        slices = torch.cat((order, order[:1].expand(max(0, count - rows)))).tensor_split(count)
        longest = lengths[torch.stack([chosen[0] for chosen in slices])].tolist()
        # Activation checkpointing of a whole slice is gradient caching (arXiv 2101.06983): the forward pass keeps only
        # token ids and the state of the random numbers; the backward pass, which has the gradient of all embeddings
        # by then, embeds a slice once more, with the same dropout, and is through with it before it takes the next.
        # Being a part of the graph it needs no second backward pass that Trainer, DDP or DeepSpeed had to know of.
        embeddings = [
            checkpoint(self._embed, input_ids[chosen, :length], attention_mask[chosen, :length], use_reentrant=False)
            for chosen, length in zip(slices, longest, strict=True)
        ]
        return torch.cat(embeddings)[order.argsort()]

    def _embed(self, input_ids: torch.LongTensor, attention_mask: torch.Tensor) -> torch.Tensor:
        # A decoder would keep a key-value cache for every chunk otherwise.
        options = {"use_cache": False} if hasattr(self.retriever.config, "use_cache") else {}
        hidden = self.retriever(input_ids=input_ids, attention_mask=attention_mask, **options).last_hidden_state
        return normalise(pool(hidden, attention_mask, self.config.pooling))

    def similarity_weights(
        self, query_embeddings: torch.Tensor, document_embeddings: torch.Tensor, group_ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Sim(D_i, D_j) of §3.3.

        Args:
            query_embeddings, document_embeddings: (B, d), L2-normalised or not.
            group_ids: (B,), which group each chunk belongs to; all in one where it is `None`.

        With `matryoshka_dims` the weights are the mean of those at each size, the whole one among them.

        Returns:
            (B, B) weights, float32 (float64 for float64 embeddings), and (B, B) cosines of the whole embeddings.

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
        weights, similarities = self._weights(query_embeddings, document_embeddings, visible)
        if self.config.matryoshka_dims is not None:
            cut = [
                self._weights(query_embeddings[:, :dim], document_embeddings[:, :dim], visible)[0]
                for dim in self.config.matryoshka_dims
            ]
            weights = torch.stack([weights, *cut]).mean(0)
        return weights, similarities

    def _weights(
        self, query_embeddings: torch.Tensor, document_embeddings: torch.Tensor, visible: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The softmax over the visible (B, B) of the cosines divided by the temperature, and the cosines."""
        queries, documents = normalise(query_embeddings), normalise(document_embeddings)
        if queries.dtype != torch.float64:
            dtype = getattr(torch, self.config.similarity_dtype)
            queries, documents = queries.to(dtype), documents.to(dtype)
        with torch.autocast(device_type=queries.device.type, enabled=False):
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
        input_ids: torch.LongTensor | None = None,
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
            input_ids, attention_mask, labels: (B, L), the chunks in the LM's tokens; see [`RevelaForCausalLM`]. Left
                out, the LM is not run, and the output holds what the retriever gives alone.
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
        output = {}
        if input_ids is not None:
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

    def set_attn_implementation(self, attn_implementation: str | dict, *args, **kwargs) -> None:
        """The retriever's alone, as in transformers: the LM keeps in-batch attention."""
        self.retriever.set_attn_implementation(attn_implementation, *args, **kwargs)


RevelaForPreTraining.register_for_auto_class("AutoModelForPreTraining")

__all__ = ["RevelaForPreTraining", "RevelaPreTrainingOutput"]
