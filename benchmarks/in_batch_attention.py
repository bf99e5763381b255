"""
Time and peak memory of one Revela training step (forward and backward), ours against the authors' way.

    python benchmarks/in_batch_attention.py --out benchmarks/in_batch_attention.md

The LM is a Llama of 6 layers, 576 wide, 9 heads, 3 key heads, vocabulary 32,000; chunks of 160 tokens; weights from
cosines around 0.9 at temperature 1e-4. The baseline is a plain implementation of what the authors' code does: two
forward passes of the LM, both with logits, and in each layer of the second one the attention maps of all pairs, kept
for the backward pass. Each measurement is a process of its own, so that its peak memory is its own.
"""

import argparse
import json
import resource
import subprocess
import sys
import time

import torch
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from benchmarks.report import machine, report
from modeling_revela import RevelaForCausalLM
from trainers.base_trainer import keep_freed_memory

LENGTH, VOCABULARY, TEMPERATURE = 160, 32_000, 1e-4


def make_lm() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=9,
        num_key_value_heads=3,
    )
    return LlamaForCausalLM(config).train()


def make_weights(chunks: int, spread: float) -> torch.Tensor:
    """(chunks, chunks) weights of cosines drawn from N(0.9, spread) at the paper's temperature."""
    cosines = 0.9 + spread * torch.randn(chunks, chunks, generator=torch.Generator().manual_seed(1))
    return torch.softmax((cosines / TEMPERATURE).fill_diagonal_(-torch.inf), dim=-1)


def dense_attention(module, query, key, value, attention_mask, scaling=None, keys_values=None, weights=None, **kwargs):
    """The first pass stores each layer's keys and values; the second, which has weights, attends to all of them."""
    output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if weights is None:
        keys_values.append((key, value))
        return output, None
    key, value = (repeat_kv(states, module.num_key_value_groups) for states in keys_values[module.layer_idx])
    scores = torch.einsum("ihqd,jhkd->ijhqk", query * scaling, key)
    maps = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    cross = torch.einsum("ijhqk,jhkd->ijhqd", maps, value)
    norms = torch.einsum("ijhqk,jhk->ijhq", maps, value.norm(dim=-1))
    cross = cross / (norms.unsqueeze(-1) + 1e-6)
    return output + torch.einsum("ij,ijhqd->iqhd", weights.to(cross.dtype), cross), None


AttentionInterface.register("authors_way", dense_attention)
AttentionMaskInterface.register("authors_way", sdpa_mask)


def authors_way(input_ids: torch.Tensor, weights: torch.Tensor):
    lm = make_lm()
    lm.set_attn_implementation("authors_way")

    def step() -> tuple:
        keys_values: list = []
        plain = lm(input_ids, labels=input_ids, use_cache=False, keys_values=keys_values)
        in_batch = lm(input_ids, labels=input_ids, use_cache=False, keys_values=keys_values, weights=weights)
        in_batch.loss.backward()
        return in_batch.loss.detach(), plain.loss.detach(), weights.numel()

    return step, lm


def ours(input_ids: torch.Tensor, weights: torch.Tensor):
    model = RevelaForCausalLM.from_backbone(make_lm()).train()

    def step() -> tuple:
        output = model(input_ids, labels=input_ids, in_batch_weights=weights)
        output.loss.backward()
        return output.loss.detach(), output.next_token_loss, output.num_pairs

    return step, model


def measure(way: str, chunks: int, spread: float, repeats: int, bf16: bool, keep_memory: bool) -> dict:
    """Fastest of `repeats` steps after a first one; seconds, peak resident memory in GB, losses."""
    if keep_memory:
        keep_freed_memory()
    input_ids = torch.randint(VOCABULARY, (chunks, LENGTH), generator=torch.Generator().manual_seed(2))
    weights = make_weights(chunks, spread).requires_grad_()
    step, model = {"ours": ours, "authors": authors_way}[way](input_ids, weights)
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            *losses, pairs = step()
        seconds.append(time.perf_counter() - start)
        model.zero_grad(set_to_none=True)
    return {
        "way": way,
        "chunks": chunks,
        "pairs": pairs,
        "seconds": min(seconds[1:]),
        "gigabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "in_batch_loss": float(losses[0]),
        "next_token_loss": float(losses[1]),
        "weights_gradient": float(weights.grad.norm()) / (repeats + 1),
    }


def table(rows: list[dict], options: argparse.Namespace) -> str:
    baseline = next(row for row in rows if row["way"] == "authors")
    lines = [
        "| step | chunks | pairs computed | seconds | times faster | peak GB | share of memory | ms a chunk |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        same = row["chunks"] == baseline["chunks"]
        faster = f"{baseline['seconds'] / row['seconds']:.2f}" if same else ""
        share = f"{row['gigabytes'] / baseline['gigabytes']:.2f}" if same else ""
        lines.append(
            f"| {row['way']} | {row['chunks']} | {row['pairs']} | {row['seconds']:.2f} | {faster} | "
            f"{row['gigabytes']:.2f} | {share} | {1000 * row['seconds'] / row['chunks']:.0f} |"
        )
    precision = "bf16 autocast" if options.bf16 else "float32"
    lines.append(
        f"\n{precision}, {options.threads} threads, {machine()}; "
        f"fastest of {options.repeats} steps after a first one. Losses: "
        + ", ".join(f"{row['way']} {row['chunks']}: {row['in_batch_loss']:.5f}" for row in rows)
        + "."
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, nargs="+", default=[16, 32, 64], help="group sizes of ours")
    parser.add_argument("--baseline-chunks", type=int, default=16, help="group size of the authors' way")
    parser.add_argument("--spread", type=float, default=0.0012, help="of the cosines; decides how many pairs count")
    parser.add_argument("--repeats", type=int, default=3, help="timed steps a measurement")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch threads")
    parser.add_argument("--bf16", action="store_true", help="bf16 autocast instead of float32")
    parser.add_argument(
        "--keep-memory",
        choices=("ours", "both", "neither"),
        default="ours",
        help="which way keeps freed memory, as our trainers do on a CPU; the authors' code leaves it to glibc (ours)",
    )
    parser.add_argument("--out", help="Markdown file to write the table to, with the command")
    parser.add_argument("--worker", nargs=2, metavar=("WAY", "CHUNKS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.worker:
        way, chunks = options.worker
        keep_memory = options.keep_memory in (way, "both")
        print(json.dumps(measure(way, int(chunks), options.spread, options.repeats, options.bf16, keep_memory)))
        return
    rows = []
    for way, chunks in [("authors", options.baseline_chunks), *(("ours", chunks) for chunks in options.chunks)]:
        command = [sys.executable, __file__, "--worker", way, str(chunks), "--spread", str(options.spread)]
        command += ["--repeats", str(options.repeats), "--threads", str(options.threads)]
        command += ["--keep-memory", options.keep_memory]
        command += ["--bf16"] if options.bf16 else []
        print(f"{way}, {chunks} chunks …", file=sys.stderr, flush=True)
        result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        rows.append(json.loads(result.stdout.splitlines()[-1]))
    text = table(rows, options)
    report("A training step, ours against the authors' way", text, options.out)


if __name__ == "__main__":
    main()
