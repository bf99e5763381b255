"""A Hub repository of several commits, as it lies in the cache once it was downloaded."""

import shutil
from pathlib import Path

OLD, NEW = "1" * 40, "2" * 40


def put_in_cache(cache: Path, repo_id: str, **commits: Path) -> None:
    """Lay down `old` and `new`, the folders of two commits; `new` is what `main` is."""
    repo = cache / f"models--{repo_id.replace('/', '--')}"
    for name, folder in commits.items():
        shutil.copytree(folder, repo / "snapshots" / {"old": OLD, "new": NEW}[name])
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(NEW)


__all__ = ["NEW", "OLD", "put_in_cache"]
