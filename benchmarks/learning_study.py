"""
What makes a short Revela run learn: named settings of the demo, at equal minutes, with a contrastive rival beside.

    python benchmarks/learning_study.py demo no-gate contrastive --minutes 8 --seeds 0 1 --out study

Each run is the demo (examples/demo.py) with fields of its recipe changed, or `contrastive`: same backbone, adapters,
text, precision, pooling and prompts under sentence-transformers' in-batch contrastive loss, on crops and inverse cloze
(32 pairs a step, temperature 0.01 as in C.1). HumanEval and perlfaq, on which nothing is trained, are measured where
their packages are installed (see examples/study_sets.py). Runs that are in --out already are not run again; a table of
all is written to OUT/table.md, and stands in benchmarks/learning_study.md with what was concluded.
"""

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

# Each setting is what it changes in the demo's recipe.
SETTINGS: dict[str, list[str]] = {
    "demo": [],
    "no-gate": ["--in_batch_gate", "false"],
    "frozen-lm": ["--freeze_lm", "true", "--lm_lora_r", "0"],
    "v-norm": ["--v_norm", "true"],
    "one-prompt": ["--document_prompt", "query: "],
    "mostly-prose": ["--train_weights", "0.2", "0.8"],
    "first-half": ["--similarity_span", "first_half"],
    "temperature-1e-3": ["--similarity_temperature", "1e-3"],
    "temperature-3e-2": ["--similarity_temperature", "3e-2"],
    "bf16-ties-1e-4": ["--similarity_temperature", "1e-4", "--similarity_dtype", "bfloat16"],
    "float32-1e-4": ["--similarity_temperature", "1e-4"],
    "accumulate-4": ["--gradient_accumulation_steps", "4"],
    "lr-2e-4": ["--learning_rate", "2e-4", "--gate_learning_rate", "1e-2"],
    "lr-1e-3": ["--learning_rate", "1e-3", "--gate_learning_rate", "1e-2"],
    "gate-lr-3e-2": ["--gate_learning_rate", "3e-2"],
    "two-groups": ["--per_device_train_batch_size", "2"],
    "rank-16": ["--retriever_lora_r", "16", "--lm_lora_r", "16"],
}


def run_setting(name: str, minutes: float, seed: int, out: Path) -> None:
    """One run of the demo, with the two sets that nothing was trained on measured as well."""
    command = [sys.executable, str(ROOT / "examples" / "demo.py"), "--out", str(out), "--minutes", str(minutes)]
    subprocess.run([*command, "--seed", str(seed), *SETTINGS[name]], check=True)
    result = json.loads((out / "result.json").read_text(encoding="utf-8"))
    for folder, row in (("untrained", "untrained"), ("retriever", "Revela")):
        result["rows"][row].update(measure_unseen(out / folder))
    (out / "result.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def measure_unseen(folder: Path) -> dict[str, float]:
    import torch
    from sentence_transformers import SentenceTransformer

    from hub_cards.evaluation import evaluate

    model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": torch.bfloat16})
    scores = {}
    for name in ("humaneval", "perlfaq"):
        task = unseen_set(name, folder.parent.parent)
        if task is not None:
            rows = evaluate({"model": model}, task, bm25=False, show=False)["rows"]
            scores[name] = rows[0]["scores"]["ndcg_at_10"]
    return scores


def unseen_set(name: str, folder: Path) -> Path | None:
    """The BEIR folder of a set, built once; `None` where its package is not installed."""
    import study_sets

    task = folder / name
    if not task.exists():
        try:
            getattr(study_sets, name)(task)
        except (ImportError, FileNotFoundError) as error:
            print(f"Without {name}: {error}", file=sys.stderr)
            return None
    return task


def make_pairs(groups, seed: int) -> dict[str, list[str]]:
    """Independent crops (two spans of the neighbouring chunks of a document) and inverse cloze, half and half."""
    rng = random.Random(seed)
    pairs: dict[str, list[str]] = {"anchor": [], "positive": []}
    for group in groups:
        documents: dict[str, list[str]] = {}
        for doc_id, text in zip(group["doc_ids"], group["texts"], strict=True):
            documents.setdefault(doc_id, []).append(text)
        for texts in documents.values():
            if len(texts) < 2:
                continue
            if rng.random() < 0.5:
                anchor, positive = rng.sample(texts, 2)
            else:
                lines = [line for text in texts for line in text.splitlines() if len(line.split()) >= 3]
                if len(lines) < 4:
                    continue
                anchor = rng.choice(lines).strip()
                positive = "\n".join(line for line in lines if line.strip() != anchor)
            pairs["anchor"].append(anchor)
            pairs["positive"].append(positive)
    return pairs


def run_contrastive(minutes: float, seed: int, out: Path) -> None:
    """The rival, on what a demo run of the same seed prepared."""
    import demo
    import torch
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
    from sentence_transformers import SentenceTransformerTrainingArguments as Arguments
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    from trainers.base_trainer import keep_freed_memory
    from trainers.data.prepared import load_groups, mix_sets

    keep_freed_memory()  # as our trainer does
    base = out.parent / f"demo-{minutes:g}-{seed}"
    if not (base / "result.json").exists():
        run_setting("demo", minutes, seed, base)
    sets = [load_groups(base / f"prepared-{kind}", "train") for kind in ("code", "prose")]
    pairs = make_pairs(mix_sets(sets, [0.8, 0.2], seed), seed)
    torch.manual_seed(seed)
    # bf16 base weights, float32 adapters, plain attention and 64 tokens: as the Revela run has them.
    options = {"dtype": torch.bfloat16, "attn_implementation": "eager"}
    model = SentenceTransformer(str(base / "untrained"), device="cpu", model_kwargs=options)
    # transformers' own `add_adapter` asks for a peft that is not out yet.
    lora = LoraConfig(task_type="FEATURE_EXTRACTION", r=64, lora_alpha=64, target_modules="all-linear")
    model[0].model = get_peft_model(model[0].model, lora)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    model.max_seq_length = 64
    arguments = Arguments(
        output_dir=str(out / "run"),
        per_device_train_batch_size=32,
        max_steps=100_000,
        learning_rate=5e-4,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=5,
        weight_decay=0.0,
        bf16=True,
        use_cpu=True,
        seed=seed,
        save_strategy="no",
        logging_steps=2,
        disable_tqdm=True,
        report_to="none",
        prompts={"anchor": "query: ", "positive": "passage: "},
    )
    trainer = SentenceTransformerTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict(pairs),
        loss=MultipleNegativesRankingLoss(model, scale=100.0),
        callbacks=[demo.TimeBudget(minutes)],
    )
    trainer.train()
    model.max_seq_length = demo.MAX_LENGTH
    model[0].model = model[0].model.merge_and_unload()
    model.save_pretrained(str(out / "retriever"), create_model_card=False)
    held_out = load_groups(base / "prepared-code", "validation")
    held_out = held_out.select(range(min(demo.HELD_OUT_GROUPS, len(held_out))))
    row = demo.measure("Revela", out / "retriever", base / "stdlib" / "docstring2function", held_out)["Revela"]
    row.update(measure_unseen(out / "retriever"))
    result = {"seed": seed, "steps": trainer.state.global_step, "rows": {"Revela": row}}
    (out / "result.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def table(out: Path) -> str:
    columns = ("docstring -> function", "sibling retrieval", "humaneval", "perlfaq", "mean cosine")
    lines = ["| setting | minutes | seed | steps | " + " | ".join(columns) + " |", "| --- " * (4 + len(columns)) + "|"]

    def add(name, minutes, seed, steps, row):
        cells = [f"{row[column]:.3f}" if column in row else "–" for column in columns]
        lines.append(f"| {name} | {minutes} | {seed} | {steps} | " + " | ".join(cells) + " |")

    references = False
    for file in sorted(out.glob("*/result.json")):
        name, minutes, seed = file.parent.name.rsplit("-", 2)
        result = json.loads(file.read_text(encoding="utf-8"))
        if name == "demo" and not references:
            references = True
            for reference in ("untrained", "untrained, standardised", "BM25"):
                add(reference, "–", seed, "–", result["rows"][reference])
        add(name, minutes, seed, result["steps"], result["rows"]["Revela"])
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choices = [*SETTINGS, "contrastive"]
    parser.add_argument("settings", nargs="+", choices=choices, metavar="SETTING", help=f"of {', '.join(choices)}")
    parser.add_argument("--minutes", type=float, default=8, help="minutes of training a run (%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="(%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("study"), help="folder of the runs (%(default)s)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for seed in options.seeds:
        for name in options.settings:
            folder = options.out / f"{name}-{options.minutes:g}-{seed}"
            if (folder / "result.json").exists():
                continue
            if name == "contrastive":
                run_contrastive(options.minutes, seed, folder)
            else:
                run_setting(name, options.minutes, seed, folder)
    text = table(options.out)
    (options.out / "table.md").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
