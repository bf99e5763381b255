import json
from pathlib import Path

import datasets
import pytest


@pytest.fixture(autouse=True)
def datasets_cache(tmp_path, monkeypatch):
    """Arrow caches of these tests go where pytest cleans up, not to the user's."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets-cache"))


@pytest.fixture
def write_jsonl():
    def write(path: Path, texts) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
        return path

    return write


@pytest.fixture
def article():
    """An English document of any number of sentences, different for each `number`; 12 words a sentence."""

    def make(number: int, sentences: int) -> str:
        return " ".join(
            f"Sentence {index} of document {number} says that river {number * index} is long."
            for index in range(sentences)
        )

    return make
