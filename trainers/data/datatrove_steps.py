"""`revela-hub prepare` as steps of a datatrove pipeline, for corpora that one machine takes too long over.

    ReadSource(config), ChunkDocuments(config), WriteShards(config)        # as many tasks as there are workers for
    MergeShards(config, tasks)                                             # one task, after all of those

Any of datatrove's executors runs them: local, Slurm or Ray. Each task takes its share of the source's files and writes
shards of its own to OUT/tasks, so a task that failed is done again alone; the last step numbers the shards and sums
the accounts, and OUT is then a prepared set as `prepare` writes it. With one task it is that very set.

Any reader of datatrove's may take the place of the first step, and filters may stand between the steps. What a task
does not see it cannot compare: a text that two tasks read is no duplicate to either, documents are interleaved within
a task, and each leaves over its last, incomplete group.
"""

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep
from datatrove.utils.logging import logger

from trainers.data import readers
from trainers.data.prepare import Chunked, PrepareConfig, check_enough, chunk_batch, cut_of, write_chunked


class ReadSource(PipelineStep):
    """Reads a task's share of what `revela-hub prepare` reads: every n-th file of a folder, else every n-th document.

    The documents have the ids of `prepare`, and their `kind` ("prose", "code" or "html") as metadata. What cannot be
    read raises `DataError`, or is counted as `error` where the settings say skip.
    """

    name, type = "prepare's source", "📖 - READER"

    def __init__(self, config: PrepareConfig) -> None:
        super().__init__()
        self.config = config

    def run(self, data: Iterable[Document] | None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        config = self.config
        names = "source text_column title_column rows_per_document kind include text_documents dataset_config "
        settings = {name: getattr(config, name) for name in (names + "dataset_split").split()}
        source = _Share(**settings)
        source.rank, source.world_size = rank, world_size
        is_folder = Path(config.source).is_dir()
        for item in source if is_folder else islice(source, rank, None, world_size):
            if not isinstance(item, readers.DataError):
                yield Document(text=item.text, id=item.id, metadata={"kind": item.kind})
            elif config.on_error == "stop":
                raise item
            else:
                logger.warning(str(item))
                self.stat_update("error")


class _Share(readers.Source):
    rank, world_size = 0, 1

    def _files(self, folder: Path) -> Iterator[Path]:
        return islice(super()._files(folder), self.rank, None, self.world_size)


class ChunkDocuments(PipelineStep):
    """Cuts documents as `revela-hub prepare` does, and yields their chunks, or sequences, in order.

    A chunk has its document's `id`; its metadata are the document's and `chunk`, its number from 0, and `digest`, the
    document's hash. A document whose metadata has no `kind` is prose. The empty and the too short are dropped, and
    counted as `empty` and `too_short`.
    """

    name, type = "prepare's chunker", "✂️ - CHUNKER"

    def __init__(self, config: PrepareConfig) -> None:
        super().__init__()
        self.config = config

    def run(self, data: Iterable[Document], rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        cut = cut_of(self.config)
        for document in data:
            with self.track_time():
                source = readers.Document(document.id, document.text, document.metadata.get("kind", "prose"))
                (chunked,) = chunk_batch([source], cut, self.config.min_words)
            self.stat_update(chunked.outcome)
            for number, text in enumerate(chunked.chunks if chunked.outcome == "kept" else ()):
                metadata = {**document.metadata, "chunk": number, "digest": chunked.digest}
                yield Document(text=text, id=document.id, metadata=metadata)


class WriteShards(PipelineStep):
    """Groups a task's chunks, deals out the held-out documents, and writes the task's shards to OUT/tasks/RANK.

    The folder is written under a hidden name and renamed when it is whole; what a former try left is replaced.

    Raises (when run):
        FileExistsError: OUT holds a prepared set.
    """

    name, type = "prepare's grouper", "💽 - WRITER"

    def __init__(self, config: PrepareConfig) -> None:
        super().__init__()
        self.config = config

    def run(self, data: Iterable[Document], rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        if (Path(self.config.out) / "prepare.json").exists():
            raise FileExistsError(f"{self.config.out} holds a prepared set already; choose another folder.")
        folder = _task(self.config, rank)
        partial = folder.with_name(f".{folder.name}.partial")
        for former in (partial, folder):
            shutil.rmtree(former, ignore_errors=True)
        partial.mkdir(parents=True)
        with self.track_time("task"):
            _write_json(partial, write_chunked(self.config, _documents(data), partial))
        partial.rename(folder)
        return iter(())


def _documents(chunks: Iterable[Document]) -> Iterator[Chunked]:
    """Chunks that follow each other, gathered by document; a filter may have dropped some, the first included."""
    open_document, last = None, -1
    for chunk in chunks:
        number = chunk.metadata["chunk"]
        if open_document is None or chunk.id != open_document.id or number <= last:
            if open_document is not None:
                yield open_document
            open_document = Chunked(chunk.id, "kept", chunk.metadata["digest"], [])
        open_document.chunks.append(chunk.text)
        last = number
    if open_document is not None:
        yield open_document


class MergeShards(PipelineStep):
    """Makes the prepared set of what all tasks wrote: run it as the one task of a second executor.

    Args:
        config: that of the other steps.
        tasks: how many there were.

    Raises (when run):
        FileNotFoundError: tasks that have not finished.
        DataError: not enough for one row to train on.
    """

    name, type = "prepare's merger", "💽 - WRITER"

    def __init__(self, config: PrepareConfig, tasks: int) -> None:
        super().__init__()
        self.config, self.tasks = config, tasks

    def run(self, data: Iterable[Document] | None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        out, folders = Path(self.config.out), [_task(self.config, task) for task in range(self.tasks)]
        if (out / "prepare.json").exists():  # an earlier try was stopped while it cleared up
            shutil.rmtree(out / "tasks", ignore_errors=True)
            return iter(())
        missing = [folder.name for folder in folders if not (folder / "prepare.json").is_file()]
        if missing:
            raise FileNotFoundError(
                f"{out} has no shards of {len(missing)} of {self.tasks} tasks ({', '.join(missing[:3])}); start the "
                "tasks once more, the finished ones are skipped."
            )
        summaries = [json.loads((folder / "prepare.json").read_text(encoding="utf-8")) for folder in folders]
        merged, shards = _sum(summaries), {}
        for split in ("train", "validation"):
            found = [
                (folder / name, account)
                for folder, summary in zip(folders, summaries, strict=True)
                for name, account in summary["shards"].items()
                if name.startswith(f"{split}-")
            ]
            for index, (path, account) in enumerate(found):
                name = f"{split}-{index:05d}-of-{len(found):05d}.parquet"
                shards[name] = account
                if path.exists():  # not where an earlier try came this far
                    path.replace(out / name)
        merged["shards"] = shards
        check_enough(self.config, merged)
        _write_json(out, merged)
        shutil.rmtree(out / "tasks")
        return iter(())


def _sum(summaries: list[dict[str, Any]]) -> dict[str, Any]:
    """The first summary, its accounts the sums of all."""

    def add(parts: list[dict[str, Any]]) -> dict[str, Any]:
        if all(isinstance(value, int) for value in parts[0].values()):
            total: Counter[str] = Counter()
            for part in parts:
                total.update(part)
            return dict(total)
        return {key: add([part[key] for part in parts]) for key in parts[0]}

    accounts = ("documents", "chunks", "groups", "sequences")
    return {
        key: add([summary[key] for summary in summaries]) if key in accounts else value
        for key, value in summaries[0].items()
    }


def _task(config: PrepareConfig, rank: int) -> Path:
    return Path(config.out) / "tasks" / f"{rank:05d}"


def _write_json(folder: Path, summary: dict[str, Any]) -> None:
    partial = folder / ".prepare.json.partial"
    partial.write_text(json.dumps(summary, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(partial, folder / "prepare.json")


__all__ = ["ChunkDocuments", "MergeShards", "ReadSource", "WriteShards"]
