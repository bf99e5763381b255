"""Prepared sets as `datasets.Dataset`, the authors' released formats included, and mixes of several."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Features, List, Value, concatenate_datasets
from datasets.exceptions import DatasetGenerationError, DatasetsError
from pyarrow import ArrowException, ArrowInvalid

from hub_cards.hub import explain, may_be_hub_id
from trainers.data.readers import DataError, text_lines, unfit

SEQUENCE_FEATURES = Features({name: Value("string") for name in ("text", "doc_id", "source")})
FEATURES = Features({"texts": List(Value("string")), "doc_ids": List(Value("string")), "source": Value("string")})
_SHARD = re.compile(r"(?P<split>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})\.parquet")
_LINES = (".jsonl", ".jsonl.gz", ".ndjson", ".json")  # the last only where no other is: it is metadata, mostly


def load_groups(path_or_id: str | Path, split: str = "train") -> Dataset:
    """Load the groups of a prepared set, or of a set that the authors of Revela released.

    Args:
        path_or_id: one of
            - a folder that `prepare` wrote, or one Parquet file with its columns;
            - a file, or a folder of files, in a format of the authors' releases: each line either a JSON list of
              strings, the chunks of one group, or an object `{"src": ..., "text": [...]}` whose `text` is that list.
              They say nothing about documents, so each chunk's `doc_ids` entry names its group: `FILE:LINE`;
            - the id of a Hub dataset with such files.
        split: "train" or "validation". The authors' formats have "train" only.

    Returns:
        A memory-mapped dataset, one group a row: `texts` and `doc_ids` (lists of equal length, at least 2), `source`.

    Raises:
        DataError: nothing to load, shards missing, a line in another format, a group of fewer than 2 chunks.
    """
    path = _local(path_or_id)
    files = [path] if path.is_file() else _shards(path, split) or _released_files(path)
    if files and files[0].suffix == ".parquet":
        dataset = _load_parquet(files, FEATURES, "revela")
    elif split != "train":
        raise DataError(f"{path} has no split {split!r}: the authors' formats have 'train' only.")
    elif files:
        dataset = _load_released(files)
    else:
        raise DataError(
            f"{path} holds neither a prepared set (train-00000-of-0000N.parquet) nor files in the authors' formats "
            "(.jsonl); write one with revela-hub prepare."
        )
    _check_groups(dataset, path)
    return dataset


def load_sequences(path_or_id: str | Path, split: str = "train") -> Dataset:
    """Load the sequences of a set that `prepare` wrote for RetroMAE.

    Args:
        path_or_id: its folder, one Parquet file with its columns, or the id of a Hub dataset that holds it.
        split: "train" or "validation".

    Returns:
        A memory-mapped dataset, one sequence a row: `text`, `doc_id`, `source`.

    Raises:
        DataError: nothing to load, shards missing, another kind of set.
    """
    path = _local(path_or_id)
    files = [path] if path.is_file() else _shards(path, split)
    if not files or files[0].suffix != ".parquet":
        raise DataError(f"{path} holds no prepared set; write one with revela-hub prepare SOURCE --for retromae.")
    return _load_parquet(files, SEQUENCE_FEATURES, "retromae")


def _local(path_or_id: str | Path) -> Path:
    path = Path(path_or_id)
    return path if path.exists() else _download(str(path_or_id))


def _shards(folder: Path, split: str) -> list[Path]:
    """Parquet shards of a split in a folder, or in its data/ (as the Hub has it); [] where no split has any."""
    found = {}
    others = set()
    for file in [*folder.glob("*.parquet"), *folder.glob("data/*.parquet")]:
        if match := _SHARD.fullmatch(file.name):
            others.add(match["split"])
            if match["split"] == split:
                found[int(match["index"])] = (file, int(match["count"]))
    if not found:
        if others or (folder / "prepare.json").exists():
            raise DataError(
                f"{folder} has no rows in split {split!r}, only in {', '.join(sorted(others)) or 'none'}; prepare "
                "it again with a larger --validation-share or, for groups, a smaller --group-size."
            )
        return []
    count = next(iter(found.values()))[1]
    missing = sorted(set(range(count)) - set(found))
    if missing or len(found) != count:
        raise DataError(
            f"{folder}: shards {missing} of {count} of split {split!r} are missing; copy the folder again."
        )
    return [found[index][0] for index in range(count)]


def _released_files(folder: Path) -> list[Path]:
    files = sorted(file for file in folder.rglob("*") if file.name.endswith(_LINES))
    return [file for file in files if file.suffix != ".json"] or files


def _download(dataset_id: str) -> Path:
    if not may_be_hub_id(dataset_id):
        raise DataError(f"{dataset_id} does not exist, and is not the id of a Hub dataset (owner/name) either.")
    from huggingface_hub import snapshot_download

    patterns = ["*.parquet", *(f"*{suffix}" for suffix in _LINES)]
    try:
        return Path(snapshot_download(dataset_id, repo_type="dataset", allow_patterns=patterns))
    except Exception as error:  # whatever the Hub or the network has to say
        raise DataError(
            f"{dataset_id} is neither a file or folder here nor a dataset that downloads from the Hub: "
            f"{explain(error) or error}"
        ) from error


def _load_parquet(files: list[Path], features: Features, method: str) -> Dataset:
    try:
        dataset = Dataset.from_parquet([str(file) for file in files])
    except (DatasetsError, ArrowException, OSError, ValueError, TypeError) as error:  # ValueError: no row at all
        reason = error.__cause__ or error
        raise DataError(
            f"{files[0]}, or another of its {len(files)} shards, cannot be read ({reason}); copy it again."
        ) from error
    if missing := set(features) - set(dataset.column_names):
        raise DataError(
            f"{files[0]}: no column {', '.join(sorted(missing))}, so this is no prepared set for {method}; make one "
            f"of its source with revela-hub prepare --for {method}."
        )
    dataset = dataset.select_columns(list(features))
    for name, feature in features.items():
        _check_texts(dataset.data.column(name), isinstance(feature, List), f"{files[0]}, column {name!r}")
    return dataset


def _check_texts(column: pa.ChunkedArray, in_lists: bool, where: str) -> None:
    """Refuses what is no text and would end a run in its midst; reads the column once."""
    try:
        column.validate(full=True)  # writers of Parquet need not check that text is UTF-8
        nulls, is_list = column.null_count, pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
        if is_list and in_lists:
            column = pc.list_flatten(column)
    except ArrowInvalid as error:
        raise DataError(f"{where}: {error}; prepare the set again.") from error
    is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
    if is_list != in_lists or not is_text or nulls or column.null_count:
        what = "lists of texts" if in_lists else "texts"
        raise DataError(f"{where} holds something else than {what} ({column.type}, or null); prepare the set again.")


def _load_released(files: list[Path]) -> Dataset:
    stamps = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    try:
        # The stamps are arguments so that the dataset's cache, keyed by them, is not used for a file that changed.
        return Dataset.from_generator(_released_groups, features=FEATURES, gen_kwargs={"stamps": stamps})
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, DataError):
            raise error.__cause__ from None
        raise
    except ValueError as error:  # of `datasets`, for a split without a row
        raise DataError(f"{files[0]}, and the {len(files) - 1} files beside it, hold no group.") from error


def _released_groups(stamps: list[tuple[str, int, int]]) -> Iterator[dict[str, Any]]:
    for file in (Path(stamp[0]) for stamp in stamps):
        for number, line in text_lines(file):
            where = f"{file}, line {number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                column = f", column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
                raise DataError(f"{where}{column}: not JSON ({getattr(error, 'msg', error)}).") from None
            source = file.name
            if isinstance(row, dict):
                if "text" not in row:
                    raise DataError(f"{where}: no 'text' among {', '.join(map(repr, row))}; see load_groups.")
                source, row = str(row.get("src", source)), row["text"]
            if not isinstance(row, list) or not all(isinstance(text, str) for text in row):
                raise DataError(
                    f"{where}: a group is a list of strings, its chunks, but this is a {type(row).__name__}"
                    f"{' of other things' if isinstance(row, list) else ''}; if the line is a document, make groups "
                    "of the file with revela-hub prepare."
                )
            if bad := unfit("".join([source, *row])):
                raise DataError(f"{where}: {bad}")
            if len(row) < 2:
                raise DataError(
                    f"{where}: a group of {len(row)} chunk(s); each needs another to attend to: remove it."
                )
            yield {"texts": row, "doc_ids": [f"{file.name}:{number}"] * len(row), "source": source}


def _check_groups(dataset: Dataset, path: Path) -> None:
    if not len(dataset):
        raise DataError(f"{path} holds no group.")
    # Reads the lists' offsets only, not the texts.
    texts, doc_ids = (pc.list_value_length(dataset.data.column(name)) for name in ("texts", "doc_ids"))
    small = pc.index(pc.less(texts, 2), True).as_py()
    if small >= 0:
        raise DataError(f"{path}, group {small}: fewer than 2 chunks; each needs another to attend to: remove it.")
    unequal = pc.index(pc.not_equal(texts, doc_ids), True).as_py()
    if unequal >= 0:
        raise DataError(f"{path}, group {unequal}: texts and doc_ids differ in length; prepare the set again.")


def mix_sets(datasets: Sequence[Dataset], weights: Sequence[float], seed: int) -> Dataset:
    """Mix several prepared sets, so that each provides its weight's share of the rows.

    No row is repeated: the mix is the largest in which the set that runs out first keeps its share; of the others
    it takes a random part. The order is random, too, and both depend on the seed only.

    Args:
        datasets: as `load_groups` or `load_sequences` returns them.
        weights: one positive number each; their scale does not matter.
        seed: of the parts and the order.

    Raises:
        ValueError: no set, not one weight each, a weight that is not positive.
    """
    if not datasets or len(datasets) != len(weights):
        raise ValueError(f"{len(datasets)} sets and {len(weights)} weights; give at least one set, and a weight each.")
    shares = np.asarray(weights, dtype=float)
    if not (np.isfinite(shares).all() and (shares > 0).all()):
        raise ValueError(f"weights are {list(weights)}; each must be positive: leave out a set that has no weight.")
    shares /= shares.sum()
    total = min(len(dataset) / share for dataset, share in zip(datasets, shares, strict=True))
    random = np.random.default_rng(seed)
    parts = []
    for dataset, share in zip(datasets, shares, strict=True):
        size = min(len(dataset), max(1, round(total * share)))
        parts.append(dataset.select(np.sort(random.permutation(len(dataset))[:size])))
    mixed = concatenate_datasets(parts)
    return mixed.select(random.permutation(len(mixed)))
