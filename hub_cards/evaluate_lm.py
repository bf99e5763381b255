"""What a causal LM keeps of its abilities: lm-evaluation-harness on several models side by side."""

import gc
import tempfile
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hub_cards.checkpoints import check_folder, model_type, require_base
from hub_cards.export import export
from hub_cards.hub import reason, require_here_or_hub
from hub_cards.report import write_json

# Those of appendix C.6 of arXiv 2506.16552, which names ARC as a whole.
TASKS = ("arc_easy", "arc_challenge", "copa", "openbookqa", "piqa", "rte", "wic", "winogrande")


def evaluate_lm(
    models: Sequence[str],
    *,
    baselines: Sequence[str] = (),
    tasks: Sequence[str] = TASKS,
    include_path: str | Path | None = None,
    limit: int | None = None,
    out: str | Path | None = None,
    batch_size: int = 8,
    show: bool = True,
) -> dict:
    """
    Measure causal LMs with lm-evaluation-harness, in the setting of each task and without a chat template.

    Args:
        models: folders or Hub ids of causal LMs or of their PEFT adapters, or pre-training checkpoints of Revela,
            whose LM is exported to a temporary folder.
        baselines: models to compare with, shown above `models`: what training began with.
        tasks: names of the harness' tasks or groups; by default the paper's (appendix C.6), without examples.
        include_path: a folder with YAML files of further tasks. Tasks are code: use only those that you trust.
        limit: examples a task, for a trial.
        out: a JSON file to write the results to as well.
        batch_size: sequences a forward pass.
        show: print a table: accuracies, each task's best in bold, and their mean.

    Returns:
        `task`, `settings`, `versions`, `date`, and `rows` with `model`, `scores` and `stderr` (a task's accuracy, or
        its first measure where it has none, and the standard error) and `mean` (of the scores).

    Raises:
        ImportError: without lm_eval; ValueError: for a task that is unknown or whose data does not load, and for a
        model that does not load, naming it.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ImportError("evaluate-lm needs lm-evaluation-harness: pip install 'revela-hub[lm-eval]'") from error

    if include_path is not None and not Path(include_path).is_dir():
        raise FileNotFoundError(f"--include-path {include_path} is no folder.")
    manager = None
    if include_path is not None:
        # The harness' own tasks fill thousands of files: they are left unread where nobody asks for one.
        manager = TaskManager(include_path=str(include_path), include_defaults=False)
    if manager is None or not set(tasks) <= set(manager.all_tasks):
        manager = TaskManager(include_path=None if include_path is None else str(include_path))
    for task in tasks:
        _require_data(manager, task)
    rows = []
    for name in dict.fromkeys([*baselines, *models]):
        with tempfile.TemporaryDirectory() as folder:
            harness = HFLM(**_load(name, Path(folder) / "lm"), batch_size=batch_size)
            found = simple_evaluate(harness, tasks=list(tasks), limit=limit, task_manager=manager, log_samples=False)
        rows.append({"model": name, **_scores(found["results"], tasks)})
        # Two models need not fit beside each other.
        del harness, found
        gc.collect()
    results = {
        "task": {"name": "lm-evaluation-harness"},
        "rows": rows,
        "settings": {"tasks": list(tasks), "limit": limit, "batch_size": batch_size},
        "versions": {name: version(name) for name in ("lm_eval", "transformers", "torch")},
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    # First what cannot fail: measuring may have taken hours.
    if show:
        _print_table(rows, tasks)
    if out is not None:
        write_json(results, out)
    return results


def _require_data(manager, task: str) -> None:
    """Raises ValueError for a task that is unknown or whose data does not load, before any model is."""
    if task not in manager.all_tasks:
        raise ValueError(
            f"lm-evaluation-harness knows no task {task!r}: `lm-eval ls tasks` lists its own, and --include-path "
            "takes a folder with YAML files of others."
        )
    try:
        manager.load([task])
    except Exception as error:
        # Whatever the task's own code and its data's loader raise.
        raise ValueError(
            f"The data of the task {task!r} does not load ({reason(error)}): it is fetched from the Hub once and "
            "read from its cache from then on; leave the task out with --tasks, or repair its YAML or data file."
        ) from error


def _load(name: str, exported: Path) -> dict:
    """The model, on the device there is, and its tokenizer."""
    if model_type(name) in ("revela", "retromae"):
        export(name, exported, part="lm")
    else:
        require_here_or_hub(name)
        check_folder(name)
        require_base(name)
        exported = name
    options = {"trust_remote_code": False}
    try:
        model = AutoModelForCausalLM.from_pretrained(exported, dtype="auto", use_safetensors=True, **options)
        tokenizer = AutoTokenizer.from_pretrained(exported, **options)
    except (OSError, ValueError) as error:
        raise ValueError(f"{name} does not load as a causal LM ({reason(error)}).") from error
    if torch.accelerator.is_available():
        model.to(torch.accelerator.current_accelerator())
    return {"pretrained": model.eval(), "tokenizer": tokenizer}


def _scores(found: dict, tasks: Sequence[str]) -> dict:
    scores, errors = {}, {}
    for task in tasks:
        measures = {name: value for name, value in found[task].items() if "," in name and "_stderr," not in name}
        name = "acc,none" if "acc,none" in measures else next(iter(measures))
        scores[task] = float(measures[name])
        error = found[task].get(name.replace(",", "_stderr,", 1))
        errors[task] = error if isinstance(error, float) else None
    return {"scores": scores, "stderr": errors, "mean": sum(scores.values()) / len(scores)}


def _print_table(rows: list[dict], tasks: Sequence[str]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    # Models as columns: there are few of them, and many tasks.
    table = Table(title="Accuracy, %, with its standard error", title_justify="left")
    table.add_column("task")
    for row in rows:
        table.add_column(escape(row["model"]), justify="right", overflow="fold")
    for task in [*tasks, "mean"]:
        values = [row["mean"] if task == "mean" else row["scores"][task] for row in rows]
        errors = [None if task == "mean" else row["stderr"][task] for row in rows]
        cells = []
        for value, error in zip(values, errors, strict=True):
            shown = f"{100 * value:.1f}" + ("" if error is None else f" ± {100 * error:.1f}")
            cells.append(f"[bold]{shown}[/bold]" if len(rows) > 1 and value == max(values) else shown)
        table.add_row(escape(task), *cells, end_section=task == tasks[-1])
    Console().print(table)


__all__ = ["TASKS", "evaluate_lm"]
