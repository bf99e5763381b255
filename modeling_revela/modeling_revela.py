"""Revela's retriever on its own, as published: this file alone travels with a published folder."""

import os
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import ModelOutput

# What a published folder's weights, config and tokenizer are found by.
_WHERE = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")


@dataclass
class RevelaModelOutput(ModelOutput):
    """
    Output of [`RevelaModel`].

    Args:
        last_hidden_state: (B, L, d), the backbone's own.
        pooler_output: (B, d), the embedding, L2-normalised unless the folder's record says otherwise.
    """

    last_hidden_state: torch.Tensor | None = None
    pooler_output: torch.Tensor | None = None


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

    def __init__(self, config: PreTrainedConfig, backbone: PreTrainedModel | None = None):
        super().__init__(config)
        settings = getattr(config, "revela", None)
        if settings is None:
            raise ValueError(
                "The config has no `revela` entry, which says how this retriever pools and prompts: it is no folder "
                "that `revela-hub export` wrote."
            )
        self.settings = dict(settings)
        if backbone is None:
            backbone = AutoModel.from_config(config, dtype=torch.get_default_dtype(), trust_remote_code=False)
        self.backbone = backbone
        self._tokenizer, self._where = None, {}
        self.post_init()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, config: PreTrainedConfig | None = None, **kwargs):
        """As in transformers; the config is the stock backbone's, of whatever architecture."""
        where = {name: kwargs[name] for name in _WHERE if name in kwargs}
        if config is None:
            config = AutoConfig.from_pretrained(pretrained_model_name_or_path, **where)
        # The stock class reads its own weights, whether they were saved with a head (RetroMAE's masked LM) or not.
        kwargs["trust_remote_code"] = False
        kwargs.setdefault("use_safetensors", True)
        found = AutoModel.from_pretrained(pretrained_model_name_or_path, *args, config=config, **kwargs)
        backbone, *info = found if isinstance(found, tuple) else (found,)
        model = cls(config, backbone=backbone).eval()
        model.name_or_path, model._where = str(pretrained_model_name_or_path), where
        return (model, *info) if info else model

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
        embedding = pool(hidden, attention_mask, self.settings["pooling"])
        if self.settings.get("normalize", True):
            embedding = normalise(embedding)
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
            self._tokenizer = AutoTokenizer.from_pretrained(self.name_or_path, **self._where)
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
    if pooling == "eos":
        index = last_real(attention_mask)
    else:
        index = torch.where(attention_mask.bool(), positions, attention_mask.shape[1] - 1).amin(-1)
    return hidden[torch.arange(hidden.shape[0], device=hidden.device), index]


def last_real(attention_mask: torch.Tensor) -> torch.Tensor:
    """(B, L) mask -> (B,), the position of the last real token."""
    positions = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    return torch.where(attention_mask.bool(), positions, -1).amax(-1)


def normalise(embeddings: torch.Tensor) -> torch.Tensor:
    # Float32 whatever the autocast: at a temperature of 1e-4 the fourth digit of a cosine decides.
    embeddings = embeddings if embeddings.dtype == torch.float64 else embeddings.float()
    return nn.functional.normalize(embeddings, dim=-1)


RevelaModel.register_for_auto_class("AutoModel")

__all__ = ["RevelaModel", "RevelaModelOutput", "last_real", "normalise", "pool"]
