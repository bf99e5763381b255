"""mteb's `ModelMeta` of a published folder or a model on the Hub, as its leaderboard takes it."""

import re
from functools import cache
from pathlib import Path
from typing import get_args

import mteb
import yaml
from huggingface_hub import snapshot_download
from huggingface_hub.repocard import metadata_load
from mteb.models import ModelMeta, SentenceTransformerEncoderWrapper
from mteb.types import Licenses
from sentence_transformers import SentenceTransformer

from hub_cards.encoding import describe_model

# A card's language names no script, without which mteb has no code; a card may give mteb's code itself.
_LANGUAGES = {"en": "eng-Latn"}


def model_meta(model: SentenceTransformer, path: str, revision: str, name: str | None = None) -> ModelMeta:
    """
    What mteb wants to know of a model: from the loaded model and, for what it cannot show, from the model card.

    Args:
        model: the model as it was measured.
        path: the folder or Hub id that it was loaded from.
        revision: the Hub's commit, or the fingerprint of the folder's files.
        name: `org/name`; left out, the Hub id or `local/FOLDER`.

    Returns:
        The `ModelMeta`; what neither model nor card says is None, which mteb takes as unknown.
    """
    on_hub = not Path(path).is_dir()
    card = _card(Path(snapshot_download(path, local_files_only=True)) if on_hub else Path(path))
    described = describe_model(model)
    parameters = list(model.parameters())
    backbone = model.transformers_model
    datasets = _as_list(card.get("datasets"))
    base = next(iter(_as_list(card.get("base_model"))), None)
    name = name or (path if on_hub and "/" in path else f"{'hub' if on_hub else 'local'}/{Path(path).resolve().name}")
    languages = [code for code in map(_language, _as_list(card.get("language"))) if code]
    return ModelMeta(
        loader=SentenceTransformerEncoderWrapper,
        name=name,
        revision=revision,
        release_date=None,
        languages=languages or None,
        n_parameters=described["parameters"],
        n_embedding_parameters=None if backbone is None else backbone.get_input_embeddings().weight.numel(),
        memory_usage_mb=round(sum(one.numel() * one.element_size() for one in parameters) / 2**20, 3),
        max_tokens=described["max_seq_length"],
        embed_dim=model.get_embedding_dimension(),
        license=card.get("license") if card.get("license") in get_args(Licenses) else None,
        open_weights=True,
        public_training_code=None,
        public_training_data=f"https://huggingface.co/datasets/{datasets[0]}" if len(datasets) == 1 else None,
        framework=["Sentence Transformers", "PyTorch", "safetensors"],
        reference=f"https://huggingface.co/{name}" if on_hub else None,
        similarity_fn_name=described["similarity"],
        use_instructions=any(described["prompts"].values()),
        # Sets of ours that mteb has no task of, such as Wikipedia, contaminate nothing. No set named: unknown.
        training_datasets={task for one in datasets for task in _tasks_of_datasets().get(one.lower(), ())}
        if datasets
        else None,
        adapted_from=base,
    )


def _card(folder: Path) -> dict:
    readme = folder / "README.md"
    try:
        return (metadata_load(readme) if readme.is_file() else None) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"The metadata between the lines --- of {readme} is no YAML; mend it.") from error


def _as_list(value) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def _language(code: str) -> str | None:
    return code if re.fullmatch("[a-z]{3}-[A-Z][a-z]{3}", code) else _LANGUAGES.get(code)


@cache
def _tasks_of_datasets() -> dict[str, set[str]]:
    """Hub id of a dataset, in lower case -> the tasks of mteb that are made of it."""
    found = {"ms_marco": {"MSMARCO"}, "microsoft/ms_marco": {"MSMARCO"}, "tevatron/msmarco-passage": {"MSMARCO"}}
    for task in mteb.get_tasks(exclude_superseded=False, exclude_private=False):
        found.setdefault(str(task.metadata.dataset.get("path")).lower(), set()).add(task.metadata.name)
    return found


__all__ = ["model_meta"]
