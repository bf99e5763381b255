"""`prepare --for retromae`: sequences, in the same house as groups."""

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from trainers.data.prepare import SEQUENCE_SCHEMA, PrepareConfig, format_summary, prepare
from trainers.data.prepared import load_groups, load_sequences
from trainers.data.readers import DataError


def rows_of(folder: Path, split: str = "train") -> list[dict]:
    return [row for file in sorted(folder.glob(f"{split}-*.parquet")) for row in pq.read_table(file).to_pylist()]


@pytest.fixture
def corpus(tmp_path, write_jsonl, article) -> Path:
    return write_jsonl(tmp_path / "corpus.jsonl", [article(number, 5 + number % 30) for number in range(60)])


@pytest.fixture
def config(tiny_bert_folder, corpus, tmp_path) -> PrepareConfig:
    return PrepareConfig(
        str(corpus), str(tmp_path / "out"), "retromae", tokenizer=str(tiny_bert_folder), max_seq_length=128,
        validation_share=0.2,
    )  # fmt: skip


def test_a_prepared_set(config, article, tiny_bert_folder):
    summary = prepare(config)
    out = Path(config.out)
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert_folder)
    found: dict[str, list[str]] = {}
    for split in ("train", "validation"):
        rows = rows_of(out, split)
        assert len(rows) == summary["sequences"][split] > 5
        assert {row["source"] for row in rows} == {"corpus.jsonl"}
        for row in rows:
            found.setdefault(row["doc_id"], []).append(row["text"])
            assert len(tokenizer(row["text"])["input_ids"]) <= 128
            assert row["text"].startswith("Sentence ") and row["text"].endswith(" long.")
    assert set(found) == {f"corpus.jsonl:{number + 1}" for number in range(60)}
    for doc_id, sequences in found.items():
        number = int(doc_id.partition(":")[2]) - 1
        assert " ".join(sequences) == article(number, 5 + number % 30)
    assert pq.read_schema(out / "train-00000-of-00001.parquet").equals(SEQUENCE_SCHEMA)
    assert not {row["doc_id"] for row in rows_of(out)} & {row["doc_id"] for row in rows_of(out, "validation")}


def test_prepare_json_has_settings_versions_account_and_checksums(config, capsys):
    summary = prepare(config)
    out = Path(config.out)
    assert json.loads((out / "prepare.json").read_text(encoding="utf-8")) == summary
    assert (summary["settings"]["method"], summary["settings"]["max_seq_length"]) == ("retromae", 128)
    assert summary["version"]["tokenizers"] and "groups" not in summary and "chunks" not in summary
    for name, shard in summary["shards"].items():
        assert shard["sha256"] == hashlib.sha256((out / name).read_bytes()).hexdigest()
        assert shard["sequences"] == pq.read_metadata(out / name).num_rows
    printed = " ".join(capsys.readouterr().out.split())
    assert " ".join(format_summary(summary).split()) in printed
    assert f"{summary['sequences']['made']} made" in printed and "held out" in printed


def test_every_document_is_accounted_for(config, corpus, article):
    extra = [b'{"text": ""}', b'{"text": "Too short."}', b"{bad", json.dumps({"text": article(0, 5)}).encode()]
    corpus.write_bytes(corpus.read_bytes() + b"\n".join(extra))
    with pytest.raises(DataError, match=r"line 63, column 2: not JSON"):
        prepare(config)
    assert not Path(config.out).exists()
    summary = prepare(dataclasses.replace(config, on_error="skip"))
    assert summary["documents"] | {"train": 0, "validation": 0} == {
        "read": 64, "kept": 60, "empty": 1, "too_short": 1, "duplicate": 1, "error": 1, "train": 0, "validation": 0,
    }  # fmt: skip
    assert summary["documents"]["kept"] == summary["documents"]["train"] + summary["documents"]["validation"]
    assert summary["sequences"]["made"] == summary["sequences"]["train"] + summary["sequences"]["validation"]


def test_same_bytes_for_any_number_of_processes(config, tmp_path, monkeypatch):
    from trainers.data import prepare as module

    monkeypatch.setattr(module, "_BATCH_CHARACTERS", 5_000)
    summaries = [
        prepare(dataclasses.replace(config, out=str(tmp_path / str(number)), num_proc=number)) for number in (1, 2)
    ]
    assert summaries[0] == summaries[1]  # checksums included


def test_ms_marco_with_titles(config, tmp_path):
    source = tmp_path / "corpus.tsv"
    lines = [
        f"{number}\t{'-' if number % 2 else f'Title {number}'}\tThe passage {number} says it." for number in range(50)
    ]
    source.write_text("\n".join(lines) + "\n")
    prepare(dataclasses.replace(config, source=str(source), title_column="title", validation_share=0))
    rows = rows_of(Path(config.out))
    assert [row["text"] for row in rows[:2]] == ["Title 0 The passage 0 says it.", "The passage 1 says it."]
    assert len(rows) == 50


def test_books_of_a_sentence_a_row(config, write_jsonl, tmp_path):
    source = write_jsonl(tmp_path / "books.jsonl", [f"this is sentence {number} of it ." for number in range(200)])
    prepare(dataclasses.replace(config, source=str(source), rows_per_document=100, validation_share=0))
    rows = rows_of(Path(config.out))
    assert {row["doc_id"] for row in rows} == {"books.jsonl:1", "books.jsonl:101"}
    lines = [line for row in rows for line in row["text"].splitlines()]
    assert lines == [f"this is sentence {number} of it ." for number in range(200)] and len(rows) < 40


def test_the_two_kinds_of_set_are_told_apart(config, corpus, tmp_path):
    prepare(config)
    (tmp_path / "empty").mkdir()
    prepare(PrepareConfig(str(corpus), str(tmp_path / "groups"), group_size=2))
    assert load_sequences(config.out).column_names == ["text", "doc_id", "source"]
    assert load_sequences(config.out, "validation").num_rows == len(rows_of(Path(config.out), "validation"))
    with pytest.raises(DataError, match="no prepared set for retromae.*--for retromae"):
        load_sequences(tmp_path / "groups")
    with pytest.raises(DataError, match="no prepared set for revela.*--for revela"):
        load_groups(config.out)
    with pytest.raises(DataError, match="no prepared set.*--for retromae"):
        load_sequences(corpus)
    with pytest.raises(DataError, match="no prepared set.*--for retromae"):
        load_sequences(tmp_path / "empty")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"method": "dpr", "tokenizer": "x"}, "method is 'dpr'; choose one of revela, retromae"),
        ({}, "tokenizer is missing"),
        ({"tokenizer": "x", "group_size": 8}, "group_size is 8, which means nothing for retromae"),
        ({"tokenizer": "x", "shuffle": True}, "shuffle is True"),
        ({"method": "revela", "max_seq_length": 64}, "max_seq_length is 64, which means nothing for revela"),
        ({"tokenizer": "x", "rows_per_document": 0}, "rows_per_document is 0"),
    ],
)
def test_settings_of_the_other_method_are_errors(options, says):
    with pytest.raises(ValueError, match=says):
        PrepareConfig("in", "out", **{"method": "retromae"} | options)


def test_a_tokenizer_that_does_not_load_leaves_nothing(config, tmp_path):
    with pytest.raises(ValueError, match="--tokenizer .*nowhere"):
        prepare(dataclasses.replace(config, tokenizer=str(tmp_path / "nowhere")))
    assert not Path(config.out).exists() and not list(tmp_path.glob(".out*"))


def test_too_little_text_is_an_error_with_the_account(config, write_jsonl, tmp_path):
    source = write_jsonl(tmp_path / "few.jsonl", ["", "one two"])
    with pytest.raises(DataError, match="2 documents .*1 empty, 1 too short.* 0 sequences leave none for training"):
        prepare(dataclasses.replace(config, source=str(source)))


MEASURE = """
import re, sys
from trainers.data.prepare import PrepareConfig, prepare
source, out, tokenizer = sys.argv[1:]
prepare(PrepareConfig(source, out, "retromae", tokenizer=tokenizer, max_seq_length=128, validation_share=0))
print(int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads peak memory from /proc")
def test_memory_is_flat_and_a_long_line_fits(tmp_path, article, write_jsonl, tiny_bert_folder):
    def peak(name: str, texts) -> int:
        source = write_jsonl(tmp_path / f"{name}.jsonl", texts)
        command = [sys.executable, "-c", MEASURE, str(source), str(tmp_path / name), str(tiny_bert_folder)]
        run = subprocess.run(
            command, cwd=Path(__file__).parents[3], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True,
            text=True,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
        return int(run.stdout.splitlines()[-1])

    small = peak("small", [article(number, 60) for number in range(1_000)])
    assert peak("large", [article(number, 60) for number in range(8_000)]) - small < 30e6
    assert peak("line", [" ".join(f"{index:09d}" for index in range(500_000))]) - small < 100e6


@pytest.mark.slow
def test_half_a_mb_of_prose_a_second(tmp_path, write_jsonl, tiny_bert_folder):
    from pydoc_data.topics import topics

    prose = list(topics.values())
    path = write_jsonl(tmp_path / "c.jsonl", [f"Edition {edition}. {text}" for edition in range(10) for text in prose])
    started = time.process_time()
    prepare(PrepareConfig(str(path), str(tmp_path / "out"), "retromae", tokenizer=str(tiny_bert_folder)))
    # The tiny tokenizer spells most words; BERT's own is about twice as fast.
    assert path.stat().st_size / 1e6 / (time.process_time() - started) > 0.5
