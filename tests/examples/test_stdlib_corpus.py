import ast
import csv
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from stdlib_corpus import SUMMARY, build, functions, library_files, truncate

SCRIPT = Path(__file__).parents[2] / "examples" / "stdlib_corpus.py"


def read_jsonl(path):
    return {record["_id"]: record["text"] for record in map(json.loads, path.read_text("utf-8").splitlines())}


def one(text, number=0):
    return list(functions("m.py", textwrap.dedent(text)))[number]


class TestFunctions:
    def test_cuts_the_docstring_and_keeps_the_rest(self):
        found = one('''
            class A:
                @property
                # why
                def f(self, a: int = 1) -> int:
                    """Add one
                    to it.

                    >>> f(1)
                    """
                    # then
                    b = """
            column 0"""
                    return a + 1
        ''')
        assert found.id == "m.py:A.f:5"
        assert found.query == "Add one to it."
        assert found.source == (
            '@property\n# why\ndef f(self, a: int = 1) -> int:\n    # then\n    b = """\ncolumn 0"""\n    return a + 1'
        )
        assert found.body == ('b = """', 'column 0"""', "return a + 1")

    def test_without_docstring_the_query_is_empty(self):
        found = one("async def f(x):\n    await x\n    return 'not a docstring'\n")
        assert (found.query, found.source) == ("", "async def f(x):\n    await x\n    return 'not a docstring'")

    def test_a_docstring_of_examples_only_gives_no_query(self):
        assert one('def f():\n    """>>> f()\n    1\n    """\n    return 1\n').query == ""

    def test_a_nested_function_belongs_to_the_outer_one(self):
        text = "if True:\n    def f():\n        def g():\n            pass\n        return g\n"
        assert [found.id for found in functions("m.py", text)] == ["m.py:f:2"]

    @pytest.mark.parametrize(
        "text",
        ['def f(): "doc"; return 1', 'def f(): "doc"\n', 'def f():\n    "doc"; return 1', 'def f():\n    "doc"\n'],
    )
    def test_leaves_out_what_cannot_be_cut_by_lines(self, text):
        assert list(functions("m.py", text)) == []


def test_truncate_cuts_at_a_line():
    assert truncate("ab\ncd\nef", 8) == "ab\ncd\nef"
    assert truncate("ab\ncd\nef", 5) == "ab\ncd"
    assert truncate("ab\ncd\nef", 4) == "ab"
    assert truncate("abcdef", 4) == "abcd"


def module(name, body="x = a\n    y = x\n    return x"):
    return f'def {name}(a):\n    """Do the thing named {name}."""\n    {body.replace("x", name)}\n'


@pytest.fixture
def library(tmp_path):
    """A standard library of ten modules and what has to be passed over."""
    root = tmp_path / "lib"
    for number in range(10):
        word = "abcdefghij"[number] * 3
        path = root / f"pack{number % 2}" / f"{word}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(module(word), encoding="utf-8")
    for skipped in ("test/a.py", "site-packages/a.py", "encodings/a.py", "pack0/tests/a.py", "_sysconfigdata_x.py"):
        (root / skipped).parent.mkdir(parents=True, exist_ok=True)
        (root / skipped).write_text(module("skipped"), encoding="utf-8")
    return root


class TestBuild:
    def settings(self, library, **more):
        return {"stdlib": library, "heldout_share": 0.5, **more}

    def test_held_out_modules_are_whole_files_outside_training(self, library, tmp_path):
        summary = build(tmp_path / "out", **self.settings(library))
        trained = {path.relative_to(tmp_path / "out/train/code").as_posix() for path in tmp_path.rglob("code/*/*.py")}
        assert len(summary["heldout_modules"]) == len(trained) == 5
        assert trained | set(summary["heldout_modules"]) == set(library_files(library))
        assert trained.isdisjoint(summary["heldout_modules"])
        corpus = read_jsonl(tmp_path / "out/docstring2function/corpus.jsonl")
        assert sorted(key.split(":")[0] for key in corpus) == summary["heldout_modules"]

    def test_the_seed_alone_decides(self, library, tmp_path):
        first, again, other = (
            build(tmp_path / name, seed=seed, **self.settings(library))
            for name, seed in (("a", 0), ("b", 0), ("c", 1))
        )
        assert first == again
        assert first["heldout_modules"] != other["heldout_modules"]
        files = [path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*") if path.is_file()]
        assert all((tmp_path / "a" / path).read_bytes() == (tmp_path / "b" / path).read_bytes() for path in files)

    def test_leaves_out_unfair_functions(self, library, tmp_path):
        fair = set(build(tmp_path / "out", **self.settings(library))["heldout_modules"])
        for path in fair:  # in every held-out file, so that each function below is judged
            word = Path(path).stem
            extra = [
                f'def short_{word}(a):\n    """Long enough a docstring {word}."""\n    return a\n',
                f'def same_body_{word}(a):\n    """A body like others {word}."""\n    b = 1\n    b = 2\n    b = 3\n',
                f'def same_doc_{word}(a):\n    """A docstring like others."""\n    {word} = 1\n    c = 2\n    d = 3\n',
                f'def terse_{word}(a):\n    """Return {word}."""\n    {word} = 1\n    c = 2\n    d = 4\n',
                f"def silent_{word}(a):\n    {word} = 1\n    c = 2\n    d = 5\n",
            ]
            (library / path).write_text((library / path).read_text() + "".join(extra))
        counts = build(tmp_path / "out", **self.settings(library, max_documents=8))["counts"]
        assert (counts["queries"], counts["distractors"], counts["documents"]) == (5, 3, 8)
        for reason in ("trivial_body", "same_body_twice", "same_docstring_twice", "short_docstring"):
            assert counts[f"left_out_{reason}"] == 5, reason

    def test_leaves_out_what_training_has_seen(self, library, tmp_path):
        heldout = build(tmp_path / "out", **self.settings(library))["heldout_modules"]
        training = sorted(set(library_files(library)) - set(heldout))
        (library / training[0]).write_text((library / heldout[0]).read_text())
        counts = build(tmp_path / "out", **self.settings(library))["counts"]
        assert (counts["queries"], counts["left_out_body_in_training"]) == (4, 1)

    def test_source_encodings(self, library, tmp_path):
        (library / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nname = '\xe9'\n")
        (library / "broken.py").write_bytes(b"name = '\xe9'\n")
        (library / "syntax.py").write_text("print 'two'\n")
        counts = build(tmp_path / "out", **self.settings(library, heldout_share=0))["counts"]
        assert (counts["files_unreadable"], counts["code_files"]) == (2, 11)
        assert "name = 'é'" in (tmp_path / "out/train/code/latin.py").read_text("utf-8")

    def test_replaces_its_own_folder_only(self, library, tmp_path):
        out = tmp_path / "out"
        build(out, **self.settings(library))
        (out / "stale.txt").touch()
        build(out, **self.settings(library))
        assert not (out / "stale.txt").exists()
        (out / SUMMARY).unlink()
        with pytest.raises(FileExistsError, match="empty folder"):
            build(out, **self.settings(library))

    def test_a_failure_leaves_what_was_there(self, library, tmp_path):
        out = tmp_path / "out"
        build(out, **self.settings(library))
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(TypeError):
            build(out, **self.settings(library, max_chars=None))
        assert sorted(tmp_path.rglob("*")) == before

    def test_no_library(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="No Python source in"):
            build(tmp_path / "out", stdlib=tmp_path)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    out = tmp_path_factory.mktemp("stdlib") / "out"
    result = subprocess.run([sys.executable, SCRIPT, out], capture_output=True, text=True, check=True)
    assert json.loads(result.stdout)["queries"] == 300
    return out


class TestRunningPython:
    def test_help(self):
        result = subprocess.run([sys.executable, SCRIPT, "--help"], capture_output=True, text=True, check=True)
        assert "--heldout-share" in result.stdout

    def test_every_query_has_its_function_without_the_docstring(self, out):
        folder = out / "docstring2function"
        corpus, queries = read_jsonl(folder / "corpus.jsonl"), read_jsonl(folder / "queries.jsonl")
        with open(folder / "qrels" / "test.tsv", newline="") as file:
            qrels = list(csv.DictReader(file, delimiter="\t"))
        assert len(qrels) == len(queries) == len(set(queries.values())) == 300
        assert {row["query-id"] for row in qrels} == set(queries)
        for row in qrels:
            source = corpus[row["corpus-id"]]
            assert queries[row["query-id"]] not in " ".join(source.split())
            assert len(source) <= 1000
            try:
                node = ast.parse(source).body[0]
            except SyntaxError:
                assert len(source) > 800  # cut
                continue
            assert node.name == row["corpus-id"].split(":")[1].split(".")[-1]
            assert ast.get_docstring(node) is None

    def test_training_text(self, out):
        summary = json.loads((out / SUMMARY).read_text())
        files = {path.relative_to(out / "train" / "code").as_posix() for path in (out / "train/code").rglob("*.py")}
        assert len(files) == summary["counts"]["code_files"] > 300
        assert files.isdisjoint(summary["heldout_modules"])
        assert not any("test" in path.split("/")[:-1] for path in files)
        assert sum((out / "train" / "code" / path).stat().st_size for path in files) > 5e6
