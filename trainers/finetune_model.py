"""The retriever that is fine-tuned: from an encoder or a published folder, perhaps with LoRA, and back to a folder."""

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer, cast_adapter_dtype
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Normalize, Pooling
from sentence_transformers.util import is_sentence_transformer_model
from torch import nn

from hub_cards.backbones import positions, set_pad_token
from hub_cards.checkpoints import check_folder, model_type
from hub_cards.doors import copy_code, record_dims, write_for_servers
from hub_cards.encoding import plain_pooling, prompts_used, read_plain_text
from hub_cards.eos_tokenizer import append_eos, save_tokenizer
from modeling_revela.configuration_revela import check_matryoshka_dims
from trainers.backbones import check_positions, check_room, fit_vocabulary, room_taken
from trainers.checks import check_at_least, check_choice, check_dtype, check_lora

STAGING = ".saving"
_POOLING = {"cls": "cls", "mean": "mean", "eos": "lasttoken"}


@dataclass
class ModelArguments:
    """What is trained. A sentence-transformers folder brings pooling, prompts and similarity along."""

    model_name_or_path: str = field(
        metadata={"help": "An encoder, or a retriever in sentence-transformers' form: Hub id or folder."}
    )
    pooling: str | None = field(
        default=None, metadata={"help": "cls, mean or eos (last token; for decoders). For a plain encoder: cls."}
    )
    similarity: str | None = field(
        default=None, metadata={"help": "cosine or dot. For a plain encoder: cosine; the paper's code has dot."}
    )
    query_prompt: str | None = field(
        default=None, metadata={"help": "Put before a query; the retriever's own, if left out."}
    )
    document_prompt: str | None = field(
        default=None, metadata={"help": "Put before a document; the retriever's own, if left out."}
    )
    max_length: int | None = field(
        default=None, metadata={"help": "Tokens a text may have; the retriever's own, if left out."}
    )
    lora_r: int = field(default=0, metadata={"help": "LoRA rank; 0 trains all weights."})
    lora_alpha: int | None = field(default=None, metadata={"help": "LoRA alpha; the rank, if left out."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout on the adapters."})
    dtype: str = field(
        default="float32",
        metadata={"help": "Precision of the weights in memory; keep float32 and use --bf16 for fast products."},
    )
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that the model's repository carries."})

    def __post_init__(self):
        check_at_least(self, max_length=1)
        check_lora(self)
        check_dtype(self.dtype)
        if self.pooling is not None:
            check_choice("pooling", self.pooling, _POOLING)
        if self.similarity is not None:
            check_choice("similarity", self.similarity, ("cosine", "dot"))


def load_model(arguments: ModelArguments, matryoshka_dims: list[int] | None = None) -> SentenceTransformer:
    """
    The retriever to train: a sentence-transformers model as it is, or a plain encoder with pooling on top.

    Args:
        matryoshka_dims: sizes that its embedding will be trained at besides its own, which its config records.

    Raises:
        ValueError: for a pre-training checkpoint, which is exported first, files that must not be read
            (`check_folder`), a model that does not load, sizes that its embedding does not have or that
            need cosine, a length that it or the prompts leave no room for, and embeddings that lack tokens and would
            not be trained.
    """
    name = arguments.model_name_or_path
    if model_type(name) in ("revela", "retromae"):
        raise ValueError(
            f"{name} is a pre-training checkpoint: publish its encoder with `revela-hub export {name} OUT`, and "
            "fine-tune OUT."
        )
    check_folder(name, arguments.trust_remote_code)
    options = {"dtype": getattr(torch, arguments.dtype), "use_safetensors": True}
    is_retriever = is_sentence_transformer_model(name)
    if is_retriever and arguments.pooling is not None:
        raise ValueError(f"{name} has a pooling of its own: leave `pooling` out.")
    try:
        model = SentenceTransformer(name, trust_remote_code=arguments.trust_remote_code, model_kwargs=options)
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(f"{name} does not load as an encoder or retriever: {reason}") from error
    if not is_retriever:
        read_plain_text(model)
        model = _with_pooling(model, arguments.pooling or "cls", arguments.similarity or "cosine")
    elif arguments.similarity is not None:
        model.similarity_fn_name = arguments.similarity
    if matryoshka_dims is not None:
        check_matryoshka_dims(matryoshka_dims, model.get_embedding_dimension())
        if model.similarity_fn_name != "cosine":
            raise ValueError(
                f"`matryoshka_dims` compares by cosine, but {name} ranks by {model.similarity_fn_name}: pass "
                "--similarity cosine, or leave the sizes out."
            )
        record_dims(model[0].auto_model.config, matryoshka_dims)
    set_pad_token(model.tokenizer)
    prompts = prompts_used(model)
    given = {"query": arguments.query_prompt, "document": arguments.document_prompt}
    model.prompts = model.prompts | {side: prompts[side] if text is None else text for side, text in given.items()}
    backbone = model[0].auto_model
    if arguments.max_length is not None:
        check_positions("max_length", arguments.max_length, backbone)
        model.max_seq_length = arguments.max_length
    elif (most := positions(backbone)) is not None:
        model.max_seq_length = min(most, model.max_seq_length or most)
    if model.max_seq_length is not None:
        check_room("max_length", model.max_seq_length, room_taken(model.tokenizer, prompts_used(model).values()))
    fit_vocabulary(backbone, model.tokenizer, is_trained=not arguments.lora_r)
    if arguments.lora_r:
        alpha = arguments.lora_r if arguments.lora_alpha is None else arguments.lora_alpha
        lora = LoraConfig(
            r=arguments.lora_r,
            lora_alpha=alpha,
            lora_dropout=arguments.lora_dropout,
            target_modules="all-linear",
            task_type="FEATURE_EXTRACTION",
        )
        inject_adapter_in_model(lora, backbone)
        # As `get_peft_model` does: steps of the usual size are lost in what bfloat16 rounds away.
        cast_adapter_dtype(backbone, "default")
    return model


def _with_pooling(model: SentenceTransformer, pooling: str, similarity: str) -> SentenceTransformer:
    """A plain encoder, for which sentence-transformers chose mean or last-token pooling, with the one asked for."""
    if pooling == "eos":
        # Its name since sentence-transformers 6, and before.
        name = "processor" if hasattr(model[0], "processor") else "tokenizer"
        setattr(model[0], name, append_eos(model.tokenizer))
    size = model[0].auto_model.config.get_text_config().hidden_size
    modules = [model[0], Pooling(size, _POOLING[pooling])]
    if similarity == "cosine":
        modules.append(Normalize())
    return SentenceTransformer(modules=modules, similarity_fn_name=similarity)


def has_adapters(model: nn.Module) -> bool:
    """Whether LoRA's layers are in the model."""
    return any(isinstance(module, BaseTunerLayer) for module in model.modules())


def merge_adapters(model: SentenceTransformer) -> None:
    """
    Add LoRA's products to the weights below and take the adapters out, in place; the model is float32 afterwards.

    In bfloat16 most of what a short run adds to a weight, a few thousandths of it, is less than its last digit.
    """
    model.float()

    def merge(module: nn.Module) -> None:
        for name, child in module.named_children():
            if isinstance(child, BaseTunerLayer):
                child.merge(safe_merge=True)
                setattr(module, name, child.get_base_layer())
            else:
                merge(child)

    merge(model)
    del model[0].auto_model.peft_config


def save_result(model: SentenceTransformer, folder: str | os.PathLike) -> None:
    """
    Write the retriever as a sentence-transformers folder; `modules.json`, which makes it one, comes last.

    Prompts, pooling, similarity and length are the model's. A published Revela retriever keeps its `revela` record,
    brought up to date, and the code that the record is for, so that it opens by all its doors as before.
    """
    folder = Path(folder)
    staging = folder / STAGING
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    _update_record(model)
    # Its card would show texts that were trained on; `revela-hub export` writes another.
    model.save_pretrained(str(staging), create_model_card=False)
    save_tokenizer(model.tokenizer, staging)
    _write_for_servers(model, staging)
    if getattr(model[0].auto_model.config, "revela", None) is not None:
        copy_code(staging)
    for path in sorted(staging.iterdir(), key=lambda path: path.name == "modules.json"):
        target = folder / path.name
        if target.is_dir():
            shutil.rmtree(target)
        os.replace(path, target)
    staging.rmdir()


def _write_for_servers(model: SentenceTransformer, folder: Path) -> None:
    """In the form that servers read, where the model is pooled and perhaps normalised, and nothing else."""
    pooling = plain_pooling(model)
    if pooling is None or model.max_seq_length is None:
        return
    write_for_servers(
        folder,
        size=model.get_embedding_dimension(),
        pooling=pooling,
        prompts=model.prompts,
        max_length=model.max_seq_length,
        similarity=model.similarity_fn_name,
        normalised=len(model) == 3,
        default_prompt_name=model.default_prompt_name,
    )


def _update_record(model: SentenceTransformer) -> None:
    config = model[0].auto_model.config
    if getattr(config, "revela", None) is None:
        return
    prompts = prompts_used(model)
    config.revela = {
        **config.revela,
        "query_prompt": prompts["query"],
        "document_prompt": prompts["document"],
        "max_length": model.max_seq_length,
    }


__all__ = ["STAGING", "ModelArguments", "has_adapters", "load_model", "merge_adapters", "save_result"]
