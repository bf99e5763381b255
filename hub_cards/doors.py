"""The files of a published folder: stock weights, tokenizer, and what makes each of its doors open."""

import json
import shutil
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hub_cards.backbones import positions
from hub_cards.eos_tokenizer import save_tokenizer
from hub_cards.recorded import record_embeddings, record_lm
from modeling_revela import modeling_revela

_POOLING = {"eos": "lasttoken", "cls": "cls_token", "mean": "mean_tokens"}


def write_doors(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    pooling: str,
    query_prompt: str = "",
    document_prompt: str = "",
    normalize: bool = True,
    dtype: torch.dtype,
    max_length: int,
    matryoshka_dims: list[int] | None = None,
) -> None:
    """
    Write a retriever for `SentenceTransformer`, `AutoModel` (stock class) and `AutoModel` with `trust_remote_code`.

    Args:
        model: a stock model, with or without a masked-LM head; its config gets the record of how it embeds.
        tokenizer: its own; it gets `model_max_length`.
        folder: is there, and empty.
        pooling: `"eos"`, `"cls"` or `"mean"`.
        query_prompt, document_prompt: put before a text of either side.
        normalize: whether embeddings get length 1 and rank by cosine; otherwise they rank by inner product.
        dtype: of the written weights.
        max_length: tokens a text may have; less where the model or its tokenizer takes fewer.
        matryoshka_dims: sizes that the embedding was trained to be cut to.

    Raises:
        ValueError: for a weight that is not finite, naming it.
    """
    model = model.to(dtype)
    refuse_non_finite(model.state_dict())
    max_length = min(max_length, tokenizer.model_max_length, positions(model) or max_length)
    # One record of how the embedding is made; sentence-transformers' files below say the same in its own terms.
    model.config.revela = {
        "pooling": pooling,
        "query_prompt": query_prompt,
        "document_prompt": document_prompt,
        "normalize": normalize,
        "max_length": max_length,
    }
    record_dims(model.config, matryoshka_dims)
    model.config.auto_map = {"AutoModel": "modeling_revela.RevelaModel"}
    tokenizer.model_max_length = max_length
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    write_for_servers(
        folder,
        size=model.config.get_text_config().hidden_size,
        pooling=pooling,
        prompts={"query": query_prompt, "document": document_prompt},
        max_length=max_length,
        similarity="cosine" if normalize else "dot",
        normalised=normalize,
    )
    copy_code(folder)
    prompts = {"query": query_prompt, "document": document_prompt}
    settings = {"pooling": pooling, "prompts": prompts, "normalize": normalize, "max_length": max_length}
    record_embeddings(model, tokenizer, folder, kind="retriever", **settings)


def record_dims(config: PreTrainedConfig, dims: list[int] | None) -> None:
    """Say in a config which sizes its embedding may be cut to, by the name that vLLM and SGLang know."""
    if dims is not None:
        config.matryoshka_dimensions = [*dims, config.get_text_config().hidden_size]


def write_lm(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, dtype: torch.dtype) -> None:
    """
    Write a stock causal LM for `AutoModelForCausalLM`, its generation settings and its tokenizer.

    Raises:
        ValueError: for a weight that is not finite, naming it.
    """
    model = model.to(dtype)
    refuse_non_finite(model.state_dict())
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    _write_for_older_releases(folder)
    record_lm(model, tokenizer, folder)


def refuse_non_finite(weights: dict[str, torch.Tensor]) -> None:
    """Raises ValueError naming the first weight with NaN or an infinity."""
    for name, value in weights.items():
        if not bool(torch.isfinite(value).all()):
            raise ValueError(
                f"The weight {name!r} has values that are not finite in {str(value.dtype).removeprefix('torch.')}: "
                "training diverged, so export an earlier checkpoint, or float16 is too narrow, so take another dtype."
            )


def copy_code(folder: Path) -> None:
    """Put the code of `RevelaModel`, a file that needs no other of ours, into a folder, for `trust_remote_code`."""
    shutil.copy(modeling_revela.__file__, folder)


def write_for_servers(
    folder: Path,
    *,
    size: int,
    pooling: str,
    prompts: dict[str, str],
    max_length: int,
    similarity: str = "cosine",
    normalised: bool = True,
    default_prompt_name: str | None = None,
) -> None:
    """
    Write sentence-transformers' files in the names of its releases up to 5, and what else older releases look for.

    Release 6 reads these as well; what it writes itself, TEI and vLLM do not read (see `hub_cards.serving`).

    Args:
        folder: holds the model's config and its tokenizer already.
        size: dimensions of the embedding.
        pooling: `"eos"`, `"cls"` or `"mean"`.
        normalised: whether embeddings have length 1.
    """
    modules = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")][: 2 + normalised]
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"}
        for index, (name, path) in enumerate(modules)
    ]
    modes = {"word_embedding_dimension": size, "include_prompt": True}
    modes |= {f"pooling_mode_{name}": name == _POOLING[pooling] for name in _POOLING.values()}
    settings = {"prompts": prompts, "default_prompt_name": default_prompt_name, "similarity_fn_name": similarity}
    _write_json(folder / "modules.json", modules)
    _write_json(folder / "1_Pooling" / "config.json", modes)
    if normalised:
        _write_json(folder / "2_Normalize" / "config.json", {})
    _write_json(folder / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": False})
    _write_json(folder / "config_sentence_transformers.json", settings)
    _write_for_older_releases(folder)


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
    for kind, name in (("full_attention", "global_rope_theta"), ("sliding_attention", "local_rope_theta")):
        if "rope_theta" in (rope.get(kind) or {}):  # ModernBERT's
            config[name] = rope[kind]["rope_theta"]
    if config.get("pad_token_id", 0) is None:
        del config["pad_token_id"]  # TEI takes a number or nothing
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


__all__ = ["copy_code", "record_dims", "refuse_non_finite", "write_doors", "write_for_servers", "write_lm"]
