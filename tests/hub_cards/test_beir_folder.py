import pytest

from hub_cards.beir_folder import load_beir_folder


def test_reads_texts_with_titles_and_judged_queries_only(beir_folder):
    found = load_beir_folder(beir_folder)
    assert found.corpus["apple"] == "Apple An apple is a round fruit that grows on a tree."
    assert found.corpus["train"] == "A train runs on rails between two stations."
    assert list(found.queries) == ["q1", "q2"]
    assert found.qrels == {"q1": {"apple": 2, "banana": 1}, "q2": {"plane": 1, "ocean": 0}}


def test_qrels_header_is_optional(beir_folder):
    file = beir_folder / "qrels" / "test.tsv"
    expected = load_beir_folder(beir_folder).qrels
    file.write_text(file.read_text().split("\n", 1)[1])
    assert load_beir_folder(beir_folder).qrels == expected


def test_another_split(beir_folder):
    (beir_folder / "qrels" / "dev.tsv").write_text("query-id\tcorpus-id\tscore\nq3\tocean\t1\n")
    assert list(load_beir_folder(beir_folder, "dev").queries) == ["q3"]


@pytest.mark.parametrize("name", ["corpus.jsonl", "queries.jsonl", "qrels/test.tsv"])
def test_missing_file_is_named(beir_folder, name):
    (beir_folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"no BEIR-format folder: {name} not found"):
        load_beir_folder(beir_folder)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("corpus.jsonl", "", r"corpus\.jsonl is empty"),
        ("corpus.jsonl", '{"_id": "apple", "text": "x"}\n{"_id": \n', r"corpus\.jsonl, line 2"),
        ("corpus.jsonl", '{"_id": "a", "title": "no text"}\n', r'line 1: each line must be an object with "_id"'),
        ("corpus.jsonl", '{"_id": "a", "text": "x"}\n{"_id": "a", "text": "y"}\n', "line 2: the _id 'a' occurs a sec"),
        ("queries.jsonl", '{"_id": "q1", "text": "x"}\n', r"names 1 ids that are not in queries\.jsonl \(such as q2"),
        ("corpus.jsonl", '{"_id": "apple", "text": "x"}\n', r"names 3 ids that are not in corpus\.jsonl \(such as b"),
        ("qrels/test.tsv", "query-id\tcorpus-id\tscore\n", "has no judgement"),
        ("qrels/test.tsv", "query-id\tcorpus-id\tscore\nq1\tapple\t0\n", "no document is relevant"),
        ("qrels/test.tsv", "query-id\tcorpus-id\tscore\nq1\tapple\thigh\n", r"test\.tsv, line 2: expected query-id"),
        ("qrels/test.tsv", "query-id\tcorpus-id\tscore\nq1 0 apple 1\n", r"test\.tsv, line 2: expected query-id"),
        ("qrels/test.tsv", "q1\t0\tapple\t1\nq2\tplane\t1\n", r"test\.tsv, line 1: expected query-id"),
        ("qrels/test.tsv", "q1\tapple\t1.0\nq2\tplane\t1\n", r"test\.tsv, line 1: expected query-id"),
        ("qrels/test.tsv", "q1\tapple\t1\nq1\tapple\t0\n", r"line 2: apple is judged for q1 a second time"),
        ("corpus.jsonl", '{"_id": null, "text": "x"}\n', r'line 1: each line must be an object with "_id"'),
        ("corpus.jsonl", '{"_id": "a", "title": ["t"], "text": "x"}\n', 'line 1: "title" must be text'),
        ("corpus.jsonl", '{"_id": "a", "text": "\\ud800"}\n', "line 1: the text or its _id holds halves of surrogate"),
        ("corpus.jsonl", '{"_id": "\\ud800", "text": "x"}\n', "line 1: the text or its _id holds halves of surrogate"),
        (
            "corpus.jsonl",
            '{"_id": "a", "title": "\\ud800", "text": "x"}\n',
            "line 1: the text or its _id holds halves",
        ),
        ("corpus.jsonl", "[" * 10_000, r"corpus\.jsonl, line 1: maximum recursion depth"),
        ("qrels/test.tsv", "q1\tapple\t1\nq1\t" + "x" * 200_000 + "\t1\n", "names 1 ids that are not in corpus"),
    ],
)
def test_bad_content_is_one_clear_error(beir_folder, name, content, message):
    (beir_folder / name).write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        load_beir_folder(beir_folder)
    assert "\n" not in str(error.value)


def test_a_byte_order_mark_is_no_content(beir_folder):
    expected = load_beir_folder(beir_folder)
    for name in ("corpus.jsonl", "queries.jsonl", "qrels/test.tsv"):
        (beir_folder / name).write_bytes(b"\xef\xbb\xbf" + (beir_folder / name).read_bytes())
    found = load_beir_folder(beir_folder)
    assert (found.corpus, found.queries, found.qrels) == (expected.corpus, expected.queries, expected.qrels)


@pytest.mark.parametrize(
    ("name", "content"),
    [("corpus.jsonl", b'{"_id": "a", "text": "caf\xe9"}\n'), ("qrels/test.tsv", b"q1\tcaf\xe9\t1\n")],
)
def test_not_utf8(beir_folder, name, content):
    (beir_folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name} is not UTF-8"):
        load_beir_folder(beir_folder)
