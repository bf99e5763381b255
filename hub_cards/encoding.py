"""Loading a retriever, encoding with its own prompts, and stating what decided its embeddings."""

import hashlib
import sys
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import is_sentence_transformer_model

from hub_cards.backbones import set_pad_token
from hub_cards.checkpoints import check_folder, model_type, require_base
from hub_cards.hub import explain, require_here_or_hub
from hub_cards.ranking import as_tensor

# What tells of a model, or is made of it, and changes no embedding of it.
_BESIDE = ("revela_export.json", "revela_check.json", "training_record.json", "recipe.yaml", "*.md", "*.png", "*.svg")
_BESIDE += ("LICENSE*", "NOTICE*", "CITATION.cff", "onnx/*", "openvino/*")


def load_model(model: str | Path | SentenceTransformer, **options) -> SentenceTransformer:
    """
    The model itself, or the one loaded from a folder or Hub id, with the options of `SentenceTransformer`.

    No code that comes with it is run, and no pickle in a folder is read.

    Raises:
        FileNotFoundError: for a name that is no folder here, and cannot be an id on the Hub.
        ValueError: naming what did not load, what a folder holds that must not be loaded, or the training checkpoint
            that has to be exported first.
    """
    if isinstance(model, SentenceTransformer):
        return model
    require_here_or_hub(model)
    if model_type(model) in ("revela", "retromae"):
        raise ValueError(
            f"{model} is a checkpoint that training wrote, and no retriever to encode with yet: make one of it first, "
            f"with `revela-hub export {model} retriever/`."
        )
    require_base(model)
    check_folder(model)
    try:
        options["model_kwargs"] = {**(options.get("model_kwargs") or {}), "use_safetensors": True}
        loaded = SentenceTransformer(str(model), trust_remote_code=False, **options)
    except Exception as error:
        # What the loaders raise is about whichever file they tried last; the user needs the model's name first.
        hint = "" if Path(model).exists() else " There is no such folder, so it was taken for a Hub id."
        reason = explain(error) or next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(f"{model} does not load as a sentence-transformers model.{hint} ({reason})") from error
    if loaded.tokenizer is not None:
        set_pad_token(loaded.tokenizer)  # a raw decoder as baseline has none
    if not is_sentence_transformer_model(str(model)):
        read_plain_text(loaded)
    return loaded


def read_plain_text(model: SentenceTransformer) -> None:
    """
    Have a language model embed a text as it stands, in place.

    Since its release 6, sentence-transformers puts texts into the chat template of a tokenizer that has one, unless a
    saved folder says otherwise; a retriever made from the same model here has its prompt and EOS around a text.
    """
    modalities = getattr(model[0], "modality_config", {})
    if modalities.pop("message", None) is not None:
        model[0].input_formatter.supported_modalities = list(modalities)


def plain_pooling(model: SentenceTransformer) -> str | None:
    """
    How a transformer of text is pooled behind which nothing but a normalisation comes: `"eos"`, `"cls"` or `"mean"`.

    That is what the published format can say; `None` for any other model, and where a prompt's tokens are left out.
    """
    kinds = [type(module).__name__ for module in model]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        return None
    # One that puts a text into its chat template embeds otherwise in servers, which do not.
    if not model[1].include_prompt or "message" in getattr(model[0], "modality_config", ()):
        return None
    return {"lasttoken": "eos", "cls": "cls", "mean": "mean"}.get(getattr(model[1], "pooling_mode", None))


def prompts_used(model: SentenceTransformer) -> dict[str, str]:
    """The texts that `encode_query` and `encode_document` put before a query and a document."""
    names = {"query": ("query",), "document": ("document", "passage", "corpus")}
    default = model.prompts.get(model.default_prompt_name) if model.default_prompt_name else ""
    return {
        side: next((model.prompts[name] for name in candidates if name in model.prompts), default) or ""
        for side, candidates in names.items()
    }


def model_fingerprint(model: str) -> str:
    """
    What a model is, wherever it lies: the commit of one from the Hub, of a folder a hash of its files.

    The model card, its pictures, licences, the records of where the model comes from, and graphs that were made of it
    are left out: they change no embedding.
    """
    folder = Path(model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, local_files_only=True)).name
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        is_beside = any(fnmatch(name, pattern) for pattern in _BESIDE)
        if file.is_file() and not is_beside and not any(part.startswith(".") for part in name.split("/")):
            digest.update(f"{name}\0{file.stat().st_size}\0".encode())
            with open(file, "rb") as content:
                while block := content.read(1 << 20):
                    digest.update(block)
    return digest.hexdigest()


def describe_model(model: SentenceTransformer) -> dict:
    """What decides a model's embeddings beside its weights: prompts, length, similarity, size, precision, device."""
    return {
        "prompts": prompts_used(model),
        "max_seq_length": model.max_seq_length,
        "similarity": str(model.similarity_fn_name),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "device": str(model.device),
    }


def encode(
    model: SentenceTransformer, texts: Iterable[str], side: str, batch_size: int = 32, progress: bool | None = None
) -> torch.Tensor:
    """Encodes texts with the model's own prompt for their side.

    Args:
        model: a model that ranks by cosine or dot product.
        texts: N strings.
        side: "query" or "document".
        batch_size: texts a forward pass; they are sorted by length first, so that little is spent on padding.
        progress: a bar on stderr; by default where stderr is a terminal.

    Returns:
        (N, d) float32 CPU tensor, rows of length 1 where the model ranks by cosine: ready for inner products.

    Raises:
        ValueError: if the model ranks by a distance, or gives NaN.
    """
    similarity = str(model.similarity_fn_name)
    if similarity not in ("cosine", "dot"):
        raise ValueError(f"The model ranks by {similarity} distance; only cosine and dot product are supported.")
    texts = list(texts)
    method = model.encode_query if side == "query" else model.encode_document
    embeddings = method(
        texts,
        batch_size=batch_size,
        show_progress_bar=(sys.stderr.isatty() if progress is None else progress) and len(texts) > batch_size,
        convert_to_tensor=True,
        normalize_embeddings=similarity == "cosine",
    )
    return as_tensor(embeddings)
