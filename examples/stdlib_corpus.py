"""Training text and a docstring -> function test set, both from the running Python's standard library.

`python examples/stdlib_corpus.py OUT` needs no download: the text is on every machine that runs Python. It writes

- `OUT/train/code/`: the library's source files, without its tests, generated tables and the held-out modules;
- `OUT/train/prose/`: the language reference that `help()` shows (`pydoc_data.topics`), a file a topic;
- `OUT/docstring2function/`: a BEIR folder. A query is the first paragraph of a function's docstring, its one relevant
  document is the source of that function with the docstring cut out. All functions come from held-out modules;
- `OUT/stdlib_corpus.json`: the settings, counts and held-out modules.
"""

import argparse
import ast
import hashlib
import inspect
import json
import os
import platform
import re
import shutil
import sysconfig
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SUMMARY = "stdlib_corpus.json"
# Tests are no library code, encodings and the named files are generated tables, pydoc_data is prose kept as code.
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings"}
SKIPPED_FOLDERS |= {"pydoc_data", "lib-dynload", "__phello__"}
SKIPPED_FILES = {"html/entities.py", "lib2to3/pgen2/token.py", "this.py", "turtledemo/__init__.py"}


@dataclass(frozen=True)
class Function:
    """A function or method: `source` holds decorators, signature and body, dedented, without the docstring."""

    id: str
    source: str
    query: str  # the docstring's first paragraph on one line; empty where there is no docstring
    body: tuple[str, ...]  # its lines of code, stripped: no blank line, no comment line, no docstring


def library_files(stdlib: Path) -> list[str]:
    """Paths (posix, relative to `stdlib`) of the library's own sources, sorted."""
    found = []
    for folder, folders, names in os.walk(stdlib):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith("config-")]
        relative = Path(folder).relative_to(stdlib)
        found += [(relative / name).as_posix() for name in names if name.endswith(".py")]
    return sorted(path for path in found if path not in SKIPPED_FILES and not path.startswith("_sysconfigdata"))


def _by_hash(names: list[str], seed: int) -> list[str]:
    """A shuffled order that depends on each name and the seed alone, so another Python version moves few files."""
    return sorted(names, key=lambda name: hashlib.sha256(f"{seed}:{name}".encode()).digest())


def _first_paragraph(docstring: str) -> str:
    paragraph = re.split(r"\n\s*\n|\n\s*>>>|^\s*>>>", inspect.cleandoc(docstring), maxsplit=1)[0]
    return " ".join(paragraph.split())


def _walk(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Functions and methods with their qualified names; a function inside a function belongs to the outer one."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + child.name, child
        else:
            yield from _walk(child, f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix)


def functions(path: str, text: str) -> Iterator[Function]:
    """The functions of one module, in the order of the file.

    Left out are the few whose docstring shares a line with code, or whose remaining body is empty.
    Raises SyntaxError if `text` is not Python.
    """
    lines = text.splitlines()
    for name, node in _walk(ast.parse(text)):
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        docstring, statements = ast.get_docstring(node, clean=False), node.body
        kept = list(range(first, node.end_lineno + 1))
        if docstring is not None:
            cut, statements = node.body[0], node.body[1:]
            if (
                not statements
                or statements[0].lineno == cut.end_lineno
                or not lines[cut.lineno - 1][: cut.col_offset].isspace()
            ):
                continue
            kept = [number for number in kept if not cut.lineno <= number <= cut.end_lineno]
        indent = len(lines[first - 1]) - len(lines[first - 1].lstrip())
        # Not textwrap.dedent: one comment or string line at column 0 would leave the whole function indented.
        source = [re.sub(rf"^\s{{0,{indent}}}", "", lines[number - 1]).rstrip() for number in kept]
        body = (lines[number - 1].strip() for number in kept if number >= statements[0].lineno)
        yield Function(
            id=f"{path}:{name}:{node.lineno}",
            source="\n".join(source),
            query=_first_paragraph(docstring or ""),
            body=tuple(line for line in body if line and not line.startswith("#")),
        )


def truncate(source: str, limit: int) -> str:
    """At most `limit` characters, whole lines where there are any."""
    return source if len(source) <= limit else (source[: limit + 1].rpartition("\n")[0] or source[:limit])


def write_beir(folder: Path, corpus: dict[str, str], queries: dict[str, str], relevant: dict[str, str]) -> None:
    """Write `corpus.jsonl`, `queries.jsonl` and `qrels/test.tsv` (BEIR's layout, scores of 1).

    Args:
        folder: created if need be.
        corpus, queries: id -> text.
        relevant: query id -> the id of its one relevant document.
    """
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    for name, records, extra in (("corpus", corpus, {"title": ""}), ("queries", queries, {})):
        with open(folder / f"{name}.jsonl", "w", encoding="utf-8", newline="\n") as file:
            for key, text in records.items():
                file.write(json.dumps({"_id": key, **extra, "text": text}, ensure_ascii=False) + "\n")
    with open(folder / "qrels" / "test.tsv", "w", encoding="utf-8", newline="\n") as file:
        file.write("query-id\tcorpus-id\tscore\n")
        file.writelines(f"{query}\t{document}\t1\n" for query, document in relevant.items())


def _read_library(stdlib: Path, counts: Counter) -> dict[str, tuple[str, list[Function]]]:
    modules = {}
    for path in library_files(stdlib):
        try:
            with tokenize.open(stdlib / path) as file:  # honours the file's own coding line
                text = file.read()
            modules[path] = text, list(functions(path, text))
        except (SyntaxError, UnicodeDecodeError):
            counts["files_unreadable"] += 1
    return modules


def _select(held: list[Function], training: list[Function], min_words: int, min_lines: int, counts: Counter):
    """The functions of the held-out modules that make a fair test: (documented, undocumented)."""
    bodies = Counter(function.body for function in held)
    queries = Counter(function.query for function in held if function.query)
    seen_bodies = {function.body for function in training}
    seen_queries = {function.query for function in training}
    documented, undocumented = [], []
    for function in held:
        if len(function.body) < min_lines:
            counts["left_out_trivial_body"] += 1
        elif bodies[function.body] > 1:
            counts["left_out_same_body_twice"] += 1
        elif function.body in seen_bodies:
            counts["left_out_body_in_training"] += 1
        elif not function.query:
            undocumented.append(function)
        elif queries[function.query] > 1:
            counts["left_out_same_docstring_twice"] += 1
        elif function.query in seen_queries:
            counts["left_out_docstring_in_training"] += 1
        elif len(re.findall(r"[A-Za-z]{2,}", function.query)) < min_words:
            counts["left_out_short_docstring"] += 1
        else:
            documented.append(function)
    return documented, undocumented


def build(
    out_dir: str | Path,
    seed: int = 0,
    heldout_share: float = 0.15,
    max_queries: int = 300,
    max_documents: int = 300,
    min_words: int = 4,
    min_lines: int = 3,
    max_chars: int = 1000,
    stdlib: str | Path | None = None,
) -> dict:
    """Write the training text and the test set described at the top of this module.

    Args:
        out_dir: a new or empty folder, or one that an earlier call wrote: that one is replaced.
        seed: chooses the held-out modules, together with a hash of their names.
        heldout_share: share of the library's modules held out of training, whole files.
        max_queries: at most this many documented functions.
        max_documents: undocumented held-out functions fill the corpus up to this number, as distractors (none by
            default: embedding every document costs the demo more than they tell).
        min_words: words (two letters or more) that a docstring's first paragraph must have.
        min_lines: lines of code that a body must have; shorter ones (`pass`, delegations) are left out.
        max_chars: longer functions are cut after the last whole line.
        stdlib: the library's folder; the running Python's by default.

    Returns:
        The summary, as written to `stdlib_corpus.json`.

    Raises:
        FileNotFoundError: there is no source file in `stdlib` (an embedded Python keeps its library in a zip file).
        FileExistsError: `out_dir` holds files that are not ours.
    """
    stdlib, out_dir = Path(stdlib or sysconfig.get_paths()["stdlib"]), Path(out_dir)
    if out_dir.exists() and any(out_dir.iterdir()) and not (out_dir / SUMMARY).exists():
        raise FileExistsError(f"{out_dir} holds other files (no {SUMMARY} in it): give a new or an empty folder.")
    counts: Counter = Counter()
    modules = _read_library(stdlib, counts)
    if not modules:
        raise FileNotFoundError(f"No Python source in {stdlib}: run with a Python whose standard library is a folder.")

    order = _by_hash(list(modules), seed)
    heldout, training = sorted(order[: round(heldout_share * len(order))]), order[round(heldout_share * len(order)) :]
    documented, undocumented = _select(
        [function for path in heldout for function in modules[path][1]],
        [function for path in training for function in modules[path][1]],
        min_words,
        min_lines,
        counts,
    )
    chosen = set(_by_hash([function.id for function in documented], seed)[:max_queries])
    distractors = _by_hash([function.id for function in undocumented], seed)
    distractors = set(distractors[: max(0, max_documents - len(chosen))])
    corpus = [function for function in documented + undocumented if function.id in chosen | distractors]

    out_dir.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", dir=out_dir.parent))
    try:
        for path in training:
            write_text(temporary / "train" / "code" / path, modules[path][0])
        for topic, text in _reference_topics().items():
            write_text(temporary / "train" / "prose" / f"{re.sub(r'[^A-Za-z0-9_-]+', '_', topic)}.txt", text)
            counts["prose_files"] += 1
            counts["prose_characters"] += len(text)
        write_beir(
            temporary / "docstring2function",
            {function.id: truncate(function.source, max_chars) for function in sorted(corpus, key=lambda f: f.id)},
            {f"q:{function.id}": function.query for function in corpus if function.id in chosen},
            {f"q:{function.id}": function.id for function in corpus if function.id in chosen},
        )
        counts.update(
            code_files=len(training),
            code_characters=sum(len(modules[path][0]) for path in training),
            heldout_files=len(heldout),
            queries=len(chosen),
            documents=len(corpus),
            distractors=len(distractors),
            documents_cut=sum(len(function.source) > max_chars for function in corpus),
        )
        summary = {
            "python": platform.python_version(),
            "settings": {
                "seed": seed,
                "heldout_share": heldout_share,
                "max_queries": max_queries,
                "max_documents": max_documents,
                "min_words": min_words,
                "min_lines": min_lines,
                "max_chars": max_chars,
            },
            "counts": dict(sorted(counts.items())),
            "heldout_modules": heldout,
        }
        (temporary / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        temporary.chmod(0o755)  # mkdtemp's folders are private
        if out_dir.exists():
            shutil.rmtree(out_dir)
        temporary.replace(out_dir)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return summary


def _reference_topics() -> dict[str, str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions package it apart
        return {}
    return topics


def write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Training text and a docstring-to-function test set from Python itself."
    )
    parser.add_argument("out_dir", type=Path, help="folder to write (new, empty, or written by this script)")
    parser.add_argument("--seed", type=int, default=0, help="chooses the held-out modules (default: 0)")
    parser.add_argument("--heldout-share", type=float, default=0.15, help="share of modules held out (default: 0.15)")
    parser.add_argument("--max-queries", type=int, default=300, help="most queries in the test set (default: 300)")
    parser.add_argument("--max-documents", type=int, default=300, help="most documents in the test set (default: 300)")
    arguments = parser.parse_args()
    print(json.dumps(build(**vars(arguments))["counts"], indent=2))


if __name__ == "__main__":
    main()
