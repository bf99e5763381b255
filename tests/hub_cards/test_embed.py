"""Embeddings of a corpus as shards: the model's own, whoever makes them and however often the run is stopped."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil  # accelerate's own dependency
import pyarrow.parquet as pq
import pytest
from sentence_transformers import SentenceTransformer

from hub_cards.embed import EmbedConfig, embed

ROOT = Path(__file__).parents[2]
WORDS = "boat river market bridge fisher train the old city holds".split()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Texts of 1 to 40 words, so that those of a batch differ in length."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, size=rng.integers(1, 41))) for _ in range(400)]
    path.write_text("".join(json.dumps({"_id": f"d{i}", "text": text}) + "\n" for i, text in enumerate(texts)))
    return path


def texts_of(corpus: Path) -> dict[str, str]:
    rows = map(json.loads, corpus.read_text().splitlines())
    return {row["_id"]: row["text"] for row in rows}


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("side", ["document", "query"])
def test_embeddings_are_those_of_sentence_transformers(tiny_path, tiny_model, corpus, tmp_path, side):
    out, texts = tmp_path / "out", texts_of(corpus)
    manifest = embed(EmbedConfig(tiny_path, str(corpus), str(out), prompt_name=side, shard_size=150, with_text=True))
    names = [f"embeddings-0000{index}-of-00003.parquet" for index in range(3)]
    assert sorted(contents(out)) == ["embed.json", *names]
    table = pq.read_table([out / name for name in names])
    assert table["id"].to_pylist() == list(texts) and table["text"].to_pylist() == list(texts.values())
    assert [pq.read_metadata(out / name).num_rows for name in names] == [150, 150, 100]
    found = np.array(table["embedding"].to_pylist(), np.float32)
    encode = tiny_model.encode_query if side == "query" else tiny_model.encode_document
    np.testing.assert_allclose(found, encode(list(texts.values())), atol=1e-6)
    assert manifest == json.loads((out / "embed.json").read_text())
    assert manifest["model"]["prompt"] == {"document": "passage: ", "query": "query: "}[side]
    assert manifest["corpus"]["texts"] == 400 and manifest["model"]["dimension"] == found.shape[1]


def test_numpy_shards_in_half_precision(tiny_path, tiny_model, corpus, tmp_path):
    options = {"format": "numpy", "store_dtype": "float16", "shard_size": 300}
    embed(EmbedConfig(tiny_path, str(corpus), str(tmp_path / "out"), **options))
    arrays = [np.load(file, mmap_mode="r") for file in sorted((tmp_path / "out").glob("*.npy"))]
    assert [array.shape for array in arrays] == [(300, 32), (100, 32)] and arrays[0].dtype == np.float16
    expected = tiny_model.encode_document(list(texts_of(corpus).values()))
    np.testing.assert_allclose(np.concatenate(arrays), expected, atol=1e-3)
    lines = [line for file in sorted((tmp_path / "out").glob("*.jsonl")) for line in file.read_text().splitlines()]
    assert [json.loads(line) for line in lines] == [{"id": id} for id in texts_of(corpus)]


def test_precision_and_length_one_where_asked(tiny_path, corpus, tmp_path):
    unscaled = SentenceTransformer(tiny_path, device="cpu")
    del unscaled[2]  # Normalize
    unscaled.save(str(tmp_path / "unscaled"))
    norms = {}
    for normalize in (False, True):
        options = {"normalize": normalize, "dtype": "bfloat16", "format": "numpy"}
        manifest = embed(
            EmbedConfig(str(tmp_path / "unscaled"), str(corpus), str(tmp_path / f"{normalize}"), **options)
        )
        assert manifest["model"]["dtype"] == "bfloat16"
        (file,) = (tmp_path / f"{normalize}").glob("*.npy")
        norms[normalize] = np.linalg.norm(np.load(file), axis=1)
    assert abs(norms[False] - 1).max() > 0.1 and abs(norms[True] - 1).max() < 1e-2


def test_finished_shards_stay_and_missing_ones_are_made_again(tiny_path, corpus, tmp_path, capsys):
    config = EmbedConfig(tiny_path, str(corpus), str(tmp_path / "out"), shard_size=100)
    embed(config)
    before, written = contents(tmp_path / "out"), {file: file.stat() for file in (tmp_path / "out").iterdir()}
    lost = tmp_path / "out" / "embeddings-00001-of-00004.parquet"
    lost.rename(lost.with_name(f".{lost.name}.partial"))
    embed(config)
    assert "Embedded 100 of 400 texts" in capsys.readouterr().out
    assert contents(tmp_path / "out") == before
    assert {file for file, stat in written.items() if file.stat().st_mtime_ns != stat.st_mtime_ns} == {lost}


@pytest.mark.parametrize(
    ("format", "damaged"),
    [("parquet", [".parquet"]), ("numpy", [".npy"]), ("numpy", [".jsonl"]), ("numpy", [".npy", ".jsonl"])],
)
def test_damaged_shards_are_made_again(tiny_path, corpus, tmp_path, capsys, format, damaged):
    config = EmbedConfig(tiny_path, str(corpus), str(tmp_path / "out"), shard_size=100, format=format)
    embed(config)
    before = contents(tmp_path / "out")
    for number, size in ((1, 0.5), (2, 0)):
        for suffix in damaged:
            file = tmp_path / "out" / f"embeddings-0000{number}-of-00004{suffix}"
            os.truncate(file, int(file.stat().st_size * size))
    embed(config)
    told = capsys.readouterr()
    assert "Embedded 200 of 400 texts" in told.out and "-00001-of-00004" in told.err
    assert contents(tmp_path / "out") == before


def test_another_model_corpus_or_setting_is_refused(tiny_path, corpus, tmp_path):
    out, other = tmp_path / "out", tmp_path / "other"
    embed(EmbedConfig(tiny_path, str(corpus), str(out)))
    before = contents(out)
    # Where they lie, and how many texts a pass takes, changes nothing.
    moved = shutil.copytree(tiny_path, other)
    embed(EmbedConfig(str(moved), str(shutil.copy(corpus, tmp_path / "moved.jsonl")), str(out), batch_size=7))
    assert contents(out) == before

    (other / "modules.json").write_text((other / "modules.json").read_text() + "\n")
    with pytest.raises(ValueError, match="has .* as the fingerprint of model, and this run "):
        embed(EmbedConfig(str(other), str(corpus), str(out)))
    changed = tmp_path / "changed.jsonl"
    changed.write_text(corpus.read_text().replace("boat", "ship", 1))
    with pytest.raises(ValueError, match="as the fingerprint of corpus, .* choose another --out"):
        embed(EmbedConfig(tiny_path, str(changed), str(out)))
    for settings, message in (
        ({"shard_size": 99}, "has 10000 as the texts of shards, and this run 99"),
        ({"dtype": "bfloat16"}, "has 'float32' as the dtype of model"),
        ({"prompt_name": "query"}, "has 'passage: ' as the prompt of model"),
        ({"store_dtype": "float16"}, "has 'float32' as the dtype of shards"),
    ):
        with pytest.raises(ValueError, match=message):
            embed(EmbedConfig(tiny_path, str(corpus), str(out), **settings))
    assert contents(out) == before


def test_what_cannot_be_embedded_is_an_error(tiny_path, corpus, tmp_path):
    for settings, message in (
        ({"prompt_name": "passage"}, "choose one of document, query"),
        ({"dtype": "int8"}, "choose one of float32, bfloat16, float16"),
        ({"batch_size": 0}, "batch_size is 0; it must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            EmbedConfig(tiny_path, str(corpus), str(tmp_path / "out"), **settings)
    with pytest.raises(FileNotFoundError, match="no file or folder .*nowhere to embed"):
        EmbedConfig(tiny_path, str(tmp_path / "nowhere"), str(tmp_path / "out"))
    with pytest.raises(ValueError, match="would be read as part of it"):
        EmbedConfig(tiny_path, str(corpus.parent), str(corpus.parent / "out"))
    (tmp_path / "file").touch()
    with pytest.raises(PermissionError, match="file is no folder that can be written .*another --out"):
        EmbedConfig(tiny_path, str(corpus), str(tmp_path / "file" / "out"))
    if Path("/proc/self").exists():
        with pytest.raises(PermissionError, match="/proc is no folder that can be written .*another --out"):
            EmbedConfig(tiny_path, str(corpus), "/proc/x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "other.txt").write_text("")
    with pytest.raises(FileExistsError, match="holds no embed.json"):
        embed(EmbedConfig(tiny_path, str(corpus), str(tmp_path / "full")))
    with pytest.raises(ValueError, match="holds no text to embed"):
        embed(EmbedConfig(tiny_path, str(tmp_path / "full"), str(tmp_path / "out")))


def test_embeddings_that_are_not_finite_are_not_written(tiny_path, corpus, tmp_path):
    broken = SentenceTransformer(tiny_path, device="cpu")
    broken[0].auto_model.norm.weight.data.fill_(float("nan"))
    broken.save(str(tmp_path / "broken"))
    with pytest.raises(ValueError, match="The embedding of 'd0' is not finite"):
        embed(EmbedConfig(str(tmp_path / "broken"), str(corpus), str(tmp_path / "out")))
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["embed.json"]


def start(*arguments: object, output: Path) -> subprocess.Popen:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, str(ROOT / "revela_hub.py"), "embed", *map(str, arguments)]
    with open(output, "w") as file:
        return subprocess.Popen(command, env=environment, stdout=file, stderr=file)


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_to_the_same_files(tiny_path, corpus, tmp_path, processes):
    embed(EmbedConfig(tiny_path, str(corpus), str(tmp_path / "whole"), shard_size=2))
    out, output = tmp_path / "killed", tmp_path / "output.txt"
    arguments = (tiny_path, corpus, "--out", out, "--shard-size", 2, "--launch-config", "cpu")
    arguments += ("--num-processes", processes)
    run = start(*arguments, output=output)
    while len(list(out.glob("*.parquet"))) < 3:
        assert run.poll() is None, output.read_text()
        time.sleep(0.005)
    started = psutil.Process(run.pid).children(recursive=True)
    run.kill()
    run.wait()
    assert not psutil.wait_procs(started, timeout=60)[1], "a process went on alone"
    finished = {file.name: file.stat().st_mtime_ns for file in out.glob("*.parquet")}
    assert 3 <= len(finished) < 200
    assert start(*arguments, output=output).wait(timeout=300) == 0, output.read_text()
    assert contents(out) == contents(tmp_path / "whole")
    assert all((out / name).stat().st_mtime_ns == written for name, written in finished.items())
    assert f"Embedded {400 - 2 * len(finished)} of 400 texts" in output.read_text()
