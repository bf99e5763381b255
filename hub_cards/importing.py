"""What others released -> our published folder: PEFT adapters on a base LLM, and encoders such as RetroMAE's."""

import json
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from hub_cards.backbones import set_pad_token
from hub_cards.checkpoints import check_folder, model_type
from hub_cards.doors import write_doors
from hub_cards.eos_tokenizer import append_eos
from hub_cards.export import MAX_LENGTH, finetuned_writer, require_writable, torch_dtype, write_beside
from hub_cards.hub import reason, require_here_or_hub
from hub_cards.privacy import hub_id
from modeling_revela.configuration_revela import POOLINGS, require_stock

ADAPTER = "adapter_model.safetensors"
# What is fetched of a Hub repository: no pickle, and no code.
FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
# How each kind embeds, unless it is said otherwise. LLMs: as the released adapters of Revela (its README) and RepLLaMA
# (arXiv 2310.08319), which are Tevatron's usual options. Encoders: as RetroMAE's, which rank by inner product.
DEFAULTS = {
    "llm": {"pooling": "eos", "query_prompt": "query: ", "document_prompt": "passage: ", "normalize": True},
    "encoder": {"pooling": "cls", "query_prompt": "", "document_prompt": "", "normalize": False},
}


def import_model(
    source: str | Path,
    out: str | Path,
    *,
    base: str | None = None,
    revision: str | None = None,
    pooling: str | None = None,
    query_prompt: str | None = None,
    document_prompt: str | None = None,
    normalize: bool | None = None,
    dtype: str = "float32",
    max_length: int = MAX_LENGTH,
    overwrite: bool = False,
) -> Path:
    """
    Publish a retriever that others released, in the format of `export`; its card says where it came from.

    The kind is told by the files: with an adapter_config.json it is a PEFT adapter (Revela's, RepLLaMA's, Tevatron's),
    which peft merges into its base; otherwise a masked LM (RetroMAE's), which keeps its head, an encoder, or an LLM.
    Adapters and LLMs get EOS at the end of a text, which they pool, the prompts `query: ` and `passage: `, and L2
    normalisation; encoders are pooled at CLS and get neither prompts nor normalisation. Each can be said otherwise. A
    sentence-transformers folder (modules.json) says its pooling, normalisation, prompts and length itself; only
    prompts and a shorter length can be said.

    Args:
        source: a folder or Hub id.
        out: the folder to write; written beside and renamed, so that it is whole or not there.
        base: for an adapter: folder or Hub id of the LLM to merge it into, instead of the one that it names.
        revision: branch, tag or commit of `source` on the Hub. An adapter's base is read of the one that it names.
        pooling: `"eos"`, `"cls"` or `"mean"`.
        query_prompt, document_prompt: put before a text of either side.
        normalize: whether embeddings get length 1, and rank by cosine instead of inner product.
        dtype: precision of the written weights; they are merged in float32.
        max_length: tokens a text may have, EOS included; less where the model or its tokenizer takes fewer.
        overwrite: replace `out` if it is empty, or an earlier export to which nothing was added.

    Returns:
        The path of `out`.

    Raises:
        FileExistsError: if `out` is there, and is not to be or cannot be overwritten; OSError: for a source or base
        that is missing, gated or does not load; ValueError: for files that are broken or must not be read
        (`check_folder`), an adapter that does not fit its base, and options that do not go together.
    """
    out = Path(out)
    require_writable(out, overwrite)
    dtype = torch_dtype(dtype)
    if pooling not in (None, *POOLINGS):
        raise ValueError(f"No pooling {pooling!r}: choose one of {', '.join(POOLINGS)}.")
    folder = _fetch(source, revision)
    if (folder / "adapter_config.json").exists():
        model, tokenizer, base = _merged_adapter(folder, base)
        kind = "llm"
    elif base is not None:
        raise ValueError(f"{source} is no adapter, it has no adapter_config.json: leave --base out.")
    elif (folder / "modules.json").exists():
        if pooling is not None or normalize is not None:
            raise ValueError(
                f"{source} has a modules.json, which says how it pools and normalises: leave --pooling, --normalize "
                "and --no-normalize out."
            )
        said = {"query": query_prompt, "document": document_prompt}
        said = {side: prompt for side, prompt in said.items() if prompt is not None}
        write = finetuned_writer(folder, False, {"dtype": dtype, "max_length": max_length}, said)
        return write_beside(out, write, **_origin(source, revision, None))
    else:
        model, tokenizer = _whole_model(folder)
        kind = "encoder" if model.config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES else "llm"
    asked = {
        "pooling": pooling,
        "query_prompt": query_prompt,
        "document_prompt": document_prompt,
        "normalize": normalize,
    }
    record = {**DEFAULTS[kind], **{name: value for name, value in asked.items() if value is not None}}
    _drop_unknown_padding(tokenizer, model)
    if record["pooling"] == "eos":
        tokenizer = append_eos(tokenizer)
    set_pad_token(tokenizer)

    def write(folder: Path) -> None:
        write_doors(model, tokenizer, folder, dtype=dtype, max_length=max_length, **record)

    return write_beside(out, write, **_origin(source, revision, base))


def _fetch(source: str | Path, revision: str | None) -> Path:
    """The folder of a source, checked, with its files downloaded where it is a Hub id."""
    folder = Path(source)
    if not folder.is_dir():
        require_here_or_hub(source)
        try:
            folder = Path(snapshot_download(str(source), revision=revision, allow_patterns=FILES))
        except (OSError, ValueError) as error:
            raise OSError(f"{source} is no folder here, and does not come from the Hub: {reason(error)}") from error
    elif revision is not None:
        raise ValueError(f"{source} is a folder here, of which there is no revision {revision!r}: leave it out.")
    check_folder(folder)
    if model_type(folder) in ("revela", "retromae"):
        raise ValueError(f"{source} is a checkpoint of ours: publish it with `revela-hub export`.")
    if not list(folder.glob("*.safetensors")):
        raise ValueError(
            f"{source} has no weights in safetensors, and pickles are not read: take a revision that has them "
            "(--revision refs/pr/1, where the Hub's converter made one), or save the model again."
        )
    return folder


def _merged_adapter(folder: Path, base: str | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str]:
    """The base with the adapter merged, the tokenizer, and the base's name."""
    from peft import PeftConfig, get_peft_model, set_peft_model_state_dict

    if not (folder / ADAPTER).exists():
        raise ValueError(f"{folder} has an adapter_config.json but no {ADAPTER}: copy it, or choose another source.")
    settings = PeftConfig.from_pretrained(str(folder))
    name = base or settings.base_model_name_or_path
    if not name:
        raise ValueError(f"{folder}/adapter_config.json names no base model: pass it as --base.")
    weights = load_file(folder / ADAPTER)
    model, tokenizer = _base(name, None if base else settings.revision, weights)
    if any((folder / file).exists() for file in ("tokenizer.json", "tokenizer_config.json")):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    _resize(model, weights)
    settings.inference_mode = True
    try:
        wrapped = get_peft_model(model, settings)
        found = set_peft_model_state_dict(wrapped, weights)
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"The adapter in {folder} does not fit {name} ({reason(error)}): pass the model that it was "
            "trained on as --base."
        ) from error
    if not hasattr(wrapped, "merge_and_unload") or settings.is_prompt_learning:
        raise ValueError(f"{folder} is of the kind {settings.peft_type.value}, which cannot be merged into a model.")
    # peft itself passes over what fits nowhere, and embeds with the base.
    # Embeddings in `modules_to_save` are saved twice, and read once.
    lost = [key for key in found.unexpected_keys if key.replace(".modules_to_save.", ".") not in set(weights) - {key}]
    lost += [key for key in found.missing_keys if wrapped.base_model.prefix in key or "modules_to_save" in key]
    if lost:
        raise ValueError(
            f"The adapter in {folder} does not fit {name} ({len(lost)} weights have no counterpart, {lost[0]!r} "
            "first): pass the model that it was trained on as --base."
        )
    merged = wrapped.merge_and_unload()
    return (merged.get_decoder() if merged.get_output_embeddings() is not None else merged).eval(), tokenizer, name


def _base(name: str, revision: str | None, weights: dict) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """An adapter's base: with its head where the adapter was trained on a causal LM, which its weights' names tell."""
    options = {"revision": revision, "trust_remote_code": False}
    check_folder(name)
    try:
        require_stock(PreTrainedConfig.get_config_dict(name, revision=revision)[0])
        config = AutoConfig.from_pretrained(name, **options)
        causal = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
        inner = None if causal is None else f"base_model.model.{causal.base_model_prefix}."
        with_head = inner is not None and any(key.startswith(inner) for key in weights)
        auto_class = AutoModelForCausalLM if with_head else AutoModel
        model = auto_class.from_pretrained(name, dtype=torch.float32, use_safetensors=True, **options)
        return model, AutoTokenizer.from_pretrained(name, **options)
    except OSError as error:
        raise OSError(
            f"The adapter's base model {name} does not load; pass as --base a folder or Hub id that has it, or: "
            f"{reason(error)}"
        ) from error


def _resize(model: PreTrainedModel, weights: dict) -> None:
    """Give the base as many token embeddings as the adapter was trained with."""
    embeddings = model.get_input_embeddings()
    name = next(name for name, module in model.named_modules() if module is embeddings)
    rows = {
        value.shape[1] if "lora_embedding_A" in key else value.shape[0]
        for key, value in weights.items()
        if f".{name}." in key and key.endswith(("lora_embedding_A", f"{name}.weight", "base_layer.weight"))
    }
    if rows and max(rows) != embeddings.num_embeddings:
        # Of what is added all is overwritten by the adapter's own.
        model.resize_token_embeddings(max(rows), mean_resizing=False)


def _whole_model(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} has neither adapter_config.json nor config.json: it is no model.")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    require_stock(config)
    names = config.get("architectures") or [""]
    auto_class = AutoModelForMaskedLM if names[0].endswith("ForMaskedLM") else AutoModel
    options = {"trust_remote_code": False, "use_safetensors": True, "dtype": torch.float32}
    model, info = auto_class.from_pretrained(folder, output_loading_info=True, **options)
    # BERT's own pooler takes no part in an embedding.
    missing = sorted(name for name in info["missing_keys"] if not name.startswith("pooler."))
    if missing:
        raise ValueError(f"{folder} lacks {len(missing)} weights of {type(model).__name__}, {missing[0]!r} first.")
    return model.eval(), AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def _drop_unknown_padding(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """Take from a tokenizer the padding token that was added to it alone; another such token is an error."""
    rows = model.get_input_embeddings().num_embeddings
    unknown = {token for token, index in tokenizer.get_vocab().items() if index >= rows}
    if tokenizer.pad_token in unknown:
        unknown.discard(tokenizer.pad_token)
        tokenizer.pad_token = tokenizer.eos_token
    if unknown:
        raise ValueError(
            f"The tokenizer has {len(unknown)} tokens for which the model's {rows} embeddings have no row, such as "
            f"{min(unknown)!r}: the adapter lacks the embeddings that were trained with it, or has another base."
        )


def _origin(source: str | Path, revision: str | None, base: str | None) -> dict:
    """What the card is told of the weights' origin; a folder's path, which would tell of this machine, is left out."""
    known, known_base = (None if name is None else hub_id(name) for name in (source, base))
    origin = f"[{known}](https://huggingface.co/{known})" if known else "a local folder"
    origin += f" (revision `{revision}`)" if revision else ""
    if base is not None:
        origin += f", an adapter that was merged into {known_base or 'its base model'}"
    text = f"The weights are those of {origin}. They were put into this format by `revela-hub import`."
    return {"origin": text, "base_model": known_base or known}


__all__ = ["import_model"]
