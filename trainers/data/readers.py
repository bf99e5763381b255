"""SOURCE into a stream of documents: files, folders of files, and datasets on the Hugging Face Hub.

What counts as one document:

- a line of JSONL, a row of Parquet, CSV, TSV or of a Hub dataset: its text column;
- a page (Markdown, RST, HTML) or source file: the whole file;
- a text file in a folder: the whole file, as with pages. A text file given alone is a corpus: its documents are
  separated by blank lines if its first MiB has any, else each line is one. `text_documents` overrules both.

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
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

TABLES = {".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".tsv"}
TEXTS = {".txt", ".text"}
PAGES = {".md", ".markdown", ".mdx", ".rst", ".html", ".htm", ".xhtml"}
CODE = set(
    ".py .pyi .pyx .ipy .js .jsx .mjs .cjs .ts .tsx .java .kt .kts .scala .groovy .clj .go .rs .c .h .cc .cpp .cxx "
    ".hh .hpp .hxx .cu .cuh .m .mm .swift .cs .fs .vb .rb .php .pl .pm .lua .r .jl .dart .ex .exs .erl .hs .ml .mli "
    ".el .lisp .scm .sh .bash .zsh .fish .ps1 .sql .vue .svelte .zig .nim .d .f90 .f95 .f .asm .s .proto".split()
)
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_SURROGATE = re.compile("[\ud800-\udfff]")
_PEEK = 1 << 20


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
    kind: str = "auto"
    include: str | None = None
    text_documents: str = "auto"
    dataset_config: str | None = None
    dataset_split: str = "train"
    exclude: tuple[Path, ...] = ()
    """Folders that are not part of the source, such as the output when it lies inside it."""
    ignored_files: Counter[str] = field(default_factory=Counter)
    """Files of a folder that were not read, by suffix."""

    def __iter__(self) -> Iterator[Document | DataError]:
        path = Path(self.source)
        if path.is_dir():
            for file in self._files(path):
                yield from self._read(file, file.relative_to(path).as_posix(), alone=False)
        elif path.exists():
            yield from self._read(path, path.name, alone=True)
        elif _HUB_ID.fullmatch(self.source):
            yield from self.read_dataset(self.source)
        else:
            raise DataError(f"{self.source} does not exist, and is not the id of a Hub dataset (owner/name) either.")

    def _files(self, folder: Path) -> Iterator[Path]:
        excluded = {path.resolve() for path in self.exclude}
        for parent, folders, files in os.walk(folder):
            folders[:] = sorted(
                name for name in folders if name[0] != "." and (Path(parent) / name).resolve() not in excluded
            )
            for file in (Path(parent) / name for name in sorted(files)):
                suffix = _suffix(file)
                # .json inside a folder is a configuration file far more often than a corpus.
                known = suffix in (TABLES - {".json"}) | TEXTS | PAGES | CODE
                wanted = self.include is None or fnmatch.fnmatch(file.relative_to(folder).as_posix(), self.include)
                if known and wanted and file.is_file():
                    yield file
                else:
                    self.ignored_files[suffix or file.name] += 1

    def _read(self, file: Path, name: str, alone: bool) -> Iterator[Document | DataError]:
        suffix = _suffix(file)
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
        except (OSError, EOFError, zlib.error) as error:
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
                if self.text_column not in parquet.schema_arrow.names:
                    yield self._no_column(str(file), parquet.schema_arrow.names)
                    return
                number = 0
                for batch in parquet.iter_batches(batch_size=16, columns=[self.text_column]):
                    for value in batch.column(0):
                        number += 1
                        where = f"{file}, row {number}"
                        try:
                            row = {self.text_column: value.as_py()}
                        except UnicodeDecodeError:  # Parquet's writers need not check
                            yield DataError(f"{where}: {_NOT_UTF8}")
                        else:
                            yield self._document(row, f"{name}:{number}", where)
        except pyarrow.ArrowInvalid as error:
            yield DataError(f"{file}: not a Parquet file that can be read ({error}); write or copy it again.")

    def _read_csv(self, file: Path, name: str, tabs: bool) -> Iterator[Document | DataError]:
        # Tab-separated values have no quoting (IANA text/tab-separated-values); comma-separated ones do (RFC 4180).
        dialect: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if tabs else {"strict": True}
        limit = csv.field_size_limit(2**31 - 1)  # the default, 128 KiB, is less than a long document
        try:
            with _open(file) as stream:
                # Bad bytes pass through the parser as surrogates: the row they are in is known only afterwards.
                lines = (
                    line.decode("utf-8-sig" if not index else "utf-8", "surrogateescape")
                    for index, line in enumerate(stream)
                )
                rows = csv.reader(lines, **dialect)
                header = next(rows, [])
                if self.text_column not in header:
                    yield self._no_column(f"{file}, line 1", header)
                    return
                while True:
                    try:
                        values = next(rows)
                    except StopIteration:
                        return
                    except csv.Error as error:
                        yield DataError(f"{file}, line {rows.line_num}: not a row of CSV ({error}); mend its quotes.")
                        continue
                    where = f"{file}, line {rows.line_num}"
                    if not values:
                        continue
                    if len(values) != len(header):
                        yield DataError(
                            f"{where}: {len(values)} fields where the header has {len(header)}; quote fields that "
                            "hold the separator or a line break."
                        )
                        continue
                    yield self._document(dict(zip(header, values, strict=True)), f"{name}:{rows.line_num}", where)
        finally:
            csv.field_size_limit(limit)

    def read_dataset(self, path: str) -> Iterator[Document | DataError]:
        """Stream a dataset that `datasets.load_dataset` loads: a Hub id, or a local folder."""
        import datasets

        try:
            rows = datasets.load_dataset(path, self.dataset_config, split=self.dataset_split, streaming=True)
        except Exception as error:  # whatever the Hub, the network or the loader has to say
            raise DataError(
                f"{path} is neither a file or folder here nor a dataset that loads from the Hub "
                f"(--dataset-config {self.dataset_config}, --dataset-split {self.dataset_split}): {error}"
            ) from error
        if rows.column_names is not None:
            if self.text_column not in rows.column_names:
                yield self._no_column(path, rows.column_names)
                return
            rows = rows.select_columns([self.text_column])
        number = 0
        try:
            for number, row in enumerate(rows, start=1):
                where = f"{path}, {self.dataset_split} row {number}"
                yield self._document(row, f"{self.dataset_split}:{number}", where)
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:  # never to be skipped: it ends here
            raise DataError(f"{path}: the stream broke off after row {number} ({error}); try again.") from error

    def _document(self, row: dict[str, Any], doc_id: str, where: str) -> Document | DataError:
        if self.text_column not in row:
            return self._no_column(where, list(row))
        text = row[self.text_column]
        if text is None:
            text = ""
        if not isinstance(text, str):
            return DataError(
                f"{where}: column {self.text_column!r} holds {type(text).__name__}, not text; choose another with "
                "--text-column."
            )
        if not text.isascii() and _SURROGATE.search(text):
            return DataError(f"{where}: {_NOT_UTF8}")
        return Document(doc_id, text, "code" if self.kind == "code" else "prose")

    def _no_column(self, where: str, columns: list[str]) -> DataError:
        return DataError(
            f"{where}: no column {self.text_column!r}; choose one of {', '.join(map(repr, columns)) or '(none)'} with "
            "--text-column."
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
        suffix = _suffix(file)
        if suffix in {".html", ".htm", ".xhtml"} and self.kind != "code":
            return Document(name, text, "html")
        kind = self.kind if self.kind != "auto" else "code" if suffix in CODE else "prose"
        return Document(name, text, kind)


_NOT_UTF8 = "bytes that are not UTF-8; convert the file (iconv -f ENCODING -t utf-8), or pass --on-error skip."


def _suffix(file: Path) -> str:
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes and suffixes[-1] == ".gz":
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _open(file: Path) -> Any:
    return gzip.open(file, "rb") if file.suffix.lower() == ".gz" else open(file, "rb")


def numbered_lines(file: Path) -> Iterator[tuple[int, str | DataError]]:
    """Numbered lines; a line that is not UTF-8 comes as the error it is."""
    with _open(file) as stream:
        for number, line in enumerate(stream, start=1):
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                yield number, DataError(f"{file}, line {number}: {_NOT_UTF8}")


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
