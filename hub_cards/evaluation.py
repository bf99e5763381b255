"""Measures retrievers side by side: on a local BEIR-format folder, on mteb tasks, or without labels."""

import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer

from hub_cards import ranking
from hub_cards.beir_folder import BeirFolder, load_beir_folder
from hub_cards.encoding import describe_model, encode, load_model, model_fingerprint
from hub_cards.report import finish, make_results, require_writable, write_json
from hub_cards.retrieval_metric.retrieval_metric import score_run
from hub_cards.validation import read_groups, sibling_retrieval

METRIC_PATH = Path(__file__).parent / "retrieval_metric"
"""The folder to give to `evaluate.load`, wherever the package is installed."""

TOP_K = 1000

Models = str | SentenceTransformer | Sequence[str | SentenceTransformer] | Mapping[str, str | SentenceTransformer]


def evaluate(
    models: Models,
    task: str | Path | Sequence,
    *,
    baselines: Models = (),
    standardise: Models = (),
    truncate_dims: Sequence[int] = (),
    bm25: bool = True,
    out: str | Path | None = None,
    batch_size: int = 32,
    split: str = "test",
    show: bool = True,
) -> dict:
    """Measures nDCG@10, MRR@10 and Recall@10, 50, 100 and 1000 of several retrievers on the same task.

    Texts go through `encode_query` and `encode_document`, so each model's saved prompts, pooling and maximal length
    apply; the search is exact. A document that is the query itself (same id and text, not judged) is left out.

    Args:
        models: sentence-transformers models: folders, Hub ids or loaded ones; or a mapping from the name to show.
        task: a folder in BEIR's format (`corpus.jsonl`, `queries.jsonl`, `qrels/test.tsv`), or the name (or names) of
            mteb tasks or benchmarks, such as "NanoBEIR", "CoIR", "BRIGHT", "SciFact", "retromae-beir", or mteb
            task objects.
        baselines: models to compare with, shown above `models`.
        standardise: models to show (also) with embeddings standardised per dimension by the corpus: the free baseline
            that training must beat. Local folders only.
        truncate_dims: show each of `models` also with embeddings cut to so many of their first dimensions.
        bm25: show BM25 as a row. Local folders only.
        out: JSON file to write (over an old one). While mteb tasks run, what is done so far is in `OUT.partial`.
        batch_size: texts a forward pass.
        split: which qrels file of a local folder.
        show: print the table, and progress bars where stderr is a terminal.

    Returns:
        What the JSON file holds: `task`, `rows` (one a model and task, in the order shown: scores, prompts,
        max_seq_length, seconds, …, and of a folder or Hub id the `fingerprint`), `settings`, `versions`, `date`.

    Raises:
        FileNotFoundError, ValueError: on a folder that is not a test set, an unknown task (near names are given), a
            model that does not load or has fewer dimensions than asked for, no model at all.
        RuntimeError: if the data of an mteb task does not load.
        OSError: at the start, if `out` cannot be written.
    """
    require_writable(out)
    specs = _model_specs(baselines, models, standardise, truncate_dims)
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
        results = make_results(description, rows, settings)
    else:
        if any(spec["standardised"] for spec in specs):
            raise ValueError("A standardised row needs a whole corpus embedded at once: only for a local folder.")
        names = [task] if isinstance(task, (str, Path)) or not isinstance(task, Sequence) else task
        results = _evaluate_mteb(specs, names, settings, out, progress)
    return finish(results, out, show)


def evaluate_groups(
    models: Models,
    groups: str | Path | Iterable[Mapping],
    *,
    baselines: Models = (),
    standardise: Models = (),
    truncate_dims: Sequence[int] = (),
    gains: Mapping[str, Mapping] | None = None,
    span_ratio: float = 0.5,
    num_queries: int | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    batch_size: int = 32,
    split: str = "validation",
    show: bool = True,
) -> dict:
    """Measures retrievers without labels, by sibling retrieval on held-out chunks (`validation.sibling_retrieval`).

    Args:
        models, baselines, standardise, truncate_dims, out, batch_size, show: as for `evaluate`.
        groups: a prepared set's folder, or rows with `texts` and `doc_ids`.
        gains: model name -> what `validation.retrieval_gain` gave for it, to show beside.
        span_ratio, num_queries, seed: as for `sibling_retrieval`.
        split: which files of a prepared set.

    Returns:
        As `evaluate`, with `mean_cosine` (and `retrieval_gain`) among the scores.
    """
    require_writable(out)
    specs = _model_specs(baselines, models, standardise, truncate_dims)
    progress = show and sys.stderr.isatty()
    description = {"name": "sibling retrieval", "kind": "groups"}
    if isinstance(groups, (str, Path)):
        description |= {"path": str(groups), "split": split}
        groups = read_groups(groups, split)
    groups = list(groups)
    rows = []
    for spec in specs:
        model = _load(spec)
        embeddings = {}

        def encoder(side, dim, model=model, embeddings=embeddings):
            # All rows of a model rank the same embeddings, so they are made once.
            def encode_once(texts):
                if side not in embeddings:
                    embeddings[side] = encode(model, texts, side, batch_size, progress)
                return _cut(embeddings[side], dim, model)

            return encode_once

        for standardised, dim in _variants(spec):
            start = time.perf_counter()
            scores = sibling_retrieval(
                groups,
                encoder("query", dim),
                encoder("document", dim),
                span_ratio=span_ratio,
                num_queries=num_queries,
                seed=seed,
                standardised=standardised,
            )
            scores |= {} if standardised or dim or gains is None else gains.get(spec["name"], {})
            seconds = {"all": round(time.perf_counter() - start, 3)}
            rows.append(_model_row(spec, model, "sibling retrieval", scores, seconds, standardised, dim))
    description |= {
        "num_queries": rows[0]["scores"]["num_queries"],
        "num_documents": rows[0]["scores"]["num_chunks"],
    }
    settings = {"batch_size": batch_size, "span_ratio": span_ratio, "num_queries": num_queries, "seed": seed}
    return finish(make_results(description, rows, settings), out, show)


def _beir_rows(spec: dict, test_set: BeirFolder, batch_size: int, progress: bool) -> list[dict]:
    model = _load(spec)
    seconds = {}
    start = time.perf_counter()
    queries = encode(model, test_set.queries.values(), "query", batch_size, progress)
    seconds["encode_queries"] = round(time.perf_counter() - start, 3)
    start = time.perf_counter()
    documents = encode(model, test_set.corpus.values(), "document", batch_size, progress)
    seconds["encode_documents"] = round(time.perf_counter() - start, 3)
    doc_ids = list(test_set.corpus)
    rows = []
    for standardised, dim in _variants(spec):
        start = time.perf_counter()
        sides = _cut(queries, dim, model), _cut(documents, dim, model)
        scores, indices = ranking.top_k(*(ranking.standardise(*sides) if standardised else sides), TOP_K + 1)
        run = {
            query: {doc_ids[index]: score for index, score in zip(*ranked, strict=True)}
            for query, *ranked in zip(test_set.queries, indices.tolist(), scores.tolist(), strict=True)
        }
        seconds["search"] = round(time.perf_counter() - start, 3)
        task = test_set.path.resolve().name
        rows.append(_model_row(spec, model, task, _score(run, test_set), dict(seconds), standardised, dim))
    return rows


def _bm25_row(test_set: BeirFolder) -> dict:
    import bm25s
    import Stemmer

    start = time.perf_counter()
    options = {"stopwords": "en", "stemmer": Stemmer.Stemmer("english"), "show_progress": False}
    words = bm25s.tokenize(list(test_set.corpus.values()), **options)
    retriever = bm25s.BM25(method="lucene")
    run = {}
    # Texts of symbols or stopwords alone leave no vocabulary, of which bm25s makes no index: nothing is found.
    if words.vocab:
        retriever.index(words, show_progress=False)
    indexed = time.perf_counter()
    if words.vocab:
        queries = bm25s.tokenize(list(test_set.queries.values()), **options)
        k = min(TOP_K + 1, len(test_set.corpus))
        indices, scores = retriever.retrieve(queries, k=k, show_progress=False)
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
        "bm25": {"method": "lucene", "k1": retriever.k1, "b": retriever.b},
        "words": {"stopwords": "english", "stemmer": "snowball english"},
        "seconds": {"index": round(indexed - start, 3), "search": round(time.perf_counter() - indexed, 3)},
    }


def _score(run: dict[str, dict[str, float]], test_set: BeirFolder) -> dict:
    for query, ranked in run.items():
        # Some sets (ArguAna, Quora) take their queries from the corpus; finding the query itself is no find.
        is_itself = query in ranked and test_set.corpus[query].endswith(test_set.queries[query])
        if is_itself and query not in test_set.qrels[query]:
            del ranked[query]
        for extra in list(ranked)[TOP_K:]:
            del ranked[extra]
    return score_run(run, test_set.qrels)


def _evaluate_mteb(specs: list[dict], names: Sequence, settings: dict, out, progress: bool) -> dict:
    from hub_cards import mteb_tasks

    label, tasks = mteb_tasks.resolve(names)
    description = {"name": label, "kind": "mteb", "tasks": [task.metadata.name for task in tasks]}
    partial = None if out is None else Path(f"{out}.partial")
    rows = []
    for spec in specs:
        model = _load(spec)
        own_dim = model.truncate_dim
        for (_, dim), task in product(_variants(spec), tasks):
            model.truncate_dim = dim or own_dim
            found = mteb_tasks.evaluate_task(model, task, batch_size=settings["batch_size"], progress=progress)
            row = _model_row(spec, model, found["task"], found["scores"], found["seconds"], False, dim)
            rows.append(row | {key: found[key] for key in ("prompts", "dataset")})
            if partial is not None:
                write_json(make_results(description, rows, settings), partial)
        model.truncate_dim = own_dim
    rows.sort(key=lambda row: description["tasks"].index(row["task"]))
    if len(tasks) > 1:
        for name, role in {row["model"]: row["role"] for row in rows}.items():
            means = mteb_tasks.mean_of_tasks(
                label, {row["task"]: row["scores"] for row in rows if row["model"] == name}
            )
            rows.append({"model": name, "role": role, "task": "mean", "scores": means})
    if partial is not None:
        partial.unlink()
    return make_results(description, rows, settings)


def _model_row(
    spec: dict,
    model: SentenceTransformer,
    task: str,
    scores: dict,
    seconds: dict,
    standardised: bool,
    dim: int | None,
) -> dict:
    kind = ", ".join(([f"{dim} dimensions"] if dim else []) + (["standardised"] if standardised else []))
    return {
        "model": spec["name"] + (f" ({kind})" if kind else ""),
        "role": spec["role"],
        "task": task,
        "scores": scores,
        "standardised": standardised,
        "truncate_dim": dim,
        **describe_model(model),
        # Of a model in memory nobody can tell later which it was.
        **({"fingerprint": spec["fingerprint"]} if "fingerprint" in spec else {}),
        "seconds": seconds,
    }


def _model_specs(baselines: Models, models: Models, standardise: Models, truncate_dims: Sequence[int]) -> list[dict]:
    """One entry a model, in the order shown, so that a model asked for twice is encoded once."""
    specs: dict[object, dict] = {}
    for use, given in (("baseline", baselines), ("model", models), ("standardised", standardise)):
        if isinstance(given, (str, Path, SentenceTransformer)):
            given = [given]
        pairs = given.items() if isinstance(given, Mapping) else [(None, model) for model in given]
        for name, model in pairs:
            key = model if isinstance(model, SentenceTransformer) else str(model)
            spec = specs.setdefault(
                key,
                {
                    "model": key,
                    "name": None,
                    "role": "model" if use == "model" else "baseline",
                    "plain": False,
                    "standardised": False,
                    "dims": list(truncate_dims) if use == "model" else [],
                },
            )
            spec["name"] = spec["name"] or name
            spec["standardised" if use == "standardised" else "plain"] = True
    if not specs:
        raise ValueError("No model to evaluate; give at least one sentence-transformers folder or Hub id.")
    for number, spec in enumerate(specs.values(), 1):
        if spec["name"] is None:
            spec["name"] = spec["model"] if isinstance(spec["model"], str) else f"model {number}"
    names = [spec["name"] for spec in specs.values()]
    if len(set(names)) < len(names):
        raise ValueError(f"Two models have the same name to show ({', '.join(names)}); give each its own.")
    # A baseline that is only wanted standardised still belongs above the models.
    return sorted(specs.values(), key=lambda spec: spec["role"] == "model")


def _variants(spec: dict) -> list[tuple[bool, int | None]]:
    """(standardised, dimensions or `None` for all) of each row that a model is to have."""
    uses = [standardised for standardised, use in ((False, "plain"), (True, "standardised")) if spec[use]]
    return [(standardised, dim) for dim in (None, *spec["dims"]) for standardised in uses]


def _load(spec: dict) -> SentenceTransformer:
    model = load_model(spec["model"])
    _check_dims(spec, model)
    if isinstance(spec["model"], str):
        spec["fingerprint"] = model_fingerprint(spec["model"])
    return model


def _check_dims(spec: dict, model: SentenceTransformer) -> None:
    size = model.get_embedding_dimension()
    for dim in spec["dims"]:
        if not 0 < dim <= size:
            raise ValueError(f"Embeddings of {spec['name']} have {size} dimensions and cannot be cut to {dim}.")


def _cut(embeddings: torch.Tensor, dim: int | None, model: SentenceTransformer) -> torch.Tensor:
    """What `encode` gives where `model.truncate_dim` is `dim`."""
    if dim is None:
        return embeddings
    embeddings = embeddings[:, :dim]
    return torch.nn.functional.normalize(embeddings, dim=-1) if model.similarity_fn_name == "cosine" else embeddings


def _is_local(task: str | Path) -> bool:
    return isinstance(task, Path) or Path(task).exists() or "/" in task or os.sep in task
