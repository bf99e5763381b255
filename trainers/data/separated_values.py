"""Files of comma- and tab-separated values: what the first line of one says, and its rows."""

import csv
import re
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

MAX_FIELD = 1 << 26
"""Characters that a field may have; one of more is a quote that nothing closes."""


class Row(NamedTuple):
    """A row's first and last line (from 1), and its values or why there are none."""

    first: int
    last: int
    values: list[str] | csv.Error


def table_layout(first: str) -> tuple[list[str] | None, dict[str, Any], bool]:
    """What the first line of a file of tab-separated values says about it.

    Tab-separated values have a header and no quoting (IANA text/tab-separated-values), but for:

    - MS MARCO, without a header: `collection.tsv` and `queries.*.tsv` (id, text), `msmarco-docs.tsv` (id, url, title,
      text), and the passages with titles that RocketQA's authors made of it, `corpus.tsv` (id, title, text);
    - DPR's `psgs_w100.tsv` (id, text, title), the passages of Natural Questions, which has CSV's quoting, and each
      row on a line of its own.

    Returns:
        The columns, `None` where the header says them; the arguments of `csv.reader`; whether there is a header.
    """
    plain = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
    fields = first.rstrip("\r\n").split("\t")
    if fields == ["id", "text", "title"]:
        return fields, {"delimiter": "\t", "strict": True}, True
    if not re.fullmatch(r"\ufeff?D?\d+", fields[0]) or fields[-1].isdigit():  # a header, or numbers as in qrels
        return None, plain, True
    if len(fields) in (2, 3):
        return ["id", "title", "text"] if len(fields) == 3 else ["id", "text"], plain, False
    if len(fields) == 4 and "://" in fields[1]:
        return ["id", "url", "title", "text"], plain, False
    return None, plain, True


def rows_of(lines: Iterable[str], several_lines: bool, **dialect: Any) -> Iterator[Row]:
    """Rows of `lines`, which keep their ends; empty ones are passed over.

    A bad row costs its first line: what a quote that nothing closes swallowed is read again from the line below it.

    Args:
        several_lines: whether a quoted field may hold line breaks, as CSV's may.
        dialect: of `csv.reader`.
    """
    source, again, taken = iter(lines), deque(), []

    def feed() -> Iterator[str]:
        while True:
            line = again.popleft() if again else next(source, None)
            if line is None:
                return
            taken.append(line)
            yield line

    first = 1
    while True:
        record = feed() if several_lines else islice(feed(), 1)
        try:
            values = next(csv.reader(record, **dialect))
        except StopIteration:
            return
        except csv.Error as error:
            yield Row(first, first + len(taken) - 1, error)
            again.extendleft(reversed(taken[1:]))
            del taken[1:]
        else:
            if values:
                yield Row(first, first + len(taken) - 1, values)
        first += len(taken)
        taken.clear()


__all__ = ["MAX_FIELD", "Row", "rows_of", "table_layout"]
