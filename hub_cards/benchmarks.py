"""
The papers' benchmarks, run with mteb as the papers ran them; a run that was stopped goes on where it was.

A folder of results holds, for each model, what was measured so far, a file a task, and the same as mteb writes it:

    results/MODEL/FINGERPRINT/Task.json                  `settings` that decide the scores, `result` of mteb, `seconds`
    results/mteb/results/ORG__NAME/REVISION/Task.json    mteb's own layout, with model_meta.json: `mteb.ResultCache`

A task is run again if the fingerprint of the model or any of the settings changed. Tasks are dealt out to the
processes that `accelerate launch` starts, each with a device of its own, on machines that share the folder.
"""

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, parse_flag_from_env
from sentence_transformers import SentenceTransformer

from hub_cards import mteb_tasks
from hub_cards.backbones import positions
from hub_cards.checkpoints import model_type
from hub_cards.encoding import describe_model, load_model, model_fingerprint
from hub_cards.hub import require_here_or_hub
from hub_cards.model_meta import model_meta
from hub_cards.report import finish, make_results, require_writable, write_json


@dataclass(frozen=True)
class Benchmark:
    """What a paper evaluated on: names for `mteb_tasks.resolve`, those left out, and the tokens a text may have."""

    names: tuple[str, ...]
    without: tuple[str, ...] = ()
    max_length: int | None = None  # None: the length that the model was saved with; RetroMAE names none


_BRIGHT = (
    *("Biology", "EarthScience", "Economics", "Psychology", "Robotics", "Stackoverflow", "SustainableLiving"),
    *("Leetcode", "Pony", "Aops", "TheoremQAQuestions", "TheoremQATheorems"),
)
BENCHMARKS = {
    "coir": Benchmark(("CoIR",), max_length=2048),
    # Version 1.1 leaves out the documents that BRIGHT excludes for a query, as BRIGHT's own code does; mteb's first
    # version ranks them.
    "bright": Benchmark(tuple(f"Bright{name}Retrieval" for name in _BRIGHT), max_length=2048),
    # 13 sets in the paper.
    "beir": Benchmark(("BEIR",), without=("MSMARCO", "CQADupstackRetrieval"), max_length=2048),
    "retromae-beir": Benchmark((mteb_tasks.RETROMAE,)),
    "msmarco": Benchmark(("MSMARCO",)),
    "nq": Benchmark(("NQ",)),
}


def run_benchmark(
    models: Mapping[str, str] | Sequence[str],
    benchmark: str | Sequence,
    folder: str | Path,
    *,
    mteb_name: str | None = None,
    out: str | Path | None = None,
    batch_size: int = 32,
    show: bool = True,
) -> dict:
    """
    Measure models on a benchmark of the papers, or go on with it; call it in every process of a launch.

    Args:
        models: folders or Hub ids of sentence-transformers models, or a mapping from the name to show.
        benchmark: one of BENCHMARKS, or mteb task objects.
        folder: where the results of the tasks are kept, as this module's docstring says.
        mteb_name: `org/name` of the (single) model in mteb's layout; left out, its Hub id or `local/FOLDER`.
        out: JSON file to write, as `evaluate` does.
        batch_size: texts a forward pass.
        show: print the table.

    Returns:
        As `evaluate`: a row a model and task, whose `scores` are all that the papers' tables have.

    Raises:
        ValueError: an unknown benchmark; a model that does not load, or is a checkpoint of training.
        RuntimeError: if the data of a task does not load; what was measured before stays.
        OSError: at the start, if `out` cannot be written.
    """
    models = dict(models) if isinstance(models, Mapping) else {str(model): str(model) for model in models}
    check_benchmark(list(models.values()), benchmark, mteb_name, out)
    label, tasks, max_length = _resolve(benchmark)
    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    # The processes wait in the end for the slowest.
    state = PartialState(cpu=on_cpu, timeout=timedelta(days=7))
    rows: list[dict] = []
    for name, path in models.items():
        model = load_model(path, device=str(state.device))
        # A model of static embeddings has no positions, and reads all of a text.
        if max_length is not None and model.transformers_model is not None:
            model.max_seq_length = min(max_length, positions(model.transformers_model) or max_length)
        run = _Run(model, model_fingerprint(path), Path(folder), path)
        unfinished = [[task.metadata.name for task in _members(tasks) if run.read(task) is None]]
        # One process looks, since files appear while others look.
        broadcast_object_list(unfinished)
        own = unfinished[0][state.process_index :: state.num_processes]
        for task in _members(tasks):
            if task.metadata.name in own:
                run.measure(task, batch_size, show and state.is_main_process)
        state.wait_for_everyone()
        if state.is_main_process:
            run.write_mteb(tasks, mteb_name)
        rows += [{"model": name, "role": "model", **run.row(task)} for task in tasks]
    results = _results(label, tasks, rows, {"batch_size": batch_size, "max_length": max_length})
    return finish(results, out, show) if state.is_main_process else results


def check_benchmark(
    models: Sequence[str], benchmark: str | Sequence, mteb_name: str | None = None, out: str | Path | None = None
) -> None:
    """Refuses what `run_benchmark` would refuse, before anything is loaded or launched; raises as it does."""
    require_writable(out)
    if isinstance(benchmark, str) and benchmark not in BENCHMARKS:
        raise ValueError(
            f"There is no benchmark {benchmark!r}; choose one of {', '.join(BENCHMARKS)}, or give --task."
        )
    if mteb_name is not None and (len(models) > 1 or not re.fullmatch(r"[\w.-]+/[\w.-]+", mteb_name)):
        raise ValueError(f"--mteb-name {mteb_name} must be org/name, and there must be one model.")
    for path in models:
        require_here_or_hub(path)
        if model_type(path) in ("revela", "retromae"):
            raise ValueError(f"{path} is a checkpoint of training; give what `revela-hub export` makes of it.")


class _Run:
    """One model on the tasks of a benchmark."""

    def __init__(self, model: SentenceTransformer, fingerprint: str, folder: Path, path: str) -> None:
        self.model = model
        self.wrapped = mteb_tasks.SentenceTransformerEncoderWrapper(model)
        self.fingerprint = fingerprint
        self.path = path
        self.mteb_folder = folder / "mteb"
        self.folder = folder / re.sub(r"[^\w.-]+", "__", path.strip("/")).lstrip(".") / fingerprint[:16]

    def read(self, task) -> dict | None:
        """What is kept of a task, if it was measured with the same model and settings."""
        file = self._file(task)
        if not file.is_file():
            return None
        kept = json.loads(file.read_text(encoding="utf-8"))
        return kept if kept["settings"] == self._settings(task) else None

    def measure(self, task, batch_size: int, progress: bool) -> None:
        start = time.perf_counter()
        result = mteb_tasks.run_task(self.wrapped, task, batch_size, progress)
        kept = {
            "settings": self._settings(task),
            "result": json.loads(result.model_dump_json()),
            "seconds": round(time.perf_counter() - start, 3),
        }
        write_json(kept, self._file(task))

    def row(self, task) -> dict[str, Any]:
        """Scores of a task, and what decided them."""
        members = _members([task])
        kept = [self.read(member) for member in members]
        settings = kept[0]["settings"]
        return {
            "task": task.metadata.name,
            "scores": mteb_tasks.mean_scores([_result(one) for one in kept], mteb_tasks.TABLE_MEASURES),
            "standardised": False,
            **describe_model(self.model),
            "prompts": settings["prompts"],
            "dataset": mteb_tasks.dataset_of_task(task),
            "fingerprint": self.fingerprint,
            "seconds": {"all": round(sum(one["seconds"] for one in kept), 3)},
        }

    def write_mteb(self, tasks: Sequence, name: str | None) -> None:
        """The same results as mteb's cache and leaderboard read them, an aggregate's beside its members'."""
        cache = mteb_tasks.mteb.ResultCache(self.mteb_folder)
        meta = model_meta(self.model, self.path, self.fingerprint, name)
        for task in tasks:
            results = [_result(self.read(member)) for member in _members([task])]
            if task.is_aggregate:
                combined = task.combine_task_results(results)
                results.append(combined.model_copy(update={"kg_co2_emissions": None}))
            for result in results:
                cache.save_to_cache(result, meta)

    def _settings(self, task) -> dict:
        described = describe_model(self.model)
        return {
            "model": self.fingerprint,
            "prompts": mteb_tasks.prompts_of_task(self.wrapped, task),
            **{key: described[key] for key in ("max_seq_length", "similarity", "dtype")},
            "dataset": mteb_tasks.dataset_of_task(task),
            "splits": list(task.eval_splits),
        }

    def _file(self, task) -> Path:
        return self.folder / f"{task.metadata.name}.json"


def _resolve(benchmark: str | Sequence) -> tuple[str, list, int | None]:
    if not isinstance(benchmark, str):
        return *mteb_tasks.resolve(benchmark), None
    chosen = BENCHMARKS[benchmark]
    _, tasks = mteb_tasks.resolve(chosen.names)
    return benchmark, [task for task in tasks if task.metadata.name not in chosen.without], chosen.max_length


def _members(tasks: Sequence) -> list:
    """The tasks, each aggregate (CQADupstack) replaced by its members."""
    return [member for task in tasks for member in (task.tasks if task.is_aggregate else [task])]


def _result(kept: dict):
    return mteb_tasks.mteb.TaskResult.model_validate(kept["result"])


def _results(label: str, tasks: Sequence, rows: list[dict], settings: dict) -> dict:
    names = [task.metadata.name for task in tasks]
    rows = sorted(rows, key=lambda row: names.index(row["task"]))
    if len(tasks) > 1:
        for model in dict.fromkeys(row["model"] for row in rows):
            means = mteb_tasks.mean_of_tasks(
                label, {row["task"]: row["scores"] for row in rows if row["model"] == model}
            )
            rows.append({"model": model, "role": "model", "task": "mean", "scores": means})
    return make_results({"name": label, "kind": "mteb", "tasks": names}, rows, settings)


__all__ = ["BENCHMARKS", "check_benchmark", "run_benchmark"]
