"""A checkpoint, or a fine-tuned retriever -> the published folder: stock weights that four doors open."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hub_cards.backbones import positions
from hub_cards.card import CARD, said_before, take_along, was_edited, write_card
from hub_cards.checkpoints import EXPORT_RECORD, check_folder, model_type
from hub_cards.doors import refuse_non_finite, write_doors, write_lm
from hub_cards.encoding import encode, load_model, plain_pooling, prompts_used
from hub_cards.eos_tokenizer import ends_with_eos, save_tokenizer
from hub_cards.privacy import clean_configs
from hub_cards.recorded import TEXTS, distance_from, read_record, record_embeddings, record_lm
from modeling_retromae import RetroMAEForPreTraining
from modeling_revela import RevelaConfig, RevelaForCausalLM, RevelaForPreTraining, RevelaPreTrainedModel
from modeling_revela.modeling_revela_lm import add_lora

MAX_LENGTH = 2048
DTYPES = ("float32", "bfloat16", "float16")
PARTS = ("retriever", "lm")
POOLINGS = ("cls", "mean")


def export(
    checkpoint: str | Path,
    out: str | Path,
    *,
    adapter_only: bool = False,
    part: str = "retriever",
    pooling: str | None = None,
    dtype: str = "float32",
    max_length: int = MAX_LENGTH,
    overwrite: bool = False,
    card: bool = True,
) -> Path:
    """
    Publish the retriever of a checkpoint, or the LM that was trained along with it.

    The folder holds the stock model (Revela's retriever with adapters merged; RetroMAE's encoder with its masked-LM
    head), its tokenizer, sentence-transformers' files and the code of `RevelaModel`. It opens with
    `SentenceTransformer(path)` and `AutoModel.from_pretrained(path)` (stock class, no trust), with
    `AutoModel.from_pretrained(path, trust_remote_code=True)` (`encode_query`, `encode_document`), in any server that
    reads sentence-transformers folders, and RetroMAE's with `AutoModelForMaskedLM` besides.

    Args:
        checkpoint: what a script of `trainers` wrote: for pre-training a `checkpoint-N` folder or the output folder
            itself; for fine-tuning, the contrastive method, SimCSE and TSDAE the output folder.
        out: the folder to write; written beside and renamed, so that it is whole or not there.
        adapter_only: write the part's PEFT adapter as the authors release the retriever's, without base weights.
        part: `"retriever"`, or for Revela `"lm"`: a stock causal LM with its adapters merged, its own tokenizer and
            the generation settings of the LM that training began with.
        pooling: RetroMAE only: `"cls"` or `"mean"` instead of what it was trained with.
        dtype: precision of the written weights.
        max_length: tokens a text may have; less where the backbone or its tokenizer takes fewer.
        overwrite: replace `out` if it is empty, or an earlier export to which nothing was added.
        card: write the model card, from what the trainer left beside the checkpoint (`hub_cards.card`).

    Returns:
        The path of `out`.

    Raises:
        FileNotFoundError: if `checkpoint` is no checkpoint; FileExistsError: if `out` is there, and is not to be or
        cannot be overwritten; ValueError: for files that are broken or must not be read (`check_folder`), weights that
        are not finite, options that do not go together or with the checkpoint, or a tokenizer that appends no EOS.
    """
    checkpoint, out = Path(checkpoint), Path(out)
    kind = _method(checkpoint)
    require_writable(out, overwrite)
    options = {"dtype": torch_dtype(dtype), "max_length": max_length}
    if pooling is not None and kind != "retromae":
        raise ValueError(f"{checkpoint} was trained with a pooling of its own: leave `pooling` out.")
    if pooling not in (None, *POOLINGS):
        raise ValueError(f"No pooling {pooling!r}: choose one of {', '.join(POOLINGS)}.")
    if part not in PARTS:
        raise ValueError(f"No part {part!r}: choose one of {', '.join(PARTS)}.")
    if part == "lm" and kind != "revela":
        raise ValueError(f"{checkpoint} was trained without an LM: its only part is the retriever.")
    check_folder(checkpoint)
    if part == "lm":
        write = _lm_writer(checkpoint, adapter_only, options["dtype"])
    elif kind == "retromae":
        write = _retromae_writer(checkpoint, adapter_only, pooling, options)
    elif kind == "finetuned":
        write = finetuned_writer(checkpoint, adapter_only, options)
    else:
        write = _revela_writer(checkpoint, adapter_only, options)
    return write_beside(out, write, checkpoint, card)


def torch_dtype(name: str) -> torch.dtype:
    """Raises ValueError for a precision that no folder is written in."""
    if name not in DTYPES:
        raise ValueError(f"No precision {name!r}: choose one of {', '.join(DTYPES)}.")
    return getattr(torch, name)


def write_beside(
    out: Path, write: Callable[[Path], None], checkpoint: Path | None = None, card: bool = True, **facts
) -> Path:
    """
    Have a folder written beside `out` with a record of its files, then put it in the place of `out`.

    What was said for the card of an earlier export there is taken over.

    Args:
        out: the folder's final name.
        write: writes the model into the folder that it is given.
        checkpoint: whose training the card tells of.
        card: whether there is one; `facts` are what `hub_cards.card.write_card` is told besides.
    """
    staging = out.with_name(f".{out.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        write(staging)
        clean_configs(staging)
        if checkpoint is not None:
            take_along(checkpoint, staging)
        files = sorted(path.relative_to(staging).as_posix() for path in staging.rglob("*"))
        record = {"files": [*files, EXPORT_RECORD]}
        if said := said_before(out, staging):
            record["card"] = said
        text = json.dumps(record, indent=2, ensure_ascii=False)
        (staging / EXPORT_RECORD).write_text(text + "\n", encoding="utf-8")
        if graphs := [name for name in ("onnx", "openvino") if (out / name).exists()]:
            print(
                f"{out}: {' and '.join(graphs)} of the earlier export is not taken over: write it again by "
                "`revela-hub export-onnx`.",
                file=sys.stderr,
            )
        if card:
            write_card(staging, name=out.resolve().name, **facts)
        if out.exists():
            shutil.rmtree(out)
        os.replace(staging, out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return out


def _method(checkpoint: Path) -> str:
    """Which method a checkpoint is of, "revela" or "retromae", or "finetuned" for a retriever."""
    if (checkpoint / EXPORT_RECORD).exists():
        raise ValueError(f"{checkpoint} was exported already: push it as it is.")
    if (checkpoint / "modules.json").exists():
        return "finetuned"
    if not (checkpoint / "config.json").exists():
        inside = [path for path in checkpoint.glob("checkpoint-*") if (path / "config.json").exists()]
        newest = max(inside, key=lambda path: (len(path.name), path.name), default=None)
        raise FileNotFoundError(
            f"{checkpoint} is no checkpoint: it has no config.json." + (f" Did you mean {newest}?" if newest else "")
        )
    kind = model_type(checkpoint)
    if kind not in ("revela", "retromae"):
        raise ValueError(
            f"{checkpoint} is no pre-training checkpoint of Revela or RetroMAE: its config says model_type {kind}."
        )
    return kind


def require_writable(out: Path, overwrite: bool) -> None:
    """
    Refuse to delete what is not empty, nor an export and nothing else: its source holds all of that still.

    Raises:
        FileExistsError: if `out` is there, and is not to be or cannot be overwritten.
    """
    if not out.exists():
        return
    if not overwrite:
        raise FileExistsError(f"{out} is there already: pass --overwrite, or another folder.")
    if out.is_dir():
        there = {path.relative_to(out).as_posix() for path in out.rglob("*")}
        foreign = sorted(there - _recorded(out / EXPORT_RECORD))
        if not foreign:
            if was_edited(out):
                raise FileExistsError(
                    f"{out / CARD} was edited after it was written, which would be lost: move it elsewhere, or choose "
                    "another folder."
                )
            return
        if EXPORT_RECORD in there:
            raise FileExistsError(
                f"{out} holds {foreign[0]}, which no export wrote, so it is not overwritten: move that elsewhere, or "
                "choose another folder."
            )
    raise FileExistsError(f"{out} is no earlier export, so it is not overwritten: choose another folder.")


def _recorded(record: Path) -> set[str]:
    try:
        return set(json.loads(record.read_text(encoding="utf-8"))["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return set()


# One half of a checkpoint, read without the other


class _Half(RevelaForPreTraining):
    def _frozen_halves(self) -> list:
        return [half for half in super()._frozen_halves() if half[1] is not None]


class _RetrieverAlone(_Half):
    _keys_to_ignore_on_load_unexpected = (r"^(?!retriever\.)",)

    def __init__(self, config: RevelaConfig):
        RevelaPreTrainedModel.__init__(self, config)
        options = {"dtype": torch.get_default_dtype(), "trust_remote_code": False}
        self.retriever = add_lora(AutoModel.from_config(config.retriever_config, **options), config.retriever_lora)
        self.lm = SimpleNamespace(backbone=None)
        self.log_temperature = None
        self.post_init()


class _LMAlone(_Half):
    _keys_to_ignore_on_load_unexpected = (r"^(?!lm\.)",)

    def __init__(self, config: RevelaConfig):
        RevelaPreTrainedModel.__init__(self, config)
        self.retriever = self.log_temperature = None
        self.lm = RevelaForCausalLM(config)
        self.post_init()


def lm_tokenizer(checkpoint: str | Path) -> PreTrainedTokenizerBase:
    """The LM's tokenizer in a checkpoint of Revela; raises FileNotFoundError naming the folder that it lacks."""
    folder = Path(checkpoint) / "lm_tokenizer"
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{checkpoint} has no folder lm_tokenizer: copy it from another checkpoint of the same run, or save the "
            "tokenizer of the LM there."
        )
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


# What each kind of export writes, read and checked before anything is written


def _retromae_writer(checkpoint: Path, adapter_only: bool, pooling: str | None, options: dict) -> Callable:
    if adapter_only:
        raise ValueError(f"{checkpoint} is RetroMAE's, which trains all weights: there is no adapter to write.")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)
    model = RetroMAEForPreTraining.from_pretrained(checkpoint, dtype=torch.float32)
    pooling = pooling or model.config.pooling
    return lambda folder: write_doors(model.encoder, tokenizer, folder, pooling=pooling, **options)


def finetuned_writer(
    folder: Path, adapter_only: bool, options: dict, prompts_said: dict[str, str] | None = None
) -> Callable[[Path], None]:
    """
    What writes a sentence-transformers folder anew in our format, checked to embed as before.

    Args:
        options: `dtype` and `max_length`.
        prompts_said: by side (`query`, `document`), in place of those in the folder.

    Raises:
        ValueError: for a folder that embeds in a way which the format cannot say.
    """
    if adapter_only:
        raise ValueError(f"{folder} is a fine-tuned retriever, its adapter merged: export it whole.")
    model = load_model(folder, device="cpu")
    model.prompts = {**model.prompts, **(prompts_said or {})}
    pooling = plain_pooling(model)
    if pooling is None:
        kinds = ", ".join(type(module).__name__ for module in model)
        mode = getattr(model[1], "pooling_mode", None) if len(model) > 1 else None
        raise ValueError(
            f"{folder} is made of {kinds}, with pooling {mode}: what is published is a transformer of text with "
            "pooling cls or mean or eos of all tokens, and perhaps a normalisation."
        )
    if model.similarity_fn_name not in ("cosine", "dot"):
        raise ValueError(f"{folder} ranks by {model.similarity_fn_name}: what is published ranks by cosine or dot.")
    if pooling == "eos" and not ends_with_eos(model.tokenizer):
        raise ValueError(f"The tokenizer in {folder} appends no EOS, which the retriever's embedding is read from.")
    prompts, backbone = prompts_used(model), model[0].auto_model
    lengths = (options["max_length"], model.max_seq_length or options["max_length"])
    dims = getattr(backbone.config, "matryoshka_dimensions", None)
    settings = {
        "pooling": pooling,
        "query_prompt": prompts["query"],
        "document_prompt": prompts["document"],
        "normalize": len(model) == 3 or model.similarity_fn_name == "cosine",
        "dtype": options["dtype"],
        "max_length": min(lengths),
        "matryoshka_dims": None if dims is None else dims[:-1],
    }
    model.max_seq_length = settings["max_length"]
    before = {side: encode(model, texts, side, progress=False) for side, texts in TEXTS.items()}

    def write(out: Path) -> None:
        write_doors(backbone, model.tokenizer, out, **settings)
        record = read_record(out)
        if not (distance := distance_from(before, record)) <= record["tolerance"]:
            raise ValueError(f"{folder} would embed otherwise when published, by {distance:.2g}: please report it.")

    return write


def _revela_writer(checkpoint: Path, adapter_only: bool, options: dict) -> Callable:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)
    model = _RetrieverAlone.from_pretrained(checkpoint, dtype=torch.float32)
    if model.config.pooling == "eos" and not ends_with_eos(tokenizer):
        raise ValueError(
            f"The tokenizer in {checkpoint} appends no EOS, which the retriever's embedding is read from."
        )
    if adapter_only:
        wrapped, config = _peft_retriever(model), model.config
        lengths = (options["max_length"], tokenizer.model_max_length, positions(model.retriever) or MAX_LENGTH)
        how = {
            "pooling": config.pooling,
            "prompts": {"query": config.query_prompt, "document": config.document_prompt},
            "max_length": min(lengths),
        }

        def write(folder: Path) -> None:
            _write_adapter(wrapped, tokenizer, folder)
            record_embeddings(wrapped, tokenizer, folder, kind="adapter", base_dtype=_dtype(checkpoint), **how)

        return write
    return lambda folder: publish(model, tokenizer, folder, **options)


def _dtype(checkpoint: Path) -> str:
    """The precision of a checkpoint's backbones."""
    return str(RevelaConfig.from_pretrained(checkpoint).dtype or "float32").removeprefix("torch.")


def _lm_writer(checkpoint: Path, adapter_only: bool, dtype: torch.dtype) -> Callable:
    tokenizer = lm_tokenizer(checkpoint)
    model = _LMAlone.from_pretrained(checkpoint, dtype=torch.float32)
    config = model.config
    source = config.lm_name_or_path, config.lm_revision
    lm = _peft_model(AutoModelForCausalLM, model.lm.backbone, config.lm_lora, *source)
    if adapter_only:

        def write(folder: Path) -> None:
            _write_adapter(lm, tokenizer, folder)
            record_lm(lm, tokenizer, folder, kind="lm-adapter", base_dtype=_dtype(checkpoint))

        return write
    lm = lm if config.lm_lora is None else lm.merge_and_unload()
    try:
        model.lm.generation_config.validate(strict=True)
        lm.generation_config = model.lm.generation_config
    except ValueError:
        pass  # Such as transformers no longer writes: those that follow from the config stay.
    return lambda folder: write_lm(lm, tokenizer, folder, dtype)


def merged_retriever(model: RevelaForPreTraining) -> PreTrainedModel:
    """The retriever as a stock model of its own, adapters merged by peft."""
    retriever = _peft_retriever(model)
    return retriever if model.config.retriever_lora is None else retriever.merge_and_unload()


def _peft_retriever(model: RevelaForPreTraining):
    config = model.config
    source = config.retriever_name_or_path, config.retriever_revision
    return _peft_model(AutoModel, model.retriever, config.retriever_lora, *source)


def _peft_model(auto_class: type, half: PreTrainedModel, lora: dict | None, source: str | None, revision: str | None):
    """A stock backbone with the trained weights of a half, wrapped by peft where there are adapters."""
    # Merged in float32: a bfloat16 weight rounds away most of what a short run adds to it.
    stock = auto_class.from_config(half.config, dtype=torch.float32, trust_remote_code=False)
    weights = half.state_dict()
    plain = {name.replace(".base_layer.", "."): value for name, value in weights.items() if "lora_" not in name}
    stock.load_state_dict(plain)
    if lora is None:
        return stock.eval()
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    task = "FEATURE_EXTRACTION" if auto_class is AutoModel else "CAUSAL_LM"
    base = {"base_model_name_or_path": source, "revision": revision}
    settings = LoraConfig(**{**lora, **base, "task_type": task, "inference_mode": True})
    wrapped = get_peft_model(stock, settings)
    adapters = {
        f"base_model.model.{name.replace('.default.', '.')}": value
        for name, value in weights.items()
        if "lora_" in name
    }
    result = set_peft_model_state_dict(wrapped, adapters)
    if result.unexpected_keys:
        raise ValueError(
            f"peft does not know adapter weights of this checkpoint, {result.unexpected_keys[0]!r} first."
        )
    return wrapped.eval()


def _write_adapter(wrapped, tokenizer, folder: Path) -> None:
    if not hasattr(wrapped, "peft_config"):
        raise ValueError("This part was trained without LoRA, so there is no adapter: export it whole.")
    wrapped.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    saved = load_file(folder / "adapter_model.safetensors")
    refuse_non_finite(saved)
    if not saved or not any(value.abs().sum() > 0 for name, value in saved.items() if "lora_B" in name):
        raise ValueError("The adapter is empty or was never trained: every B matrix is zero.")


def publish(
    model: RevelaForPreTraining, tokenizer, folder: Path, dtype: torch.dtype, max_length: int = MAX_LENGTH
) -> None:
    """Write the published folder of a model in memory, trained or not; `export` is this on a checkpoint."""
    config = model.config
    write_doors(
        merged_retriever(model),
        tokenizer,
        folder,
        pooling=config.pooling,
        query_prompt=config.query_prompt,
        document_prompt=config.document_prompt,
        dtype=dtype,
        max_length=max_length,
        matryoshka_dims=config.matryoshka_dims,
    )


__all__ = [
    "DTYPES",
    "MAX_LENGTH",
    "PARTS",
    "POOLINGS",
    "export",
    "finetuned_writer",
    "lm_tokenizer",
    "merged_retriever",
    "publish",
    "require_writable",
    "torch_dtype",
    "write_beside",
]
