"""
What RetroMAE's parts are worth on a small scale: the demo's pre-training and fine-tuning, one setting changed.

    python benchmarks/retromae_study.py none mlm enhanced basic --seeds 0 1 --out study-retromae

Each run is one variant of examples/demo_retromae.py: the same encoder, text, order of data and steps. A seed
moves the held-out modules, the fresh layers, what is masked and the order. Runs that are in --out already are not run
again; a table of all, means over the seeds with each seed's nDCG@10 beside, is written to OUT/table.md, and stands in
benchmarks/retromae_study.md with what was concluded.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

# Each setting is a variant of the demo, and what it changes in the model's arguments.
SETTINGS: dict[str, tuple[str, dict]] = {
    "none": ("none", {}),
    "mlm": ("mlm", {}),
    "enhanced": ("enhanced", {}),
    "enhanced-0.15": ("enhanced", {"decoder_mask_ratio": 0.15}),
    "enhanced-0.9": ("enhanced", {"decoder_mask_ratio": 0.9}),
    "basic": ("enhanced", {"decoding": "basic"}),
    "basic-0.15": ("enhanced", {"decoding": "basic", "decoder_mask_ratio": 0.15}),
    "basic-0.9": ("enhanced", {"decoding": "basic", "decoder_mask_ratio": 0.9}),
}


def run(name: str, seed: int, steps: int, finetune_steps: int, out: Path) -> None:
    """One run, from data to measures; OUT/NAME-SEED.json."""
    import console
    import demo_retromae as demo

    console.quiet()
    folder = out / f"{name}-{seed}"
    task = demo.prepare_data(folder, seed, demo.PAIRS)
    variant, options = SETTINGS[name]
    result = demo.run_variant(folder, variant, task, seed, steps, finetune_steps, options)
    result |= {"name": name, "seed": seed, "steps": steps, "finetune_steps": finetune_steps}
    result["beside"] = demo.references(task)
    (out / f"{name}-{seed}.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def table(out: Path) -> str:
    """Markdown; a row a setting, in the order of SETTINGS."""
    found: dict[str, list[dict]] = {}
    for file in sorted(out.glob("*.json")):
        result = json.loads(file.read_text(encoding="utf-8"))
        found.setdefault(result["name"], []).append(result)
    lines = [
        "| pre-training | seeds | nDCG@10 before | nDCG@10 after | of each seed | MRR@10 after | R@100 after | "
        "decoder accuracy | minutes |",
        "| --- " * 9 + "|",
    ]

    def mean(values) -> str:
        values = list(values)
        return f"{sum(values) / len(values):.3f}" if values else "–"

    beside: dict[str, dict[int, dict]] = {}
    for results in found.values():
        for result in results:
            for model, scores in result["beside"].items():
                beside.setdefault(model, {})[result["seed"]] = scores
    for model, by_seed in beside.items():
        each = " ".join(f"{scores['ndcg_at_10']:.3f}" for _, scores in sorted(by_seed.items()))
        rest = [
            mean(scores[key] for scores in by_seed.values()) for key in ("ndcg_at_10", "mrr_at_10", "recall_at_100")
        ]
        lines.append(f"| ({model}) | {len(by_seed)} | – | {rest[0]} | {each} | {rest[1]} | {rest[2]} | – | – |")
    for name in (name for name in SETTINGS if name in found):
        results = sorted(found[name], key=lambda result: result["seed"])
        last = [
            [entry["decoder_accuracy"] for entry in result["log"] if "decoder_accuracy" in entry][-1:]
            for result in results
        ]
        cells = [
            name,
            str(len(results)),
            mean(result["before"]["ndcg_at_10"] for result in results),
            mean(result["after"]["ndcg_at_10"] for result in results),
            " ".join(f"{result['after']['ndcg_at_10']:.3f}" for result in results),
            mean(result["after"]["mrr_at_10"] for result in results),
            mean(result["after"]["recall_at_100"] for result in results),
            mean(value for values in last for value in values),
            f"{sum(sum(result['minutes'].values()) for result in results) / len(results):.1f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join(SETTINGS)
    parser.add_argument("settings", nargs="+", choices=list(SETTINGS), metavar="SETTING", help=f"of {names}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=400, help="steps of pre-training (%(default)s)")
    parser.add_argument("--finetune-steps", type=int, default=60, help="steps of fine-tuning (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("study-retromae"), help="folder of the runs (%(default)s)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for seed in options.seeds:
        for name in options.settings:
            if not (options.out / f"{name}-{seed}.json").exists():
                run(name, seed, options.steps, options.finetune_steps, options.out)
    text = table(options.out)
    (options.out / "table.md").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
