import json
import os

import pyarrow
import pyarrow.parquet as parquet
import pytest

from hub_cards.search import print_hits, read_passages, search, split_passages


def test_search_finds_the_passage(minilm, beir_folder, capsys):
    hits = search(minilm, beir_folder, "which machine moves on rails?", top_k=2)
    assert [hit.id for hit in hits][0] == "train" and len(hits) == 2
    assert 1 >= hits[0].score > hits[1].score
    print_hits(hits)
    printed = capsys.readouterr().out
    assert f"1. {hits[0].score:.3f}  train" in printed and "A train runs on rails" in printed


def test_scores_are_the_models_own(tiny_model, beir_folder):
    hits = search(tiny_model, beir_folder / "corpus.jsonl", "salty fish", top_k=100)
    assert len(hits) == 5
    expected = tiny_model.encode_document([hit.text for hit in hits]) @ tiny_model.encode_query("salty fish")
    assert [hit.score for hit in hits] == pytest.approx(expected.tolist(), abs=1e-5)
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)


def test_reads_a_prepared_set(tmp_path):
    for split, doc in (("train", "a"), ("validation", "b")):
        rows = [{"texts": [f"{doc} one", f"{doc} two"], "doc_ids": [doc, doc], "source": "s"}]
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"{split}-00000-of-00001.parquet")
    expected = [("a", "a one"), ("a", "a two"), ("b", "b one"), ("b", "b two")]
    assert read_passages(tmp_path) == expected
    assert read_passages(tmp_path / "train-00000-of-00001.parquet") == expected[:2]
    parquet.write_table(pyarrow.table({"text": ["x"]}), tmp_path / "other.parquet")
    with pytest.raises(
        ValueError, match=r"other\.parquet is no .*it has the columns text, but a prepared set has texts"
    ):
        read_passages(tmp_path)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"texts": ["a", None], "doc_ids": ["d", "d"]}, "row 1 has no texts with an id each"),
        ({"texts": ["a", "b"], "doc_ids": ["d"]}, "row 1 has no texts with an id each"),
        ({"texts": None, "doc_ids": ["d"]}, "row 1 has no texts with an id each"),
        ({"texts": [1, 2], "doc_ids": ["d", "d"]}, "row 1 has no texts with an id each"),
    ],
)
def test_a_prepared_set_that_holds_something_else_is_named(tmp_path, row, message):
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "set.parquet")
    with pytest.raises(ValueError, match=rf"set\.parquet is no prepared set that can be read \({message}"):
        read_passages(tmp_path)


def test_a_damaged_prepared_set_is_named(tmp_path):
    parquet.write_table(pyarrow.table({"texts": [["a"]], "doc_ids": [["d"]]}), tmp_path / "set.parquet")
    whole = (tmp_path / "set.parquet").read_bytes()
    for content in (b"", whole[:-20], whole[:30] + b"\0\0\xff" + whole[33:]):
        (tmp_path / "set.parquet").write_bytes(content)
        with pytest.raises(ValueError, match=r"set\.parquet is no prepared set that can be read"):
            read_passages(tmp_path)


def test_names_and_marks_that_could_not_be_stored(tmp_path):
    """Byte order marks are no text, and a file's name that is not UTF-8 makes ids that are."""
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_bytes(b"\xef\xbb\xbfcoffee")
    (tmp_path / "lines.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "tea"}\n')
    assert read_passages(tmp_path) == [("caf\\udce9.txt#1", "coffee"), ("lines.jsonl#1", "tea")]
    assert read_passages(tmp_path / os.fsdecode(b"caf\xe9.txt")) == [("caf\\udce9.txt#1", "coffee")]


def test_reads_a_folder_of_text(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.md").write_text("# Title\n\nBody.")
    (tmp_path / "a.txt").write_text("First.\n\nSecond.")
    (tmp_path / "c.jsonl").write_text('{"text": "line one"}\n{"_id": "x", "title": "T", "text": "line two"}\n')
    (tmp_path / ".hidden").write_text("hidden")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\x00\x01")
    assert read_passages(tmp_path) == [
        ("a.txt#1", "First.\n\nSecond."),
        ("c.jsonl#1", "line one"),
        ("c.jsonl#x", "T line two"),
        ("sub/b.md#1", "# Title\n\nBody."),
    ]
    assert read_passages(tmp_path / "a.txt") == [("a.txt#1", "First.\n\nSecond.")]
    assert read_passages(tmp_path / "c.jsonl") == [("1", "line one"), ("x", "T line two")]


def test_what_cannot_be_read_is_an_error(tiny_model, tmp_path):
    with pytest.raises(FileNotFoundError, match="no file or folder .*nowhere to search in"):
        read_passages(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds no text"):
        read_passages(tmp_path)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8 text"):
        read_passages(tmp_path / "latin.txt")
    (tmp_path / "bad.jsonl").write_text(json.dumps({"_id": 1}))
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 1"):
        read_passages(tmp_path / "bad.jsonl")
    with pytest.raises(ValueError, match="query is empty"):
        search(tiny_model, tmp_path, " ")
    with pytest.raises(ValueError, match="top_k must be 1 or more"):
        search(tiny_model, tmp_path, "x", top_k=0)


def test_split_passages():
    assert split_passages("one two\n\nthree\n \nfour five six", 3) == ["one two\n\nthree", "four five six"]
    assert split_passages("one two three four five", 2) == ["one two", "three four", "five"]
    assert split_passages("def f():\n    return 1\n\n    # note\n", 100) == ["def f():\n    return 1\n\n    # note"]
    assert split_passages("\n\n  \n") == []
    long = split_passages("図" * 5000)
    assert len(long) == 3 and "".join(long) == "図" * 5000 and max(map(len, long)) == 2400


def test_a_long_text_is_cut_in_the_print(capsys):
    from hub_cards.search import Hit

    print_hits([Hit(0.5, "code.py#1", "\n".join(f"line [{i}]" for i in range(40)))])
    printed = capsys.readouterr().out
    assert "line [7] …" in printed and "line [8]" not in printed
