"""Search in a corpus with a retriever: encode all of it, rank exactly, show the top passages."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as parquet
from pyarrow import ArrowException
from sentence_transformers import SentenceTransformer

from hub_cards import ranking
from hub_cards.beir_folder import iter_jsonl
from hub_cards.encoding import encode, load_model

MAX_WORDS = 120


@dataclass
class Hit:
    """A passage found: cosine (or dot product) with the query, the passage's id and its text."""

    score: float
    id: str
    text: str


def search(
    model: str | SentenceTransformer, corpus: str | Path, query: str, top_k: int = 5, batch_size: int = 32
) -> list[Hit]:
    """The passages of a corpus nearest to a query, best first.

    Args:
        model: a sentence-transformers folder, Hub id or loaded model.
        corpus: what `read_passages` reads. It is encoded anew at each call.
        query: the text to search for.
        top_k: how many passages at most.
        batch_size: passages a forward pass.

    Raises:
        FileNotFoundError, ValueError: on a corpus that cannot be read, a model that does not load, an empty query.
    """
    if not query.strip():
        raise ValueError("The query is empty; give the text to search for.")
    if top_k < 1:
        raise ValueError(f"top_k must be 1 or more, not {top_k}.")
    passages = read_passages(corpus)
    model = load_model(model)
    embeddings = encode(model, [text for _, text in passages], "document", batch_size)
    scores, indices = ranking.top_k(encode(model, [query], "query"), embeddings, top_k)
    return [Hit(score, *passages[index]) for score, index in zip(scores[0].tolist(), indices[0].tolist(), strict=True)]


def read_passages(corpus: str | Path) -> list[tuple[str, str]]:
    """Reads a corpus as (id, text) pairs.

    A BEIR folder, `.jsonl` files of objects with `text` (and `_id`, `title`) and a prepared set (Parquet with `texts`
    and `doc_ids`) are taken passage by passage as they are. Text files, one or a folder of them, are cut into passages
    of at most 120 words along paragraphs; files that are not UTF-8 text and hidden ones are passed over in a folder.

    Raises:
        FileNotFoundError: if there is no such file or folder.
        ValueError: if it holds no text, or a file is not as its name says.
    """
    passages = list(iter_passages(corpus))
    if not passages:
        raise ValueError(f"{corpus} holds no text to search in.")
    return passages


def iter_passages(corpus: str | Path) -> Iterator[tuple[str, str]]:
    """What `read_passages` reads, as a stream: one text file, line or Parquet batch is held at a time."""
    path = Path(corpus)
    if not path.exists():
        raise FileNotFoundError(f"There is no file or folder {path} to search in.")
    if path.is_dir() and (path / "corpus.jsonl").is_file():
        path = path / "corpus.jsonl"
    prepared = sorted(path.glob("*.parquet")) if path.is_dir() else [path] if path.suffix == ".parquet" else []
    if prepared:
        for file in prepared:
            yield from _read_prepared(file)
    elif path.is_file():
        yield from _read_file(path, path.name.encode("utf-8", "backslashreplace").decode(), is_only=True)
    else:
        names = [(file, file.relative_to(path)) for file in sorted(path.rglob("*")) if file.is_file()]
        for file, name in names:
            if not any(part.startswith(".") for part in name.parts):
                # Bytes of a name that are not UTF-8 could be neither printed nor stored.
                yield from _read_file(file, str(name).encode("utf-8", "backslashreplace").decode(), is_only=False)


def split_passages(text: str, max_words: int = MAX_WORDS) -> list[str]:
    """Cuts a text into passages of at most `max_words` words: whole paragraphs where they fit, else at a word.

    In scripts written without spaces every 20 characters count as a word.
    """
    passages, open_paragraphs, words_open = [], [], 0

    def close():
        nonlocal open_paragraphs, words_open
        if open_paragraphs:
            passages.append("\n\n".join(open_paragraphs))
        open_paragraphs, words_open = [], 0

    for paragraph in re.split(r"\n[ \t\r]*\n", text):
        words = list(re.finditer(r"\S{1,20}", paragraph))
        for start in range(0, len(words), max_words):
            part = words[start : start + max_words]
            if words_open + len(part) > max_words:
                close()
            # The indent of the first line belongs to code.
            begin = 0 if start == 0 else part[0].start()
            open_paragraphs.append(paragraph[begin : part[-1].end()].strip("\n"))
            words_open += len(part)
    close()
    return passages


def print_hits(hits: list[Hit], max_lines: int = 8, max_characters: int = 600) -> None:
    """Prints each hit's rank, score and id above the first lines of its text."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    console = Console(highlight=False)
    for rank, hit in enumerate(hits, 1):
        console.print(Text.assemble((f"{rank}. ", "bold"), (f"{hit.score:.3f}", "cyan"), f"  {hit.id}"))
        lines = hit.text.strip("\n").splitlines()
        snippet = "\n".join(lines[:max_lines])[:max_characters]
        if len(lines) > max_lines or len(snippet) == max_characters:
            snippet = snippet.rstrip() + " …"
        console.print(Padding(Text(snippet), (0, 0, 1, 4)))


def _read_prepared(file: Path) -> Iterator[tuple[str, str]]:
    number = 0
    try:
        with parquet.ParquetFile(file) as rows:
            columns = set(rows.schema_arrow.names)
            if not {"texts", "doc_ids"} <= columns:
                raise ValueError(
                    f"it has the columns {', '.join(sorted(columns))}, but a prepared set has texts and doc_ids"
                )
            for batch in rows.iter_batches(batch_size=256, columns=["texts", "doc_ids"]):
                for texts, ids in zip(batch.column("texts"), batch.column("doc_ids"), strict=True):
                    number += 1
                    texts, ids = texts.as_py(), ids.as_py()
                    whole = isinstance(texts, list) and isinstance(ids, list) and len(texts) == len(ids)
                    if not whole or not all(isinstance(part, str) for part in texts + ids):
                        raise ValueError(f"row {number} has no texts with an id each")
                    yield from zip(ids, texts, strict=True)
    except (ValueError, OSError, ArrowException) as error:  # ValueError: UnicodeDecodeError and ArrowInvalid as well
        raise ValueError(f"{file} is no prepared set that can be read ({error}): prepare or copy it again.") from error


def _read_file(file: Path, name: str, is_only: bool) -> Iterator[tuple[str, str]]:
    if file.suffix == ".jsonl":
        for _, key, text in iter_jsonl(file, number_lines=True):
            yield (key if is_only else f"{name}#{key}"), text
        return
    try:
        content = file.read_bytes()
        if b"\0" in content:
            raise ValueError("it holds NUL bytes")
        text = content.decode("utf-8-sig")
    except ValueError as error:
        if is_only:
            raise ValueError(f"{file} is not UTF-8 text ({error}); convert it first.") from None
        return
    for number, passage in enumerate(split_passages(text), 1):
        yield f"{name}#{number}", passage
