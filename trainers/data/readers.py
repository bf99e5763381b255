"""SOURCE into a stream of documents: files, folders of files, and datasets on the Hugging Face Hub.

What counts as one document:

- a line of JSONL, a row of Parquet, CSV, TSV or of a Hub dataset: its text column, with its title column before it
  where one is named; several rows in a row where `rows_per_document` says so;
- a page (Markdown, RST, HTML) or source file: the whole file;
- a text file in a folder: the whole file, as with pages. A text file given alone is a corpus: its documents are
  separated by blank lines if its first MiB has any, else each line is one. `text_documents` overrules both.

Files of MS MARCO and of DPR's Natural Questions are read as they are distributed: `separated_values.table_layout` says
which.

HTML goes through selectolax (the Lexbor engine, well kept, wheels for all platforms): it repairs what browsers
repair, has CSS selectors, and takes pages to text at about 16 MB a second; the standard library's parser is event
based, leaves the repair to its caller, and is slower than that before any of it is done.

Everything is read as a stream, so memory holds one line, row or file (not one corpus).
"""

import csv
import fnmatch
import gzip
import json
import os
import re
import stat
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from hub_cards.hub import explain, may_be_hub_id
from trainers.data.output_folder import readable
from trainers.data.separated_values import MAX_FIELD, Row, rows_of, table_layout

TABLES = {".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".tsv"}
TEXTS = {".txt", ".text"}
PAGES = {".md", ".markdown", ".mdx", ".rst", ".html", ".htm", ".xhtml"}
CODE = set(
    ".py .pyi .pyx .ipy .js .jsx .mjs .cjs .ts .tsx .java .kt .kts .scala .groovy .clj .go .rs .c .h .cc .cpp .cxx "
    ".hh .hpp .hxx .cu .cuh .m .mm .swift .cs .fs .vb .rb .php .pl .pm .lua .r .jl .dart .ex .exs .erl .hs .ml .mli "
    ".el .lisp .scm .sh .bash .zsh .fish .ps1 .sql .vue .svelte .zig .nim .d .f90 .f95 .f .asm .s .proto".split()
)
_SURROGATE = re.compile("[\ud800-\udfff]")
_MSMARCO_V2 = re.compile(r"msmarco_(passage|doc)_\d+")  # its .gz files hold JSON lines and do not say so
_PEEK = 1 << 20
_CUT_SHORT = (OSError, EOFError, zlib.error)  # what a damaged .gz raises, the first on a disk's fault as well


class Document(NamedTuple):
    """One document: `kind` is "prose", "code" or "html" (prose once its text is extracted)."""

    id: str
    text: str
    kind: str


class DataError(ValueError):
    """Something in the data that cannot be read: the message names the file, the line and the mend."""


@dataclass
class Source:
    """What to read, and how. Iterating yields a `Document`, or a `DataError` for each one that cannot be read.

    Errors are yielded rather than raised, so that the caller alone decides between stopping and skipping.
    """

    source: str
    text_column: str = "text"
    title_column: str | None = None
    rows_per_document: int = 1
    kind: str = "auto"
    include: str | None = None
    text_documents: str = "auto"
    dataset_config: str | None = None
    dataset_split: str = "train"
    ignored_files: Counter[str] = field(default_factory=Counter)
    """Files of a folder that were not read, by suffix, and folders that a link leads to a second time."""

    def __iter__(self) -> Iterator[Document | DataError]:
        return self._items() if self.rows_per_document == 1 else self._joined(self._items())

    def _items(self) -> Iterator[Document | DataError]:
        path = Path(self.source)
        if readable(path) != str(path):
            raise DataError(f"{readable(path)}: this name is not UTF-8; rename it.")
        if path.is_dir():
            if self.include is None and (path / "corpus.jsonl").is_file() and (path / "queries.jsonl").is_file():
                raise DataError(
                    f"{path} is a folder in BEIR's format, whose queries and judgements are no text to learn from: "
                    f"name its corpus, {path / 'corpus.jsonl'} (with --title-column title, if they have titles)."
                )
            for file in self._files(path):
                if isinstance(file, DataError):
                    yield file
                else:
                    yield from self._read(file, file.relative_to(path).as_posix(), alone=False)
        elif path.exists():
            yield from self._read(path, path.name, alone=True)
        elif may_be_hub_id(self.source):
            yield from self.read_dataset(self.source)
        else:
            raise DataError(f"{self.source} does not exist, and is not the id of a Hub dataset (owner/name) either.")

    def _joined(self, items: Iterable[Document | DataError]) -> Iterator[Document | DataError]:
        """Each `rows_per_document` consecutive rows of a file as one document of as many lines."""
        rows: list[Document] = []
        for item in items:
            if isinstance(item, DataError):
                yield item
                continue
            if rows and (len(rows) == self.rows_per_document or _file_of(item) != _file_of(rows[0])):
                yield _join(rows)
                rows = []
            rows.append(item)
        if rows:
            yield _join(rows)

    def _files(self, root: Path) -> Iterator[Path | DataError]:
        """Files below `root`, those of a folder before those of its own folders. Links are followed, but not twice."""
        seen = set()
        folders = [root]
        while folders:
            folder = folders.pop()
            place = Path(os.path.realpath(folder))
            if place in seen:
                self.ignored_files["(folder linked twice)"] += 1
                continue
            seen.add(place)
            try:
                paths = [folder / name for name in sorted(os.listdir(folder))]
            except OSError as error:
                yield _closed(folder, error)
                continue
            inner = []
            for path in paths:
                try:
                    mode = path.stat().st_mode
                except FileNotFoundError:  # a link to nothing
                    mode = 0
                except OSError as error:
                    yield _closed(path, error)
                    continue
                if stat.S_ISDIR(mode):
                    if path.name[0] != ".":
                        inner.append(path)
                    continue
                suffix = _suffix(path)
                # .json inside a folder is a configuration file far more often than a corpus.
                known = suffix in (TABLES - {".json"}) | TEXTS | PAGES | CODE
                wanted = self.include is None or fnmatch.fnmatch(path.relative_to(root).as_posix(), self.include)
                if known and wanted and stat.S_ISREG(mode):
                    yield path
                else:
                    self.ignored_files[readable(suffix or path.name)] += 1
            folders += reversed(inner)

    def _read(self, file: Path, name: str, alone: bool) -> Iterator[Document | DataError]:
        suffix = _suffix(file)
        if readable(name) != name:
            yield DataError(f"{readable(file)}: the file's name is not UTF-8; rename it, or pass --on-error skip.")
            return
        try:
            if suffix in {".jsonl", ".ndjson", ".json"}:
                yield from self._read_jsonl(file, name)
            elif suffix == ".parquet":
                yield from self._read_parquet(file, name)
            elif suffix in {".csv", ".tsv"}:
                yield from self._read_csv(file, name, tabs=suffix == ".tsv")
            elif suffix in TEXTS and (unit := self._text_unit(file, alone)) != "file":
                yield from self._read_text(file, name, unit)
            elif suffix in TEXTS | PAGES | CODE:
                yield self._read_page(file, name)
            else:
                raise DataError(
                    f"{file}: the suffix {suffix or '(none)'} says nothing about its format; give it one of "
                    f"{', '.join(sorted(TABLES | TEXTS | PAGES))} or that of a source file."
                )
        except _CUT_SHORT as error:
            yield DataError(f"{file}: cannot be read to its end ({error}); copy the file again.")

    # Tables

    def _read_jsonl(self, file: Path, name: str) -> Iterator[Document | DataError]:
        for number, line in numbered_lines(file):
            if isinstance(line, DataError):
                yield line
                continue
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # ValueError: a number of thousands of digits
                column = f", column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
                yield DataError(
                    f"{file}, line {number}{column}: not JSON ({getattr(error, 'msg', error)}); write one JSON object "
                    "a line, or skip such lines with --on-error skip."
                )
                continue
            if not isinstance(row, dict):
                yield DataError(
                    f"{file}, line {number}: a JSON {type(row).__name__} where an object is needed, such as "
                    f'{{"{self.text_column}": "..."}}; a file that is one JSON array becomes lines with jq -c ".[]".'
                )
                continue
            yield self._document(row, f"{name}:{number}", f"{file}, line {number}")

    def _read_parquet(self, file: Path, name: str) -> Iterator[Document | DataError]:
        import pyarrow
        import pyarrow.parquet

        try:
            # Buffered, in small batches: a row group as a whole, or 256 rows of 50 MB each, may not fit in memory.
            with pyarrow.parquet.ParquetFile(file, pre_buffer=False, buffer_size=_PEEK) as parquet:
                if missing := self._missing(parquet.schema_arrow.names):
                    yield self._no_column(str(file), parquet.schema_arrow.names, missing)
                    return
                number = 0
                for batch in parquet.iter_batches(batch_size=16, columns=self._columns):
                    for values in zip(*(batch.column(name) for name in self._columns), strict=True):
                        number += 1
                        where = f"{file}, row {number}"
                        try:
                            row = {name: value.as_py() for name, value in zip(self._columns, values, strict=True)}
                        except UnicodeDecodeError:  # Parquet's writers need not check
                            yield DataError(f"{where}: {_NOT_UTF8}")
                        else:
                            yield self._document(row, f"{name}:{number}", where)
        except pyarrow.ArrowInvalid as error:
            yield DataError(f"{file}: not a Parquet file that can be read ({error}); write or copy it again.")

    def _read_csv(self, file: Path, name: str, tabs: bool) -> Iterator[Document | DataError]:
        limit = csv.field_size_limit(MAX_FIELD)  # the default, 128 KiB, is less than a long document
        try:
            with _open(file) as stream:
                # Bad bytes pass through the parser as surrogates: the row they are in is known only afterwards.
                lines = (
                    line.decode("utf-8-sig" if not index else "utf-8", "surrogateescape")
                    for index, line in enumerate(stream)
                )
                first = next(lines, "")
                header, dialect, has_header = table_layout(first) if tabs else (None, {"strict": True}, True)
                rows = rows_of(chain([first], lines), several_lines=not tabs, **dialect)
                if has_header:
                    titles = next(rows, Row(1, 1, []))
                    if isinstance(titles.values, csv.Error):
                        yield DataError(
                            f"{file}, line 1: no header of CSV ({titles.values}); mend its quotes, or its line "
                            "ends where they are CR alone (tr '\\r' '\\n')."
                        )
                        return
                    if bad := unfit("".join(titles.values)):
                        yield DataError(f"{file}, line 1: {bad}")
                        return
                    header = header or titles.values
                if missing := self._missing(header):
                    yield self._no_column(f"{file}, line 1", header, missing)
                    return
                for row in rows:
                    yield self._csv_document(row, header, file, name, "the header" if has_header else "line 1")
        finally:
            csv.field_size_limit(limit)

    def _csv_document(self, row: Row, header: list[str], file: Path, name: str, rule: str) -> Document | DataError:
        lines = f"line {row.last}" if row.first == row.last else f"lines {row.first} to {row.last}"
        if isinstance(row.values, csv.Error):
            return DataError(
                f"{file}, line {row.first}: not a row of CSV ({row.values}"
                + (f" on line {row.last}" if row.last > row.first else "")
                + "); mend its quotes."
            )
        if len(row.values) != len(header):
            return DataError(
                f"{file}, {lines}: {len(row.values)} fields where {rule} has {len(header)}; quote fields that hold "
                "the separator or a line break."
            )
        return self._document(dict(zip(header, row.values, strict=True)), f"{name}:{row.last}", f"{file}, {lines}")

    def read_dataset(self, path: str) -> Iterator[Document | DataError]:
        """Stream a dataset that `datasets.load_dataset` loads: a Hub id, or a local folder."""
        import datasets

        try:
            rows = datasets.load_dataset(path, self.dataset_config, split=self.dataset_split, streaming=True)
        except Exception as error:  # whatever the Hub, the network or the loader has to say
            raise DataError(
                f"{path} is neither a file or folder here nor a dataset that loads from the Hub "
                f"(--dataset-config {self.dataset_config}, --dataset-split {self.dataset_split}): "
                f"{explain(error) or error}"
            ) from error
        if rows.column_names is not None:
            if missing := self._missing(rows.column_names):
                yield self._no_column(path, rows.column_names, missing)
                return
            rows = rows.select_columns(self._columns)
        number = 0
        try:
            for number, row in enumerate(rows, start=1):
                where = f"{path}, {self.dataset_split} row {number}"
                yield self._document(row, f"{self.dataset_split}:{number}", where)
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:  # never to be skipped: it ends here
            raise DataError(f"{path}: the stream broke off after row {number} ({error}); try again.") from error

    @property
    def _columns(self) -> list[str]:
        return [self.text_column] if self.title_column is None else [self.title_column, self.text_column]

    def _missing(self, columns: Iterable[str]) -> str | None:
        return next((name for name in self._columns if name not in columns), None)

    def _document(self, row: dict[str, Any], doc_id: str, where: str) -> Document | DataError:
        if missing := self._missing(row):
            return self._no_column(where, list(row), missing)
        parts = []
        for column in self._columns:
            text = row[column]
            if text is None:
                text = ""
            if not isinstance(text, str):
                return DataError(
                    f"{where}: column {column!r} holds {type(text).__name__}, not text; choose another with "
                    f"{self._option(column)}."
                )
            if bad := unfit(text):
                return DataError(f"{where}: {bad}")
            parts.append(text)
        title, text = parts if len(parts) == 2 else ("", parts[0])
        if len(title) > 2:  # the rule of RetroMAE's authors: MS MARCO writes "-" for none
            text = f"{title} {text}"
        return Document(doc_id, text, "code" if self.kind == "code" else "prose")

    def _option(self, column: str) -> str:
        return "--text-column" if column == self.text_column else "--title-column"

    def _no_column(self, where: str, columns: list[str], missing: str) -> DataError:
        return DataError(
            f"{where}: no column {missing!r}; choose one of {', '.join(map(repr, columns)) or '(none)'} with "
            f"{self._option(missing)}."
        )

    # Texts, pages and source files

    def _text_unit(self, file: Path, alone: bool) -> str:
        if self.text_documents != "auto":
            return self.text_documents
        if not alone:
            return "file"
        with _open(file) as stream:
            start = stream.read(_PEEK)
        return "paragraph" if re.search(rb"\n[^\S\n]*\n[^\S\n]*\S", start) else "line"

    def _read_text(self, file: Path, name: str, unit: str) -> Iterator[Document | DataError]:
        kind = "code" if self.kind == "code" else "prose"
        paragraph: list[str] = []
        first, bad = 1, None
        for number, line in numbered_lines(file):
            if unit == "line":
                yield line if isinstance(line, DataError) else Document(f"{name}:{number}", line, kind)
            elif isinstance(line, DataError):
                bad = bad or line
            elif line.strip():
                first = first if paragraph else number
                paragraph.append(line)
            else:
                if bad or paragraph:
                    yield bad or Document(f"{name}:{first}", "".join(paragraph), kind)
                paragraph, bad = [], None
        if bad or paragraph:
            yield bad or Document(f"{name}:{first}", "".join(paragraph), kind)

    def _read_page(self, file: Path, name: str) -> Document | DataError:
        with _open(file) as stream:
            data = stream.read()
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            return DataError(f"{file}, line {data.count(10, 0, error.start) + 1}: {_NOT_UTF8}")
        if "\0" in text:
            return DataError(f"{file}, line {data.count(10, 0, data.index(0)) + 1}: {_NUL}")
        suffix = _suffix(file)
        if suffix in {".html", ".htm", ".xhtml"} and self.kind != "code":
            return Document(name, text, "html")
        kind = self.kind if self.kind != "auto" else "code" if suffix in CODE else "prose"
        return Document(name, text, kind)


_NOT_UTF8 = "bytes that are not UTF-8; convert the file (iconv -f ENCODING -t utf-8), or pass --on-error skip."
_NUL = "NUL characters, so this is no UTF-8 text; convert it (iconv -f utf-16 -t utf-8?), or pass --on-error skip."


def unfit(text: str) -> str | None:
    """Why a text is none to learn from: halves of surrogate pairs, as bad bytes leave them, or NUL; else `None`."""
    if not text.isascii() and _SURROGATE.search(text):
        return _NOT_UTF8
    return _NUL if "\0" in text else None


def _closed(path: Path, error: OSError) -> DataError:
    return DataError(
        f"{readable(path)} cannot be looked into ({error.strerror}); make it readable, or pass --on-error skip."
    )


def _file_of(row: Document) -> str:
    return re.sub(r":\d+$", "", row.id)


def _join(rows: list[Document]) -> Document:
    return rows[0]._replace(text="\n".join(row.text.rstrip("\r\n") for row in rows))


def _suffix(file: Path) -> str:
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes and suffixes[-1] == ".gz":
        suffixes.pop()
    if not suffixes and _MSMARCO_V2.fullmatch(file.stem.lower()):
        return ".jsonl"
    return suffixes[-1] if suffixes else ""


def _open(file: Path) -> Any:
    return gzip.open(file, "rb") if file.suffix.lower() == ".gz" else open(file, "rb")


def numbered_lines(file: Path) -> Iterator[tuple[int, str | DataError]]:
    """Numbered lines; one that is not UTF-8, or holds NUL, comes as the error it is."""
    with _open(file) as stream:
        for number, line in enumerate(stream, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                yield number, DataError(f"{file}, line {number}: {_NOT_UTF8}")
                continue
            yield number, DataError(f"{file}, line {number}: {_NUL}") if "\0" in text else text


def text_lines(file: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines without their ends; blank ones are passed over.

    Raises:
        DataError: a line that is not UTF-8 or holds NUL, a file that cannot be read to its end.
    """
    try:
        for number, line in numbered_lines(file):
            if isinstance(line, DataError):
                raise line
            if line.strip():
                yield number, line.rstrip("\r\n")
    except _CUT_SHORT as error:
        raise DataError(f"{file}: cannot be read to its end ({error}); copy the file again.") from error


_DROPPED = (
    "head, script, style, noscript, template, svg, nav, footer, form, button, select, iframe, div[role=navigation]"
)
_BLOCKS = (
    "address, article, aside, blockquote, br, caption, dd, details, div, dl, dt, fieldset, figcaption, figure, h1, "
    "h2, h3, h4, h5, h6, header, hr, li, main, ol, p, pre, section, summary, table, tr, ul"
)
# Private characters stand for a block's edge, and for the whitespace inside <pre> while all other is collapsed.
_BREAK = "\ue000"
_KEPT = {ord("\n"): "\ue001", ord(" "): "\ue002", ord("\t"): "\ue003"}
_RESTORED = {ord(mark): chr(space) for space, mark in _KEPT.items()}


def html_to_text(html: str) -> str:
    """Text of an HTML page: that of its one <main> if it has exactly one, else of its body, less the navigation.

    Blocks are separated by blank lines, whitespace inside them is collapsed, line breaks of <pre> are kept.
    """
    from selectolax.lexbor import LexborHTMLParser

    tree = LexborHTMLParser(html)
    for node in tree.css(_DROPPED):
        node.decompose()
    for node in tree.css("pre"):
        node.replace_with(_BREAK + node.text().translate(_KEPT) + _BREAK)
    for node in tree.css(_BLOCKS):
        node.insert_before(_BREAK)
        node.insert_after(_BREAK)
    for node in tree.css("td, th"):
        node.insert_after(" ")
    main = tree.css("main, [role=main]")
    root = main[0] if len(main) == 1 else tree.body
    if root is None:
        return ""
    blocks = (" ".join(block.split()).translate(_RESTORED) for block in root.text().split(_BREAK))
    return "\n\n".join(block.rstrip() for block in blocks if block.strip())
