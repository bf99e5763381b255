"""Retrieval tasks and benchmarks of the mteb package, by name."""

import difflib
import time
import warnings
from collections.abc import Sequence
from functools import cache
from operator import itemgetter

from hub_cards.encoding import prompts_used
from hub_cards.retrieval_metric.retrieval_metric import MEASURES

try:
    import mteb
    from mteb.models import SentenceTransformerEncoderWrapper
    from mteb.types import PromptType
except ImportError as error:
    raise ImportError(
        "A task that is no local folder is looked up in mteb, which is not installed: pip install 'revela-hub[mteb]'."
    ) from error

# Those of the papers' tables as well.
TABLE_MEASURES = (*MEASURES, "mrr_at_100", "recall_at_20", "recall_at_30")
RETROMAE = "retromae-beir"
# Of the 18 sets of RetroMAE's Table 1 these may not be passed on by others, so mteb has none of them.
_NOT_IN_MTEB = ("BioASQ", "Signal-1M", "TREC-NEWS", "Robust04")


def resolve(names: Sequence) -> tuple[str, list]:
    """Looks up tasks and benchmarks.

    Args:
        names: task names ("SciFact"), benchmark names or aliases ("NanoBEIR", "CoIR", "BRIGHT", "MTEB(eng, v2)"), mteb
            task objects, or "retromae-beir": MS MARCO (dev), NQ and the sets of RetroMAE's Table 1.

    Returns:
        A name for the whole, and the task objects. Of a benchmark only the retrieval tasks.

    Raises:
        ValueError: on an unknown name, with near ones, and on a task that is no retrieval task.
    """
    tasks, labels = [], []
    for name in names:
        if isinstance(name, mteb.AbsTask):
            found, label = [name], name.metadata.name
        elif str(name).lower() == RETROMAE:
            found, label = list(mteb.get_benchmark("BEIR").tasks), RETROMAE
            warnings.warn(
                f"{RETROMAE} leaves out {', '.join(_NOT_IN_MTEB)}, which mteb does not have: get them from their "
                "owners, and evaluate them as local folders.",
                stacklevel=2,
            )
        elif (benchmark := _benchmarks().get(str(name).lower())) is not None:
            found = [task for task in benchmark.tasks if _is_retrieval(task)]
            label = benchmark.name
        elif (task_name := _task_names().get(str(name).lower())) is not None:
            found, label = [mteb.get_task(task_name)], task_name
        else:
            known = {**_task_names(), **{key: benchmark.name for key, benchmark in _benchmarks().items()}}
            near = [known[key] for key in difflib.get_close_matches(str(name).lower(), known, n=5, cutoff=0.6)]
            raise ValueError(
                f"{name!r} is neither a folder nor a task or benchmark of mteb {mteb.__version__}."
                + (f" Near names: {', '.join(dict.fromkeys(near))}." if near else " See mteb.get_benchmarks().")
            )
        wrong = [task.metadata.name for task in found if not _is_retrieval(task)]
        if wrong or not found:
            raise ValueError(
                f"{', '.join(wrong) or label} is no text retrieval task; only those can be evaluated here."
            )
        tasks += found
        labels.append(label)
    if not tasks:
        raise ValueError("No task to evaluate; give a folder in BEIR's format or the name of an mteb task.")
    return ", ".join(labels), list({task.metadata.name: task for task in tasks}.values())


def evaluate_task(model, task, batch_size: int, progress: bool) -> dict:
    """Runs one task with mteb.

    Args:
        model: a SentenceTransformer.
        task: an mteb retrieval task; of an aggregate (CQADupstack) the members are run and averaged.
        batch_size: texts a forward pass.
        progress: show progress bars.

    Returns:
        `task`, `scores` (means over the task's splits and subsets, in 0..1), `prompts` as mteb applies them,
        `dataset` (path and revision; `None` for an aggregate), `seconds`.

    Raises:
        RuntimeError: if the task's data does not load, as without network.
    """
    members = list(task.tasks) if task.is_aggregate else [task]
    wrapped = SentenceTransformerEncoderWrapper(model)
    start = time.perf_counter()
    results = [run_task(wrapped, member, batch_size, progress) for member in members]
    return {
        "task": task.metadata.name,
        "scores": mean_scores(results),
        "prompts": prompts_of_task(wrapped, members[0]),
        "dataset": dataset_of_task(task),
        "seconds": {"all": round(time.perf_counter() - start, 3)},
    }


def run_task(wrapped, task, batch_size: int, progress: bool):
    """Runs one task that is no aggregate, of a model in mteb's wrapper; returns mteb's `TaskResult`.

    Raises:
        RuntimeError: if the task's data does not load, as without network.
    """
    preloaded = task.data_loaded
    task.k_values = sorted({*task.k_values, *(int(name.rpartition("_")[2]) for name in TABLE_MEASURES)})
    try:
        task.load_data()
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise RuntimeError(
            f"The data of the mteb task {task.metadata.name} does not load; it comes from the Hub or, offline, "
            f"from its cache. ({reason})"
        ) from error
    # No cache: mteb knows a local model by its path alone and would return an older model's results.
    (result,) = mteb.evaluate(
        wrapped,
        task,
        cache=None,
        co2_tracker=False,
        encode_kwargs={"batch_size": batch_size, "show_progress_bar": progress},
        show_progress_bar=progress,
    ).task_results
    if not preloaded:
        task.unload_data()
    return result


def mean_scores(results: Sequence, measures: Sequence[str] = tuple(MEASURES)) -> dict[str, float]:
    """Means over the splits and subsets of each of mteb's `TaskResult`s, then over them; in 0..1."""
    return {
        measure: sum(float(result.get_score(getter=itemgetter(measure))) for result in results) / len(results)
        for measure in measures
    }


def mean_of_tasks(label: str, scores: dict[str, dict[str, float]]) -> dict[str, float]:
    """
    Means over tasks, a row of its own in a table of results.

    Args:
        label: what `resolve` calls the whole. RetroMAE trains on MS MARCO, and its Table 1 averages the others alone.
        scores: by task and measure.
    """
    left_out = ("MSMARCO",) if label == RETROMAE else ()
    kept = [of_task for task, of_task in scores.items() if task not in left_out]
    return {measure: sum(one[measure] for one in kept) / len(kept) for measure in kept[0]}


def prompts_of_task(wrapped, task) -> dict[str, str]:
    """What goes before a query and a document of a task, as mteb applies it."""
    return {side: _prompt(wrapped, task.metadata, PromptType(side)) for side in ("query", "document")}


def dataset_of_task(task) -> dict | None:
    """Path and revision of a task's dataset on the Hub; `None` for an aggregate, which has one a member."""
    if task.is_aggregate:
        return None
    return {key: task.metadata.dataset.get(key) for key in ("path", "revision")}


def _prompt(wrapped, metadata, side) -> str:
    name = wrapped.get_prompt_name(metadata, side)
    # Where mteb finds none of its own it passes None, and encode_query / encode_document choose.
    return wrapped.model.prompts[name] if name else prompts_used(wrapped.model)[side.value]


def _is_retrieval(task) -> bool:
    return task.metadata.simplified_task_type == "retrieval" and list(task.metadata.modalities) == ["text"]


@cache
def _benchmarks() -> dict:
    found = {}
    for benchmark in mteb.get_benchmarks():
        for name in (benchmark.name, *(benchmark.aliases or ())):
            found[name.lower()] = benchmark
    return found


@cache
def _task_names() -> dict[str, str]:
    names = (task.metadata.name for task in mteb.get_tasks(exclude_superseded=False, exclude_private=False))
    return {name.lower(): name for name in names}
