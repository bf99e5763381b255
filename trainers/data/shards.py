"""Rows into numbered Parquet shards of bounded size."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

_ROW_GROUP, _SHARD_BYTES = 4096, 512 << 20  # texts a row group; bytes of text a shard


class Shards:
    """Writes the rows of one split, `(text or texts, doc_id or doc_ids)` each, to numbered Parquet shards.

    Args:
        folder: where to.
        split: "train" or "validation".
        schema: three columns: the two of a row, and `source`.
        source: what that column says.
        unit: what the account calls a row: "groups" or "sequences".
    """

    def __init__(self, folder: Path, split: str, schema: pa.Schema, source: str, unit: str) -> None:
        self._folder, self._split, self._schema, self._source, self._unit = folder, split, schema, source, unit
        self._writer: pq.ParquetWriter | None = None
        self._paths: list[Path] = []
        self._rows: list[int] = []
        self._pending: list[tuple] = []
        self._texts = self._bytes = 0

    def write(self, rows: Iterable[tuple]) -> None:
        """Add rows, in order."""
        for row in rows:
            self._pending.append(row)
            texts = [row[0]] if isinstance(row[0], str) else row[0]
            self._texts += len(texts)
            self._bytes += sum(map(len, texts))
            if self._texts >= _ROW_GROUP:
                self._flush()
                if self._bytes >= _SHARD_BYTES:
                    self._close_writer()

    def _flush(self) -> None:
        if not self._pending:
            return
        if self._writer is None:
            self._paths.append(self._folder / f"{self._split}-{len(self._paths):05d}.parquet")
            self._rows.append(0)
            self._writer = pq.ParquetWriter(self._paths[-1], self._schema, compression="zstd")
        texts, doc_ids = zip(*self._pending, strict=True)
        sources = [self._source] * len(texts)
        self._writer.write_table(pa.table([texts, doc_ids, sources], schema=self._schema), row_group_size=len(texts))
        self._rows[-1] += len(texts)
        self._pending, self._texts = [], 0

    def _close_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer, self._bytes = None, 0

    def close(self) -> dict[str, dict[str, Any]]:
        """Finish; returns number of rows and SHA-256 of each shard by its final name."""
        self._flush()
        self._close_writer()
        shards = {}
        for index, (path, rows) in enumerate(zip(self._paths, self._rows, strict=True)):
            name = f"{self._split}-{index:05d}-of-{len(self._paths):05d}.parquet"
            path.rename(self._folder / name)
            with open(self._folder / name, "rb") as file:
                digest = hashlib.sha256()
                while block := file.read(1 << 20):
                    digest.update(block)
            shards[name] = {self._unit: rows, "sha256": digest.hexdigest()}
        return shards


__all__ = ["Shards"]
