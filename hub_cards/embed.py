"""
`revela-hub embed`: a corpus in, its embeddings out, as shards of Parquet or NumPy.

A folder of embeddings holds `embed.json`, which says what was embedded with what, and shards of `shard_size` texts in
the corpus's order, named `embeddings-00000-of-0000N`:

- `.parquet`: `id` (string), `embedding` (list of dimension float32 or float16) and, where asked for, `text` (string);
- or `.npy`, an array of (texts, dimension), with a `.jsonl` of the same name: `id` (and `text`) a line.

Shards are dealt out to the processes that `accelerate launch` starts, on one machine or on several that share the
folder. Each process reads the corpus as a stream and holds the texts of one shard. A shard is written under a hidden
name and renamed when it is whole, so whatever bears its name is finished, and a run that was killed goes on after it.
"""

import hashlib
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, parse_flag_from_env
from sentence_transformers import SentenceTransformer
from tqdm.auto import tqdm

from hub_cards.checkpoints import require_writable
from hub_cards.encoding import load_model, model_fingerprint, prompts_used
from hub_cards.search import iter_passages

MANIFEST = "embed.json"
_SUFFIX = {"parquet": ".parquet", "numpy": ".npy"}


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class EmbedConfig:
    """Settings of `embed`. Every field is an option of `revela-hub embed`."""

    model: str = field(metadata={"help": "A sentence-transformers folder or Hub id."})
    corpus: str = field(
        metadata={"help": "What to embed: text files or a folder of them, a BEIR folder, JSONL, a prepared set."}
    )
    out: str = field(metadata={"help": "Folder to write the embeddings to; one that all machines see."})
    prompt_name: str = _option("document", "Which of the model's prompts precedes each text: document or query.")
    batch_size: int = _option(32, "Texts a forward pass.")
    shard_size: int = _option(10_000, "Texts a shard; what a run that is killed loses at most, per process.")
    dtype: str | None = _option(
        None, "Precision of the model: float32, bfloat16 or float16. Left out: that of its weights."
    )
    store_dtype: str = _option("float32", "Precision of what is written: float32 or float16.")
    normalize: bool = _option(False, "Scale embeddings to length 1 where the model does not do so itself.")
    format: str = _option("parquet", "parquet or numpy.")
    with_text: bool = _option(False, "Write the texts beside their embeddings.")

    def __post_init__(self) -> None:
        for name, values in {
            "prompt_name": ("document", "query"),
            "dtype": (None, "float32", "bfloat16", "float16"),
            "store_dtype": ("float32", "float16"),
            "format": tuple(_SUFFIX),
        }.items():
            if getattr(self, name) not in values:
                choices = ", ".join(value for value in values if value)
                raise ValueError(f"{name} is {getattr(self, name)!r}; choose one of {choices}.")
        for name in ("batch_size", "shard_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if not Path(self.corpus).exists():
            raise FileNotFoundError(f"There is no file or folder {self.corpus} to embed.")
        if Path(self.out).resolve().is_relative_to(Path(self.corpus).resolve()):
            raise ValueError(f"{self.out} lies in {self.corpus}, and would be read as part of it; choose another.")
        require_writable(self.out, "--out")


def embed(config: EmbedConfig) -> dict[str, Any]:
    """
    Embed a corpus, or go on where an earlier run stopped; call it in every process of a launch.

    The embeddings are those of `SentenceTransformer.encode_document` (`encode_query`) to float32's rounding, and a
    shard does not depend on which process of how many made it.

    Returns:
        The manifest, as saved in `embed.json`: `model` (name, fingerprint, prompt, dtype, dimension …), `corpus`
        (path, texts, fingerprint), `shards` (their number, size and format).

    Raises:
        ValueError: a corpus or model that cannot be read; a folder that holds embeddings of another corpus or model,
            or made with other settings; embeddings that are not finite.
        FileExistsError: a folder that holds something else.
    """
    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    # The processes wait while the first counts the corpus, and in the end for the slowest.
    state = PartialState(cpu=on_cpu, timeout=timedelta(days=7))
    model = _load(config, state.device)
    started = time.perf_counter()
    out = Path(config.out)
    plan: list[Any] = [None, None]
    if state.is_main_process:
        manifest = _manifest(config, model)
        _start(out, manifest)
        plan = [manifest, [shard for shard in _shards(manifest) if not _is_whole(out / shard.name, shard.texts)]]
    broadcast_object_list(plan)
    manifest, unfinished = plan
    own = {shard.index: shard for shard in unfinished[state.process_index :: state.num_processes]}
    todo = sum(shard.texts for shard in unfinished)
    with tqdm(total=manifest["corpus"]["texts"], unit=" texts", desc="Embedding", disable=_hidden(state)) as bar:

        def show(in_progress: int = 0) -> None:
            finished = sum(shard.texts for shard in _shards(manifest) if (out / shard.name).exists())
            bar.update(finished + in_progress - bar.n)

        bar.initial = bar.n = bar.total - todo
        for shard, passages in _read(config, own):
            _embed_shard(config, model, passages, out / shard.name, bar.update)
            show()
        state.wait_for_everyone()
        show()
    if state.is_main_process:
        seconds = time.perf_counter() - started
        print(f"Embedded {todo:,} of {manifest['corpus']['texts']:,} texts in {seconds:.1f} s into {out}.")
    return manifest


@dataclass(frozen=True)
class _Shard:
    index: int
    name: str
    texts: int


def _shards(manifest: dict[str, Any]) -> list[_Shard]:
    """All shards of a folder of embeddings, those not yet written included."""
    texts, shards = manifest["corpus"]["texts"], manifest["shards"]
    count, size, suffix = shards["count"], shards["texts"], _SUFFIX[shards["format"]]
    return [
        _Shard(index, f"embeddings-{index:05d}-of-{count:05d}{suffix}", min(size, texts - index * size))
        for index in range(count)
    ]


def _is_whole(path: Path, texts: int) -> bool:
    """Whether a shard is there with all its rows, told without reading its embeddings; a damaged one is removed."""
    if not path.exists():
        return False
    try:
        if path.suffix == ".npy":
            with open(path.with_suffix(".jsonl"), "rb") as lines:
                ids = sum(line.endswith(b"\n") for line in lines)
            rows = {ids, len(np.load(path, mmap_mode="r"))}  # an error where the file is shorter than its header says
        else:
            rows = {pq.read_metadata(path).num_rows}  # written last
    except (OSError, ValueError, EOFError):  # ValueError: ArrowInvalid as well
        rows = set()
    if rows != {texts}:
        print(f"{path} is damaged, and is made again.", file=sys.stderr)
        path.unlink()
    return rows == {texts}


def _hidden(state: PartialState) -> bool:
    return not (state.is_main_process and sys.stderr.isatty())


def _load(config: EmbedConfig, device: torch.device) -> SentenceTransformer:
    options = {} if config.dtype is None else {"model_kwargs": {"dtype": config.dtype}}
    return load_model(config.model, device=str(device), **options)


def _manifest(config: EmbedConfig, model: SentenceTransformer) -> dict[str, Any]:
    texts, fingerprint = _count(config.corpus)
    return {
        "model": {
            "name": config.model,
            "fingerprint": model_fingerprint(config.model),
            "prompt": prompts_used(model)[config.prompt_name],
            "task": config.prompt_name,
            "max_seq_length": model.max_seq_length,
            "dimension": model.get_embedding_dimension(),
            "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
            "normalize": config.normalize,
        },
        "corpus": {"path": config.corpus, "texts": texts, "fingerprint": fingerprint},
        "shards": {
            "texts": config.shard_size,
            "count": -(-texts // config.shard_size),
            "format": config.format,
            "dtype": config.store_dtype,
            "with_text": config.with_text,
        },
    }


def _count(corpus: str) -> tuple[int, str]:
    """Number of texts, and a hash of all ids and texts in their order."""
    digest, texts = hashlib.blake2b(digest_size=16), 0
    for passage in iter_passages(corpus):
        for part in passage:
            part = part.encode("utf-8", "surrogatepass")
            digest.update(len(part).to_bytes(8, "little") + part)
        texts += 1
    if not texts:
        raise ValueError(f"{corpus} holds no text to embed.")
    return texts, digest.hexdigest()


def _start(out: Path, manifest: dict[str, Any]) -> None:
    """Writes the manifest, or compares it with the one there; where the two lie says nothing about what they are."""
    path = out / MANIFEST
    if path.is_file():
        there = json.loads(path.read_text(encoding="utf-8"))
        for part, settings in manifest.items():
            for name, value in settings.items():
                former = there.get(part, {}).get(name)
                if name not in ("name", "path") and value != former:
                    raise ValueError(
                        f"{path} has {former!r} as the {name} of {part}, and this run {value!r}; for another model, "
                        "corpus or setting choose another --out, or remove that folder."
                    )
        return
    if out.exists() and any(file.name[0] != "." for file in out.iterdir()):
        raise FileExistsError(f"{out} is not empty and holds no {MANIFEST}; choose another --out.")
    out.mkdir(parents=True, exist_ok=True)
    with _renamed(path) as partial:
        text = json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")  # bytes of a path, as JSON's \udcff


@contextmanager
def _renamed(path: Path) -> Iterator[Path]:
    """A hidden name to write to, which becomes `path` once all of it is on the disk."""
    partial = path.with_name(f".{path.name}.partial")
    yield partial
    with open(partial, "rb+") as file:
        os.fsync(file.fileno())
    partial.replace(path)


def _read(config: EmbedConfig, own: dict[int, _Shard]) -> Iterator[tuple[_Shard, list[tuple[str, str]]]]:
    passages = iter_passages(config.corpus)
    for index in range(max(own, default=-1) + 1):
        rows = islice(passages, config.shard_size)
        if index not in own:
            deque(rows, maxlen=0)
            continue
        shard, rows = own[index], list(rows)
        if len(rows) != shard.texts:
            raise ValueError(f"{config.corpus} changed while it was read: shard {index} has {len(rows)} texts.")
        yield shard, rows


def _embed_shard(
    config: EmbedConfig,
    model: SentenceTransformer,
    passages: list[tuple[str, str]],
    path: Path,
    done: Callable[[int], Any],
) -> None:
    ids, texts = (list(column) for column in zip(*passages, strict=True))
    embeddings = _encode(config, model, texts, done).astype(config.store_dtype)
    finite = np.isfinite(embeddings).all(axis=1)
    if not finite.all():
        raise ValueError(
            f"The embedding of {ids[int(finite.argmin())]!r} is not finite; try --dtype or --store-dtype float32."
        )
    if config.format == "numpy":
        with _renamed(path.with_suffix(".jsonl")) as partial, open(partial, "w", encoding="utf-8") as file:
            for id, text in passages:
                row = {"id": id, "text": text} if config.with_text else {"id": id}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        with _renamed(path) as partial, open(partial, "wb") as file:
            np.save(file, embeddings)
        return
    columns = {
        "id": pa.array(ids, pa.string()),
        "embedding": pa.FixedSizeListArray.from_arrays(pa.array(embeddings.ravel()), embeddings.shape[1]),
    }
    if config.with_text:
        columns["text"] = pa.array(texts, pa.string())
    with _renamed(path) as partial:
        # Numbers of an embedding repeat as little as random ones: neither a dictionary nor zstd makes them smaller.
        strings = dict.fromkeys(columns.keys() - {"embedding"}, "zstd")
        pq.write_table(pa.table(columns), partial, compression=strings, use_dictionary=False)


def _encode(
    config: EmbedConfig, model: SentenceTransformer, texts: list[str], done: Callable[[int], Any]
) -> np.ndarray:
    """(texts, dimension) float32, through the model's own `encode_…`, a batch a call."""
    encode = model.encode_query if config.prompt_name == "query" else model.encode_document
    # `encode` sorts by characters, whose number of tokens differs: by tokens, next to nothing is padding.
    order = np.argsort(_lengths(model, texts), kind="stable")[::-1]
    parts = []
    for start in range(0, len(order), config.batch_size):
        batch = [texts[index] for index in order[start : start + config.batch_size]]
        options = {"batch_size": config.batch_size, "normalize_embeddings": config.normalize}
        parts.append(encode(batch, convert_to_tensor=True, show_progress_bar=False, **options))
        done(len(batch))
    # One copy a shard: one a batch would have the device wait for it each time.
    sorted_embeddings = torch.cat(parts).float().cpu().numpy()
    embeddings = np.empty_like(sorted_embeddings)
    embeddings[order] = sorted_embeddings
    return embeddings


def _lengths(model: SentenceTransformer, texts: list[str]) -> list[int]:
    tokenizer = model.tokenizer
    if not getattr(tokenizer, "is_fast", False):
        return [len(text) for text in texts]
    encoded = tokenizer(texts, truncation=True, max_length=model.max_seq_length, return_attention_mask=False)
    return [len(ids) for ids in encoded["input_ids"]]


__all__ = ["EmbedConfig", "embed"]
