"""
Memory and time of a Revela training step (forward and backward) as the group grows.

    python benchmarks/large_groups.py --out benchmarks/large_groups.md

Retriever and LM are Llamas of 4 layers, 256 wide, vocabulary 8,000; a chunk has 64 to 96 tokens. The weights are what
the retriever gives at the paper's temperature, 1e-4: almost one-hot. `plain` keeps every activation; `cached` embeds
`--embed-batch-size` chunks at a time and checkpoints the layers of both halves. Each measurement is a process of its
own, so that its peak memory is its own; what it held before the step is taken off. Time is the processor's, which
other processes on the machine do not stretch as they do a clock's.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from itertools import pairwise

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.report import machine, report
from modeling_revela import RevelaForPreTraining

VOCABULARY, SHORTEST, LONGEST = 8_000, 64, 96


def make_model(way: str, embed_batch_size: int) -> RevelaForPreTraining:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    retriever, lm = LlamaForCausalLM(config), LlamaForCausalLM(config)
    cached = way == "cached"
    model = RevelaForPreTraining.from_backbones(
        retriever, lm, similarity_temperature=1e-4, embed_batch_size=embed_batch_size if cached else None
    ).train()
    if cached:
        # As a Trainer does with `--gradient_checkpointing true`.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return model


def make_group(chunks: int) -> dict[str, torch.Tensor]:
    """One group of random chunks, padded on the right; the first half of each is its query."""
    generator = torch.Generator().manual_seed(chunks)
    lengths = torch.randint(SHORTEST, LONGEST + 1, (chunks, 1), generator=generator)
    input_ids = torch.randint(VOCABULARY, (chunks, LONGEST), generator=generator)
    mask = (torch.arange(LONGEST) < lengths).long()
    query_mask = (torch.arange(LONGEST // 2) < lengths // 2).long()
    return {
        "input_ids": input_ids,
        "attention_mask": mask,
        "labels": input_ids.masked_fill(mask == 0, -100),
        "document_input_ids": input_ids,
        "document_attention_mask": mask,
        "query_input_ids": input_ids[:, : LONGEST // 2],
        "query_attention_mask": query_mask,
    }


def resident_megabytes() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def measure(way: str, chunks: int, options: argparse.Namespace) -> dict:
    """Processor seconds of the fastest step, MB of peak memory above what was held before, loss and gradient."""
    model, group = make_model(way, options.embed_batch_size), make_group(chunks)
    if options.float64:
        model.double()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    # Two chunks, so that what does not depend on the group (code, buffers of the products) is there.
    pair = {name: value[:2] for name, value in group.items()}
    model(**pair, return_next_token_loss=False).loss.backward()
    held, seconds = resident_megabytes(), []
    for _ in range(options.repeats):
        model.zero_grad(set_to_none=False)
        start = time.process_time()
        output = model(**group, return_next_token_loss=False)
        output.loss.backward()
        seconds.append(time.process_time() - start)
    gradients = [parameter.grad for parameter in model.retriever.parameters()]
    return {
        "way": way,
        "chunks": chunks,
        "pairs": output.num_pairs,
        "held": held,
        "megabytes": peak_megabytes() - held,
        "seconds": min(seconds),
        "loss": float(output.loss.detach()),
        "gradient": float(torch.cat([gradient.flatten() for gradient in gradients]).norm()),
    }


def table(rows: list[dict], options: argparse.Namespace) -> str:
    lines = [
        "| step | chunks | pairs computed | peak MB | MB a chunk | to the first | ms a chunk | to the first |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        first = next(other for other in rows if other["way"] == row["way"])
        memory, first_memory = (entry["megabytes"] / entry["chunks"] for entry in (row, first))
        time_taken, first_time = (1000 * entry["seconds"] / entry["chunks"] for entry in (row, first))
        lines.append(
            f"| {row['way']} | {row['chunks']} | {row['pairs']} | {row['megabytes']:.0f} | {memory:.2f} | "
            f"{memory / first_memory:.2f} | {time_taken:.0f} | {time_taken / first_time:.2f} |"
        )
    lines.append("")
    for way in dict.fromkeys(row["way"] for row in rows):
        grown = [
            f"{(after['megabytes'] - before['megabytes']) / (after['chunks'] - before['chunks']):.2f} from "
            f"{before['chunks']} to {after['chunks']}"
            for before, after in pairwise(row for row in rows if row["way"] == way)
        ]
        lines.append(f"MB that one chunk more takes, {way}: {', '.join(grown)}.")
    precision = "float64" if options.float64 else "float32"
    lines.append(
        f"\n{precision}, {options.threads} threads, {machine()}; "
        f"fastest of {options.repeats} steps; at most "
        f"{max(row['held'] for row in rows):.0f} MB held before. Loss and norm of the retriever's gradient: "
        + ", ".join(f"{row['way']} {row['chunks']}: {row['loss']:.6f}, {row['gradient']:.6g}" for row in rows)
        + "."
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, nargs="+", default=[16, 64, 128, 256], help="group sizes")
    parser.add_argument("--embed-batch-size", type=int, default=16, help="chunks a forward pass of the retriever")
    parser.add_argument("--repeats", type=int, default=1, help="timed steps a measurement")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--float64", action="store_true", help="float64 instead of float32")
    parser.add_argument("--out", help="Markdown file to write the table to, with the command")
    parser.add_argument("--worker", nargs=2, metavar=("WAY", "CHUNKS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.worker:
        way, chunks = options.worker
        print(json.dumps(measure(way, int(chunks), options)))
        return
    rows = []
    for way in ("plain", "cached"):
        for chunks in options.chunks:
            command = [sys.executable, __file__, "--worker", way, str(chunks), "--repeats", str(options.repeats)]
            command += ["--embed-batch-size", str(options.embed_batch_size), "--threads", str(options.threads)]
            command += ["--float64"] if options.float64 else []
            print(f"{way}, {chunks} chunks …", file=sys.stderr, flush=True)
            # Without a fixed threshold glibc keeps tensors below 32 MB in its heap, whose holes then count as memory
            # in small groups and not in large ones.
            environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
            result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
            rows.append(json.loads(result.stdout.splitlines()[-1]))
    text = table(rows, options)
    report("A training step as the group grows", text, options.out)


if __name__ == "__main__":
    main()
