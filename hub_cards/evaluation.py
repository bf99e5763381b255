"""Measures retrievers, several side by side, on a local BEIR-format folder, on mteb tasks, or without labels."""

import json
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer

from hub_cards import ranking
from hub_cards.beir_folder import BeirFolder, load_beir_folder
from hub_cards.retrieval_metric.retrieval_metric import MEASURES, score_run


METRIC_PATH = Path(__file__).parent / "retrieval_metric"
"""The folder to give to `evaluate.load`, wherever the package is installed."""

MEASURE_NAMES = {
    "ndcg_at_10": "nDCG@10",
    "mrr_at_10": "MRR@10",
    "recall_at_10": "Recall@10",
    "recall_at_100": "Recall@100",
}
TOP_K = 100

Models = Sequence[str | SentenceTransformer] | Mapping[str, str | SentenceTransformer]


def evaluate(
    models: Models,
    task: str | Path | Sequence[str],
    *,
    baselines: Models = (),
    standardise: Models = (),
    bm25: bool = True,
    out: str | Path | None = None,
    batch_size: int = 32,
    split: str = "test",
    show: bool = True,
) -> dict:
    """Measures nDCG@10, MRR@10, Recall@10 and Recall@100 of several retrievers on the same task.

    Texts go through `encode_query` and `encode_document`, so each model's saved prompts, pooling and maximal length
    apply; the search is exact.

    Args:
        models: sentence-transformers models: folders, Hub ids or loaded ones; or a mapping from the name to show.
        task: a folder in BEIR's format (`corpus.jsonl`, `queries.jsonl`, `qrels/test.tsv`), or the name (or names) of
            mteb tasks or benchmarks, such as "NanoBEIR", "CoIR", "BRIGHT", "SciFact".
        baselines: models to compare with, shown above `models`.
        standardise: models to show (also) with embeddings standardised per dimension by the corpus: the free baseline
            that training must beat. Local folders only.
        bm25: show BM25 as a row. Local folders only.
        out: JSON file to write (over an old one).
        batch_size: texts a forward pass.
        split: which qrels file of a local folder.
        show: print the table, and progress bars where stderr is a terminal.

    Returns:
        What the JSON file holds: `task`, `rows` (one a model, in the order shown: scores, prompts, max_seq_length,
        seconds, …), `settings`, `versions`, `date`.

    Raises:
        FileNotFoundError, ValueError: on a folder that is not a test set, an unknown task (near names are given), a
            model that does not load, no model at all.
    """
    specs = _model_specs(baselines, models, standardise)
    settings = {"batch_size": batch_size, "top_k": TOP_K}
    progress = show and sys.stderr.isatty()
    if isinstance(task, (str, Path)) and _is_local(task):
        test_set = load_beir_folder(task, split)
        description = {
            "name": test_set.path.resolve().name,
            "kind": "beir_folder",
            "path": str(test_set.path),
            "split": split,
            "num_documents": len(test_set.corpus),
            "num_queries": len(test_set.queries),
            "num_judgements": sum(map(len, test_set.qrels.values())),
        }
        rows = [_bm25_row(test_set)] if bm25 else []
        for spec in specs:
            rows += _beir_rows(spec, test_set, batch_size, progress)
        results = _results(description, rows, settings)
    else:
        from hub_cards import mteb_tasks

        if any(spec["standardise"] for spec in specs):
            raise ValueError("Standardised rows need all embeddings of a corpus at once: only for a local folder.")
        names = [task] if isinstance(task, (str, Path)) else list(task)
        description, rows = mteb_tasks.evaluate_tasks(specs, [str(name) for name in names], batch_size, progress)
        results = _results(description, rows, settings)
    if out is not None:
        write_json(results, out)
    if show:
        print_table(results)
    return results


def load_model(model: str | SentenceTransformer) -> SentenceTransformer:
    """The model itself, or the one loaded from a folder or Hub id; raises ValueError naming what did not load."""
    if isinstance(model, SentenceTransformer):
        return model
    try:
        return SentenceTransformer(str(model))
    except Exception as error:
        # One sentence that names the model: what the loaders raise is about whichever file they tried last.
        hint = "" if Path(model).exists() else " There is no such folder, so it was taken for a Hub id."
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(f"{model} does not load as a sentence-transformers model.{hint} ({reason})") from error


def describe_model(model: SentenceTransformer) -> dict:
    """What decides a model's embeddings beside its weights: the prompts used, length, similarity, size, device."""
    return {
        "prompts": prompts_used(model),
        "max_seq_length": model.max_seq_length,
        "similarity": str(model.similarity_fn_name),
        "dimensions": model.get_embedding_dimension(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "device": str(model.device),
    }


def prompts_used(model: SentenceTransformer) -> dict[str, str]:
    """The texts that `encode_query` and `encode_document` put before a query and a document."""
    names = {"query": ("query",), "document": ("document", "passage", "corpus")}
    default = model.prompts.get(model.default_prompt_name) if model.default_prompt_name else ""
    return {
        side: next((model.prompts[name] for name in candidates if name in model.prompts), default) or ""
        for side, candidates in names.items()
    }


def encode(model: SentenceTransformer, texts: Sequence[str], side: str, batch_size: int, progress: bool):
    """Float32 CPU embeddings (N, d), ready for inner products. `side`: "query" or "document"."""
    method = model.encode_query if side == "query" else model.encode_document
    similarity = str(model.similarity_fn_name)
    if similarity not in ("cosine", "dot"):
        raise ValueError(f"The model ranks by {similarity} distance; only cosine and dot product are supported.")
    embeddings = method(
        list(texts),
        batch_size=batch_size,
        show_progress_bar=progress and len(texts) > batch_size,
        convert_to_tensor=True,
        normalize_embeddings=similarity == "cosine",
    )
    return ranking.as_tensor(embeddings)


def _beir_rows(spec: dict, test_set: BeirFolder, batch_size: int, progress: bool) -> list[dict]:
    model = load_model(spec["model"])
    start = time.perf_counter()
    queries = encode(model, test_set.queries.values(), "query", batch_size, progress)
    encoded_queries = time.perf_counter()
    documents = encode(model, test_set.corpus.values(), "document", batch_size, progress)
    encoded_documents = time.perf_counter()
    seconds = {"encode_queries": encoded_queries - start, "encode_documents": encoded_documents - encoded_queries}
    rows = []
    for standardised in (False, True):
        if not spec["standardise" if standardised else "plain"]:
            continue
        start = time.perf_counter()
        sides = ranking.standardise(queries, documents) if standardised else (queries, documents)
        scores, indices = ranking.top_k(*sides, TOP_K + 1)
        doc_ids = list(test_set.corpus)
        run = {
            query: {doc_ids[index]: score for index, score in zip(*ranked, strict=True)}
            for query, *ranked in zip(test_set.queries, indices.tolist(), scores.tolist(), strict=True)
        }
        rows.append(
            {
                "model": spec["name"] + (" (standardised)" if standardised else ""),
                "role": spec["role"],
                "task": test_set.path.resolve().name,
                "scores": _score(run, test_set),
                "standardised": standardised,
                **describe_model(model),
                "seconds": _rounded({**seconds, "search": time.perf_counter() - start}),
            }
        )
    return rows


def _bm25_row(test_set: BeirFolder) -> dict:
    import bm25s
    import Stemmer

    start = time.perf_counter()
    tokens = {"stopwords": "en", "stemmer": Stemmer.Stemmer("english"), "show_progress": False}
    retriever = bm25s.BM25(method="lucene")
    retriever.index(bm25s.tokenize(list(test_set.corpus.values()), **tokens), show_progress=False)
    indexed = time.perf_counter()
    indices, scores = retriever.retrieve(
        bm25s.tokenize(list(test_set.queries.values()), **tokens),
        k=min(TOP_K + 1, len(test_set.corpus)),
        show_progress=False,
    )
    doc_ids = list(test_set.corpus)
    # A document at 0 shares no word with the query: it was not found.
    run = {
        query: {doc_ids[index]: score for index, score in zip(*ranked, strict=True) if score > 0}
        for query, *ranked in zip(test_set.queries, indices.tolist(), scores.tolist(), strict=True)
    }
    return {
        "model": "BM25",
        "role": "baseline",
        "task": test_set.path.resolve().name,
        "scores": _score(run, test_set),
        "standardised": False,
        "tokens": {"stopwords": "english", "stemmer": "english (snowball)"},
        "bm25": {"method": "lucene", "k1": retriever.k1, "b": retriever.b},
        "seconds": _rounded({"index": indexed - start, "search": time.perf_counter() - indexed}),
    }


def _score(run: dict[str, dict[str, float]], test_set: BeirFolder) -> dict:
    for query, ranked in run.items():
        # Some sets (ArguAna, Quora) take their queries from the corpus; finding the query itself is no find.
        if query in ranked and query not in test_set.qrels[query]:
            if test_set.corpus[query].endswith(test_set.queries[query]):
                del ranked[query]
        for extra in list(ranked)[TOP_K:]:
            del ranked[extra]
    return score_run(run, test_set.qrels)


def _model_specs(baselines: Models, models: Models, standardise: Models) -> list[dict]:
    """One entry a model, in the order shown, so that a model asked for twice is encoded once."""
    specs: dict[object, dict] = {}
    for role, given in (("baseline", baselines), ("model", models), ("standardise", standardise)):
        if isinstance(given, (str, SentenceTransformer)):
            given = [given]
        pairs = given.items() if isinstance(given, Mapping) else ((None, model) for model in given)
        for name, model in pairs:
            key = model if isinstance(model, SentenceTransformer) else str(model)
            shown = role if role != "standardise" else "baseline"
            spec = specs.setdefault(
                key, {"model": key, "name": name, "role": shown, "plain": False, "standardise": False}
            )
            spec["name"] = spec["name"] or name
            spec["standardise" if role == "standardise" else "plain"] = True
    if not specs:
        raise ValueError("No model to evaluate; give at least one sentence-transformers folder or Hub id.")
    for number, spec in enumerate(specs.values(), 1):
        if spec["name"] is None:
            spec["name"] = spec["model"] if isinstance(spec["model"], str) else f"model {number}"
    return list(specs.values())


def _is_local(task: str | Path) -> bool:
    return isinstance(task, Path) or Path(task).exists() or task.startswith((".", "/", "~")) or os.sep in task


def _results(task: dict, rows: list[dict], settings: dict) -> dict:
    packages = ("revela-hub", "sentence-transformers", "transformers", "torch", "ir-measures", "bm25s", "mteb")
    return {
        "task": task,
        "rows": rows,
        "settings": settings,
        "versions": {"python": sys.version.split()[0], **{name: _version(name) for name in packages}},
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except ModuleNotFoundError:
        return None


def _rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in seconds.items()}


def write_json(results: dict, out: str | Path) -> None:
    """Writes results whole or not at all: to a temporary name beside `out`, then renamed."""
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(temporary, out)


def print_table(results: dict) -> None:
    """Prints one line a row: the model and its measures, best in bold."""
    from rich.console import Console
    from rich.table import Table

    task = results["task"]
    counts = ", ".join(f"{task[f'num_{name}']} {name}" for name in ("queries", "documents") if f"num_{name}" in task)
    table = Table(title=f"{task['name']}{f' ({counts})' if counts else ''}", title_justify="left")
    several = len({row["task"] for row in results["rows"]}) > 1
    if several:
        table.add_column("task")
    table.add_column("model", overflow="fold")
    for name in MEASURE_NAMES.values():
        table.add_column(name, justify="right")
    for row in results["rows"]:
        cells = []
        for measure in MEASURES:
            value = row["scores"][measure]
            best = max(other["scores"][measure] for other in results["rows"] if other["task"] == row["task"])
            cells.append(f"[bold]{value:.3f}[/bold]" if value == best else f"{value:.3f}")
        table.add_row(*([row["task"]] if several else []), row["model"], *cells)
    Console().print(table)
