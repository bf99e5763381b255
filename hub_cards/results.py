"""What `revela-hub evaluate --out` measured, as a card shows it and as the Hub reads it."""

import json
import os
import re
from pathlib import Path

import yaml
from huggingface_hub import EvalResult, EvalResultEntry, eval_result_entries_to_yaml, parse_eval_result_entries
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from hub_cards.encoding import model_fingerprint
from hub_cards.privacy import hub_id

EVAL_RESULTS = ".eval_results"
"""The folder of a repository in which the Hub looks for results: a YAML file a task."""

_MEASURES = {
    "ndcg_at_10": "nDCG@10",
    "mrr_at_10": "MRR@10",
    "recall_at_10": "R@10",
    "recall_at_100": "R@100",
    "retrieval_gain": "gain",
}
_MTEB = "https://github.com/embeddings-benchmark/mteb/"
_COMMIT = re.compile("[0-9a-f]{40}")
_STANDARDISED = " (standardised)"


def read_results(path: str | Path, folder: Path, repo_id: str | None) -> dict:
    """
    Read a file of results, and tell the rows of a folder's model from those of others.

    Args:
        path: what `revela-hub evaluate --out` wrote.
        folder: the model's. Its rows are those that were measured on the same files, or by the name `repo_id` on the
            Hub. In a file of an earlier version, which names no files, they are found by path or `repo_id`, and those
            of the only model that was no baseline are taken to be its own whatever it is called.

    Returns:
        `task`, `kind`, `split`, `counts`, `date`, `mteb` (its version) and `rows`: `model` (without the path of a
        local one; `None` for our own), `standardised`, `task`, `scores`, `dataset`.

    Raises:
        ValueError: for a file of another kind, or without rows of this model as it is now.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        task, rows = found["task"], found["rows"]
        names = list(dict.fromkeys(_plain(row["model"]) for row in rows if row["role"] == "model"))
        measured = {
            _plain(row["model"]): row["fingerprint"]
            for row in rows
            if row["role"] == "model" and "fingerprint" in row and not row.get("truncate_dim")
        }
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no results that `revela-hub evaluate --out` wrote.") from error
    if measured:
        here = model_fingerprint(str(folder))
        # Of a repository the fingerprint is a commit.
        own = [name for name, of in measured.items() if of == here or (name == repo_id and _COMMIT.fullmatch(of))]
        if not own:
            raise ValueError(
                f"{path} was measured on {', '.join(measured)}, with other files than {folder} has: evaluate that "
                "folder as it is now."
            )
    else:
        own = names if len(names) == 1 else [name for name in names if _is_own(name, folder, repo_id)]
    if not own:
        raise ValueError(
            f"{path} has rows of {', '.join(names) or 'no model'}, and which of them is {folder} cannot be told: "
            f"evaluate that folder, under its own path."
        )
    kept = [
        {
            "model": None if _plain(row["model"]) in own else _shown(_plain(row["model"])),
            "standardised": row["model"].endswith(_STANDARDISED),
            "task": row["task"],
            "scores": {name: row["scores"][name] for name in _MEASURES if name in row["scores"]},
            "dataset": row.get("dataset"),
        }
        for row in rows
    ]
    return {
        "task": task["name"],
        "kind": task["kind"],
        "split": task.get("split"),
        "counts": {name: task[f"num_{name}"] for name in ("queries", "documents") if f"num_{name}" in task},
        "date": found.get("date"),
        "mteb": found.get("versions", {}).get("mteb") if task["kind"] == "mteb" else None,
        "rows": kept,
    }


def as_eval_results(results: list[dict]) -> tuple[list[EvalResult], dict[str, list[dict]]]:
    """
    Our own rows, for the card's `model-index` and for the Hub's `.eval_results/`.

    Measures without labels and means over tasks belong in neither, and a local task has no dataset on the Hub that
    the latter could name.

    Returns:
        One entry a task and measure; file name -> content.
    """
    indexed, files = [], {}
    for result in results:
        for row in result["rows"]:
            if row["model"] is not None or row["standardised"] or row["task"] == "mean" or result["kind"] == "groups":
                continue
            dataset = row["dataset"] or {}
            for measure, value in row["scores"].items():
                indexed.append(
                    EvalResult(
                        task_type="information-retrieval",
                        task_name="Information Retrieval",
                        dataset_type=dataset.get("path") or "unknown",
                        dataset_name=row["task"],
                        # Without a name of its own, one task's numbers would be taken for another's.
                        dataset_config=row["task"],
                        dataset_split=result["split"],
                        dataset_revision=dataset.get("revision"),
                        metric_type=measure,
                        metric_name=_MEASURES[measure],
                        metric_value=round(value, 5),
                    )
                )
            if dataset.get("path"):
                by = f"mteb {result['mteb']}" if result["mteb"] else "mteb"
                entry = EvalResultEntry(
                    dataset_id=dataset["path"],
                    task_id=row["task"],
                    # In percent, as mteb writes them there; the index of a card has 0..1, as mteb's does.
                    value=round(100 * row["scores"]["ndcg_at_10"], 5),
                    dataset_revision=dataset.get("revision"),
                    date=result["date"],
                    source_url=_MTEB,
                    source_name=by,
                    notes=f"nDCG@10 of `revela-hub evaluate`, {by}",
                )
                file = f"{re.sub(r'[^A-Za-z0-9._-]+', '-', row['task'])}.yaml"
                files[file] = eval_result_entries_to_yaml([entry])
    return indexed, files


def check_entries(path: Path) -> None:
    """Raises ValueError for a file of `.eval_results/` that huggingface_hub does not read, or the Hub would refuse."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
        entries = parse_eval_result_entries(found)
        for entry in entries:
            validate_repo_id(entry.dataset_id)
        if not entries or not all(isinstance(entry.value, (int, float)) for entry in entries):
            raise ValueError("a result must have a number as its value")
    except (ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError, HFValidationError) as error:
        raise ValueError(
            f"{path} holds no results as the Hub has them ({error}): write it with `revela-hub card`."
        ) from error


def tables(results: list[dict], own: str, base_model: str | None) -> list[dict]:
    """
    The results as tables: `title`, `header` and `rows` of cells, the best of each comparison in bold.

    One task gives a table of models by measures, several one of tasks by models with nDCG@10.
    """
    made = []
    for result in results:
        rows = result["rows"]
        labels = [_label(row, own, base_model) for row in rows]
        counts = ", ".join(f"{count:,} {name}" for name, count in result["counts"].items())
        title = result["task"] + (f" ({counts})" if counts else "")
        if len({row["task"] for row in rows}) == 1:
            measures = [name for name in _MEASURES if any(name in row["scores"] for row in rows)]
            columns = {name: _cells([row["scores"].get(name) for row in rows]) for name in measures}
            header = ["", *(_MEASURES[name] for name in measures)]
            body = [[label, *(columns[name][at] for name in measures)] for at, label in enumerate(labels)]
        else:
            models = list(dict.fromkeys(labels))
            header, body, title = ["nDCG@10", *models], [], title
            for task in dict.fromkeys(row["task"] for row in rows):
                scores = {
                    label: row["scores"].get("ndcg_at_10")
                    for label, row in zip(labels, rows, strict=True)
                    if row["task"] == task
                }
                body.append([task, *_cells([scores.get(model) for model in models])])
        made.append({"title": title, "header": header, "rows": body, "kind": result["kind"]})
    return made


def _cells(values: list[float | None]) -> list[str]:
    known = [value for value in values if value is not None]
    cells = []
    for value in values:
        shown = "–" if value is None else f"{value:.3f}"
        cells.append(f"**{shown}**" if known and value == max(known) > min(known) else shown)
    return cells


def _label(row: dict, own: str, base_model: str | None) -> str:
    name = own if row["model"] is None else row["model"]
    if base_model is not None and row["model"] in (base_model, base_model.rpartition("/")[2]):
        name = f"{base_model} (base model)"
    return name + (_STANDARDISED if row["standardised"] else "")


def _plain(name: str) -> str:
    return name.removesuffix(_STANDARDISED)


def _is_own(name: str, folder: Path, repo_id: str | None) -> bool:
    return name == repo_id or os.path.realpath(name) == os.path.realpath(folder)


def _shown(name: str) -> str:
    return name if hub_id(name) else Path(name).name


__all__ = ["EVAL_RESULTS", "as_eval_results", "check_entries", "read_results", "tables"]
