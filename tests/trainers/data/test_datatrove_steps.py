"""The steps of a datatrove pipeline prepare what `prepare` does."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

pytest.importorskip("datatrove")

from datatrove.data import Document
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.base import PipelineStep

from trainers.data.datatrove_steps import ChunkDocuments, MergeShards, ReadSource, WriteShards
from trainers.data.prepare import PrepareConfig, prepare
from trainers.data.prepared import load_groups
from trainers.data.readers import DataError


@pytest.fixture
def corpus(tmp_path, write_jsonl, article) -> Path:
    """Eight files of twelve documents each, with an empty, a short and a doubled one."""
    for file in range(8):
        texts = [article(12 * file + number, 5 + 7 * number % 60) for number in range(12)]
        write_jsonl(tmp_path / "corpus" / f"{file}.jsonl", [*texts, "", "Too short.", texts[0]])
    return tmp_path / "corpus"


def run(config: PrepareConfig, tasks: int, workers: int = 1, extra: tuple = (), source=None) -> None:
    logs = Path(f"{config.out}-logs")
    source = source or ReadSource(config)
    steps = [source, ChunkDocuments(config), *extra, WriteShards(config)]
    shards = LocalPipelineExecutor(steps, tasks=tasks, workers=workers, logging_dir=str(logs / "shards"))
    merge = [MergeShards(config, tasks)]
    LocalPipelineExecutor(merge, workers=1, logging_dir=str(logs / "merge"), depends=shards).run()


def chunks_by_document(folder: Path) -> dict[str, list[str]]:
    """The chunks of each document, in their order in it: sentences of `article` are numbered."""
    found: dict[str, list[str]] = {}
    for file in sorted(folder.glob("*.parquet")):
        for group in pq.read_table(file).to_pylist():
            for doc_id, text in zip(group["doc_ids"], group["texts"], strict=True):
                found.setdefault(doc_id, []).append(text)
    return {doc_id: sorted(texts, key=lambda text: int(text.split()[1])) for doc_id, texts in found.items()}


@pytest.mark.parametrize("shuffle", [False, True])
def test_one_task_writes_the_very_set_of_prepare(tmp_path, corpus, shuffle):
    settings = {"validation_share": 0.2, "group_size": 4, "shuffle": shuffle}
    expected = prepare(PrepareConfig(str(corpus), str(tmp_path / "expected"), **settings))
    run(PrepareConfig(str(corpus), str(tmp_path / "found"), **settings), tasks=1)
    assert {file.name for file in (tmp_path / "found").iterdir()} == {"prepare.json", *expected["shards"]}
    for name in expected["shards"]:
        assert (tmp_path / "found" / name).read_bytes() == (tmp_path / "expected" / name).read_bytes(), name
    found = json.loads((tmp_path / "found" / "prepare.json").read_text())
    # What the chunker drops is in datatrove's own account.
    read = expected["documents"]["kept"] + expected["documents"]["duplicate"]
    assert found.pop("documents") == expected.pop("documents") | {"read": read, "empty": 0, "too_short": 0}
    assert found == expected
    stats = json.loads((tmp_path / "found-logs" / "shards" / "stats.json").read_text())
    chunker = next(step["stats"] for step in stats if "chunker" in step["name"])
    assert (chunker["kept"], chunker["empty"], chunker["too_short"]) == (104, 8, 8)


def test_sequences_for_retromae(tmp_path, corpus, tiny_bert_folder):
    settings = {"method": "retromae", "tokenizer": str(tiny_bert_folder), "max_seq_length": 64}
    expected = prepare(PrepareConfig(str(corpus), str(tmp_path / "expected"), **settings))
    run(PrepareConfig(str(corpus), str(tmp_path / "found"), **settings), tasks=1)
    for name in expected["shards"]:
        assert (tmp_path / "found" / name).read_bytes() == (tmp_path / "expected" / name).read_bytes(), name


def test_several_tasks_make_the_same_chunks_of_each_document(tmp_path, corpus):
    settings = {"validation_share": 0.25, "group_size": 2}
    prepare(PrepareConfig(str(corpus), str(tmp_path / "expected"), **settings))
    out = tmp_path / "found"
    run(PrepareConfig(str(corpus), str(out), **settings), tasks=3, workers=2)
    expected, found = chunks_by_document(tmp_path / "expected"), chunks_by_document(out)
    whole = {doc_id for doc_id in found if found[doc_id] == expected.get(doc_id)}
    # A task leaves over its last group, no more than one chunk here, of either split.
    assert len(found.keys() | expected.keys()) - len(whole) <= 2 * 3 + 2
    assert len(whole) > 80
    for split in ("train", "validation"):
        folders = (out, tmp_path / "expected")
        ids = [{one for ids in load_groups(folder, split)["doc_ids"] for one in ids} for folder in folders]
        assert len(ids[0] ^ ids[1]) <= 4 and ids[0]
    summary = json.loads((out / "prepare.json").read_text())
    assert set(summary["shards"]) == {file.name for file in out.glob("*.parquet")} and len(summary["shards"]) == 6
    chunks, documents = summary["chunks"], summary["documents"]
    assert documents["read"] == 104 and documents["kept"] == 96 == documents["train"] + documents["validation"]
    assert chunks["made"] == chunks["train"] + chunks["validation"] + chunks["left_over"]
    assert chunks["train"] == sum(map(len, load_groups(out, "train")["texts"]))
    assert not (out / "tasks").exists()


class FailOnce(PipelineStep):
    """Stops the second task, while a file says so, when it is half through."""

    name, type = "fails", "test"

    def __init__(self, switch: Path) -> None:
        super().__init__()
        self.switch = switch

    def run(self, data, rank: int = 0, world_size: int = 1):
        for number, document in enumerate(data):
            if rank == 1 and number == 20 and self.switch.exists():
                raise RuntimeError("out of luck")
            yield document


def test_a_restart_does_the_failed_task_only(tmp_path, corpus):
    config = PrepareConfig(str(corpus), str(tmp_path / "found"), group_size=2)
    switch = tmp_path / "switch"
    switch.touch()
    with pytest.raises(RuntimeError, match="out of luck"):
        run(config, tasks=2, extra=(FailOnce(switch),))
    tasks = tmp_path / "found" / "tasks"
    (done,) = tasks.glob("0*")
    before = {file.name: file.stat().st_mtime_ns for file in done.glob("*.parquet")}
    assert done.name == "00000" and before
    with pytest.raises(FileNotFoundError, match=r"no shards of 1 of 2 tasks \(00001\); start the tasks once more"):
        next(iter(MergeShards(config, 2).run(None)))
    switch.unlink()
    run(config, tasks=2, extra=(FailOnce(switch),))
    found = tmp_path / "found"
    kept = {file.stat().st_mtime_ns for file in found.glob("*.parquet")}
    assert set(before.values()) <= kept
    run(PrepareConfig(str(corpus), str(tmp_path / "whole"), group_size=2), tasks=2)
    assert {file.name: file.read_bytes() for file in found.iterdir()} == {
        file.name: file.read_bytes() for file in (tmp_path / "whole").iterdir()
    }
    with pytest.raises(FileExistsError, match="holds a prepared set already"):
        WriteShards(config).run(iter(()))


def test_a_merge_that_was_stopped_goes_on(tmp_path, corpus, monkeypatch):
    config = PrepareConfig(str(corpus), str(tmp_path / "found"), group_size=2)
    for rank in range(2):
        WriteShards(config).run(ChunkDocuments(config).run(ReadSource(config).run(None, rank, 2)), rank, 2)
    replace, moved = Path.replace, []

    def stop(path, target):
        if moved:
            raise KeyboardInterrupt
        moved.append(replace(path, target))

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "replace", stop)
        MergeShards(config, 2).run(None)
    MergeShards(config, 2).run(None)
    run(PrepareConfig(str(corpus), str(tmp_path / "whole"), group_size=2), tasks=2)
    assert {file.name: file.read_bytes() for file in (tmp_path / "found").iterdir()} == {
        file.name: file.read_bytes() for file in (tmp_path / "whole").iterdir()
    }


def test_documents_of_any_reader_and_filters_between(tmp_path, article):
    documents = [Document(text=article(number, 30), id=f"web/{number}") for number in range(20)]
    documents.append(Document(text=f"<main><p>{article(20, 30)}</p></main>", id="page", metadata={"kind": "html"}))

    def drop_first(data, rank, world_size):
        return (chunk for chunk in data if chunk.metadata["chunk"])

    config = PrepareConfig("crawl", str(tmp_path / "out"), group_size=2, validation_share=0)
    run(config, tasks=1, extra=(drop_first,), source=documents)
    rows = load_groups(tmp_path / "out")
    assert set(rows["source"]) == {"crawl"}
    assert {doc_id for ids in rows["doc_ids"] for doc_id in ids} == {document.id for document in documents}
    texts = [text for texts in rows["texts"] for text in texts]
    assert not any("<p>" in text or text.startswith("Sentence 0 ") for text in texts)


def test_data_that_cannot_be_read_stops_or_is_counted(tmp_path, corpus):
    with open(corpus / "3.jsonl", "a") as file:
        file.write("not json\n")
    with pytest.raises(DataError, match=r"3\.jsonl, line 16.*not JSON"):
        list(ReadSource(PrepareConfig(str(corpus), "out")).run(None))
    reader = ReadSource(PrepareConfig(str(corpus), "out", on_error="skip"))
    assert len(list(reader.run(None))) == 8 * 15
    assert reader.stats["error"].total == 1


def test_every_document_of_one_file_has_one_task(tmp_path, write_jsonl, article):
    file = write_jsonl(tmp_path / "corpus.jsonl", [article(number, 10) for number in range(10)])
    reader = ReadSource(PrepareConfig(str(file), "out"))
    ids = [[document.id for document in reader.run(None, rank, 3)] for rank in range(3)]
    assert [len(part) for part in ids] == [4, 3, 3]
    assert sorted(sum(ids, [])) == sorted(f"corpus.jsonl:{number}" for number in range(1, 11))


def test_too_little_text_is_an_error(tmp_path, write_jsonl, article):
    file = write_jsonl(tmp_path / "corpus.jsonl", [article(0, 10)])
    with pytest.raises(DataError, match="1 chunks make no group of 16"):
        run(PrepareConfig(str(file), str(tmp_path / "out"), validation_share=0), tasks=1)
