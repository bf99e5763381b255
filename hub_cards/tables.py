"""The papers' tables with the numbers that their text gives, and rows of models measured here below."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

PUBLISHED = Path(__file__).parent / "published_tables.yaml"


def load_tables() -> dict[str, dict]:
    """The published tables by name (`revela-1`, …, `retromae-5`), as `published_tables.yaml` explains them."""
    return yaml.safe_load(PUBLISHED.read_text(encoding="utf-8"))


def fill_table(table: Mapping, results: Sequence[Mapping] = ()) -> list[dict]:
    """
    The rows of a table.

    Args:
        table: one of `load_tables()`.
        results: what `evaluate` or `run_benchmark` returned or wrote. A model that several measured is one row.

    Returns:
        A dict a row: `model`, `published` (bool) and `values`, one a column in the table's own unit, None where it is
        missing. A model of `results` without any of the columns has no row. The mean of ours is there if all are.
    """
    columns = table["columns"]
    empty = [None] * len(columns)
    rows = [{"model": model, "published": True, "values": values or empty} for model, values in table["rows"].items()]
    scores: dict[str, dict[str, dict]] = {}
    for result in results:
        for row in result["rows"]:
            if row["task"] != "mean":
                scores.setdefault(row["model"], {})[_key(row["task"])] = row["scores"]
    for model, tasks in scores.items():
        found = [_score(tasks, column) for column in columns if "mean" not in column]
        if all(value is None for value in found):
            continue
        found = [None if value is None else value * table["scale"] for value in found]
        mean = None if None in found else sum(found) / len(found)
        rest = iter(found)
        values = [mean if "mean" in column else next(rest) for column in columns]
        rows.append({"model": model, "published": False, "values": values})
    return rows


def other_tasks(tables: Sequence[Mapping], results: Sequence[Mapping]) -> dict | None:
    """
    A table, as `fill_table` takes it, of the tasks in `results` that fill no column of any of the `tables`.

    A column a task, nDCG@10 in percent, and no published row; `None` if there is no such task.
    """
    wanted = [column for table in tables for column in table["columns"] if "mean" not in column]
    rows = [row for result in results for row in result["rows"] if row["task"] != "mean"]
    tasks = dict.fromkeys(
        row["task"] for row in rows if all(_score({_key(row["task"]): row["scores"]}, one) is None for one in wanted)
    )
    columns = [{"label": task, "task": task, "measure": "ndcg_at_10"} for task in tasks]
    title = "Tasks that are no column of the tables asked for (nDCG@10, %)"
    return {"title": title, "columns": columns, "rows": {}, "scale": 100, "decimals": 1} if columns else None


def read_results(files: Sequence[str | Path]) -> list[dict]:
    """Results that `revela-hub evaluate --out` wrote.

    Raises:
        FileNotFoundError, ValueError: naming the file that is not there, or is something else.
    """
    results = []
    for file in files:
        try:
            found = json.loads(Path(file).read_text(encoding="utf-8"))
            # All that `fill_table` reads.
            [(row["model"], row["task"], dict(row["scores"])) for row in found["rows"]]
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{file} holds no results; give what `revela-hub evaluate --out` wrote.") from error
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"There is no file {file}; give what `revela-hub evaluate --out` wrote."
            ) from error
        results.append(found)
    return results


def as_markdown(table: Mapping, rows: Sequence[Mapping]) -> str:
    """The table as Markdown: ours in bold, an en dash where a value is missing, the notes and the source below."""
    columns, decimals = table["columns"], table["decimals"]
    source = table.get("source")
    lines = [
        f"**{source['paper']}, Table {source['table']}.** {table['title']}" if source else f"**{table['title']}**",
        "",
        f"| model | {' | '.join(column['label'] for column in columns)} |",
        f"| --- |{' --- |' * len(columns)}",
    ]
    for row in rows:
        cells = []
        for value, column in zip(row["values"], columns, strict=True):
            mark = "†" if column.get("differs") and not row["published"] else ""
            cells.append("–" if value is None else f"{value:.{decimals}f}{mark}")
        name = row["model"].replace("|", "\\|")
        lines.append(f"| {name if row['published'] else f'**{name}**'} | {' | '.join(cells)} |")
    notes = " ".join(note if note.endswith(".") else f"{note}." for note in table.get("notes", ()))
    if source is None:
        return "\n".join(lines) + "\n"
    lines += ["", f"Source: arXiv {source['arxiv']}, Table {source['table']}; – is missing. {notes}".rstrip()]
    return "\n".join(lines) + "\n"


def as_csv(tables: Mapping[str, tuple[Mapping, Sequence[Mapping]]]) -> str:
    """
    Tables in one CSV, a line a value: table, model, where it is from, column, value, and whether it can be compared.

    The columns of several tables differ, so they cannot share a header. A missing value is an empty field.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["table", "model", "source", "column", "value", "comparable"])
    for name, (table, rows) in tables.items():
        for row in rows:
            for value, column in zip(row["values"], table["columns"], strict=True):
                shown = "" if value is None else f"{value:.{table['decimals']}f}"
                comparable = row["published"] or not column.get("differs")
                source = "measured"
                if row["published"]:
                    source = f"arXiv {table['source']['arxiv']}, Table {table['source']['table']}"
                writer.writerow([name, row["model"], source, column["label"], shown, str(comparable).lower()])
    return text.getvalue()


def _score(tasks: Mapping[str, Mapping], column: Mapping) -> float | None:
    # A local folder is called by its name, which may be that of the column.
    names = (column.get("task", ""), column["label"])
    scores = next((tasks[_key(name)] for name in names if _key(name) in tasks), {})
    return scores.get(column["measure"])


def _key(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


__all__ = ["as_csv", "as_markdown", "fill_table", "load_tables", "other_tasks", "read_results"]
