"""
What a published folder is known by: a few texts and what the model made of them before it was written.

The record, `revela_check.json`, travels with the folder. `open_doors` loads a folder or a repository of the Hub in
every way that it is meant to be loaded, and measures how far each is from the record.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hub_cards.hub import reason
from modeling_revela.modeling_revela import pool

CHECK = "revela_check.json"
# By kind of weights: how far embeddings, by their length, or nats a token may be from the record on another machine. A
# missing prompt or EOS moves them by tenths.
TOLERANCES = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 5e-2}
TEXTS = {
    "query": ["where do boats stop", "def common_path(paths):", "Où dorment les poissons ?"],
    "document": [
        "Boats stop at the bank of the river, near the old bridge, where the market sells fish in the morning.",
        "Return the longest path that all of the given paths begin with; raise ValueError if there is none.",
        "川の岸に船が止まる。",
    ],
}


def record_embeddings(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    kind: str,
    pooling: str,
    prompts: dict[str, str],
    max_length: int,
    normalize: bool = True,
) -> None:
    """
    Write the record of a retriever.

    Args:
        model: gives `last_hidden_state`; it may have a head on top.
        tokenizer: its own, which appends EOS where the pooling needs it.
        folder: where the record goes.
        kind: `"retriever"`, whose folder holds all weights, or `"adapter"`.
        pooling: `"eos"`, `"cls"` or `"mean"`.
        prompts: what is put before a text, by side (`query`, `document`).
        max_length: tokens a text may have.
        normalize: whether embeddings get length 1.
    """
    settings = {"pooling": pooling, "prompts": prompts, "max_length": max_length, "normalize": normalize}
    embeddings = _embed(model.eval(), tokenizer, settings)
    rows = {side: [[round(value, 7) for value in row] for row in rows.tolist()] for side, rows in embeddings.items()}
    record = {"kind": kind, "has_masked_lm": kind == "retriever" and model.base_model is not model}
    _write(folder, {**record, **settings, **_precision(model), "texts": TEXTS, "embeddings": rows})


def record_lm(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, kind: str = "lm") -> None:
    """Write the record of a causal LM, or of the adapter of one: the mean log-likelihood of each text's tokens."""
    likelihoods = _log_likelihoods(model.eval(), tokenizer, TEXTS["document"])
    record = {"kind": kind, **_precision(model), "texts": TEXTS["document"], "log_likelihoods": likelihoods}
    _write(folder, record)


def read_record(folder: str | Path) -> dict:
    """
    The record in a folder.

    Raises:
        ValueError: if there is none, or it is broken.
    """
    path = Path(folder) / CHECK
    if not path.is_file():
        raise ValueError(f"{folder} has no {CHECK}, by which it could be checked: write it by `revela-hub export`.")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        wanted = {"retriever": "embeddings", "adapter": "embeddings"}.get(record["kind"], "log_likelihoods")
        return {**record, "expected": record[wanted], "tolerance": float(record["tolerance"])}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is broken ({error}): write the folder again by `revela-hub export`.") from error


def is_same_model(one: dict, other: dict) -> bool:
    """Whether two records are of one model: the same settings and, but for rounding, the same numbers."""
    if not one or one.keys() != other.keys():
        return False
    measured = ("embeddings", "log_likelihoods")
    if any(one[name] != other[name] for name in one if name not in measured):
        return False
    pairs = [(torch.tensor(a), torch.tensor(b)) for a, b in zip(_numbers(one), _numbers(other), strict=True)]
    return all(a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in pairs)


def _numbers(record: dict) -> list:
    return list(record["embeddings"].values()) if "embeddings" in record else [record["log_likelihoods"]]


def open_doors(name: str | Path, record: dict, revision: str | None = None) -> dict[str, float]:
    """
    Load a model in all its ways, as its users do, on the CPU, and compare each with the record.

    Args:
        name: a folder, or a Hub id. Its code is run: it has to be known as ours.
        record: what `read_record` returns.
        revision: of a Hub id.

    Returns:
        Door -> the largest distance to a recorded embedding (0..2), or for a LM the largest difference in nats a
        token.

    Raises:
        ValueError: naming the door that does not open, or gives something else than was recorded.
    """
    name, where = str(name), {"revision": revision} if revision else {}
    distances = {}
    for door, load in _doors(name, record).items():
        try:
            distances[door] = distance_from(load(where), record)
        except Exception as error:  # whatever a loader has to say
            raise ValueError(f"{name} does not load by {door}: {reason(error)}") from error
        # Turned round, as NaN is no distance either.
        if not distances[door] <= record["tolerance"]:
            raise ValueError(
                f"{name} loaded by {door} is {distances[door]:.2g} from what {CHECK} has, more than the "
                f"{record['tolerance']:g} that rounding explains: its files were changed after the export, or this "
                "machine's libraries read them wrongly."
            )
    return distances


def _doors(name: str, record: dict) -> dict[str, Callable]:
    """Door -> what loads a model through it and returns what is compared with the record."""

    def tokenizer(where: dict):
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False, **where)

    def stock(where: dict) -> dict[str, torch.Tensor]:
        model = AutoModel.from_pretrained(name, trust_remote_code=False, use_safetensors=True, **where)
        return _embed(model, tokenizer(where), record)

    def masked_lm(where: dict) -> dict[str, torch.Tensor]:
        model, info = AutoModelForMaskedLM.from_pretrained(
            name, trust_remote_code=False, use_safetensors=True, output_loading_info=True, **where
        )
        if info["missing_keys"]:
            raise ValueError(f"the head's weight {sorted(info['missing_keys'])[0]!r} is missing.")
        return _embed(model, tokenizer(where), record)

    def remote_code(where: dict) -> dict[str, torch.Tensor]:
        model = AutoModel.from_pretrained(name, trust_remote_code=True, **where)
        texts = record["texts"]
        return {"query": model.encode_query(texts["query"]), "document": model.encode_document(texts["document"])}

    def sentence_transformers(where: dict) -> dict[str, torch.Tensor]:
        from hub_cards.encoding import encode, load_model

        model = load_model(name, device="cpu", **where)
        return {side: encode(model, texts, side, progress=False) for side, texts in record["texts"].items()}

    def on_base(auto_class: type, where: dict):
        from peft import PeftConfig, PeftModel

        base = PeftConfig.from_pretrained(name, **where)
        source = {"revision": base.revision} if base.revision else {}
        model = auto_class.from_pretrained(
            base.base_model_name_or_path, dtype=torch.float32, use_safetensors=True, **source
        )
        return PeftModel.from_pretrained(model, name, **where)

    def adapter(where: dict) -> dict[str, torch.Tensor]:
        return _embed(on_base(AutoModel, where), tokenizer(where), record)

    def lm_adapter(where: dict) -> list[float]:
        return _log_likelihoods(on_base(AutoModelForCausalLM, where), tokenizer(where), record["texts"])

    def causal_lm(where: dict) -> list[float]:
        model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=False, use_safetensors=True, **where)
        return _log_likelihoods(model, tokenizer(where), record["texts"])

    if record["kind"] == "lm":
        return {"AutoModelForCausalLM": causal_lm}
    if record["kind"] in ("adapter", "lm-adapter"):
        return {"PeftModel": adapter if record["kind"] == "adapter" else lm_adapter}
    doors = {"SentenceTransformer": sentence_transformers, "AutoModel": stock}
    doors["AutoModel, trust_remote_code=True"] = remote_code
    if record["has_masked_lm"]:
        doors["AutoModelForMaskedLM"] = masked_lm
    return doors


@torch.no_grad()
def _embed(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: dict) -> dict[str, torch.Tensor]:
    """Side -> (N, d) embeddings of its texts, one by one, as the record says."""
    backbone = model if hasattr(model, "peft_config") else model.base_model
    found = {}
    for side, texts in settings.get("texts", TEXTS).items():
        rows = []
        for text in texts:
            batch = tokenizer(
                settings["prompts"][side] + text,
                truncation=True,
                max_length=settings["max_length"],
                return_tensors="pt",
            )
            mask = batch["attention_mask"]
            hidden = backbone(input_ids=batch["input_ids"], attention_mask=mask).last_hidden_state
            rows.append(pool(hidden.float(), mask, settings["pooling"]))
        found[side] = torch.cat(rows)
        if settings.get("normalize", True):
            found[side] = torch.nn.functional.normalize(found[side], dim=-1)
    return found


@torch.no_grad()
def _log_likelihoods(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[float]:
    found = []
    for text in texts:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        logits = model(input_ids=ids).logits[0, :-1].float()
        found.append(-float(torch.nn.functional.cross_entropy(logits, ids[0, 1:])))
    return found


def distance_from(found: dict[str, torch.Tensor] | list[float], record: dict) -> float:
    """How far embeddings (side -> (N, d)) or log-likelihoods are from a record, as `open_doors` measures it."""
    expected = record["expected"]
    if isinstance(found, list):
        return float((torch.tensor(found) - torch.tensor(expected)).abs().max())
    wanted = {side: torch.tensor(rows) for side, rows in expected.items()}
    # Relative to their length, which is 1 for most models.
    return max(float(((found[side] - rows).norm(dim=-1) / rows.norm(dim=-1)).max()) for side, rows in wanted.items())


def _precision(model: PreTrainedModel) -> dict:
    dtype = str(model.dtype).removeprefix("torch.")
    return {"dtype": dtype, "tolerance": TOLERANCES[dtype]}


def _write(folder: Path, record: dict) -> None:
    (folder / CHECK).write_text(json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8")


__all__ = [
    "CHECK",
    "TEXTS",
    "distance_from",
    "is_same_model",
    "open_doors",
    "read_record",
    "record_embeddings",
    "record_lm",
]
