"""`revela-hub prepare`: raw text in, a prepared set out.

A prepared set is a folder of Parquet shards, `train-00000-of-0000N.parquet` and `validation-00000-of-0000M.parquet`,
one group of chunks a row, and `prepare.json` with the settings, the account and each shard's SHA-256. Columns:

- `texts` (list of group_size strings): the chunks, shuffled within the group;
- `doc_ids` (list of group_size strings): the document that each chunk comes from;
- `source` (string): the base name of SOURCE, to tell sets apart once mixed.

Documents are read, in the source's order, by this process; extracted and chunked by workers; and taken back in the
same order, so that everything that depends on order (duplicates, grouping, shards) is decided in one place and the
shards are byte for byte the same whatever the number of processes.
"""

import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import shutil
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from tqdm.auto import tqdm

from trainers.data.chunking import chunk_text, count_words
from trainers.data.grouping import DigestSet, Group, Grouper, Shuffler, in_validation, text_digest
from trainers.data.readers import DataError, Document, Source, html_to_text

SCHEMA = pa.schema([("texts", pa.list_(pa.string())), ("doc_ids", pa.list_(pa.string())), ("source", pa.string())])
_BATCH_CHARACTERS, _BATCH_DOCUMENTS = 1 << 18, 1024  # what a worker gets at a time
_ROW_GROUP, _SHARD_BYTES = 256, 512 << 20  # groups a row group; bytes of text a shard
_REPORTED_ERRORS = 20


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class PrepareConfig:
    """Settings of `prepare`. Every field is an option of `revela-hub prepare`."""

    source: str = field(metadata={"help": "File, folder or Hub dataset id to read."})
    out: str = field(metadata={"help": "Folder to write the prepared set to."})
    text_column: str = _option("text", "Column of JSONL, Parquet, CSV, TSV and Hub datasets that holds the text.")
    kind: str = _option("auto", "prose, code, or auto: code for source files (by suffix), prose for all else.")
    max_words: int = _option(120, "Words in a chunk, at most (the paper: 120).")
    min_words: int = _option(5, "Documents of fewer words are skipped and counted as too short.")
    group_size: int = _option(16, "Chunks in a group, the paper's batch (4, 8 or 16).")
    documents_per_group: int = _option(2, "Documents whose chunks are interleaved at any time.")
    shuffle: bool = _option(
        False,
        "Draw the documents of a group from all over the corpus, a piece of each, instead of neighbours in the "
        "corpus's order (the paper's). Short runs on a folder of files learn far more with it.",
    )
    validation_share: float = _option(0.02, "Share of the documents held out for validation; 0 for none.")
    seed: int = _option(42, "Seed of the held-out share and of the order within a group.")
    language: str = _option("en", "ISO 639 code of the prose, for the abbreviations that end no sentence.")
    include: str | None = _option(None, "Glob that a file of a folder must match to be read, such as '*.md'.")
    text_documents: str = _option(
        "auto",
        "What is one document of a .txt file: file, line, paragraph (separated by blank lines), or auto: file in a "
        "folder; alone, paragraph if its first MiB has blank lines, else line.",
    )
    dataset_config: str | None = _option(None, "Configuration of a Hub dataset, such as 20231101.en.")
    dataset_split: str = _option("train", "Split of a Hub dataset.")
    on_error: str = _option("stop", "stop at data that cannot be read, or skip and count it.")
    num_proc: int = _option(1, "Processes that chunk; the result does not depend on it.")
    overwrite: bool = _option(False, "Replace the prepared set in the output folder.")

    def __post_init__(self) -> None:
        for name, values in {
            "kind": ("auto", "prose", "code"),
            "text_documents": ("auto", "file", "line", "paragraph"),
            "on_error": ("stop", "skip"),
        }.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(values)}.")
        for name, least in {
            "max_words": 1,
            "min_words": 0,
            "group_size": 2,  # a chunk alone has nothing to attend to
            "documents_per_group": 1,
            "num_proc": 1,
        }.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}.")
        if not 0 <= self.validation_share < 1:
            raise ValueError(f"validation_share is {self.validation_share}; it must be at least 0 and below 1.")


class _Chunked(NamedTuple):
    """What a worker makes of a document."""

    id: str
    outcome: str  # "kept" so far, "empty" or "too_short"
    digest: int
    chunks: list[str]


def _chunk_batch(documents: list[Document], max_words: int, min_words: int, language: str) -> list[_Chunked]:
    results = []
    for doc_id, text, kind in documents:
        if kind == "html":
            text, kind = html_to_text(text), "prose"
        chunks = list(chunk_text(text, kind, max_words, language))
        outcome = "kept"
        if not chunks:
            outcome = "empty"
        elif len(chunks) < min_words and sum(map(count_words, chunks)) < min_words:  # a chunk has at least one
            outcome = "too_short"
        results.append(_Chunked(doc_id, outcome, text_digest(text), chunks))
    return results


def _batches(items: Iterable[Document | DataError]) -> Iterator[list[Document | DataError]]:
    batch: list[Document | DataError] = []
    characters = 0
    for item in items:
        batch.append(item)
        characters += len(item.text) if isinstance(item, Document) else 0
        if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    yield batch


def _chunked(config: PrepareConfig, source: Source) -> Iterator[_Chunked | DataError]:
    """The source's documents, chunked by `num_proc` processes, in the source's order."""
    settings = (config.max_words, config.min_words, config.language)

    def merge(batch: list[Document | DataError], results: list[_Chunked]) -> Iterator[_Chunked | DataError]:
        done = iter(results)
        return (item if isinstance(item, DataError) else next(done) for item in batch)

    if config.num_proc == 1:
        for batch in _batches(source):
            yield from merge(batch, _chunk_batch([x for x in batch if isinstance(x, Document)], *settings))
        return
    # spawn: forking a process whose libraries run threads (Arrow, tokenizers) can deadlock.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(config.num_proc, mp_context=context) as pool:
        waiting: deque[tuple[list[Document | DataError], Any]] = deque()
        try:
            for batch in _batches(source):
                documents = [item for item in batch if isinstance(item, Document)]
                # What is kept here to merge by is the place of the errors, not the texts a second time.
                places = [item if isinstance(item, DataError) else _PLACE for item in batch]
                waiting.append((places, pool.submit(_chunk_batch, documents, *settings)))
                if len(waiting) > 2 * config.num_proc:  # bounds memory when reading is faster than chunking
                    places, future = waiting.popleft()
                    yield from merge(places, future.result())
            while waiting:
                places, future = waiting.popleft()
                yield from merge(places, future.result())
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


_PLACE = Document("", "", "")


class _Shards:
    """Writes the groups of one split to numbered Parquet shards."""

    def __init__(self, folder: Path, split: str, source: str) -> None:
        self._folder, self._split, self._source = folder, split, source
        self._writer: pq.ParquetWriter | None = None
        self._paths: list[Path] = []
        self._groups: list[int] = []
        self._pending: list[Group] = []
        self._bytes = 0

    def write(self, groups: Iterable[Group]) -> None:
        for group in groups:
            self._pending.append(group)
            self._bytes += sum(map(len, group[0]))
            if len(self._pending) == _ROW_GROUP:
                self._flush()
                if self._bytes >= _SHARD_BYTES:
                    self._close_writer()

    def _flush(self) -> None:
        if not self._pending:
            return
        if self._writer is None:
            self._paths.append(self._folder / f"{self._split}-{len(self._paths):05d}.parquet")
            self._groups.append(0)
            self._writer = pq.ParquetWriter(self._paths[-1], SCHEMA, compression="zstd")
        texts, doc_ids = zip(*self._pending, strict=True)
        sources = [self._source] * len(texts)
        self._writer.write_table(pa.table([texts, doc_ids, sources], schema=SCHEMA), row_group_size=_ROW_GROUP)
        self._groups[-1] += len(texts)
        self._pending = []

    def _close_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer, self._bytes = None, 0

    def close(self) -> dict[str, dict[str, Any]]:
        """Finish; returns groups and SHA-256 of each shard by its final name."""
        self._flush()
        self._close_writer()
        shards = {}
        for index, (path, groups) in enumerate(zip(self._paths, self._groups, strict=True)):
            name = f"{self._split}-{index:05d}-of-{len(self._paths):05d}.parquet"
            path.rename(self._folder / name)
            with open(self._folder / name, "rb") as file:
                digest = hashlib.sha256()
                while block := file.read(1 << 20):
                    digest.update(block)
            shards[name] = {"groups": groups, "sha256": digest.hexdigest()}
        return shards


def prepare(config: PrepareConfig) -> dict[str, Any]:
    """Read a source, chunk its documents, group the chunks (section 4.1), and write a prepared set.

    Memory is bounded by the largest document (one file, for pages and source files), whatever the corpus.
    The set is written to a hidden folder beside `out` and renamed when it is whole.

    Returns:
        The summary, as saved in `prepare.json`: `settings`, `documents` (read = kept + empty + too_short +
        duplicate + error), `chunks` (made = train + validation + left_over), `groups`, `shards`.

    Raises:
        DataError: data that cannot be read (with `on_error="stop"`), or not enough of it for one group.
        FileExistsError: `out` exists, and `overwrite` is off or it holds something else than a prepared set.
    """
    out = Path(config.out).resolve()
    _check_out(out, config.overwrite)
    started = time.perf_counter()
    partial = out.parent / f".{out.name}.partial-{os.getpid()}"
    source = Source(
        source=config.source,
        text_column=config.text_column,
        kind=config.kind,
        include=config.include,
        text_documents=config.text_documents,
        dataset_config=config.dataset_config,
        dataset_split=config.dataset_split,
        exclude=(out, partial),
    )
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        summary = _write(config, source, partial)
        with open(partial / "prepare.json", "w", encoding="utf-8") as file:
            json.dump(summary, file, indent=2, ensure_ascii=False)
            file.write("\n")
        _replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    seconds = time.perf_counter() - started
    print(f"{format_summary(summary)}\nPrepared {out} in {seconds:.1f} s.")
    return summary


def _check_out(out: Path, overwrite: bool) -> None:
    if not out.exists() or out.is_dir() and not any(out.iterdir()):
        return
    if not overwrite:
        raise FileExistsError(f"{out} exists and is not empty; choose another --out, or pass --overwrite.")
    if not (out / "prepare.json").is_file():
        raise FileExistsError(
            f"{out} holds no prepare.json, so it is no prepared set and --overwrite does not delete it; remove it "
            "yourself, or choose another --out."
        )


def _replace(partial: Path, out: Path) -> None:
    if not out.exists():
        partial.rename(out)
        return
    old = out.parent / f".{out.name}.old-{os.getpid()}"
    out.rename(old)
    partial.rename(out)
    shutil.rmtree(old)


def _write(config: PrepareConfig, source: Source, folder: Path) -> dict[str, Any]:
    splits = ("train", "validation")
    name = Path(config.source).name if Path(config.source).exists() else config.source
    groupers = {s: Grouper(config.group_size, config.documents_per_group, config.seed, s) for s in splits}
    shards = {split: _Shards(folder, split, name) for split in splits}
    piece = max(1, config.group_size // config.documents_per_group)
    shufflers = {split: Shuffler(piece, config.seed, split) for split in splits} if config.shuffle else {}
    documents, chunks = Counter(), Counter()
    errors: list[str] = []
    seen = DigestSet()
    with tqdm(unit=" documents", desc="Preparing", disable=None) as progress:
        for item in _chunked(config, source):
            documents["read"] += 1
            progress.update()
            if isinstance(item, DataError):
                if config.on_error == "stop":
                    raise item
                documents["error"] += 1
                errors.append(str(item)) if len(errors) < _REPORTED_ERRORS else None
                continue
            outcome = item.outcome
            if outcome == "kept" and not seen.add(item.digest):
                outcome = "duplicate"
            documents[outcome] += 1
            if outcome != "kept":
                continue
            held_out = in_validation(item.id, config.validation_share, config.seed)
            split = splits[held_out]
            documents[split] += 1
            chunks["made"] += len(item.chunks)
            dealt = shufflers[split].add(item.id, item.chunks) if config.shuffle else [(item.id, item.chunks)]
            for doc_id, members in dealt:
                shards[split].write(groupers[split].add(doc_id, members))
    for split in splits:
        for doc_id, members in shufflers[split].finish() if config.shuffle else ():
            shards[split].write(groupers[split].add(doc_id, members))
        shards[split].write(groupers[split].finish())
        chunks[split] = groupers[split].groups * config.group_size
        chunks["left_over"] += groupers[split].left_over
    _check_enough(config, documents, chunks, groupers["train"], errors, source)
    settings = asdict(config)
    for name_ in ("out", "num_proc", "overwrite"):  # where and how, not what: the set is the same for any
        del settings[name_]
    return {
        "format": 1,
        "version": {package: _version(package) for package in ("revela-hub", "sentencex", "selectolax")},
        "settings": settings,
        "documents": {
            key: documents[key] for key in ("read", "kept", "empty", "too_short", "duplicate", "error", *splits)
        },
        "chunks": {key: chunks[key] for key in ("made", *splits, "left_over")},
        "groups": {
            split: {
                "groups": grouper.groups,
                "of_one_document": grouper.groups_of_one_document,
                "without_siblings": grouper.groups_without_siblings,
            }
            for split, grouper in groupers.items()
        },
        "ignored_files": dict(sorted(source.ignored_files.items())),
        "first_errors": errors,
        "shards": dict(chain.from_iterable(shards[split].close().items() for split in splits)),
    }


def _check_enough(
    config: PrepareConfig, documents: Counter, chunks: Counter, train: Grouper, errors: list[str], source: Source
) -> None:
    if train.groups:
        return
    account = ", ".join(
        f"{documents[key]} {key.replace('_', ' ')}"
        for key in ("train", "validation", "empty", "too_short", "duplicate", "error")
    )
    ignored = sum(source.ignored_files.values())
    raise DataError(
        f"{config.source}: {documents['read']} documents ({account}) and {chunks['made']} chunks make no group of "
        f"{config.group_size} for training; give it more text, or lower --group-size."
        + (f" {ignored} files were ignored, for their suffix or --include." if ignored else "")
        + (f" First error: {errors[0]}" if errors else "")
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # run from a clone that was not installed
        return None


def format_summary(summary: dict[str, Any]) -> str:
    """The account of every document, chunk and group, for people."""
    documents, chunks, groups = summary["documents"], summary["chunks"], summary["groups"]
    train, validation = groups["train"], groups["validation"]

    def line(label: str, count: int, what: str) -> str:
        return f"{label:<9} {count:>13,} {what}"

    lines = [
        line("Documents", documents["read"], "read"),
        line("", documents["kept"], f"kept ({documents['train']:,} train, {documents['validation']:,} validation)"),
        line("", documents["empty"], "empty"),
        line("", documents["too_short"], "too short"),
        line("", documents["duplicate"], "duplicates"),
        line("", documents["error"], "that could not be read"),
        line("Chunks", chunks["made"], "made"),
        line("", chunks["train"], f"in {train['groups']:,} train groups"),
        line("", chunks["validation"], f"in {validation['groups']:,} validation groups"),
        line("", chunks["left_over"], "left over (the last, incomplete groups)"),
    ]
    if ignored := summary["ignored_files"]:
        most = ", ".join(f"{count} {name}" for name, count in sorted(ignored.items(), key=lambda x: -x[1])[:5])
        lines.append(line("Files", sum(ignored.values()), f"ignored, for their suffix or --include: {most}"))
    if alone := train["without_siblings"]:
        lines.append(line("Note:", alone, "train groups hold no two chunks of one document, so there is less to find"))
    if single := train["of_one_document"]:
        lines.append(line("Note:", single, "train groups hold chunks of one document only"))
    if summary["settings"]["validation_share"] and not validation["groups"]:
        lines.append("Note: no validation group; raise --validation-share to measure learning without labels")
    lines += [f"Skipped: {error}" for error in summary["first_errors"][:3]]
    return "\n".join(lines)
