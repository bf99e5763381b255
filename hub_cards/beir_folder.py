"""Reading a retrieval test set in BEIR's format from a local folder."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass
class BeirFolder:
    """`corpus` and `queries`: id -> text (a document's title before its text); `qrels`: query id -> doc id -> grade.

    `queries` holds only those that the qrels judge.
    """

    path: Path
    corpus: dict[str, str]
    queries: dict[str, str]
    qrels: dict[str, dict[str, int]]


def load_beir_folder(path: str | Path, split: str = "test") -> BeirFolder:
    """Reads `corpus.jsonl` (`_id`, `title`, `text`), `queries.jsonl` (`_id`, `text`) and `qrels/{split}.tsv`.

    The qrels file has the tab-separated columns query-id, corpus-id, score; a header line is not required.

    Raises:
        FileNotFoundError: naming the file that is not there.
        ValueError: on a line that cannot be read (file and line are named), an empty file, ids of the qrels that are
            not in the corpus or the queries, and qrels without a relevant document.
    """
    path = Path(path)
    files = [path / "corpus.jsonl", path / "queries.jsonl", path / "qrels" / f"{split}.tsv"]
    missing = [str(file.relative_to(path)) for file in files if not file.is_file()]
    if missing:
        raise FileNotFoundError(
            f"{path} is no BEIR-format folder: {', '.join(missing)} not found; it needs corpus.jsonl, queries.jsonl "
            f"and qrels/{split}.tsv."
        )
    corpus, queries, qrels = read_jsonl(files[0]), read_jsonl(files[1]), _read_qrels(files[2])
    _check_known(files[2], files[0], {doc for docs in qrels.values() for doc in docs} - corpus.keys())
    _check_known(files[2], files[1], qrels.keys() - queries.keys())
    if not any(grade > 0 for docs in qrels.values() for grade in docs.values()):
        raise ValueError(f"{files[2]} has no line with a score of 1 or above, so no document is relevant.")
    return BeirFolder(path, corpus, {query: queries[query] for query in qrels}, qrels)


def read_jsonl(path: Path) -> dict[str, str]:
    """Reads lines of objects with `_id`, `text` and perhaps `title`, as id -> title and text.

    Raises:
        ValueError: naming file and line of what cannot be read or has the `_id` of another, or if there is no line.
    """
    texts = {}
    for number, key, text in iter_jsonl(path):
        if key in texts:
            raise ValueError(f"{path}, line {number}: the _id {key!r} occurs a second time.")
        texts[key] = text
    if not texts:
        raise ValueError(f"{path} is empty.")
    return texts


def iter_jsonl(path: Path, number_lines: bool = False) -> Iterator[tuple[int, str, str]]:
    """The lines that `read_jsonl` reads, one at a time: number, id, title and text.

    With `number_lines` a line without `_id` is named by its number.

    Raises:
        ValueError: naming file and line of what cannot be read.
    """
    number = 0
    with open(path, encoding="utf-8-sig") as lines:
        try:
            for line in lines:
                number += 1
                if not line.strip():
                    continue
                record = json.loads(line)
                if number_lines and isinstance(record, dict):
                    record = {"_id": number, **record}
                if (
                    not isinstance(record, dict)
                    or record.get("_id") is None
                    or not isinstance(record.get("text"), str)
                ):
                    raise ValueError('each line must be an object with "_id" and "text"')
                if not isinstance(record.get("title") or "", str):
                    raise ValueError('"title" must be text')
                key, text = str(record["_id"]), f"{record.get('title') or ''} {record['text']}".strip()
                if any("\ud800" <= letter <= "\udfff" for letter in key + text):
                    raise ValueError("the text or its _id holds halves of surrogate pairs, which no tokenizer reads")
                yield number, key, text
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 ({error}); convert it first.") from None
        except (ValueError, RecursionError) as error:  # the latter from brackets in brackets
            raise ValueError(f"{path}, line {number}: {error}.") from None


def _read_qrels(path: Path) -> dict[str, dict[str, int]]:
    qrels: dict[str, dict[str, int]] = {}
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error}); convert it first.") from None
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        row = line.split("\t")
        try:
            query, doc, score = row
            grade = int(score)
        except ValueError:
            # A header: names of columns, and no judgement with a slip.
            if number == 1 and len(row) == 3 and re.fullmatch(r"[A-Za-z][\w .-]*", row[2]):
                continue
            raise ValueError(
                f"{path}, line {number}: expected query-id, corpus-id and a whole-number score, separated by tabs, "
                f"not {row}."
            ) from None
        if qrels.setdefault(query, {}).setdefault(doc, grade) != grade:
            raise ValueError(f"{path}, line {number}: {doc} is judged for {query} a second time, and otherwise.")
    if not qrels:
        raise ValueError(f"{path} has no judgement.")
    return qrels


def _check_known(qrels_file: Path, file: Path, unknown: set[str]) -> None:
    if unknown:
        shown = ", ".join(sorted(unknown)[:3])
        raise ValueError(
            f"{qrels_file} names {len(unknown)} ids that are not in {file.name} (such as {shown}); "
            "the files do not belong together, or the set was cut down without its qrels."
        )
