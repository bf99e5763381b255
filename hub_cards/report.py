"""What a measurement gives: results as JSON, written whole or not at all, and as a table on the terminal."""

import json
import os
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from hub_cards.checkpoints import write_whole

TITLES = {
    "ndcg_at_10": "nDCG@10",
    "mrr_at_10": "MRR@10",
    "recall_at_10": "R@10",
    "recall_at_50": "R@50",
    "recall_at_100": "R@100",
    "recall_at_1000": "R@1000",
    "retrieval_gain": "gain",
    "mean_cosine": "mean cosine",
}


def finish(results: dict, out: str | Path | None, show: bool) -> dict:
    """Shows and writes results, and returns them."""
    # First what cannot fail: measuring may have taken hours.
    if show:
        print_table(results)
    if out is not None:
        write_json(results, out)
    return results


def make_results(task: dict, rows: list[dict], settings: dict) -> dict:
    """Results with the versions of what made them, and the date."""
    packages = ("revela-hub", "sentence-transformers", "transformers", "torch", "ir-measures", "bm25s", "mteb")
    return {
        "task": task,
        "rows": rows,
        "settings": settings,
        "versions": {"python": sys.version.split()[0], **{name: _version(name) for name in packages}},
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def require_writable(out: str | Path | None) -> None:
    """
    Refuses a file that could not be written in the end, before hours of measuring.

    Raises:
        OSError: naming it.
    """
    if out is None:
        return
    out = Path(out)
    if out.is_dir():
        raise OSError(f"The results cannot be written to {out}: it is a folder; pass another --out.")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        probe = out.with_name(f".{out.name}.{os.getpid()}.tmp")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OSError(f"The results cannot be written to {out} ({error.strerror}); pass another --out.") from error


def write_json(results: dict, out: str | Path) -> None:
    """Writes results whole or not at all: to a temporary name beside `out`, then renamed."""
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        write_whole(out, json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        raise OSError(f"The results could not be written to {out} ({error.strerror}); pass another --out.") from error


def print_table(results: dict) -> None:
    """Prints one line a row: the model and its measures, a task's best in bold."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    task, rows = results["task"], results["rows"]
    counts = ", ".join(f"{task[f'num_{name}']} {name}" for name in ("queries", "documents") if f"num_{name}" in task)
    table = Table(title=escape(f"{task['name']}{f' ({counts})' if counts else ''}"), title_justify="left")
    several = len({row["task"] for row in rows}) > 1
    if several:
        table.add_column("task")
    table.add_column("model", overflow="fold")
    measures = [name for name in TITLES if any(name in row["scores"] for row in rows)]
    for name in measures:
        table.add_column(TITLES[name], justify="right")
    for row in rows:
        cells = []
        for name in measures:
            value = row["scores"].get(name)
            shown = "" if value is None else _shown(value)
            rivals = [
                other["scores"][name] for other in rows if other["task"] == row["task"] and name in other["scores"]
            ]
            # A mean cosine is no contest.
            is_best = name != "mean_cosine" and len(rivals) > 1 and value == max(rivals)
            cells.append(f"[bold]{shown}[/bold]" if is_best else shown)
        table.add_row(*([escape(row["task"])] if several else []), escape(row["model"]), *cells)
    Console().print(table)


def _shown(value: float) -> str:
    # Three decimals, but a gain of a thousandth of a nat is not 0.
    return f"{value:.2g}" if 0 < abs(value) < 0.005 else f"{value:.3f}"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


__all__ = ["finish", "make_results", "print_table", "require_writable", "write_json"]
