import csv
import gzip
import json
import os
import shutil
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainers.data.readers import DataError, Document, Source, html_to_text


def read(source, **options) -> list[Document]:
    items = list(Source(str(source), **options))
    for item in items:
        if isinstance(item, DataError):
            raise item
    return items


def texts(source, **options) -> list[str]:
    return [document.text for document in read(source, **options)]


def error(source, **options) -> str:
    with pytest.raises(DataError) as caught:
        read(source, **options)
    return str(caught.value)


# Tables

ROWS = [{"text": 'one, "quoted" 中', "n": 1}, {"text": "two\tor\nthree", "n": 2}, {"text": "", "n": 3}]


def write_table(path: Path, rows) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        open_ = gzip.open if path.suffix == ".gz" else open
        with open_(path, "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz", "t.ndjson", "t.json", "t.parquet", "t.csv"])
def test_tables(tmp_path, name):
    documents = read(write_table(tmp_path / name, ROWS))
    assert [document.text for document in documents] == [row["text"] for row in ROWS]
    assert {document.kind for document in documents} == {"prose"}
    lines = [2, 4, 5] if name.endswith(".csv") else [1, 2, 3]  # a record of CSV may take several lines
    assert [document.id for document in documents] == [f"{name}:{line}" for line in lines]


def test_tab_separated_values_have_no_quoting(tmp_path):
    (tmp_path / "t.tsv").write_text('id\ttext\n1\t"not closed\n2\ttwo, three\n', encoding="utf-8")
    assert texts(tmp_path / "t.tsv") == ['"not closed', "two, three"]


def test_text_column_and_kind(tmp_path):
    path = write_table(tmp_path / "t.jsonl", [{"content": "x = 1"}])
    assert read(path, text_column="content", kind="code") == [Document("t.jsonl:1", "x = 1", "code")]


@pytest.mark.parametrize("name", ["t.jsonl", "t.parquet", "t.csv"])
def test_a_missing_text_column_names_those_that_exist(tmp_path, name):
    path = write_table(tmp_path / name, [{"title": "a", "body": "b"}])
    message = error(path)
    assert str(path) in message
    assert "'text'" in message and "'title', 'body'" in message and "--text-column" in message


def test_blank_lines_and_a_byte_order_mark_are_no_documents(tmp_path):
    (tmp_path / "t.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n{"text": "b"}')
    assert texts(tmp_path / "t.jsonl") == ["a", "b"]
    (tmp_path / "t.csv").write_bytes(b"\xef\xbb\xbftext\r\na\r\n\r\nb\r\n")
    assert texts(tmp_path / "t.csv") == ["a", "b"]
    (tmp_path / "t.md").write_bytes(b"\xef\xbb\xbf# a")
    assert texts(tmp_path / "t.md") == ["# a"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"text": "cut', "not JSON"),
        (b'{"text": ' + b"1" * 5000 + b"}", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'["a", "b"]', "a JSON list where an object is needed"),
        (b'{"text": 7}', "holds int, not text"),
        (b'{"text": "caf\xe9"}', "not UTF-8"),
        (b'{"text": "\\ud83d"}', "not UTF-8"),
        (b'{"body": "x"}', "no column 'text'"),
    ],
)
def test_a_bad_jsonl_line_is_an_error_with_file_and_line(tmp_path, line, says):
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b'\n{"text": "good too"}\n')
    before, bad, after = Source(str(path))
    assert (before.text, after.text) == ("good", "good too")
    assert isinstance(bad, DataError)
    assert str(bad).startswith(f"{path}, line 2") and says in str(bad)


def test_null_is_an_empty_document(tmp_path):
    assert texts(write_table(tmp_path / "t.jsonl", [{"text": None}])) == [""]
    assert texts(write_table(tmp_path / "t.parquet", [{"text": None}, {"text": "a"}])) == ["", "a"]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (b'"unclosed\n', "not a row of CSV"),
        (b"caf\xe9,1\n", "not UTF-8"),
        (b"a,1,2\n", "3 fields"),
        (b"a\n", "1 fields"),
    ],
)
def test_a_bad_csv_row_is_an_error_with_file_and_line(tmp_path, row, says):
    path = tmp_path / "t.csv"
    path.write_bytes(b"text,n\ngood,1\n" + row)
    good, bad = Source(str(path))
    assert good.text == "good"
    assert str(bad).startswith(f"{path}, line 3") and says in str(bad)


def test_csv_goes_on_after_a_bad_row(tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(b'text,n\ncaf\xe9,1\n"a"b,1\nlast,1\n')
    items = list(Source(str(path)))
    assert [isinstance(item, DataError) for item in items] == [True, True, False]
    assert items[-1].text == "last"


def test_a_csv_field_may_be_long(tmp_path):
    (tmp_path / "t.csv").write_text('text\n"' + "a b\n" * 100_000 + '"\n')
    assert list(map(len, texts(tmp_path / "t.csv"))) == [400_000]
    assert csv.field_size_limit() == 131_072  # a setting of the whole process, put back


@pytest.mark.parametrize("name", ["t.parquet", "t.jsonl.gz"])
def test_a_damaged_file_is_an_error(tmp_path, name):
    path = write_table(tmp_path / name, [{"text": f"text {index}"} for index in range(1000)])
    path.write_bytes(path.read_bytes()[:-100])
    assert str(path) in error(path)


def test_bad_bytes_in_a_parquet_row_are_an_error_with_file_and_row(tmp_path):
    path = tmp_path / "t.parquet"
    column = pa.array([b"one", b"caf\xe9", b"three"], pa.binary()).cast(pa.string(), safe=False)
    pq.write_table(pa.table({"text": column}), path)
    first, bad, last = Source(str(path))
    assert (first.text, last.text) == ("one", "three")
    assert str(bad).startswith(f"{path}, row 2: bytes that are not UTF-8")


# Texts, pages and source files


def test_a_text_file_alone_has_one_document_a_line(tmp_path):
    (tmp_path / "t.txt").write_text("one\ntwo\n\n", encoding="utf-8")
    assert [document.id for document in read(tmp_path / "t.txt")][:2] == ["t.txt:1", "t.txt:2"]
    assert [text.strip() for text in texts(tmp_path / "t.txt")][:2] == ["one", "two"]


def test_a_text_file_alone_with_blank_lines_has_one_document_a_paragraph(tmp_path):
    path = tmp_path / "t.txt"
    path.write_text("\none\nmore\n  \n\ntwo\n", encoding="utf-8")
    assert [(x.id, x.text) for x in read(path)] == [("t.txt:2", "one\nmore\n"), ("t.txt:6", "two\n")]
    assert len(read(path, text_documents="file")) == 1
    assert "two\n" in texts(path, text_documents="line")


def test_bad_bytes_in_text(tmp_path):
    path = tmp_path / "t.txt"
    path.write_bytes(b"one\ncaf\xe9\nthree\n")
    first, bad, last = Source(str(path))
    assert (first.text, last.text) == ("one\n", "three\n")
    assert str(bad).startswith(f"{path}, line 2: bytes that are not UTF-8") and "iconv" in str(bad)
    path.write_bytes(b"one\n\ntwo\ncaf\xe9\nthree\n\nfour\n")
    items = list(Source(str(path)))
    assert [isinstance(item, DataError) for item in items] == [False, True, False]
    assert str(items[1]).startswith(f"{path}, line 4")
    assert str(path) + ", line 4" in error(path, text_documents="file")


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "corpus"
    for name, text in {
        "b.md": "# Title\n\nText.",
        "a.rst": "Title\n=====",
        "sub/page.html": "<p>One</p>",
        "sub/mod.py": "def f():\n    pass\n",
        "sub/notes.txt": "one\n\ntwo",
        "sub/rows.jsonl": '{"text": "row"}\n',
        "sub/package.json": "{}",
        "image.png": "x",
        ".git/config.md": "hidden",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


def test_a_folder_is_read_in_order_each_file_by_its_suffix(folder):
    source = Source(str(folder))
    assert [(x.id, x.kind) for x in source] == [
        ("a.rst", "prose"),
        ("b.md", "prose"),
        ("sub/mod.py", "code"),
        ("sub/notes.txt", "prose"),
        ("sub/page.html", "html"),
        ("sub/rows.jsonl:1", "prose"),
    ]
    assert source.ignored_files == {".png": 1, ".json": 1}


def test_include_and_kind_in_a_folder(folder):
    assert [x.id for x in read(folder, include="*.py")] == ["sub/mod.py"]
    assert {x.kind for x in read(folder, kind="code")} == {"code"}
    assert {x.kind for x in read(folder, kind="prose")} == {"prose", "html"}


def test_of_a_beir_folder_the_corpus_alone_is_read_and_asked_for(tmp_path):
    for name in ("corpus", "queries"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"_id": "1", "text": "{name}"}}\n')
    with pytest.raises(DataError, match="BEIR's format.* name its corpus, .*corpus.jsonl .*--title-column title"):
        read(tmp_path)
    assert [x.text for x in read(tmp_path / "corpus.jsonl")] == ["corpus"]
    assert [x.text for x in read(tmp_path, include="corpus.jsonl")] == ["corpus"]


def test_bad_bytes_in_a_page(folder):
    (folder / "b.md").write_bytes(b"one\ntwo\ncaf\xe9")
    assert error(folder).startswith(f"{folder / 'b.md'}, line 3: bytes that are not UTF-8")


def test_unknown_formats_and_missing_sources(tmp_path):
    (tmp_path / "t.docx").write_text("x")
    assert ".docx" in error(tmp_path / "t.docx")
    assert "does not exist" in error(tmp_path / "nothing.jsonl")


def test_html_to_text():
    page = """<html><head><title>T</title><style>p {}</style></head><body><nav>menu</nav><h1>Hi <b>th</b>ere</h1>
    <p>One
       two.<br>Three &amp; &#x4e2d;</p><ul><li>a<li>b</ul><pre>def f():\n    return  1\n</pre><script>x()</script>
    <table><tr><td>1</td><td>2</td></tr></table>tail<footer>(c)</footer></body></html>"""
    blocks = ["Hi there", "One two.", "Three & 中", "a", "b", "def f():\n    return  1", "1 2", "tail"]
    assert html_to_text(page) == "\n\n".join(blocks)
    assert html_to_text("<div>around</div><main>in<div>side</div></main>") == "in\n\nside"
    assert html_to_text("") == ""
    assert html_to_text("<html role=navigation><body>a < b") == "a < b"
    assert html_to_text("<nav><form><button>x</button></form><nav>y</nav></nav>z" + "<div>" * 5000) == "z"


# Datasets


def test_datasets_stream(tmp_path):
    write_table(tmp_path / "train.jsonl", [{"text": f"row {index}", "n": index} for index in range(5)])
    write_table(tmp_path / "test.jsonl", [{"text": "other"}])
    documents = list(Source(str(tmp_path)).read_dataset(str(tmp_path)))
    assert documents == [Document(f"train:{index + 1}", f"row {index}", "prose") for index in range(5)]
    other = Source("", dataset_split="test").read_dataset(str(tmp_path))
    assert [x.text for x in other] == ["other"]
    (bad,) = Source("", text_column="body").read_dataset(str(tmp_path))
    assert "no column 'body'; choose one of 'text', 'n'" in str(bad)


def test_a_dataset_that_does_not_load_is_an_error(monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    assert "nobody/nothing is neither a file or folder here nor a dataset" in error("nobody/nothing")


# Titles, rows that make one document, and the files of MS MARCO and of DPR


def test_a_title_is_put_before_the_text_unless_it_is_hardly_one(tmp_path):
    rows = [{"title": "Title", "text": "Text."}, {"title": "-", "text": "Other."}, {"title": None, "text": "Third."}]
    for name in ("t.jsonl", "t.parquet", "t.csv"):
        path = write_table(tmp_path / name, rows)
        assert texts(path, title_column="title") == ["Title Text.", "Other.", "Third."]
        assert texts(path) == ["Text.", "Other.", "Third."]
        message = error(path, title_column="headline")
        assert "no column 'headline'" in message and "--title-column" in message


def test_consecutive_rows_make_one_document(tmp_path):
    for name in ("a.jsonl", "b.jsonl"):
        write_table(tmp_path / name, [{"text": f"{name[0]}{index} ."} for index in range(5)])
    (tmp_path / "c.txt").write_text("c0\nc1\nc2\n")
    (tmp_path / "d.md").write_text("page")
    documents = read(tmp_path, rows_per_document=2, text_documents="line")
    assert [(document.id, document.text) for document in documents] == [
        ("a.jsonl:1", "a0 .\na1 ."),
        ("a.jsonl:3", "a2 .\na3 ."),
        ("a.jsonl:5", "a4 ."),
        ("b.jsonl:1", "b0 .\nb1 ."),
        ("b.jsonl:3", "b2 .\nb3 ."),
        ("b.jsonl:5", "b4 ."),
        ("c.txt:1", "c0\nc1"),
        ("c.txt:3", "c2"),
        ("d.md", "page"),
    ]


MSMARCO = {
    "corpus.tsv": ("0\t-\tThe presence.\n1\tManhattan\tIts bomb.\n", ["The presence.", "Manhattan Its bomb."]),
    "msmarco-docs.tsv": (
        "D1555982\thttp://a.de/x\tThe hippo\tIt is large.\nD301595\thttps://b.de\tChild\tA child.\n",
        ["The hippo It is large.", "Child A child."],
    ),
    "psgs_w100.tsv": (
        'id\ttext\ttitle\n1\t"Aaron ( or ; ""Ahärôn"") is a prophet."\tAaron\n2\tNo quotes, here.\t"""A"" film"\n',
        ['Aaron Aaron ( or ; "Ahärôn") is a prophet.', '"A" film No quotes, here.'],
    ),
}


@pytest.mark.parametrize("name", ["corpus.tsv", "msmarco-docs.tsv", "psgs_w100.tsv"])
@pytest.mark.parametrize("gzipped", [False, True])
def test_distribution_files_with_titles(tmp_path, name, gzipped):
    content, expected = MSMARCO[name]
    path = tmp_path / (name + ".gz" * gzipped)
    with (gzip.open if gzipped else open)(path, "wt", encoding="utf-8") as file:
        file.write(content)
    documents = read(path, title_column="title")
    assert [document.text for document in documents] == expected
    first = 2 if name == "psgs_w100.tsv" else 1
    assert [document.id for document in documents] == [f"{path.name}:{first}", f"{path.name}:{first + 1}"]


def test_distribution_files_without_titles(tmp_path):
    (tmp_path / "collection.tsv").write_text('0\tThe "presence.\n1\tThe Manhattan.\n', encoding="utf-8")
    assert read(tmp_path / "collection.tsv") == [
        Document("collection.tsv:1", 'The "presence.', "prose"),
        Document("collection.tsv:2", "The Manhattan.", "prose"),
    ]
    assert "no column 'title'; choose one of 'id', 'text'" in error(tmp_path / "collection.tsv", title_column="title")
    (tmp_path / "collection.tsv").write_text("0\tThe presence.\n1\ta\tb\n", encoding="utf-8")
    assert "line 2: 3 fields where line 1 has 2" in error(tmp_path / "collection.tsv")


def test_the_second_version_of_ms_marco(tmp_path):
    passage = {"pid": "msmarco_passage_00_0", "passage": "One.", "spans": "(0,4)", "docid": "msmarco_doc_00_0"}
    with gzip.open(tmp_path / "msmarco_passage_00.gz", "wt") as file:
        file.write(json.dumps(passage) + "\n")
    assert texts(tmp_path / "msmarco_passage_00.gz", text_column="passage") == ["One."]
    assert texts(tmp_path, text_column="passage") == ["One."]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("qrels.train.tsv", "1185869\t0\t0\t1\n"),
        ("qidpidtriples.tsv", "1\t2\t3\n"),
        ("top1000.tsv", "1\t2\ta b\tc d\n"),
    ],
)
def test_a_table_of_numbers_holds_no_text(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    assert "no column 'text'" in error(tmp_path / name)


# What hides or destroys text


def test_a_quote_that_nothing_closes_costs_its_own_line_only(tmp_path):
    path = tmp_path / "t.csv"
    rows = [f"text {index},{index}\n" for index in range(60)]
    rows[5] = '"text 5,5\n'
    path.write_text("text,n\n" + "".join(rows))
    items = list(Source(str(path)))
    (bad,) = (item for item in items if isinstance(item, DataError))
    assert str(bad).startswith(f"{path}, line 7: not a row of CSV") and "on line 61" in str(bad)
    assert [item.id for item in items if isinstance(item, Document)] == [
        f"t.csv:{line}" for line in range(2, 62) if line != 7
    ]


def test_a_wrong_number_of_fields_names_all_lines_of_the_row(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text('text,n\n"one\ntwo\nthree"\nfour,4\n')
    bad, good = Source(str(path))
    assert str(bad).startswith(f"{path}, lines 2 to 4: 1 fields") and good.text == "four"


def test_stray_quotes_merge_no_rows_of_dprs_files(tmp_path):
    path = tmp_path / "t.tsv"
    path.write_text('id\ttext\ttitle\n1\t"one\tA\n2\ttwo"\tB\n3\t"three" 3\tC\n4\tfour "4"\tD\n')
    items = list(Source(str(path)))
    assert [str(item).split(":")[0] for item in items[::2]] == [f"{path}, line 2", f"{path}, line 4"]
    assert [item.text for item in items[1::2]] == ['two"', 'four "4"']


@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.jsonl", "t.txt", "t.md", "t.parquet"])
def test_nul_characters_are_an_error_with_file_and_line(tmp_path, name):
    path = tmp_path / name
    if name == "t.parquet":
        write_table(path, [{"text": "good"}, {"text": "b\0d"}])
    else:
        path.write_bytes({"t.csv": b"text\n", "t.tsv": b"id\ttext\n1\t"}.get(name, b'{"text": "good"}\n') + b"b\0d\n")
    bad = [item for item in Source(str(path)) if isinstance(item, DataError)]
    assert len(bad) == 1 and ", row 2: " if name == "t.parquet" else ", line 2: " in str(bad[0])
    assert str(bad[0]).startswith(str(path)) and "NUL" in str(bad[0])


def test_an_escaped_nul_is_an_error_too(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"text": "a\\u0000b"}\n')
    assert error(path).startswith(f"{path}, line 1: NUL characters")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.jsonl", "t.txt", "t.md"])
def test_utf_16_is_an_error(tmp_path, name, encoding):
    path = tmp_path / name
    content = {"t.csv": "text,n\none,1\n", "t.tsv": "text\tn\none\t1\n", "t.jsonl": '{"text": "one"}\n'}
    path.write_bytes(content.get(name, "one\ntwo\n").encode(encoding))
    message = error(path)
    assert message.startswith(f"{path}, line 1") and "UTF-8" in message and message.isprintable()


def test_line_ends_of_cr_alone_in_csv_are_an_error(tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(b"text,n\rone,1\rtwo,2\r")
    assert error(path).startswith(f"{path}, line 1: no header of CSV") and "tr '\\r' '\\n'" in error(path)


def test_linked_folders_are_read_once(folder, tmp_path):
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    (tmp_path / "elsewhere" / "deep" / "z.md").write_text("Z")
    (tmp_path / "elsewhere" / "deep" / "up").symlink_to(tmp_path / "elsewhere")
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    (folder / "sub" / "loop").symlink_to(folder)
    source = Source(str(folder), include="*.md")
    assert [item.id for item in source] == ["b.md", "linked/deep/z.md"]
    assert source.ignored_files["(folder linked twice)"] == 2


@pytest.fixture
def as_nobody():
    """Root may read all; the tests of what cannot be read are another user's, in a folder open to all."""
    root = Path(tempfile.mkdtemp())
    root.chmod(0o777)
    if os.geteuid() == 0:
        os.seteuid(65534)
    yield root
    if os.getuid() == 0:
        os.seteuid(0)
    for path in root.rglob("*"):
        path.chmod(0o700)
    shutil.rmtree(root)


def test_a_folder_that_cannot_be_read_is_an_error(as_nobody):
    for name in ("a", "b", "c"):
        (as_nobody / name).mkdir()
        (as_nobody / name / "t.md").write_text(name)
    (as_nobody / "b").chmod(0o000)
    first, bad, last = Source(str(as_nobody))
    assert (first.id, last.id) == ("a/t.md", "c/t.md")
    assert str(bad).startswith(f"{as_nobody / 'b'} cannot be looked into (Permission denied)")
    (as_nobody / "b").chmod(0o400)  # its names, and nothing more
    assert str(list(Source(str(as_nobody)))[1]).startswith(f"{as_nobody / 'b' / 't.md'} cannot be looked into")


def test_a_name_that_is_not_utf8_is_an_error(tmp_path):
    (tmp_path / "a.md").write_text("a")
    (tmp_path / os.fsdecode(b"caf\xe9.md")).write_text("b")
    (tmp_path / os.fsdecode(b"caf\xe9.xyz")).write_text("c")
    source = Source(str(tmp_path))
    good, bad = source
    assert good.id == "a.md" and str(bad).startswith(f"{tmp_path}/caf\\udce9.md: the file's name is not UTF-8")
    assert "caf\\udce9.md: this name is not UTF-8" in error(tmp_path / os.fsdecode(b"caf\xe9.md"))
