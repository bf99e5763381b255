"""What a folder of weights says it is, read without loading any."""

import json
from pathlib import Path


def model_type(folder: str | Path) -> str | None:
    """The `model_type` that a folder's config.json names, `"revela"` or `"bert"` say; `None` without that file."""
    config = Path(folder) / "config.json"
    return json.loads(config.read_text(encoding="utf-8")).get("model_type") if config.is_file() else None


__all__ = ["model_type"]
