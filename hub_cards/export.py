"""A pre-training checkpoint -> the published folder: stock weights that four doors open."""

import inspect
import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

import modeling_revela.modeling_revela as remote_code
from hub_cards.eos_tokenizer import ends_with_eos, save_tokenizer
from modeling_revela import RevelaConfig, RevelaForPreTraining

MAX_LENGTH = 2048
DTYPES = ("float32", "bfloat16", "float16")
_ADAPTER_CONFIG = "adapter_config.json"
_POOLING = {"eos": "lasttoken", "cls": "cls_token", "mean": "mean_tokens"}


def export(
    checkpoint: str | Path,
    out: str | Path,
    *,
    adapter_only: bool = False,
    dtype: str = "float32",
    max_length: int = MAX_LENGTH,
    overwrite: bool = False,
) -> Path:
    """
    Publish the retriever of a checkpoint.

    The folder holds the stock backbone (adapters merged), its tokenizer, sentence-transformers' files and the code of
    `RevelaModel`. It opens with `SentenceTransformer(path)` and `AutoModel.from_pretrained(path)` (stock class, no
    trust), with `AutoModel.from_pretrained(path, trust_remote_code=True)` (`encode_query`, `encode_document`), and in
    any server that reads sentence-transformers folders.

    Args:
        checkpoint: what `trainers/revela.py` wrote: a `checkpoint-N` folder or the output folder itself.
        out: the folder to write; written beside and renamed, so that it is whole or not there.
        adapter_only: write the PEFT adapter as the authors release it, without base weights.
        dtype: precision of the written weights.
        max_length: tokens a text may have; less where the backbone or its tokenizer takes fewer.
        overwrite: replace `out` if it is there and an earlier export, or empty.

    Returns:
        The path of `out`.

    Raises:
        FileNotFoundError: if `checkpoint` is no checkpoint; FileExistsError: if `out` is there, and is not to be or
        cannot be overwritten; ValueError: for `adapter_only` on a checkpoint without adapters, or a tokenizer that
        appends no EOS.
    """
    checkpoint, out = Path(checkpoint), Path(out)
    if not (checkpoint / "config.json").exists():
        inside = [path for path in checkpoint.glob("checkpoint-*") if (path / "config.json").exists()]
        newest = max(inside, key=lambda path: (len(path.name), path.name), default=None)
        raise FileNotFoundError(
            f"{checkpoint} is no checkpoint: it has no config.json." + (f" Did you mean {newest}?" if newest else "")
        )
    if json.loads((checkpoint / "config.json").read_text(encoding="utf-8")).get("model_type") != "revela":
        raise ValueError(f"{checkpoint} is no Revela pre-training checkpoint: its config names another model type.")
    if out.exists() and not overwrite:
        raise FileExistsError(f"{out} is there already: pass --overwrite, or another folder.")
    if out.exists() and not _is_export(out):
        raise FileExistsError(f"{out} is no earlier export, so it is not overwritten: choose another folder.")
    if dtype not in DTYPES:
        raise ValueError(f"No precision {dtype!r}: choose one of {', '.join(DTYPES)}.")
    model = RevelaForPreTraining.from_pretrained(checkpoint, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
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
        else:
            publish(model, tokenizer, staging, getattr(torch, dtype), max_length)
        if out.exists():
            shutil.rmtree(out)
        os.replace(staging, out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return out


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
    config: RevelaConfig = model.config
    retriever = merged_retriever(model).to(dtype)
    positions = getattr(retriever.config.get_text_config(), "max_position_embeddings", None) or max_length
    max_length = min(max_length, positions, tokenizer.model_max_length)
    # One record of how the embedding is made; sentence-transformers' files below say the same in its own terms.
    retriever.config.revela = {
        "pooling": config.pooling,
        "query_prompt": config.query_prompt,
        "document_prompt": config.document_prompt,
        "max_length": max_length,
    }
    retriever.config.auto_map = {"AutoModel": "modeling_revela.RevelaModel"}
    tokenizer.model_max_length = max_length
    retriever.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    _write_sentence_transformers_files(config, retriever.config.get_text_config().hidden_size, max_length, folder)
    _write_for_older_releases(folder)
    for file in Path(inspect.getfile(remote_code)).parent.glob("*.py"):
        if file.name != "__init__.py":
            shutil.copy(file, folder / file.name)


def _write_sentence_transformers_files(config: RevelaConfig, size: int, max_length: int, folder: Path) -> None:
    # In the names of its releases up to 5, which 6 and the servers read as well; what 6 writes, they do not.
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"}
        for index, (name, path) in enumerate(
            (("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize"))
        )
    ]
    pooling = {"word_embedding_dimension": size, "include_prompt": True}
    pooling |= {f"pooling_mode_{name}": name == _POOLING[config.pooling] for name in _POOLING.values()}
    settings = {
        "prompts": {"query": config.query_prompt, "document": config.document_prompt},
        "default_prompt_name": None,
        "similarity_fn_name": "cosine",
    }
    _write_json(folder / "modules.json", modules)
    _write_json(folder / "1_Pooling" / "config.json", pooling)
    _write_json(folder / "2_Normalize" / "config.json", {})
    _write_json(folder / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": False})
    _write_json(folder / "config_sentence_transformers.json", settings)


def _write_for_older_releases(folder: Path) -> None:
    """Say in the files of transformers 5 also what releases before it, and servers in other languages, look for."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in rope:
        # Without it they take 10,000, in silence.
        config["rope_theta"] = rope["rope_theta"]
        if rope.get("rope_type", "default") != "default":
            config["rope_scaling"] = {name: value for name, value in rope.items() if name != "rope_theta"}
        _write_json(path, config)
    path = folder / "tokenizer_config.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    if tokenizer.get("tokenizer_class") == "TokenizersBackend":
        tokenizer["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(tokenizer.get("extra_special_tokens"), list):
        tokenizer["additional_special_tokens"] = tokenizer.pop("extra_special_tokens")
    _write_json(path, tokenizer)


def _write_json(path: Path, value: dict | list) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


__all__ = ["DTYPES", "MAX_LENGTH", "export", "merged_retriever", "publish"]
