"""`revela-hub prepare`: raw text in, a prepared set out.

A prepared set is a folder of Parquet shards, `train-00000-of-0000N.parquet` and `validation-00000-of-0000M.parquet`,
and `prepare.json` with the settings, the account and each shard's SHA-256. What a row is depends on the method that
trains on it. For Revela, one group of chunks:

- `texts` (list of group_size strings): the chunks, shuffled within the group;
- `doc_ids` (list of group_size strings): the document that each chunk comes from;

for RetroMAE, one sequence of whole sentences, in the corpus's order:

- `text` (string), `doc_id` (string);

and for both `source` (string): the base name of SOURCE, to tell sets apart once mixed.

Documents are read, in the source's order, by this process; extracted and cut by workers; and taken back in the
same order, so that everything that depends on order (duplicates, grouping, shards) is decided in one place and the
shards are byte for byte the same whatever the number of processes.
"""

import importlib.metadata
import json
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from tqdm.auto import tqdm

from trainers.data.chunking import chunk_text, count_words
from trainers.data.grouping import DigestSet, Group, Grouper, Shuffler, in_validation, text_digest
from trainers.data.output_folder import readable, replaced_folder
from trainers.data.packing import Packer
from trainers.data.readers import DataError, Document, Source, html_to_text
from trainers.data.shards import Shards

SCHEMA = pa.schema([("texts", pa.list_(pa.string())), ("doc_ids", pa.list_(pa.string())), ("source", pa.string())])
SEQUENCE_SCHEMA = pa.schema([("text", pa.string()), ("doc_id", pa.string()), ("source", pa.string())])
# Settings that the other method has no use for.
_OWN = {
    "revela": ("max_words", "group_size", "documents_per_group", "shuffle"),
    "retromae": ("tokenizer", "max_seq_length"),
}
_BATCH_CHARACTERS, _BATCH_DOCUMENTS = 1 << 18, 1024  # what a worker gets at a time
_REPORTED_ERRORS = 20


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class PrepareConfig:
    """Settings of `prepare`. Every field is an option of `revela-hub prepare`."""

    source: str = field(metadata={"help": "File, folder or Hub dataset id to read."})
    out: str = field(metadata={"help": "Folder to write the prepared set to."})
    method: str = field(
        default="revela",
        metadata={
            "help": "The method to prepare for: revela (groups of chunks) or retromae (sequences of whole sentences).",
            "option": "--for",
        },
    )
    text_column: str = _option("text", "Column of JSONL, Parquet, CSV, TSV and Hub datasets that holds the text.")
    title_column: str | None = _option(
        None, "Column whose content is put before the text, with a space between, where it has over 2 characters."
    )
    rows_per_document: int = _option(
        1, "Rows or lines that follow each other and make one document, as in BookCorpus with a sentence a row."
    )
    kind: str = _option("auto", "prose, code, or auto: code for source files (by suffix), prose for all else.")
    max_words: int = _option(120, "Revela: words in a chunk, at most (the paper: 120).")
    min_words: int = _option(5, "Documents of fewer words are skipped and counted as too short.")
    group_size: int = _option(16, "Revela: chunks in a group, the paper's batch (4, 8 or 16).")
    documents_per_group: int = _option(2, "Revela: documents whose chunks are interleaved at any time.")
    shuffle: bool = _option(
        False,
        "Revela: draw the documents of a group from all over the corpus, a piece of each, instead of neighbours in "
        "the corpus's order (the paper's). Short runs on a folder of files learn far more with it.",
    )
    tokenizer: str | None = _option(None, "RetroMAE: the encoder's tokenizer, a Hub id or folder; needed.")
    max_seq_length: int = _option(
        512, "RetroMAE: tokens of a sequence at most, special tokens included (the authors: 512; MS MARCO: 150)."
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
            "method": ("revela", "retromae"),
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
            "rows_per_document": 1,
            "num_proc": 1,
        }.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}.")
        if not 0 <= self.validation_share < 1:
            raise ValueError(f"validation_share is {self.validation_share}; it must be at least 0 and below 1.")
        defaults = {field.name: field.default for field in fields(self)}
        for name in _OWN["retromae" if self.method == "revela" else "revela"]:
            if getattr(self, name) != defaults[name]:
                raise ValueError(f"{name} is {getattr(self, name)!r}, which means nothing for {self.method}.")
        if self.method == "retromae" and self.tokenizer is None:
            raise ValueError("tokenizer is missing: sequences are as long as the encoder's own tokens make them.")
        source = Path(self.source)
        if source.is_dir() and source.resolve() in Path(self.out).resolve().parents:
            raise ValueError(
                f"--out {readable(self.out)} lies in {readable(self.source)}, and would be read as part of it from "
                "then on; choose another --out."
            )


class Chunked(NamedTuple):
    """What a worker makes of a document; `digest` is `text_digest` of its text."""

    id: str
    outcome: str  # "kept" so far, "empty" or "too_short"
    digest: int
    chunks: list[str]


Cut = Callable[[list[tuple[str, str]]], list[list[str]]]
"""Texts and their kinds in, the pieces of each out."""


@dataclass(frozen=True)
class _Chunker:
    """Cuts documents into chunks of at most `max_words` words."""

    max_words: int
    language: str

    def __call__(self, documents: list[tuple[str, str]]) -> list[list[str]]:
        return [list(chunk_text(text, kind, self.max_words, self.language)) for text, kind in documents]


def cut_of(config: PrepareConfig) -> Cut:
    """What cuts documents for the method."""
    if config.method == "revela":
        return _Chunker(config.max_words, config.language)
    return Packer(config.tokenizer, config.max_seq_length, config.language)


def chunk_batch(documents: list[Document], cut: Cut, min_words: int) -> list[Chunked]:
    """Documents, extracted where they are HTML and cut, in their order."""
    documents = [
        Document(doc_id, html_to_text(text), "prose") if kind == "html" else Document(doc_id, text, kind)
        for doc_id, text, kind in documents
    ]
    results = []
    pieces = cut([(text, kind) for _, text, kind in documents])
    for (doc_id, text, _), chunks in zip(documents, pieces, strict=True):
        outcome = "kept"
        if not chunks:
            outcome = "empty"
        elif len(chunks) < min_words and sum(map(count_words, chunks)) < min_words:  # a chunk has at least one
            outcome = "too_short"
        results.append(Chunked(doc_id, outcome, text_digest(text), chunks))
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


def _chunked(config: PrepareConfig, source: Source) -> Iterator[Chunked | DataError]:
    """The source's documents, chunked by `num_proc` processes, in the source's order."""
    cut = cut_of(config)

    def merge(batch: list[Document | DataError], results: list[Chunked]) -> Iterator[Chunked | DataError]:
        done = iter(results)
        return (item if isinstance(item, DataError) else next(done) for item in batch)

    if config.num_proc == 1:
        for batch in _batches(source):
            yield from merge(batch, chunk_batch([x for x in batch if isinstance(x, Document)], cut, config.min_words))
        return
    # spawn: forking a process whose libraries run threads (Arrow, tokenizers) can deadlock.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(config.num_proc, mp_context=context, initializer=_start_worker) as pool:
        waiting: deque[tuple[list[Document | DataError], Any]] = deque()
        try:
            for batch in _batches(source):
                documents = [item for item in batch if isinstance(item, Document)]
                # What is kept here to merge by is the place of the errors, not the texts a second time.
                places = [item if isinstance(item, DataError) else _PLACE for item in batch]
                waiting.append((places, pool.submit(chunk_batch, documents, cut, config.min_words)))
                if len(waiting) > 2 * config.num_proc:  # bounds memory when reading is faster than chunking
                    places, future = waiting.popleft()
                    yield from merge(places, future.result())
            while waiting:
                places, future = waiting.popleft()
                yield from merge(places, future.result())
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


_PLACE = Document("", "", "")


def _start_worker() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process a core already
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent's word is enough
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker waits for work in vain once its parent was killed, since all workers hold the queue's other end."""
    multiprocessing.parent_process().join()
    os._exit(1)


def prepare(config: PrepareConfig) -> dict[str, Any]:
    """Read a source, cut its documents into groups of chunks or into sequences, and write a prepared set.

    Memory is bounded by the largest document (one file, for pages and source files), whatever the corpus.
    The set is written to a hidden folder beside `out` and renamed when it is whole; see `replaced_folder`.

    Returns:
        The summary, as saved in `prepare.json`: `settings`, `documents` (read = kept + empty + too_short +
        duplicate + error), for Revela `chunks` (made = train + validation + left_over) and `groups`, for RetroMAE
        `sequences` (made = train + validation), and `shards`.

    Raises:
        DataError: data that cannot be read (with `on_error="stop"`), or not enough of it for one row.
        ValueError: a tokenizer that cannot be used.
        FileExistsError: `out` exists, and `overwrite` is off or it holds anything else than a prepared set.
        OSError: `out` cannot be written.
    """
    out = Path(config.out).resolve()
    started = time.perf_counter()
    with replaced_folder(out, config.source, config.overwrite) as partial:
        source = Source(
            source=config.source,
            text_column=config.text_column,
            title_column=config.title_column,
            rows_per_document=config.rows_per_document,
            kind=config.kind,
            include=config.include,
            text_documents=config.text_documents,
            dataset_config=config.dataset_config,
            dataset_split=config.dataset_split,
        )
        summary = _write(config, source, partial)
        with open(partial / "prepare.json", "w", encoding="utf-8") as file:
            json.dump(summary, file, indent=2, ensure_ascii=False)
            file.write("\n")
    seconds = time.perf_counter() - started
    print(f"{format_summary(summary)}\nPrepared {out} in {seconds:.1f} s.")
    return summary


class _GroupRows:
    """Groups of chunks, of documents that are shuffled first where the settings say so."""

    def __init__(self, config: PrepareConfig, split: str) -> None:
        self._size = config.group_size
        self._grouper = Grouper(config.group_size, config.documents_per_group, config.seed, split)
        piece = max(1, config.group_size // config.documents_per_group)
        self._shuffler = Shuffler(piece, config.seed, split) if config.shuffle else None

    def add(self, doc_id: str, chunks: list[str]) -> Iterator[Group]:
        for dealt in self._shuffler.add(doc_id, chunks) if self._shuffler else [(doc_id, chunks)]:
            yield from self._grouper.add(*dealt)

    def finish(self) -> Iterator[Group]:
        for dealt in self._shuffler.finish() if self._shuffler else ():
            yield from self._grouper.add(*dealt)
        yield from self._grouper.finish()

    @property
    def pieces(self) -> int:
        return self._grouper.groups * self._size

    @property
    def account(self) -> dict[str, int]:
        return {
            "groups": self._grouper.groups,
            "of_one_document": self._grouper.groups_of_one_document,
            "without_siblings": self._grouper.groups_without_siblings,
        }


class _SequenceRows:
    """One row a sequence, in the corpus's order."""

    def __init__(self, config: PrepareConfig, split: str) -> None:
        self.pieces = 0

    def add(self, doc_id: str, chunks: list[str]) -> Iterator[tuple[str, str]]:
        self.pieces += len(chunks)
        return ((chunk, doc_id) for chunk in chunks)

    def finish(self) -> Iterator[tuple[str, str]]:
        return iter(())


def _write(config: PrepareConfig, source: Source, folder: Path) -> dict[str, Any]:
    summary = write_chunked(config, _chunked(config, source), folder)
    summary["ignored_files"] = dict(sorted(source.ignored_files.items()))
    check_enough(config, summary)
    return summary


def write_chunked(config: PrepareConfig, items: Iterable[Chunked | DataError], folder: Path) -> dict[str, Any]:
    """Write the shards of cut documents to a folder; returns the summary of `prepare`.

    Raises:
        DataError: one of the items (with `on_error="stop"`).
    """
    splits = ("train", "validation")
    name = Path(config.source).name if Path(config.source).exists() else config.source
    make, schema, unit = {
        "revela": (_GroupRows, SCHEMA, "groups"),
        "retromae": (_SequenceRows, SEQUENCE_SCHEMA, "sequences"),
    }[config.method]
    rows = {split: make(config, split) for split in splits}
    shards = {split: Shards(folder, split, schema, name, unit) for split in splits}
    documents, made = Counter(), 0
    errors: list[str] = []
    seen = DigestSet()
    with tqdm(unit=" documents", desc="Preparing", disable=None) as progress:
        for item in items:
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
            made += len(item.chunks)
            shards[split].write(rows[split].add(item.id, item.chunks))
    for split in splits:
        shards[split].write(rows[split].finish())
    pieces = {split: rows[split].pieces for split in splits}
    pieces = {"made": made, **pieces, "left_over": made - sum(pieces.values())}
    settings = asdict(config)
    for name_ in ("out", "num_proc", "overwrite"):  # where and how, not what: the set is the same for any
        del settings[name_]
    if config.method == "revela":
        parts = {"chunks": pieces, "groups": {split: rows[split].account for split in splits}}
    else:
        parts = {"sequences": {key: pieces[key] for key in ("made", *splits)}}
    packages = ("revela-hub", "sentencex", "selectolax", "tokenizers")
    return {
        "format": 1,
        "version": {package: _version(package) for package in packages},
        "settings": settings,
        "documents": {
            key: documents[key] for key in ("read", "kept", "empty", "too_short", "duplicate", "error", *splits)
        },
        **parts,
        "ignored_files": {},
        "first_errors": errors,
        "shards": dict(chain.from_iterable(shards[split].close().items() for split in splits)),
    }


def check_enough(config: PrepareConfig, summary: dict[str, Any]) -> None:
    """Raises DataError, with the account, where there is nothing to train on."""
    documents, errors = summary["documents"], summary["first_errors"]
    pieces = summary["chunks" if config.method == "revela" else "sequences"]
    if pieces["train"]:
        return
    account = ", ".join(
        f"{documents[key]} {key.replace('_', ' ')}"
        for key in ("train", "validation", "empty", "too_short", "duplicate", "error")
    )
    if config.method == "revela":
        lack = f"{pieces['made']} chunks make no group of {config.group_size} for training; give it more text, "
        lack += "or lower --group-size."
    else:
        lack = f"{pieces['made']} sequences leave none for training; give it more text, or lower --validation-share."
    ignored = sum(summary["ignored_files"].values())
    found = f"{documents['read']} documents ({account}) and {lack}"
    if not documents["read"]:
        found = "no document was found there; name a file or a folder that holds text."
    raise DataError(
        f"{config.source}: {found}"
        + (f" {ignored} files were ignored, for their suffix or --include." if ignored else "")
        + (f" First error: {errors[0]}" if errors else "")
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # run from a clone that was not installed
        return None


def format_summary(summary: dict[str, Any]) -> str:
    """The account of every document, and of what was made of them, for people."""
    documents = summary["documents"]

    def line(label: str, count: int, what: str) -> str:
        return f"{label:<9} {count:>13,} {what}"

    lines = [
        line("Documents", documents["read"], "read"),
        line("", documents["kept"], f"kept ({documents['train']:,} train, {documents['validation']:,} validation)"),
        line("", documents["empty"], "empty"),
        line("", documents["too_short"], "too short"),
        line("", documents["duplicate"], "duplicates"),
        line("", documents["error"], "that could not be read"),
    ]
    notes = []
    if "groups" in summary:
        chunks, (train, validation) = summary["chunks"], summary["groups"].values()
        held_out, unit = validation["groups"], "group"
        lines += [
            line("Chunks", chunks["made"], "made"),
            line("", chunks["train"], f"in {train['groups']:,} train groups"),
            line("", chunks["validation"], f"in {validation['groups']:,} validation groups"),
            line("", chunks["left_over"], "left over (the last, incomplete groups)"),
        ]
        if alone := train["without_siblings"]:
            notes += [
                line("Note:", alone, "train groups hold no two chunks of one document, so there is less to find")
            ]
        if single := train["of_one_document"]:
            notes += [line("Note:", single, "train groups hold chunks of one document only")]
    else:
        sequences = summary["sequences"]
        held_out, unit = sequences["validation"], "sequence"
        lines += [
            line("Sequences", sequences["made"], "made"),
            line("", sequences["train"], "to train on"),
            line("", sequences["validation"], "held out"),
        ]
    if ignored := summary["ignored_files"]:
        most = ", ".join(f"{count} {name}" for name, count in sorted(ignored.items(), key=lambda x: -x[1])[:5])
        lines.append(
            line("Files", sum(ignored.values()), f"ignored, for their suffix or --include, or read before: {most}")
        )
    if summary["settings"]["validation_share"] and not held_out:
        notes += [f"Note: no validation {unit}; raise --validation-share to measure learning without labels"]
    return "\n".join([*lines, *notes, *(f"Skipped: {error}" for error in summary["first_errors"][:3])])
