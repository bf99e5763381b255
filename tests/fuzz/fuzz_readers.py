"""
Feeds the readers with files damaged in every way that Hypothesis thinks of: `make fuzz`, or FUZZ_SECONDS=20 make fuzz.

Each example is a folder of files, most of them valid ones that were cut, spliced and spiced. A reader has to give a
result that is sound, or a ValueError or OSError that names a file of the folder: nothing else, no hang, no row lost.
An example that fails is shrunk, printed, and kept in Hypothesis' database, whose examples the next run tries first.
"""

import csv
import faulthandler
import gzip
import io
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.numpy
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase

from hub_cards.beir_folder import load_beir_folder
from hub_cards.checkpoints import check_folder, model_type
from hub_cards.search import iter_passages
from trainers.arguments import parse_recipe, read_recipe
from trainers.data.prepare import PrepareConfig, chunk_batch, cut_of, prepare
from trainers.data.prepared import load_groups, load_sequences
from trainers.data.readers import DataError, Document, Source
from trainers.finetune_data import load_development_set, load_training_set
from trainers.revela import DataArguments, ModelArguments

Files = dict[str, bytes]
HANGS_AFTER = 60  # seconds; the slowest example that is none takes two
ROOT = Path(__file__).resolve().parents[2]

# What readers trip over, put anywhere.
SPICE = [
    b"\xef\xbb\xbf", b"\0", b"\xff\xfe", b"\xed\xa0\x80", b"\\ud800", b'"', b"'", b"\\", b"\r", b"\n", b"\n\n", b"\t",
    b",", b"{", b"}", b"[", b"]", b":", b"- ", b"null", b"true", b"1e999", b"9" * 5000, b"[" * 3000, b'{"a":' * 3000,
    b"<pre>" * 500, b"x" * 200_000, b"\x1f\x8b", b"&a", b"*a", b"!!python/name:os.system", b"!!bool x",
    b"!!timestamp x", b"..", b"/", "\u2028é".encode(),
]  # fmt: skip
TEXT = st.one_of(
    st.text(st.characters(), max_size=20),  # every code point, halves of surrogate pairs included
    st.sampled_from(
        ["", " ", "the river bank", "fish and boats. And trains.", "\ud800", "\ufeff", "a\0b", "\u2028", "7"]
    ),
)
CLEAN = st.text(st.characters(exclude_categories=("Cs", "Cc", "Zs", "Zl", "Zp")), min_size=1, max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)


def mostly(usual: st.SearchStrategy, otherwise: st.SearchStrategy) -> st.SearchStrategy:
    return st.integers(0, 9).flatmap(lambda number: usual if number else otherwise)


@st.composite
def damaged(draw, valid: st.SearchStrategy[bytes]) -> bytes:
    """A valid file, left whole or changed at up to three places; now and then any bytes at all."""
    data = draw(mostly(valid, st.binary(max_size=200)))
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(data)))
        end = draw(st.integers(start, min(len(data), start + 60)))
        how = draw(st.sampled_from(["spice", "bytes", "cut", "end", "again"]))
        if how == "spice":
            data = data[:start] + draw(st.sampled_from(SPICE)) + data[end:]
        elif how == "bytes":
            data = data[:start] + draw(st.binary(max_size=8)) + data[end:]
        elif how == "cut":
            data = data[:start] + data[end:]
        elif how == "end":
            data = data[:start]
        else:
            data = data[:end] + data[start:]
    return data


@st.composite
def packed(draw, name: str, content: st.SearchStrategy[bytes]) -> tuple[str, bytes]:
    """A file that is damaged before it is packed, after, or both; or not packed."""
    if not draw(st.integers(0, 3)):
        whole = content.map(lambda data: gzip.compress(data, 1, mtime=0))
        return f"{name}.gz", draw(damaged(whole))
    return name, draw(content)


def utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def json_lines(rows: list[Any]) -> bytes:
    return b"".join(utf8(json.dumps(row)) + b"\n" for row in rows)


def separated(rows: list[list[str]], **dialect: Any) -> bytes:
    out = io.StringIO(newline="")
    try:
        csv.writer(out, **dialect).writerows(rows)
    except csv.Error:  # what the dialect cannot hold
        return utf8("\n".join(dialect.get("delimiter", ",").join(row) for row in rows))
    return utf8(out.getvalue())


def table(rows: list[dict[str, Any]]) -> bytes:
    out = pa.BufferOutputStream()
    try:
        columns = pa.Table.from_pylist(rows)
        pq.write_table(columns, pa.BufferOutputStream())
    except (pa.ArrowException, UnicodeEncodeError, OverflowError):  # of several types, or no UTF-8
        columns = pa.table({ascii(name): [ascii(row.get(name)) for row in rows] for name in rows[0]})
    pq.write_table(columns, out, compression="none")
    return out.getvalue().to_pybytes()


def rows(columns: dict[str, st.SearchStrategy], **optional: st.SearchStrategy) -> st.SearchStrategy:
    return st.lists(mostly(st.fixed_dictionaries(columns, optional=optional), st.dictionaries(TEXT, JSON)), max_size=6)


# A corpus in each of its forms

CELLS = st.lists(st.lists(TEXT, min_size=2, max_size=2), max_size=5)
LINES = st.lists(TEXT, max_size=6).map(lambda lines: utf8("\n".join(lines)))
MARKUP = st.lists(
    TEXT
    | st.sampled_from(["<p>", "</p>", "<pre>", "<main>", "<table><td>", "<script>", "<!--", "&amp;", "# Title\n"]),
    max_size=12,
).map(lambda parts: utf8("".join(parts)))
CORPUS_ROWS = rows({"text": mostly(TEXT, JSON)}, title=TEXT | JSON, _id=TEXT | JSON)
GROUP_ROWS = st.lists(
    st.integers(1, 3).flatmap(
        lambda size: st.fixed_dictionaries(
            {
                "texts": mostly(st.lists(mostly(TEXT, st.none()), min_size=size, max_size=size), st.none()),
                "doc_ids": mostly(st.lists(mostly(TEXT, st.none()), min_size=size, max_size=size), st.none()),
                "source": mostly(TEXT, st.none()),
            }
        )
    ),
    max_size=5,
)
FORMS = {
    "a.jsonl": CORPUS_ROWS.map(json_lines) | st.lists(JSON, max_size=4).map(json_lines),
    "b.csv": CELLS.map(lambda cells: separated([["title", "text"], *cells])),
    "c.tsv": CELLS.map(lambda cells: separated([["id", "text"], *cells], delimiter="\t", quoting=csv.QUOTE_NONE)),
    "collection.tsv": st.lists(TEXT, max_size=5).map(
        lambda texts: utf8("".join(f"{number}\t{text}\n" for number, text in enumerate(texts)))
    ),
    "psgs_w100.tsv": CELLS.map(
        lambda cells: b"id\ttext\ttitle\n" + separated([["1", *row] for row in cells], delimiter="\t")
    ),
    "d.txt": LINES,
    "e.html": MARKUP,
    "f.md": MARKUP,
    "g.rst": LINES,
    "h.py": LINES,
    "i.parquet": CORPUS_ROWS.map(table),
}


@st.composite
def corpora(draw, forms: dict[str, st.SearchStrategy], may_pack: bool = True) -> Files:
    names = draw(st.lists(st.sampled_from(sorted(forms)), min_size=1, max_size=2, unique=True))
    files = {}
    for name in names:
        content = damaged(forms[name])
        if may_pack and not name.endswith(".parquet"):
            name, data = draw(packed(name, content))
        else:
            data = draw(content)
        files[name] = data
    return files


def sound(text: Any, where: str) -> None:
    assert isinstance(text, str), f"{where}: {text!r} is no text"
    text.encode("utf-8")


def only(folder: Path) -> Path:
    """The folder, or its one file."""
    files = list(folder.iterdir())
    return files[0] if len(files) == 1 else folder


# The readers, each with what it is given; what it raises is looked at by `one_example`


def read_source(folder: Path, options: dict[str, Any]) -> None:
    """trainers/data/readers.py, and the extraction and the chunker behind it."""
    documents = []
    for item in Source(str(only(folder)), **options):
        if isinstance(item, DataError):
            assert str(folder) in str(item), f"names no file: {item}"
            continue
        assert isinstance(item, Document)
        sound(item.text, item.id)
        assert "\0" not in item.text and item.id
        documents.append(item)
    assert len({document.id for document in documents}) == len(documents), "two documents have one id"
    config = PrepareConfig("", "")
    for chunked in chunk_batch(documents, cut_of(config), config.min_words):
        for chunk in chunked.chunks:
            sound(chunk, chunked.id)


SOURCE = st.fixed_dictionaries(
    {},
    optional={
        "title_column": st.just("title"),
        "rows_per_document": st.integers(2, 3),
        "text_documents": st.sampled_from(["file", "line", "paragraph"]),
        "kind": st.just("code"),
    },
)


def read_lines(folder: Path, _: Any) -> None:
    """No line of JSONL and no row of separated values is lost: each is a document or an error."""
    (file,) = folder.iterdir()
    content = file.read_bytes()
    items = list(Source(str(file)))
    if file.suffix == ".jsonl":
        lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
        # A line that is no UTF-8 cannot be blank.
        expected = sum(1 for line in lines if not _is_utf8(line) or line.decode().strip())
        assert len(items) == expected, f"{len(items)} items of {expected} lines"
    elif file.suffix == ".txt":
        expected = len(content.split(b"\n")) - content.endswith(b"\n") - (not content)
        items = list(Source(str(file), text_documents="line"))
        assert len(items) == expected, f"{len(items)} items of {expected} lines"
        kept = [item.text for item in items if isinstance(item, Document)]
        bare = content.removeprefix(b"\xef\xbb\xbf")
        assert all(utf8(text) in bare for text in kept)


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def read_prepare(folder: Path, method: Any) -> None:
    """`prepare` with --on-error skip: every document that was read is in the account."""
    out = folder.with_name(f"{folder.name}-out")
    config = PrepareConfig(str(folder), str(out), on_error="skip", group_size=2, min_words=1, **method)
    try:
        counts = prepare(config)["documents"]
        assert counts["read"] == sum(counts[name] for name in ("kept", "empty", "too_short", "duplicate", "error"))
        assert counts["kept"] == counts["train"] + counts["validation"]
        for group in load_groups(out):
            for text in group["texts"]:
                sound(text, str(out))
    finally:
        shutil.rmtree(out, ignore_errors=True)


def read_passages(folder: Path, _: Any) -> None:
    """What `search` and `embed` take for a corpus."""
    for name, text in iter_passages(only(folder)):
        sound(name, "an id")
        sound(text, name)


def read_beir(folder: Path, _: Any) -> None:
    """hub_cards/beir_folder.py"""
    found = load_beir_folder(folder)
    for texts in (found.corpus, found.queries):
        for name, text in texts.items():
            sound(name, "an id")
            sound(text, name)
    assert found.qrels.keys() == found.queries.keys()
    assert all(doc in found.corpus for docs in found.qrels.values() for doc in docs)


def read_training_set(folder: Path, negatives: str | None) -> None:
    """trainers/finetune_data.py"""
    source = str(only(folder))
    options = {"negatives": str(folder / negatives)} if negatives in os.listdir(folder) else {}
    found = load_training_set(source, **options)
    for text in (*found.queries, *found.documents):
        sound(text, source)
    assert len(found.queries) == len(set(found.queries)) == len(found.positives) == len(found.negatives) > 0
    for positives, given_negatives in zip(found.positives, found.negatives, strict=True):
        assert positives and not set(positives) & set(given_negatives)
        assert all(0 <= place < len(found.documents) for place in (*positives, *given_negatives))


def read_development_set(folder: Path, _: Any) -> None:
    """What fine-tuning is measured on."""
    found = load_development_set(str(only(folder)), "train", max_queries=2, max_documents=3)
    assert found.queries.keys() == found.relevant.keys()
    assert all(doc in found.corpus for docs in found.relevant.values() for doc in docs)


def read_groups(folder: Path, _: Any) -> None:
    """trainers/data/prepared.py: groups, as prepared and as released."""
    for group in load_groups(only(folder)):
        assert len(group["texts"]) == len(group["doc_ids"]) >= 2
        for text in (*group["texts"], *group["doc_ids"], group["source"]):
            sound(text, str(folder))


def read_sequences(folder: Path, _: Any) -> None:
    """trainers/data/prepared.py: RetroMAE's sequences."""
    for row in load_sequences(only(folder)):
        for text in row.values():
            sound(text, str(folder))


def read_yaml(folder: Path, _: Any) -> None:
    """trainers/arguments.py: the recipe, and its values as options."""
    (file,) = folder.iterdir()
    read_recipe(str(file))
    try:
        with redirect_stderr(io.StringIO()):
            parse_recipe((ModelArguments, DataArguments), [str(file), "--retriever_name_or_path", "x"])
    except (SystemExit, ValueError):  # these name the field, not the file
        pass


def read_weights(folder: Path, _: Any) -> None:
    """hub_cards/checkpoints.py"""
    model_type(folder)
    check_folder(folder)


# What each is given

QRELS = st.lists(st.tuples(CLEAN | st.just("q"), CLEAN | st.just("d"), st.integers(-1, 3)), max_size=4)


@st.composite
def beir_folders(draw, split: str = "test") -> Files:
    judged = draw(QRELS)
    docs = {doc for _, doc, _ in judged} | set(draw(st.lists(CLEAN, max_size=2)))
    lines = [f"{query}\t{doc}\t{grade}" for query, doc, grade in judged]
    corpus = json_lines([{"_id": doc, "title": draw(TEXT), "text": draw(TEXT)} for doc in sorted(docs)])
    queries = json_lines([{"_id": query, "text": draw(TEXT)} for query in sorted({query for query, *_ in judged})])
    header = draw(st.sampled_from(["", "query-id\tcorpus-id\tscore\n"]))
    return {
        "corpus.jsonl": draw(damaged(st.just(corpus))),
        "queries.jsonl": draw(damaged(st.just(queries))),
        f"qrels/{split}.tsv": draw(damaged(st.just(utf8(header + "\n".join(lines))))),
    }


@st.composite
def msmarco_folders(draw) -> Files:
    judged = draw(QRELS)
    docs, queries = ({row[place] for row in judged} for place in (1, 0))
    texts = {name: f"{name}\t{draw(CLEAN)}\n" for name in sorted(docs | queries)}
    files = [
        ("collection.tsv", "".join(texts[doc] for doc in sorted(docs))),
        ("queries.train.tsv", "".join(texts[query] for query in sorted(queries))),
        ("qrels.train.tsv", "".join(f"{query}\t0\t{doc}\t{grade}\n" for query, doc, grade in judged)),
        ("negatives.tsv", "".join(f"{query}\t{doc},{doc}\n" for query, doc, _ in judged)),
    ]
    return dict(draw(packed(name, damaged(st.just(utf8(content))))) for name, content in files)


TRAINING_ROWS = rows(
    {"query": mostly(TEXT, JSON), "positive": mostly(TEXT, JSON)}, negative=TEXT | st.lists(TEXT, max_size=2) | JSON
)
TRAINING = {
    "rows.jsonl": TRAINING_ROWS.map(json_lines),
    "rows.csv": CELLS.map(lambda cells: separated([["query", "positive"], *cells])),
    "rows.parquet": TRAINING_ROWS.map(table),
    "triples.tsv": st.lists(st.tuples(TEXT, TEXT, TEXT), max_size=4).map(
        lambda found: utf8("".join("\t".join(row) + "\n" for row in found))
    ),
}
TRAINING_FILES = st.sampled_from(sorted(TRAINING)).flatmap(lambda name: corpora({name: TRAINING[name]}))
TRAINING_FOLDERS = msmarco_folders() | beir_folders("train") | TRAINING_FILES
SHARD = "train-00000-of-00001.parquet"
RELEASED = st.lists(
    mostly(
        st.lists(TEXT, max_size=3) | st.fixed_dictionaries({"src": TEXT, "text": st.lists(TEXT, max_size=3)}), JSON
    ),
    max_size=5,
)
GROUPS = corpora({SHARD: GROUP_ROWS.map(table)}) | corpora({"groups.jsonl": RELEASED.map(json_lines)})
SEQUENCE_ROWS = rows({name: mostly(TEXT, st.none()) for name in ("text", "doc_id", "source")})
PREPARED = {**{name: FORMS[name] for name in ("a.jsonl", "d.txt", "f.md")}, SHARD: GROUP_ROWS.map(table)}
FIELDS = st.sampled_from(
    [
        "retriever_name_or_path",
        "pooling",
        "similarity_temperature",
        "v_norm",
        "train_sets",
        "train_weights",
        "max_length",
    ]
)
RECIPE = mostly(st.dictionaries(FIELDS, JSON, max_size=4), JSON).map(lambda value: utf8(yaml.safe_dump(value)))
WEIGHTS = st.just(safetensors.numpy.save({"a": np.ones((2, 3), "float32")}))


@st.composite
def weight_folders(draw) -> Files:
    shards = st.dictionaries(TEXT, mostly(st.just("model.safetensors"), TEXT | JSON), max_size=2)
    modules = st.lists(
        mostly(
            st.fixed_dictionaries({"type": st.just("sentence_transformers.models.Pooling"), "path": TEXT | JSON}), JSON
        ),
        max_size=3,
    )
    files = {
        "config.json": st.dictionaries(st.just("model_type") | TEXT, JSON, max_size=2).map(json_bytes),
        "modules.json": modules.map(json_bytes),
        "model.safetensors.index.json": st.fixed_dictionaries({"weight_map": mostly(shards, JSON)}).map(json_bytes),
        "model.safetensors": WEIGHTS,
        "pytorch_model.bin": st.binary(max_size=5),
    }
    chosen = draw(st.lists(st.sampled_from(sorted(files)), min_size=1, unique=True))
    return {name: draw(damaged(files[name])) for name in chosen}


def json_bytes(value: Any) -> bytes:
    return utf8(json.dumps(value))


READERS: dict[str, tuple[Callable[[Path, Any], None], st.SearchStrategy[Files], st.SearchStrategy]] = {
    "documents": (read_source, corpora(FORMS), SOURCE),
    "lines": (
        read_lines,
        st.sampled_from(["a.jsonl", "d.txt"]).flatmap(lambda name: corpora({name: FORMS[name]}, may_pack=False)),
        st.none(),
    ),
    "prepare": (read_prepare, corpora(FORMS), st.fixed_dictionaries({}, optional={"validation_share": st.just(0.3)})),
    "passages": (read_passages, corpora(PREPARED, may_pack=False) | beir_folders(), st.none()),
    "BEIR": (read_beir, beir_folders(), st.none()),
    "training sets": (read_training_set, TRAINING_FOLDERS, st.sampled_from([None, "negatives.tsv"])),
    "development sets": (read_development_set, TRAINING_FOLDERS, st.none()),
    "groups": (read_groups, GROUPS, st.none()),
    "sequences": (read_sequences, corpora({SHARD: SEQUENCE_ROWS.map(table)}), st.none()),
    "recipes": (read_yaml, st.fixed_dictionaries({"recipe.yaml": damaged(RECIPE)}), st.none()),
    "weights": (read_weights, weight_folders(), st.none()),
}


def one_example(read: Callable[[Path, Any], None], files: Files, options: Any, folder: Path) -> None:
    """Write the files, read them, and let the errors pass that say which file is at fault."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    faulthandler.dump_traceback_later(HANGS_AFTER, exit=True)
    try:
        read(folder, options)
    except (ValueError, OSError) as error:
        if str(folder) not in str(error):
            raise AssertionError(f"names no file: {error!r}") from error
    finally:
        faulthandler.cancel_dump_traceback_later()


def fuzz(name: str, seconds: float, scratch: Path) -> tuple[int, Exception | None]:
    """The number of examples that a reader was given in that time, and how it failed, if it did."""
    read, files, options = READERS[name]
    end, ran = time.monotonic() + seconds, 0

    @settings(
        max_examples=200,
        deadline=None,
        phases=[Phase.reuse, Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        database=DirectoryBasedExampleDatabase(ROOT / ".hypothesis" / "fuzz"),
    )
    @given(files, options)
    def examples(files, options):
        nonlocal ran
        if time.monotonic() > end and not failed:
            return
        ran += 1
        # A folder of its own each: `datasets` keeps what it read of a path.
        folder = Path(tempfile.mkdtemp(dir=scratch))
        try:
            one_example(read, files, options, folder)
        except BaseException:
            failed.append(folder)
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    failed: list[Path] = []
    examples.hypothesis.inner_test.__qualname__ = f"fuzz {name}"  # its key in the database
    while ran == 0 or time.monotonic() < end:
        try:
            examples()
        except Exception as error:
            return ran, error
    return ran, None


def main() -> int:
    seconds = float(os.environ.get("FUZZ_SECONDS", "300"))
    names = sys.argv[1:] or list(READERS)
    status = 0
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    with tempfile.TemporaryDirectory() as scratch:
        datasets.config.HF_DATASETS_CACHE = str(Path(scratch) / "cache")
        print(f"{seconds:g} s in all; an example that takes {HANGS_AFTER} s ends this, and is left in {scratch}.")
        for name in names:
            with open(os.devnull, "w") as devnull, redirect_stderr(devnull):
                stdout, sys.stdout = sys.stdout, devnull
                try:
                    ran, error = fuzz(name, seconds / len(names), Path(scratch))
                finally:
                    sys.stdout = stdout
            print(f"{name}: {ran} examples{', FAILED' if error else ''}", flush=True)
            if error is not None:
                status = 1
                traceback.print_exception(error, file=sys.stdout)
    return status


if __name__ == "__main__":
    sys.exit(main())
