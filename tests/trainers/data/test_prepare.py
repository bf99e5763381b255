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

from trainers.data.chunking import count_words
from trainers.data.prepare import SCHEMA, PrepareConfig, format_summary, prepare
from trainers.data.prepared import load_groups
from trainers.data.readers import DataError


def groups_of(folder: Path, split: str = "train") -> list[dict]:
    return [row for file in sorted(folder.glob(f"{split}-*.parquet")) for row in pq.read_table(file).to_pylist()]


def chunks_of(folder: Path, *splits: str) -> list[str]:
    return [text for split in splits for group in groups_of(folder, split) for text in group["texts"]]


@pytest.fixture
def corpus(tmp_path, write_jsonl, article) -> Path:
    return write_jsonl(tmp_path / "corpus.jsonl", [article(number, 5 + number % 60) for number in range(120)])


def test_a_prepared_set(tmp_path, corpus):
    out = tmp_path / "out"
    summary = prepare(PrepareConfig(str(corpus), str(out), validation_share=0.2, group_size=8))
    assert sorted(file.name for file in out.iterdir()) == [
        "prepare.json",
        "train-00000-of-00001.parquet",
        "validation-00000-of-00001.parquet",
    ]
    documents_of = {}
    for split in ("train", "validation"):
        groups = groups_of(out, split)
        assert len(groups) == summary["groups"][split]["groups"] > 1
        assert all(len(group["texts"]) == len(group["doc_ids"]) == 8 for group in groups)
        assert {group["source"] for group in groups} == {"corpus.jsonl"}
        documents_of[split] = {doc_id for group in groups for doc_id in group["doc_ids"]}
        for group in groups:
            for text, doc_id in zip(group["texts"], group["doc_ids"], strict=True):
                number = int(doc_id.removeprefix("corpus.jsonl:")) - 1
                assert f" of document {number} says" in text
                assert count_words(text) <= 120 and text.startswith("Sentence ") and text.endswith(" is long.")
    assert not documents_of["train"] & documents_of["validation"]
    assert pq.read_schema(out / "train-00000-of-00001.parquet").equals(SCHEMA)


def test_prepare_json_has_settings_versions_account_and_checksums(tmp_path, corpus):
    out = tmp_path / "out"
    config = PrepareConfig(str(corpus), str(out), group_size=4, seed=7)
    summary = prepare(config)
    assert json.loads((out / "prepare.json").read_text(encoding="utf-8")) == summary
    settings = dataclasses.asdict(config)
    assert summary["settings"] == {k: v for k, v in settings.items() if k not in ("out", "num_proc", "overwrite")}
    assert summary["version"]["sentencex"]
    assert set(summary["shards"]) == {file.name for file in out.glob("*.parquet")}
    for name, shard in summary["shards"].items():
        assert shard["sha256"] == hashlib.sha256((out / name).read_bytes()).hexdigest()
        assert shard["groups"] == pq.read_metadata(out / name).num_rows


def account_is_whole(summary: dict) -> bool:
    documents, chunks, groups = summary["documents"], summary["chunks"], summary["groups"]
    size = summary["settings"]["group_size"]
    return (
        documents["read"] == sum(documents[key] for key in ("kept", "empty", "too_short", "duplicate", "error"))
        and documents["kept"] == documents["train"] + documents["validation"]
        and chunks["made"] == chunks["train"] + chunks["validation"] + chunks["left_over"]
        and all(chunks[split] == groups[split]["groups"] * size for split in ("train", "validation"))
    )


def test_every_document_and_chunk_is_accounted_for(tmp_path, article, capsys):
    texts = [article(number, 40) for number in range(20)]
    lines = [json.dumps({"text": text}).encode() for text in texts]
    lines[3:3] = [b'{"text": ""}', b'{"text": " \\n "}', b'{"text": "Too short."}', b"{bad", b'{"text": "caf\xe9"}']
    lines += [lines[0], json.dumps({"text": "\n" + texts[1] + " "}).encode()]
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b"\n".join(lines))
    summary = prepare(PrepareConfig(str(path), str(tmp_path / "out"), on_error="skip", validation_share=0.3))
    assert account_is_whole(summary)
    assert summary["documents"]["read"] == 27
    assert {key: summary["documents"][key] for key in ("kept", "empty", "too_short", "duplicate", "error")} == {
        "kept": 20,
        "empty": 2,
        "too_short": 1,
        "duplicate": 2,
        "error": 2,
    }
    assert summary["chunks"]["left_over"] > 0
    assert [error.split(":")[0] for error in summary["first_errors"]] == [
        f"{path}, line 7, column 2",
        f"{path}, line 8",
    ]
    printed = capsys.readouterr().out
    assert format_summary(summary) in printed
    for expected in ("27 read", "20 kept", "2 empty", "1 too short", "2 duplicates", "2 that could not be read"):
        assert expected in " ".join(printed.split())


def test_chunks_of_the_corpus_are_all_there(tmp_path, corpus, article):
    summary = prepare(PrepareConfig(str(corpus), str(tmp_path / "out"), group_size=2, documents_per_group=1))
    assert summary["chunks"]["left_over"] <= 2
    written = sorted(" ".join(chunks_of(tmp_path / "out", "train", "validation")).split())
    given = sorted(" ".join(article(number, 5 + number % 60) for number in range(120)).split())
    assert len(given) - len(written) <= 2 * 120
    if not summary["chunks"]["left_over"]:
        assert written == given


def test_error_stops_by_default_and_leaves_nothing(tmp_path, write_jsonl, article):
    path = write_jsonl(tmp_path / "corpus.jsonl", [article(number, 40) for number in range(500)])
    with open(path, "a") as file:
        file.write("{bad\n")
    with pytest.raises(DataError, match=r"corpus\.jsonl, line 501, column 2: not JSON"):
        prepare(PrepareConfig(str(path), str(tmp_path / "out")))
    assert [file.name for file in tmp_path.iterdir() if file.name != "datasets-cache"] == ["corpus.jsonl"]


@pytest.mark.parametrize("num_proc", [2, 3])
def test_same_bytes_for_any_number_of_processes(tmp_path, corpus, num_proc, monkeypatch):
    from trainers.data import prepare as module

    monkeypatch.setattr(module, "_BATCH_CHARACTERS", 10_000)  # many batches, so that processes overtake each other
    with open(corpus, "a") as file:
        file.write("{bad\n" + open(corpus).read())
    summaries = [
        prepare(PrepareConfig(str(corpus), str(tmp_path / f"out{n}"), num_proc=n, on_error="skip", group_size=4))
        for n in (1, num_proc)
    ]
    assert summaries[0] == summaries[1]
    assert summaries[0]["documents"]["duplicate"] == 120
    for name in summaries[0]["shards"]:
        assert (tmp_path / "out1" / name).read_bytes() == (tmp_path / f"out{num_proc}" / name).read_bytes()


def test_seed_decides_split_and_order(tmp_path, corpus):
    def groups(name: str, seed: int) -> list[list[str]]:
        prepare(PrepareConfig(str(corpus), str(tmp_path / name), seed=seed, validation_share=0.2))
        return [group["texts"] for group in groups_of(tmp_path / name)]

    first = groups("a", 1)
    assert first == groups("b", 1)
    assert first != groups("c", 2)


def test_shards_are_cut_by_size(tmp_path, corpus, monkeypatch):
    from trainers.data import shards

    prepare(PrepareConfig(str(corpus), str(tmp_path / "one"), group_size=4))
    monkeypatch.setattr(shards, "_ROW_GROUP", 40)
    monkeypatch.setattr(shards, "_SHARD_BYTES", 30_000)
    summary = prepare(PrepareConfig(str(corpus), str(tmp_path / "many"), group_size=4))
    names = [name for name in summary["shards"] if name.startswith("train")]
    assert len(names) > 3
    assert names == [f"train-{index:05d}-of-{len(names):05d}.parquet" for index in range(len(names))]
    assert groups_of(tmp_path / "many") == groups_of(tmp_path / "one")


def test_too_little_text_is_an_error_with_the_account(tmp_path, write_jsonl, article):
    path = write_jsonl(tmp_path / "corpus.jsonl", ["", article(0, 20)])
    with pytest.raises(DataError, match="2 documents .*1 empty.* and 2 chunks make no group of 16") as caught:
        prepare(PrepareConfig(str(path), str(tmp_path / "out"), validation_share=0))
    assert "--group-size" in str(caught.value)
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_text("x")
    with pytest.raises(DataError, match="images: no document was found there; .* 1 files were ignored"):
        prepare(PrepareConfig(str(tmp_path / "images"), str(tmp_path / "out")))
    (tmp_path / "none.jsonl").touch()
    with pytest.raises(DataError, match="none.jsonl: no document was found there; .*holds text.$"):
        prepare(PrepareConfig(str(tmp_path / "none.jsonl"), str(tmp_path / "out")))


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "poetry"},
        {"on_error": "raise"},
        {"text_documents": "page"},
        {"group_size": 1},
        {"max_words": 0},
        {"num_proc": 0},
        {"documents_per_group": 0},
        {"validation_share": 1.0},
    ],
)
def test_wrong_settings_are_errors_that_name_them(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        PrepareConfig("in", "out", **options)


def test_every_setting_has_help():
    assert all(field.metadata.get("help") for field in dataclasses.fields(PrepareConfig))


def test_a_folder_of_pages_and_code_as_source(tmp_path):
    root = tmp_path / "project"
    root.mkdir()
    for index in range(10):
        prose = " ".join(f"Page {index} has sentence number {n} here." for n in range(60))
        (root / f"{index}.html").write_text(f"<title>x</title><p>{prose}</p>")
        (root / f"{index}.md").write_text(f"# Title\n\n{prose.replace('Page', 'Leaf')}\n")
        (root / f"{index}.py").write_text(
            "".join(f"def f{index}_{n}(x):\n    return x + {n}\n\n\n" for n in range(100))
        )
    out = tmp_path / "prepared"
    config = PrepareConfig(str(root), str(out), validation_share=0)
    first = prepare(config)
    assert first["documents"]["kept"] == 30
    code = [t for g in groups_of(out) for t, d in zip(g["texts"], g["doc_ids"], strict=True) if ".py" in d]
    assert code and all("\n" in chunk for chunk in code)
    assert not any("<p>" in chunk for chunk in chunks_of(out, "train"))


@pytest.mark.parametrize("out", ["prepared", "sub/prepared", "../linked/prepared"])
def test_a_set_inside_its_source_is_refused(tmp_path, out):
    root = tmp_path / "project"
    (root / "sub").mkdir(parents=True)
    (tmp_path / "linked").symlink_to(root)
    with pytest.raises(ValueError, match="prepared lies in .*project, .* choose another --out"):
        PrepareConfig(str(root), str(root / out))
    PrepareConfig(str(root), str(tmp_path / "project-prepared"))


@pytest.mark.parametrize(
    "sentence",
    [
        "今天第{n}次天气很好，我们一起去公园散步吧。",
        "คำถามที่ {n} สวัสดีครับวันนี้อากาศดีมาก ",
        "هذا هو السؤال رقم {n} يا صديقي العزيز؟ ",
        "Emoji {n} 👨‍👩‍👧‍👦 🇩🇪🇫🇷 👍🏽 everywhere 😀😀😀! ",
    ],
)
def test_scripts(tmp_path, write_jsonl, sentence):
    texts = ["".join(sentence.format(n=f"{d}{n:03d}") for n in range(100)) for d in range(20)]
    path = write_jsonl(tmp_path / "corpus.jsonl", texts)
    summary = prepare(PrepareConfig(str(path), str(tmp_path / "out"), group_size=4, validation_share=0))
    assert account_is_whole(summary)
    chunks = chunks_of(tmp_path / "out", "train")
    assert all(
        chunk in texts[d]
        for g in groups_of(tmp_path / "out")
        for chunk, d in zip(g["texts"], (int(i.split(":")[1]) - 1 for i in g["doc_ids"]), strict=True)
    )
    assert len(chunks) >= 20 * 4
    assert max(map(len, chunks)) < 1000


@pytest.mark.parametrize("name", ["lines.txt", "lines.jsonl"])
def test_100_000_one_line_documents(tmp_path, write_jsonl, name):
    lines = [f"Line {index} of the corpus is one short document." for index in range(100_000)]
    path = tmp_path / name
    if name.endswith(".txt"):
        path.write_text("\n".join(lines) + "\n")
    else:
        write_jsonl(path, lines)
    summary = prepare(PrepareConfig(str(path), str(tmp_path / "out")))
    assert summary["documents"]["read"] == summary["documents"]["kept"] == summary["chunks"]["made"] == 100_000
    assert account_is_whole(summary)
    assert summary["chunks"]["left_over"] < 32
    assert "hold no two chunks of one document" in format_summary(summary)


MEASURE = """
import json, re, sys
from trainers.data.prepare import PrepareConfig, prepare
summary = prepare(PrepareConfig(sys.argv[1], sys.argv[2], validation_share=0))
# Not getrusage's ru_maxrss, which a process inherits from the one that started it.
peak = re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())
print(json.dumps({"rss": int(peak[1]) * 1024, "chunks": summary["chunks"]}))
"""


def measure(source: Path, out: Path) -> dict:
    """Peak resident memory, in bytes, of preparing `source` in a process of its own."""
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(source), str(out)],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(run.stdout.splitlines()[-1])


linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads peak memory from /proc")


@linux
@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv", "txt"])
def test_memory_is_flat(tmp_path, article, suffix):
    def corpus(documents: int) -> Path:
        path = tmp_path / f"{documents}.{suffix}"
        texts = (article(number, 60) for number in range(documents))
        if suffix == "parquet":
            import pyarrow as pa

            schema = pa.schema([("text", pa.string())])
            with pq.ParquetWriter(path, schema) as writer:  # one large row group, as some writers leave them
                writer.write_table(pa.table({"text": list(texts)}, schema=schema), row_group_size=10**9)
        else:
            with open(path, "w") as file:
                if suffix == "csv":
                    file.write("text\n")
                file.writelines((json.dumps({"text": text}) if suffix == "jsonl" else text) + "\n" for text in texts)
        return path

    small, large = corpus(2_000), corpus(20_000)
    assert large.stat().st_size > (5 if suffix == "parquet" else 70) * 1e6
    growth = measure(large, tmp_path / "large")["rss"] - measure(small, tmp_path / "small")["rss"]
    assert growth < 30e6  # of 65 MB more of text


@linux
@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_one_line_of_50_mb(tmp_path, suffix):
    words = 50_000_000 // 10
    line = " ".join(f"{index:09d}" for index in range(words))
    path = tmp_path / f"line.{suffix}"
    path.write_text(line if suffix == "txt" else json.dumps({"text": line}))
    assert path.stat().st_size >= 49_999_999
    measured = measure(path, tmp_path / "out")
    assert measured["chunks"]["made"] >= words / 120
    assert measured["chunks"]["left_over"] < 16
    written = [int(word) for group in groups_of(tmp_path / "out") for text in group["texts"] for word in text.split()]
    assert len(set(written)) == len(written) >= words - 16 * 120
    assert measured["rss"] < 500e6


@pytest.mark.slow
def test_2_mb_of_prose_a_second(tmp_path, write_jsonl):
    from pydoc_data.topics import topics

    prose = list(topics.values())
    texts = [f"Edition {edition}. {text}" for edition in range(40) for text in prose]
    path = write_jsonl(tmp_path / "corpus.jsonl", texts)
    started = time.process_time()
    prepare(PrepareConfig(str(path), str(tmp_path / "out")))
    seconds = time.process_time() - started
    assert path.stat().st_size / 1e6 / seconds > 2


def test_shuffle_draws_groups_from_all_over_the_corpus(tmp_path, text_folder):
    def documents(shuffle: bool) -> list[set[str]]:
        out = tmp_path / f"out-{shuffle}"
        prepare(
            PrepareConfig(str(text_folder), str(out), group_size=4, max_words=30, validation_share=0, shuffle=shuffle)
        )
        return [set(ids) for ids in load_groups(out, "train")["doc_ids"]]

    plain, shuffled = documents(False), documents(True)
    assert sum(map(len, shuffled)) > 0 and len(shuffled) == len(plain)
    # In the corpus's order a document meets only its neighbours; shuffled, most pairs are of distant ones.
    distinct = [len({frozenset(pair) for pair in groups}) for groups in (plain, shuffled)]
    assert distinct[1] > 1.5 * distinct[0]
