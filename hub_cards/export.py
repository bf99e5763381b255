"""A pre-training checkpoint -> the published folder: stock weights that four doors open."""

import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

from hub_cards.checkpoints import model_type
from hub_cards.doors import write_doors
from hub_cards.eos_tokenizer import ends_with_eos, save_tokenizer
from modeling_retromae import RetroMAEForPreTraining
from modeling_revela import RevelaForPreTraining

MAX_LENGTH = 2048
DTYPES = ("float32", "bfloat16", "float16")
POOLINGS = ("cls", "mean")
_ADAPTER_CONFIG = "adapter_config.json"


def export(
    checkpoint: str | Path,
    out: str | Path,
    *,
    adapter_only: bool = False,
    pooling: str | None = None,
    dtype: str = "float32",
    max_length: int = MAX_LENGTH,
    overwrite: bool = False,
) -> Path:
    """
    Publish the retriever of a checkpoint.

    The folder holds the stock model (Revela's retriever with adapters merged; RetroMAE's encoder with its masked-LM
    head), its tokenizer, sentence-transformers' files and the code of `RevelaModel`. It opens with
    `SentenceTransformer(path)` and `AutoModel.from_pretrained(path)` (stock class, no trust), with
    `AutoModel.from_pretrained(path, trust_remote_code=True)` (`encode_query`, `encode_document`), in any server that
    reads sentence-transformers folders, and RetroMAE's with `AutoModelForMaskedLM` besides.

    Args:
        checkpoint: what `trainers/revela.py` or `trainers/retromae.py` wrote: a `checkpoint-N` folder or the output
            folder itself.
        out: the folder to write; written beside and renamed, so that it is whole or not there.
        adapter_only: write the PEFT adapter as the authors release it, without base weights.
        pooling: RetroMAE only: `"cls"` or `"mean"` instead of what it was trained with.
        dtype: precision of the written weights.
        max_length: tokens a text may have; less where the backbone or its tokenizer takes fewer.
        overwrite: replace `out` if it is there and an earlier export, or empty.

    Returns:
        The path of `out`.

    Raises:
        FileNotFoundError: if `checkpoint` is no checkpoint; FileExistsError: if `out` is there, and is not to be or
        cannot be overwritten; ValueError: for `adapter_only` on a checkpoint without adapters, `pooling` on one of
        Revela, or a tokenizer that appends no EOS.
    """
    checkpoint, out = Path(checkpoint), Path(out)
    kind = _method(checkpoint)
    if out.exists() and not overwrite:
        raise FileExistsError(f"{out} is there already: pass --overwrite, or another folder.")
    if out.exists() and not _is_export(out):
        raise FileExistsError(f"{out} is no earlier export, so it is not overwritten: choose another folder.")
    if dtype not in DTYPES:
        raise ValueError(f"No precision {dtype!r}: choose one of {', '.join(DTYPES)}.")
    if pooling is not None and kind == "revela":
        raise ValueError(f"{checkpoint} was trained with a pooling of its own: leave `pooling` out.")
    if pooling not in (None, *POOLINGS):
        raise ValueError(f"No pooling {pooling!r}: choose one of {', '.join(POOLINGS)}.")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    if kind == "retromae":
        if adapter_only:
            raise ValueError(f"{checkpoint} is RetroMAE's, which trains all weights: there is no adapter to write.")
        model = RetroMAEForPreTraining.from_pretrained(checkpoint, dtype=torch.float32)
    else:
        model = RevelaForPreTraining.from_pretrained(checkpoint, dtype=torch.float32)
        if model.config.pooling == "eos" and not ends_with_eos(tokenizer):
            raise ValueError(
                f"The tokenizer in {checkpoint} appends no EOS, which the retriever's embedding is read from."
            )

    staging = out.with_name(f".{out.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        if adapter_only:
            _write_adapter(model, tokenizer, staging)
        elif kind == "retromae":
            write_doors(
                model.encoder,
                tokenizer,
                staging,
                pooling=pooling or model.config.pooling,
                dtype=getattr(torch, dtype),
                max_length=max_length,
            )
        else:
            publish(model, tokenizer, staging, getattr(torch, dtype), max_length)
        if out.exists():
            shutil.rmtree(out)
        os.replace(staging, out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return out


def _method(checkpoint: Path) -> str:
    """Which method a checkpoint is of, "revela" or "retromae"."""
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


def _is_export(folder: Path) -> bool:
    """Whether a folder is an earlier export, or empty: deleting it loses nothing that a checkpoint does not hold."""
    if not folder.is_dir():
        return False
    return not any(folder.iterdir()) or any((folder / name).exists() for name in ("modules.json", _ADAPTER_CONFIG))


def merged_retriever(model: RevelaForPreTraining) -> PreTrainedModel:
    """The retriever as a stock model of its own, adapters merged by peft."""
    retriever = _peft_retriever(model)
    return retriever if model.config.retriever_lora is None else retriever.merge_and_unload()


def _peft_retriever(model: RevelaForPreTraining):
    """The stock backbone with the trained weights, wrapped by peft where there are adapters."""
    stock = AutoModel.from_config(model.config.retriever_config, dtype=model.dtype)
    weights = model.retriever.state_dict()
    plain = {name.replace(".base_layer.", "."): value for name, value in weights.items() if "lora_" not in name}
    stock.load_state_dict(plain)
    if model.config.retriever_lora is None:
        return stock.eval()
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    lora = LoraConfig(
        base_model_name_or_path=model.config.retriever_name_or_path,
        task_type="FEATURE_EXTRACTION",
        inference_mode=True,
        **model.config.retriever_lora,
    )
    wrapped = get_peft_model(stock, lora)
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


def _write_adapter(model: RevelaForPreTraining, tokenizer, folder: Path) -> None:
    if model.config.retriever_lora is None:
        raise ValueError("The retriever was trained without LoRA, so there is no adapter: export it whole.")
    wrapped = _peft_retriever(model)
    wrapped.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    saved = load_file(folder / "adapter_model.safetensors")
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
    )


__all__ = ["DTYPES", "MAX_LENGTH", "POOLINGS", "export", "merged_retriever", "publish"]
