"""What fine-tuning reads, in each format, and what it says to a file that is not as it should be."""

import gzip
import json

import pandas
import pytest

from tests.trainers.finetune_sets import make_task
from trainers.finetune_data import has_development_set, load_development_set, load_training_set


@pytest.fixture
def msmarco(tmp_path):
    """MS MARCO's files in miniature, some of them gzipped."""
    with gzip.open(tmp_path / "collection.tsv.gz", "wt") as file:
        file.write("10\tthe river\n20\ta title\tthe bridge\n30\tthe train\n40\tthe river\n")
    (tmp_path / "queries.train.tsv").write_text("1\twater\n2\tcrossing\n3\tnot judged\n")
    (tmp_path / "queries.dev.small.tsv").write_text("7\trails\n")
    (tmp_path / "qrels.train.tsv").write_text("1\t0\t10\t1\n2\t0\t20\t1\n2\t0\t30\t0\n")
    (tmp_path / "qrels.dev.small.tsv").write_text("7 0 30 1\n")
    (tmp_path / "qidpidtriples.train.full.2.tsv").write_text("1\t10\t30\n1\t10\t40\n2\t20\t30\n")
    return tmp_path


def texts(found, rows):
    return [[found.documents[position] for position in row] for row in rows]


def test_beir_folder_gives_positives_and_judged_negatives(tmp_path):
    found = load_training_set(str(make_task(tmp_path / "beir", size=20, negatives=2)))
    assert len(found.queries) == 15 and len(found.documents) == 20
    assert found.pairs == [(row, positives[0]) for row, positives in enumerate(found.positives)]
    for query, positives, negatives in zip(found.queries, found.positives, found.negatives, strict=True):
        first, _, second = query.split()
        assert {first, second} <= set(found.documents[positives[0]].split())
        assert len(negatives) == 2 and not set(negatives) & set(positives)


def test_msmarco_files_are_read_as_distributed(msmarco):
    found = load_training_set(str(msmarco))
    assert found.queries == ["water", "crossing"]
    # Two passages of the same text are one: what is relevant is no negative under another id.
    assert found.documents == ["the river", "a title the bridge", "the train"]
    assert texts(found, found.positives) == [["the river"], ["a title the bridge"]]
    assert texts(found, found.negatives) == [["the train"], ["the train"]]
    dev = load_development_set(str(msmarco))
    assert (dev.queries, dev.relevant) == ({"7": "rails"}, {"7": {"30"}})
    assert has_development_set(str(msmarco)) and not has_development_set(str(msmarco), "test")


@pytest.mark.parametrize("line", ["2\t10,30\n", "2 10 30\n", "2 Q0 10 1 9.5 bm25\n2 Q0 30 2 9.1 bm25\n"])
def test_file_of_negatives_replaces_the_triples(msmarco, line):
    (msmarco / "negatives.tsv").write_text(line)
    found = load_training_set(str(msmarco), negatives=str(msmarco / "negatives.tsv"))
    assert texts(found, found.negatives) == [[], ["the river", "the train"]]


ROWS = [
    {"query": "water", "positive": "the river", "negative": "the train"},
    {"query": "water", "positive": "the sea", "negative": None},
    {"query": "rails", "positive": "the train", "negative": "the river"},
]
EXPECTED = (["water", "rails"], [["the river", "the sea"], ["the train"]], [["the train"], ["the river"]])


@pytest.mark.parametrize(
    "name", ["rows.jsonl", "rows.jsonl.gz", "rows.parquet", "rows.csv", "tevatron.jsonl", "dpr.json"]
)
def test_rows_of_texts_go_by_the_names_in_use(tmp_path, name):
    path = tmp_path / name
    if name.startswith("rows.jsonl"):
        lines = "".join(json.dumps(row) + "\n" for row in ROWS)
        path.write_bytes(gzip.compress(lines.encode()) if name.endswith("gz") else lines.encode())
    elif name == "rows.parquet":
        pandas.DataFrame(ROWS).rename(columns={"negative": "negative_1"}).to_parquet(path)
    elif name == "rows.csv":
        pandas.DataFrame(ROWS).to_csv(path, index=False)
    elif name == "tevatron.jsonl":
        rows = [
            {"query": "water", "pos": ["the river", "the sea"], "neg": ["the train"]},
            {"query": "rails", "pos": ["the train"], "neg": ["the river"]},
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:

        def passages(*names):
            return [{"title": "the", "text": name} for name in names]

        rows = [
            {"question": "water", "positive_ctxs": passages("river", "sea"), "hard_negative_ctxs": passages("train")},
            {"question": "rails", "positive_ctxs": passages("train"), "hard_negative_ctxs": passages("river")},
        ]
        path.write_text(json.dumps(rows))
    found = load_training_set(str(path))
    assert (found.queries, texts(found, found.positives), texts(found, found.negatives)) == EXPECTED
    assert len(found.documents) == 3


def test_text_triples_and_a_corpus_beside_them(tmp_path):
    (tmp_path / "triples.tsv").write_text("water\tthe river\tthe train\n")
    (tmp_path / "psgs.tsv").write_text('id\ttext\ttitle\n1\t"a ""red"" bus"\tRoads\n2\tthe river\t\n')
    found = load_training_set(str(tmp_path / "triples.tsv"), corpus=str(tmp_path / "psgs.tsv"))
    assert found.documents == ['Roads a "red" bus', "the river", "the train"]
    assert (found.positives, found.negatives) == ([[1]], [[2]])


def test_development_set_is_cut_to_judged_and_other_documents(tmp_path):
    folder = str(make_task(tmp_path / "beir", size=40, negatives=1))
    whole = load_development_set(folder)
    assert (len(whole.queries), len(whole.corpus)) == (10, 40)
    cut = load_development_set(folder, max_queries=3, max_documents=12, seed=1)
    assert (len(cut.queries), len(cut.corpus)) == (3, 12)
    assert set().union(*cut.relevant.values()) <= cut.corpus.keys()
    assert cut == load_development_set(folder, max_queries=3, max_documents=12, seed=1)
    assert cut.queries != load_development_set(folder, max_queries=3, max_documents=12, seed=2).queries


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("qrels.train.tsv", "1\t0\t10\n", "qrels.train.tsv, line 1: expected query id, 0, passage id and grade"),
        ("qrels.train.tsv", "1\t0\t99\t1\n", "names the document 99, which is not in"),
        ("qrels.train.tsv", "99\t0\t10\t1\n", "qrels.train.tsv names the query 99, which has no text"),
        ("qrels.train.tsv", "1\t0\t10\t0\n", "no query with a relevant document"),
        ("queries.train.tsv", "1 water\n", "queries.train.tsv, line 1: expected an id and, behind a tab, a text"),
        ("qidpidtriples.train.full.2.tsv", "1\t10\n", "line 1: 2 fields where a query's id and those of two passages"),
        ("qidpidtriples.train.full.2.tsv", "1\t10\t99\n", "names the document 99"),
        ("qrels.train.tsv", "1\t0\t10\t²\n", "qrels.train.tsv, line 1: expected query id, 0, passage id and grade"),
        ("collection.tsv.gz", "no gzip", "collection.tsv.gz: cannot be read to its end"),
        (
            "collection.tsv.gz",
            gzip.compress(b"1\tx\n" * 99, mtime=0)[:20] + b"\0\xff" * 9,
            "collection.tsv.gz: cannot be read to",
        ),
    ],
)
def test_bad_files_are_named_with_the_line(msmarco, file, content, message):
    (msmarco / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        load_training_set(str(msmarco))
    if "qrels" in file and "no query with" not in message:
        with pytest.raises(ValueError, match=message):
            load_development_set(str(msmarco), "train")


def test_missing_sources_are_named(msmarco, tmp_path_factory):
    (msmarco / "queries.train.tsv").unlink()
    with pytest.raises(FileNotFoundError, match="but no queries.train.tsv"):
        load_training_set(str(msmarco))
    with pytest.raises(FileNotFoundError, match="no file nowhere.tsv of negatives"):
        load_training_set(str(make_task(tmp_path_factory.mktemp("a") / "b", size=8)), negatives="nowhere.tsv")
    other = tmp_path_factory.mktemp("other")
    (other / "a.jsonl").write_text('{"question": "x", "body": "y"}\n')
    with pytest.raises(ValueError, match="columns question, body, but none named positive"):
        load_training_set(str(other / "a.jsonl"))
    (other / "b.txt").write_text("x")
    with pytest.raises(ValueError, match="no file to train on"):
        load_training_set(str(other / "b.txt"))
    with pytest.raises(ValueError, match="nowhere is no BEIR or MS MARCO folder, and no file or dataset that loads"):
        load_training_set("nowhere")
    with pytest.raises(ValueError, match="names documents by id"):
        load_training_set(str(other / "a.jsonl"), negatives="x")


def test_a_stray_quote_in_csv_is_named_and_swallows_no_row(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text('query,positive\nwater,"the ""big"" river, and\nits bank"\nsay "hi",the sea\n')
    found = load_training_set(str(file))
    assert found.queries == ["water", 'say "hi"'] and found.documents[0] == 'the "big" river, and\nits bank'
    # The third line's quote closes at the fifth's: read leniently, that would be one row of three.
    file.write_text('query,positive\nwater,the river\nrails,"the train\nbank,the bridge\nbus,"the road\n')
    with pytest.raises(ValueError, match=r"rows.csv, line 3: not a row of CSV .*mend its quotes"):
        load_training_set(str(file))
    file.write_text("query,positive\nwater,the river, the sea\n")
    with pytest.raises(ValueError, match="line 2: 3 fields where the header has 2"):
        load_training_set(str(file))
    file.write_bytes(b"query,positive\nwater,the \xff river\n")
    with pytest.raises(ValueError, match="line 2"):
        load_training_set(str(file))
    file.write_text("query,positive\n,the river\n")
    with pytest.raises(ValueError, match="rows.csv, line 2: a query and at least one positive are needed"):
        load_training_set(str(file))
    file.write_text("")
    with pytest.raises(ValueError, match="none named query"):
        load_training_set(str(file))
