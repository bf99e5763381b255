import gzip
import hashlib
import json
import shutil
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from trainers.data.prepare import SCHEMA, PrepareConfig, prepare
from trainers.data.prepared import load_groups, mix_sets
from trainers.data.readers import DataError


@pytest.fixture
def prepared(tmp_path, write_jsonl, article) -> Path:
    corpus = write_jsonl(tmp_path / "corpus.jsonl", [article(number, 30) for number in range(60)])
    prepare(PrepareConfig(str(corpus), str(tmp_path / "prepared"), group_size=4, validation_share=0.2))
    return tmp_path / "prepared"


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_prepared_set_round_trips(prepared, split):
    groups = load_groups(prepared, split)
    assert isinstance(groups, Dataset)
    assert groups.column_names == ["texts", "doc_ids", "source"]
    assert groups[:] == pq.read_table(next(prepared.glob(f"{split}-*"))).to_pydict()
    assert groups.cache_files  # memory-mapped, not in memory
    assert load_groups(str(prepared), split)[0] == groups[0]


def test_a_set_that_was_prepared_again_is_not_taken_from_the_cache(prepared, tmp_path):
    before = load_groups(prepared)
    prepare(PrepareConfig(str(tmp_path / "corpus.jsonl"), str(prepared), group_size=8, overwrite=True))
    after = load_groups(prepared)
    assert len(before[0]["texts"]) == 4 and len(after[0]["texts"]) == 8


def test_a_split_without_groups_is_an_error(tmp_path, write_jsonl, article):
    corpus = write_jsonl(tmp_path / "corpus.jsonl", [article(number, 30) for number in range(60)])
    prepare(PrepareConfig(str(corpus), str(tmp_path / "out"), validation_share=0))
    with pytest.raises(DataError, match="no rows in split 'validation', only in train; .*--validation-share"):
        load_groups(tmp_path / "out", "validation")


def test_a_missing_or_damaged_shard_is_an_error(prepared):
    shard = prepared / "train-00000-of-00001.parquet"
    shard.rename(prepared / "train-00001-of-00002.parquet")
    with pytest.raises(DataError, match=r"shards \[0\] of 2 .* are missing"):
        load_groups(prepared)
    shard.write_bytes((prepared / "train-00001-of-00002.parquet").read_bytes()[:-50])
    (prepared / "train-00001-of-00002.parquet").unlink()
    with pytest.raises(DataError, match="train-00000-of-00001.parquet.* cannot be read"):
        load_groups(prepared)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"texts": ["alone"], "doc_ids": ["a"], "source": "s"}, "group 1: fewer than 2 chunks"),
        ({"texts": ["a", "b"], "doc_ids": ["a"], "source": "s"}, "group 1: texts and doc_ids differ"),
    ],
)
def test_bad_groups_are_errors(tmp_path, row, says):
    rows = [{"texts": ["a", "b"], "doc_ids": ["a", "b"], "source": "s"}, row]
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), tmp_path / "train-00000-of-00001.parquet")
    with pytest.raises(DataError, match=says):
        load_groups(tmp_path)


def test_a_parquet_file_of_documents_is_no_prepared_set(tmp_path):
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match="no column doc_ids, source, texts.*revela-hub prepare"):
        load_groups(tmp_path / "t.parquet")


# The authors' released formats

RELEASED = '["a b", "c", "d"]\n\n{"src": "wiki", "text": ["中", "y"]}\n'
RELEASED_GROUPS = {
    "texts": [["a b", "c", "d"], ["中", "y"]],
    "doc_ids": [["r.jsonl:1"] * 3, ["r.jsonl:3"] * 2],
    "source": ["r.jsonl", "wiki"],
}


def test_released_formats(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text(RELEASED, encoding="utf-8")
    assert load_groups(path)[:] == RELEASED_GROUPS
    assert load_groups(tmp_path)[:] == RELEASED_GROUPS
    with gzip.open(tmp_path / "r.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(RELEASED)
    assert load_groups(tmp_path / "r.jsonl.gz")["texts"][:] == RELEASED_GROUPS["texts"]
    path.write_text(RELEASED.replace("a b", "changed"), encoding="utf-8")
    assert load_groups(path)[0]["texts"][0] == "changed"
    with pytest.raises(DataError, match="no split 'validation'"):
        load_groups(path, "validation")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"src": "wiki", "text": "a document"}', "list of strings.* but this is a str; .*revela-hub prepare"),
        ('["a", 1]', "list of strings.* list of other things"),
        ('{"body": ["a", "b"]}', "no 'text' among 'body'"),
        ('["alone"]', "a group of 1 chunk"),
        ('["a", "b"', "column .*: not JSON"),
        ('["a", "caf\udce9"]', "not UTF-8"),
        ('["a", "\\ud800"]', "not UTF-8"),
        ('{"src": "\\ud800", "text": ["a", "b"]}', "not UTF-8"),
        ("[" * 10_000, "not JSON"),
        ("9" * 5000, "not JSON"),
    ],
)
def test_a_line_in_no_released_format_is_an_error_with_file_and_line(tmp_path, line, says):
    path = tmp_path / "r.jsonl"
    path.write_text(RELEASED + line + "\n", encoding="utf-8", errors="surrogateescape")
    with pytest.raises(DataError, match=says) as caught:
        load_groups(path)
    assert str(caught.value).startswith(f"{path}, line 4")


def test_a_file_without_a_group_or_cut_short_is_named(tmp_path):
    (tmp_path / "r.jsonl").write_text("\n")
    with pytest.raises(DataError, match=r"r\.jsonl.* hold no group"):
        load_groups(tmp_path)
    (tmp_path / "r.jsonl").unlink()
    packed = gzip.compress(RELEASED.encode() * 50)
    (tmp_path / "r.jsonl.gz").write_bytes(packed[: len(packed) // 2] + b"\0\xff" * 9)
    with pytest.raises(DataError, match=r"r\.jsonl\.gz: cannot be read to its end"):
        load_groups(tmp_path)


NO_UTF8 = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")])


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("texts", [["a", None]]),
        ("texts", [None]),
        ("texts", ["a text"]),
        ("texts", [[1, 2]]),
        ("doc_ids", [["a", None]]),
        ("source", [None]),
        ("source", NO_UTF8),
    ],
)
def test_columns_that_hold_no_text_are_named(tmp_path, column, values):
    table = {"texts": [["a", "b"]], "doc_ids": [["d", "d"]], "source": ["s"], column: values}
    pq.write_table(pa.table(table), tmp_path / "train-00000-of-00001.parquet")
    with pytest.raises(DataError, match=f"train-00000-of-00001.parquet, column '{column}'.*prepare the set again"):
        load_groups(tmp_path)


def test_an_empty_folder_is_an_error(tmp_path):
    with pytest.raises(DataError, match="neither a prepared set .*revela-hub prepare"):
        load_groups(tmp_path)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Puts a folder into the Hub's cache as a dataset, as a download would; nothing is asked of the network."""
    import huggingface_hub.constants as constants

    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    def put(dataset_id: str, folder: Path) -> None:
        repo = cache / f"datasets--{dataset_id.replace('/', '--')}"
        commit = hashlib.sha1(dataset_id.encode()).hexdigest()
        shutil.copytree(folder, repo / "snapshots" / commit)
        (repo / "refs").mkdir()
        (repo / "refs" / "main").write_text(commit)

    return put


def test_a_hub_dataset(prepared, tmp_path, hub):
    hub("someone/prepared", prepared)
    assert load_groups("someone/prepared", "validation")[:] == load_groups(prepared, "validation")[:]
    (tmp_path / "released" / "data").mkdir(parents=True)
    (tmp_path / "released" / "dataset_infos.json").write_text(json.dumps({"default": {}}))
    (tmp_path / "released" / "data" / "r.jsonl").write_text(RELEASED, encoding="utf-8")
    hub("someone/released", tmp_path / "released")
    assert load_groups("someone/released")[:] == RELEASED_GROUPS
    with pytest.raises(
        DataError, match="nobody/nothing is neither a file or folder here nor a dataset that downloads"
    ):
        load_groups("nobody/nothing")
    with pytest.raises(DataError, match="does not exist"):
        load_groups(tmp_path / "nothing" / "here")


# Mixes


def groups(name: str, count: int) -> Dataset:
    return Dataset.from_dict(
        {
            "texts": [[f"{name}{index}", "x"] for index in range(count)],
            "doc_ids": [[name, name]] * count,
            "source": [name] * count,
        }
    )


@pytest.mark.parametrize(
    ("sizes", "weights", "expected"),
    [
        ((100, 100), (1, 1), (100, 100)),
        ((100, 100), (3, 1), (100, 33)),
        ((100, 30), (0.5, 0.5), (30, 30)),
        ((10, 1000, 1000), (1, 2, 3), (10, 20, 30)),
        ((1, 5), (1, 1000), (1, 5)),
    ],
)
def test_a_mix_has_its_weights_and_repeats_nothing(sizes, weights, expected):
    mixed = mix_sets([groups(name, size) for name, size in zip("abc", sizes, strict=False)], weights, seed=0)
    assert tuple(Counter(mixed["source"]).values()) == tuple(
        Counter({name: count for name, count in zip("abc", expected, strict=False)})[name]
        for name in dict.fromkeys(mixed["source"])
    )
    texts = [row["texts"][0] for row in mixed]
    assert len(set(texts)) == len(texts) == sum(expected)


def test_a_mix_depends_on_the_seed_only():
    sets = [groups("a", 100), groups("b", 50)]
    first = mix_sets(sets, [1, 1], seed=1)[:]
    assert first == mix_sets(sets, [2, 2], seed=1)[:]
    assert first != mix_sets(sets, [1, 1], seed=2)[:]
    assert first["source"] != sorted(first["source"])
    taken = {texts[0] for texts in first["texts"] if texts[0].startswith("a")}
    assert taken != {f"a{index}" for index in range(50)}  # a random part, not the first


@pytest.mark.parametrize("weights", [[1], [1, 0], [1, -1], [1, float("nan")]])
def test_wrong_weights_are_errors(weights):
    with pytest.raises(ValueError, match="weight"):
        mix_sets([groups("a", 5), groups("b", 5)], weights, seed=0)
