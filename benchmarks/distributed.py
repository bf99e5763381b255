"""
Several processes: time and bytes sent a step, and the memory of each, measured; and the memory of the paper's set-ups.

    python benchmarks/distributed.py --out benchmarks/distributed.md

Measured: full fine-tuning of two random Llamas (retriever and LM) in float32 with Adam, one process and two on one
machine's loopback (gloo), under each strategy. What is sent is what the loopback interface counted, so let nothing
else use it. Memory is what the last process holds between two steps, when gradients are gone; two sizes of model are
run, and what the larger takes more is compared with what the formula of the table says for weights and moments.

Computed: weights, gradients and Adam's moments a device, from the shapes of the models (no activations): ZeRO-1 splits
the optimizer, ZeRO-2 the gradients as well, ZeRO-3 and FSDP2 all of it.
"""

import argparse
import ctypes
import gc
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
# How much of weights, gradients and moments each splits, as stages of ZeRO.
STAGES = {"one process": 0, "ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp2": 3}
SIZES = {"small": 256, "large": 512}  # hidden size of the measured models
LAYERS, VOCABULARY, STEPS = 4, 8000, 6
# hidden, layers, heads, key-value heads, intermediate, vocabulary, tied
MODELS = {
    "SmolLM2-135M": (576, 30, 9, 3, 1536, 49_152, True),
    "Qwen2.5-0.5B": (896, 24, 14, 2, 4864, 151_936, True),
    "Llama-3.2-1B": (2048, 16, 32, 8, 8192, 128_256, True),
    "Llama-3.2-3B": (3072, 28, 24, 8, 8192, 128_256, True),
    "Llama-3.1-8B": (4096, 32, 32, 8, 14_336, 128_256, False),
}
LORA_RANK = 256
GIB = 2**30


def bytes_a_device(
    frozen: int, trained: int, stage: int, devices: int, weight: int = 4, gradient: int = 4, master: int = 0
) -> float:
    """
    State of a model with `frozen` and `trained` parameters, in bytes a device.

    Args:
        stage: of ZeRO; 0 for one copy of everything on each device.
        weight, gradient, master: bytes of a weight, of its gradient, and of the copy that the optimizer keeps.
    """
    optimizer = trained * (8 + master) / (devices if stage >= 1 else 1)
    gradients = trained * gradient / (devices if stage >= 2 else 1)
    weights = (frozen + trained) * weight / (devices if stage >= 3 else 1)
    return optimizer + gradients + weights


# What runs in each process


def child(settings: dict) -> None:
    if settings["strategy"] == "fsdp2":
        # accelerate knows FSDP on GPUs only.
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
        from accelerate.state import PartialState
        from accelerate.utils import DistributedType

        PartialState._prepare_backend = lambda self, *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)
    from transformers import TrainerCallback

    from trainers import base_trainer
    from trainers.revela import DataArguments, ModelArguments, train
    from trainers.revela_trainer import RevelaTrainingArguments

    # What is freed has to go back to the system, to be seen in what a process holds.
    base_trainer.keep_freed_memory = lambda: None

    class Clock(TrainerCallback):
        marks: list = []
        held = 0

        def on_step_end(self, args, state, control, **kwargs):
            self.marks.append((time.perf_counter(), loopback_bytes()))
            if state.global_step == STEPS:
                Clock.held = resident_bytes()

    folder, processes = Path(settings["folder"]), settings["processes"]
    on_cpu = {} if settings["strategy"] == "fsdp2" else {"use_cpu": True}
    model = str(folder / settings["size"])
    train(
        ModelArguments(retriever_name_or_path=model, similarity_temperature=0.01, in_batch_gate=True),
        DataArguments(train_sets=[str(folder / "groups")], max_length=64),
        RevelaTrainingArguments(
            output_dir=str(folder / "out" / f"{settings['strategy']}-{settings['size']}"),
            max_steps=STEPS, per_device_train_batch_size=2 // processes, logging_steps=100, save_strategy="no",
            report_to="none", disable_tqdm=True, max_grad_norm=0.0, **on_cpu,
        ),
        callbacks=[Clock()],
    )  # fmt: skip
    # The first two steps make states and buffers.
    marks = Clock.marks[1:]
    seconds = min(b[0] - a[0] for a, b in zip(marks, marks[1:], strict=False))
    sent = min(b[1] - a[1] for a, b in zip(marks, marks[1:], strict=False))
    result = {"seconds": seconds, "sent": sent / processes, "held": Clock.held}
    Path(settings["result"] + os.environ.get("RANK", "0")).write_text(json.dumps(result))


def resident_bytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def loopback_bytes() -> int:
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[0])
    return 0


# What starts them


def make_inputs(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from trainers.data.prepare import PrepareConfig, prepare

    words = {word: number for number, word in enumerate(["<s>", "</s>", *(f"w{i}" for i in range(VOCABULARY - 2))])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<s>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    for size, hidden in SIZES.items():
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=LAYERS,
            num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=True,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(folder / size)
        tokenizer.save_pretrained(folder / size)
    (folder / "texts").mkdir()
    for number in range(40):
        sentences = (" ".join(f"w{(number * 97 + i * 13 + j) % 7000}" for j in range(12)) + "." for i in range(60))
        (folder / "texts" / f"{number}.txt").write_text(" ".join(sentences))
    prepare(PrepareConfig(str(folder / "texts"), str(folder / "groups"), group_size=4, max_words=48))


def measure(folder: Path, strategy: str, size: str) -> dict:
    processes = 1 if strategy == "one process" else 2
    settings = {"strategy": strategy, "size": size, "processes": processes, "folder": str(folder)}
    settings["result"] = str(folder / f"{strategy}-{size}-")
    config = ROOT / "trainers" / "accelerate_configs" / f"{'cpu' if processes == 1 else strategy}.yaml"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    command += ["--num_processes", str(processes), "--main_process_port", "0", __file__, "--child"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(folder / "cache")}
    done = subprocess.run([*command, json.dumps(settings)], env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{strategy}, {size}: {done.stderr[-3000:]}")
    first, last = (json.loads(Path(f"{settings['result']}{rank}").read_text()) for rank in (0, processes - 1))
    return first | {"held": last["held"]}


def measured_table(folder: Path) -> list[str]:
    from tqdm import tqdm
    from transformers import LlamaForCausalLM

    strategies = [name for name in STAGES if "zero" not in name or importlib.util.find_spec("deepspeed")]
    runs = [(strategy, size) for strategy in strategies for size in SIZES]
    results = {run: measure(folder, *run) for run in tqdm(runs, desc="Runs")}
    counts = {size: 2 * LlamaForCausalLM.from_pretrained(folder / size).num_parameters() for size in SIZES}
    first = results["one process", "large"]
    lines = [
        "| | s a step | against one process | MB sent a process and step | in weights "
        "| held more by the larger model, MB | computed |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for strategy in strategies:
        large, small = results[strategy, "large"], results[strategy, "small"]
        devices = 1 if strategy == "one process" else 2
        grown = large["held"] - small["held"]
        more = counts["large"] - counts["small"]
        computed = bytes_a_device(0, more, STAGES[strategy], devices, gradient=0)
        lines.append(
            f"| {strategy} | {large['seconds']:.2f} | {large['seconds'] / first['seconds']:.2f} | "
            f"{large['sent'] / 1e6:.1f} | {large['sent'] / (4 * counts['large']):.2f} | {grown / 1e6:.0f} | "
            f"{computed / 1e6:.0f} |"
        )
    lines += [
        "",
        "What is held beyond the computed weights and moments: DDP keeps its buckets of gradients, which are as large",
        "as the weights; DeepSpeed and FSDP2 keep buffers for what they gather and reduce.",
        "",
        f"Weights of the larger pair: {counts['large'] / 1e6:.1f} million, {4 * counts['large'] / 1e6:.0f} MB.",
    ]
    return lines


def parameters(name: str) -> tuple[int, int]:
    """(weights, weights of adapters of rank `LORA_RANK` on all linear maps) of a model, by its shapes."""
    hidden, layers, heads, kv, inner, vocabulary, tied = MODELS[name]
    narrow = hidden // heads * kv
    maps = [(hidden, hidden), (hidden, narrow), (hidden, narrow), (hidden, hidden)]
    maps += [(hidden, inner), (hidden, inner), (inner, hidden)]
    whole = layers * (sum(a * b for a, b in maps) + 2 * hidden) + hidden + vocabulary * hidden * (1 if tied else 2)
    return whole, layers * sum(LORA_RANK * (a + b) for a, b in maps)


def computed_table() -> list[str]:
    lines = [
        "| retriever, with Llama-3.2-1B as LM | devices | DDP | ZeRO-1 | ZeRO-2 | ZeRO-3, FSDP2 |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lm = parameters("Llama-3.2-1B")
    for name in MODELS:
        retriever = parameters(name)
        for devices in (1, 4, 16, 64):
            cells = []
            for way in ("LoRA", "full"):
                frozen, trained = retriever[0] + lm[0], retriever[1] + lm[1]
                if way == "full":
                    frozen, trained = 0, frozen
                # DeepSpeed and FSDP2 hold bfloat16 weights, and float32 copies of what is trained.
                sizes = {"weight": 2, "gradient": 2, "master": 4}
                cells.append([bytes_a_device(frozen, trained, stage, devices, **sizes) / GIB for stage in range(4)])
            both = " | ".join(f"{adapters:.1f} / {full:.1f}" for adapters, full in zip(*cells, strict=True))
            lines.append(f"| {name} | {devices} | {both} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="Markdown file to write; the screen, if left out.")
    arguments = parser.parse_args()
    if arguments.child:
        child(json.loads(arguments.child))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_inputs(folder)
        measured = measured_table(folder)
    import torch

    text = "\n".join([
        "# Several processes",
        "",
        "    python benchmarks/distributed.py --out benchmarks/distributed.md",
        "",
        "## Measured: two processes on one machine",
        "",
        "The same step of two groups: both in one process, or one in each of two. With two cores and gloo on the",
        "loopback the times say what the strategies cost, not what GPUs would gain.",
        "",
        *measured,
        "",
        f"{platform.machine()}, {os.cpu_count()} cores, one thread a process, torch {torch.__version__}.",
        "",
        "## Computed: GiB a device for the paper's models",
        "",
        f"Adapters of rank {LORA_RANK} on all linear maps of both halves / full fine-tuning of both. Weights and",
        "gradients in bfloat16, float32 copies and Adam's moments of what is trained; no activations, no buffers.",
        "",
        *computed_table(),
        "",
    ])  # fmt: skip
    if arguments.out:
        arguments.out.write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
