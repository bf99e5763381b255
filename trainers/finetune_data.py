"""What fine-tuning reads: queries, their relevant documents and hard negatives, from the formats of the field."""

import csv
import hashlib
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from hub_cards.beir_folder import load_beir_folder
from hub_cards.hub import explain, may_be_hub_id
from hub_cards.search import read_passages
from trainers.data.readers import DataError, numbered_lines, text_lines
from trainers.data.separated_values import MAX_FIELD, Row, rows_of

# Names that a column goes by: sentence-transformers' own, and those of tevatron's, FlagEmbedding's and DPR's files.
QUERY_COLUMNS = ("query", "anchor", "question")
POSITIVE_COLUMNS = ("positive", "positives", "pos", "positive_passages", "positive_ctxs", "answer")
NEGATIVE_COLUMNS = ("negative", "negatives", "neg", "negative_passages", "hard_negative_ctxs")
_DPR_HEADER = "id\ttext\ttitle"
_LOADERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".ndjson": "json"}


@dataclass
class TrainingSet:
    """
    Queries and documents as texts; what is relevant to a query, and what is given as not, as positions in `documents`.

    `positives[i]` and `negatives[i]` belong to `queries[i]`; each query has a positive, no query is there twice.
    """

    queries: list[str] = field(default_factory=list)
    documents: list[str] = field(default_factory=list)
    positives: list[list[int]] = field(default_factory=list)
    negatives: list[list[int]] = field(default_factory=list)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """(query, positive document), one training example each."""
        return [(query, document) for query, documents in enumerate(self.positives) for document in documents]

    @cached_property
    def digest(self) -> str:
        """A hash of all that is in it."""
        found = hashlib.blake2b(digest_size=16)
        for texts in (self.queries, self.documents):
            for text in texts:
                found.update(text.encode("utf-8", "surrogatepass") + b"\0")
        found.update(json.dumps([self.positives, self.negatives]).encode())
        return found.hexdigest()


@dataclass
class DevelopmentSet:
    """id -> text of queries and documents, and query id -> ids of the relevant documents."""

    queries: dict[str, str]
    corpus: dict[str, str]
    relevant: dict[str, set[str]]


class TrainingSetBuilder:
    """Collects a training set; a text that comes twice, as query or as document, is one."""

    def __init__(self):
        self.set = TrainingSet()
        self._queries: dict[str, int] = {}
        self._documents: dict[str, int] = {}

    def document(self, text: str) -> int:
        position = self._documents.setdefault(text, len(self._documents))
        if position == len(self.set.documents):
            self.set.documents.append(text)
        return position

    def add(self, query: str, positives: Iterable[int], negatives: Iterable[int] = ()) -> None:
        row = self._queries.setdefault(query, len(self._queries))
        if row == len(self.set.queries):
            self.set.queries.append(query)
            self.set.positives.append([])
            self.set.negatives.append([])
        self.set.positives[row] = list(dict.fromkeys([*self.set.positives[row], *positives]))
        self.set.negatives[row] = list(dict.fromkeys([*self.set.negatives[row], *negatives]))

    def finish(self, where: str) -> TrainingSet:
        """Negatives that are positives are dropped, as are queries without a positive."""
        found = self.set
        kept = [row for row, positives in enumerate(found.positives) if positives]
        if not kept:
            raise DataError(f"{where} has no query with a relevant document, so there is nothing to learn from.")
        return TrainingSet(
            queries=[found.queries[row] for row in kept],
            documents=found.documents,
            positives=[found.positives[row] for row in kept],
            negatives=[
                [document for document in found.negatives[row] if document not in set(found.positives[row])]
                for row in kept
            ],
        )


def load_training_set(
    source: str,
    split: str = "train",
    config: str | None = None,
    negatives: str | None = None,
    corpus: str | None = None,
) -> TrainingSet:
    """
    Read what a retriever is trained on.

    Args:
        source: a folder in BEIR's format (documents of grade 0 count as hard negatives); a folder of MS MARCO's files
            (`collection.tsv`, `queries.train.tsv`, `qrels.train.tsv` and perhaps `qidpidtriples.train*.tsv`, gzip or
            not); a file of text triples (`triples.train.small.tsv`: query, positive, negative); a Parquet, JSONL or
            CSV file or a `datasets` id with columns `query`, `positive` and, for hard negatives, `negative` (a text,
            or a list) or `negative_1` and so on.
        split: the qrels of a folder, or the split of a dataset.
        config: the configuration of a Hub dataset.
        negatives: for folders: a file of hard negatives by id. Each line has a query's id and those of its negatives
            (`qid<TAB>pid,pid,...`), or is a line of a TREC run (`qid Q0 pid rank score name`).
        corpus: further documents for rows and triples: what `hub_cards.search.read_passages` reads, MS MARCO's
            `collection.tsv`, or DPR's `psgs_w100.tsv`.

    Returns:
        The training set. The documents are the whole corpus for folders, else all texts of the rows and `corpus`.

    Raises:
        FileNotFoundError, ValueError: naming the file, and the line where there is one, that cannot be used.
    """
    path = Path(source)
    if path.is_dir() and (path / "corpus.jsonl").is_file():
        return _load_beir(path, split, negatives)
    if path.is_dir() and _find(path, "collection"):
        return _load_msmarco(path, split, negatives)
    if negatives is not None:
        raise DataError(f"`negatives_file` names documents by id, but {source} has none: give it the texts instead.")
    builder = TrainingSetBuilder()
    for text in _read_corpus(corpus):
        builder.document(text)
    if path.is_file() and _is_tsv(path):
        for query, positive, negative in _read_columns(path, 3, "query, positive and negative"):
            builder.add(query, [builder.document(positive)], [builder.document(negative)])
    else:
        for query, positives, negative_texts in _read_rows(source, split, config):
            builder.add(query, map(builder.document, positives), map(builder.document, negative_texts))
    return builder.finish(source)


def load_development_set(
    source: str,
    split: str = "dev",
    config: str | None = None,
    max_queries: int | None = None,
    max_documents: int | None = None,
    seed: int = 0,
) -> DevelopmentSet:
    """
    Read what nDCG@10 is measured on while training; the sources are those of `load_training_set`.

    Args:
        max_queries: so many at most, drawn at random.
        max_documents: so many at most: those judged for the queries, and others drawn at random to fill up. A smaller
            corpus is an easier one: such a number ranks checkpoints of a run, and is not for a paper.

    Raises:
        FileNotFoundError, ValueError: as `load_training_set`.
    """
    path = Path(source)
    if path.is_dir() and (path / "corpus.jsonl").is_file():
        folder = load_beir_folder(path, split)
        queries, corpus, judged = folder.queries, folder.corpus, folder.qrels
        relevant = {query: {doc for doc, grade in docs.items() if grade > 0} for query, docs in judged.items()}
    elif path.is_dir() and _find(path, "collection"):
        corpus, texts, relevant = _read_msmarco(path, split)
        queries = {query: texts[query] for query in relevant}
        judged = relevant
    else:
        rows = load_training_set(source, split, config)
        corpus = {str(position): text for position, text in enumerate(rows.documents)}
        queries = {str(row): text for row, text in enumerate(rows.queries)}
        relevant = {str(row): set(map(str, documents)) for row, documents in enumerate(rows.positives)}
        judged = {str(row): [*map(str, docs)] for row, docs in enumerate(rows.negatives)}
        judged = {row: [*judged[row], *relevant[row]] for row in judged}
    names = [query for query in queries if relevant.get(query)]
    generator = random.Random(seed)
    if max_queries is not None and len(names) > max_queries:
        names = generator.sample(names, max_queries)
    if max_documents is not None and len(corpus) > max_documents:
        kept = dict.fromkeys(document for name in names for document in judged[name])
        others = [document for document in corpus if document not in kept]
        kept |= dict.fromkeys(generator.sample(others, min(len(others), max(0, max_documents - len(kept)))))
        corpus = {document: corpus[document] for document in kept}
    return DevelopmentSet(
        {name: queries[name] for name in names}, corpus, {name: set(relevant[name]) for name in names}
    )


def has_development_set(source: str, split: str = "dev") -> bool:
    """Whether the folder that is trained on brings a development set along."""
    path = Path(source)
    return (path / "qrels" / f"{split}.tsv").is_file() or bool(path.is_dir() and _find(path, "qrels", split))


# Folders


def _load_beir(path: Path, split: str, negatives: str | None) -> TrainingSet:
    folder = load_beir_folder(path, split)
    given: dict[str, list[str]] = {
        query: [doc for doc, grade in docs.items() if grade <= 0] for query, docs in folder.qrels.items()
    }
    relevant = {query: [doc for doc, grade in docs.items() if grade > 0] for query, docs in folder.qrels.items()}
    return _join(str(path), folder.corpus, folder.queries, relevant, given, negatives)


def _load_msmarco(path: Path, split: str, negatives: str | None) -> TrainingSet:
    corpus, queries, relevant = _read_msmarco(path, split)
    given: dict[str, list[str]] = {}
    triples = _find(path, "qidpidtriples", split)
    if triples and negatives is None:
        for query, _, document in _read_columns(triples, 3, "a query's id and those of two passages"):
            given.setdefault(query, []).append(document)
    return _join(str(path), corpus, queries, relevant, given, negatives)


def _read_msmarco(path: Path, split: str) -> tuple[dict[str, str], dict[str, str], dict[str, set[str]]]:
    files = {name: _find(path, name, split) for name in ("queries", "qrels")}
    missing = [f"{name}.{split}.tsv" for name, file in files.items() if file is None]
    if missing:
        raise FileNotFoundError(
            f"{path} has a collection.tsv as MS MARCO's folders do, but no {' and no '.join(missing)} (.gz would do)."
        )
    relevant: dict[str, set[str]] = {}
    for number, line in text_lines(files["qrels"]):
        fields = line.split()
        if len(fields) != 4 or not re.fullmatch("-?[0-9]{1,9}", fields[3]):
            raise DataError(f"{files['qrels']}, line {number}: expected query id, 0, passage id and grade.")
        if int(fields[3]) > 0:
            relevant.setdefault(fields[0], set()).add(fields[2])
    corpus, queries = _read_texts(_find(path, "collection")), _read_texts(files["queries"])
    for query, documents in relevant.items():
        if query not in queries:
            raise DataError(f"{files['qrels']} names the query {query}, which has no text in {files['queries']}.")
        if unknown := documents - corpus.keys():
            raise DataError(
                f"{files['qrels']} names the document {min(unknown)}, which is not in the collection: the files do "
                "not belong together."
            )
    return corpus, queries, relevant


def _join(
    where: str,
    corpus: Mapping[str, str],
    queries: Mapping[str, str],
    relevant: Mapping[str, Iterable[str]],
    given: dict[str, list[str]],
    negatives: str | None,
) -> TrainingSet:
    """Ids to positions."""
    if negatives is not None:
        for query, documents in _read_negatives(Path(negatives), queries):
            given.setdefault(query, []).extend(documents)
    builder = TrainingSetBuilder()
    positions = {name: builder.document(text) for name, text in corpus.items()}

    for query, documents in relevant.items():
        if unknown := [name for name in given.get(query, ()) if name not in positions]:
            raise DataError(
                f"{negatives or where} names the document {unknown[0]}, which is not in {where}: the files do not "
                "belong together."
            )
        builder.add(
            queries[query],
            [positions[name] for name in sorted(documents)],
            [positions[name] for name in given.get(query, ())],
        )
    return builder.finish(where)


def _read_negatives(file: Path, queries: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    if not file.is_file():
        raise FileNotFoundError(f"There is no file {file} of negatives.")
    for number, line in text_lines(file):
        fields = line.split()
        if len(fields) == 6 and fields[1].upper() == "Q0":
            query, documents = fields[0], [fields[2]]
        else:
            query, *rest = re.split(r"[\s,]+", line.strip())
            documents = rest
        if not documents:
            raise DataError(f"{file}, line {number}: expected a query's id and, behind a tab, those of its negatives.")
        if query in queries:
            yield query, documents


def _find(path: Path, name: str, split: str | None = None) -> Path | None:
    """MS MARCO's own file names: `qrels.dev.tsv`, `queries.train.tsv.gz`, `qidpidtriples.train.small.tsv`."""
    middle = "" if split is None else f".{split}"
    for pattern in (
        f"{name}{middle}.tsv",
        f"{name}{middle}.tsv.gz",
        f"{name}{middle}.*.tsv",
        f"{name}{middle}.*.tsv.gz",
    ):
        found = sorted(path.glob(pattern))
        if found:
            return found[0]
    return None


def _is_tsv(path: Path) -> bool:
    return path.name.removesuffix(".gz").endswith(".tsv")


def _read_columns(file: Path, count: int, what: str) -> Iterator[list[str]]:
    for number, line in text_lines(file):
        fields = line.split("\t")
        if len(fields) != count:
            raise DataError(f"{file}, line {number}: {len(fields)} fields where {what} are expected, parted by tabs.")
        yield fields


def _read_texts(file: Path) -> dict[str, str]:
    """`id<TAB>text`, or `id<TAB>title<TAB>text`, which are joined; after DPR's header, `id<TAB>text<TAB>title`."""
    texts, title_last = {}, False
    for number, line in text_lines(file):
        name, *fields = line.split("\t")
        if not fields:
            raise DataError(f"{file}, line {number}: expected an id and, behind a tab, a text.")
        if number == 1 and line == _DPR_HEADER:
            title_last = True
            continue
        if title_last:
            # DPR's texts are quoted as in CSV.
            fields = [field[1:-1].replace('""', '"') if field[:1] == '"' else field for field in reversed(fields)]
        texts[name] = " ".join(fields).strip()
    if not texts:
        raise DataError(f"{file} is empty.")
    return texts


def _read_corpus(corpus: str | None) -> Iterable[str]:
    if corpus is None:
        return ()
    path = Path(corpus)
    return _read_texts(path).values() if _is_tsv(path) else (text for _, text in read_passages(path))


# Rows of texts


def _read_rows(source: str, split: str, config: str | None) -> Iterator[tuple[str, list[str], list[str]]]:
    if Path(source).is_file() and Path(source.removesuffix(".gz")).suffix == ".csv":
        places, columns, rows = _read_csv(Path(source))
    else:
        rows = _load_rows(source, split, config)
        columns, places = rows.column_names, (f"{source}, row {number}" for number in range(1, len(rows) + 1))
    query = _column(source, columns, QUERY_COLUMNS)
    positive = _column(source, columns, POSITIVE_COLUMNS)
    negatives = [name for name in columns if name in NEGATIVE_COLUMNS or re.fullmatch(r"negative_\d+", name)]
    for place, row in zip(places, rows, strict=True):

        def texts(name, row=row, place=place) -> list[str]:
            return _as_texts(row[name], lambda: f"{place}, column {name!r}")

        query_texts, positive_texts = texts(query), texts(positive)
        if len(query_texts) != 1 or not positive_texts:
            raise DataError(f"{place}: a query and at least one positive are needed.")
        yield query_texts[0], positive_texts, [text for name in negatives for text in texts(name)]


def _read_csv(file: Path) -> tuple[list[str], list[str], list[dict[str, str]]]:
    """Where each row stands, the header, and the rows; of a quote that nothing closes the line is said."""

    def lines() -> Iterator[str]:
        for _, line in numbered_lines(file):
            if isinstance(line, DataError):
                raise line
            yield line

    limit = csv.field_size_limit(MAX_FIELD)
    try:
        header, *rows = list(rows_of(lines(), several_lines=True, strict=True)) or [Row(1, 1, [])]
    except (OSError, EOFError) as error:
        raise DataError(f"{file}: cannot be read to its end ({error}); copy the file again.") from error
    finally:
        csv.field_size_limit(limit)
    for row in (header, *rows):
        if isinstance(row.values, csv.Error):
            raise DataError(f"{file}, line {row.first}: not a row of CSV ({row.values}); mend its quotes.")
        if len(row.values) != len(header.values):
            raise DataError(
                f"{file}, line {row.first}: {len(row.values)} fields where the header has {len(header.values)}; quote "
                "fields that hold commas or line breaks."
            )
    places = [f"{file}, line {row.first}" for row in rows]
    return places, header.values, [dict(zip(header.values, row.values, strict=True)) for row in rows]


def _load_rows(source: str, split: str, config: str | None):
    import datasets

    path = Path(source)
    try:
        if path.is_file():
            kind = _LOADERS.get(Path(path.name.removesuffix(".gz")).suffix)
            if kind is None:
                suffixes = ", ".join([*_LOADERS, ".csv"])
                raise DataError(f"{path} is no file to train on: give it one of the suffixes {suffixes}.")
            return datasets.load_dataset(kind, data_files=str(path), split="train")
        if not path.exists() and not may_be_hub_id(source):
            raise DataError(f"{source} does not exist, and is not the id of a Hub dataset (owner/name) either.")
        return datasets.load_dataset(source, config, split=split)
    except DataError:
        raise
    except Exception as error:  # whatever the Hub, the network or the loader has to say
        reason = explain(error) or next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise DataError(
            f"{source} is no BEIR or MS MARCO folder, and no file or dataset that loads (split {split}): {reason}"
        ) from error


def _column(source: str, columns: list[str], names: tuple[str, ...]) -> str:
    for name in names:
        if name in columns:
            return name
    raise DataError(
        f"{source} has the columns {', '.join(columns)}, but none named {names[0]} (or {', '.join(names[1:])}): "
        "rename the one that holds it."
    )


def _as_texts(value: Any, where: Callable[[], str]) -> list[str]:
    """A text, an object of `title` and `text`, or a list of either."""
    if value is None:
        return []
    if isinstance(value, str):
        return [value] if value.strip() else []
    if isinstance(value, dict) and isinstance(value.get("text"), str):
        return [f"{value.get('title') or ''} {value['text']}".strip()]
    if isinstance(value, list):
        return [text for item in value for text in _as_texts(item, where)]
    raise DataError(f"{where()} holds {type(value).__name__}, not text.")


__all__ = ["DevelopmentSet", "TrainingSet", "has_development_set", "load_development_set", "load_training_set"]
