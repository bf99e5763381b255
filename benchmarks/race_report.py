"""The table and the picture of a race's results."""

import json
import statistics
from pathlib import Path

COLUMNS = ("docstring -> function", "HumanEval", "perlfaq", "sibling retrieval")
"""What is measured, nDCG@10 each."""
REFERENCES = ("untrained", "untrained, standardised", "static", "BM25")
"""What was not trained on the text."""


def read_results(out: Path) -> list[dict]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(out.glob("*/result.json"))]


def table(results: list[dict], order: list[str]) -> str:
    """A row a method, by `order`, and length: the mean over its seeds, and the distance from it to the farthest."""
    columns = (*COLUMNS, "mean of the four", "mean cosine")
    lines = ["| run | minutes | seeds | steps | " + " | ".join(columns) + " |", "| --- " * (4 + len(columns)) + "|"]

    def add(name, minutes, seeds, steps, rows: list[dict]):
        cells = []
        for column in columns:
            wanted = COLUMNS if column == "mean of the four" else (column,)
            values = [
                statistics.mean(row[name] for name in wanted)
                for row in rows
                if all(row.get(name) is not None for name in wanted)
            ]
            mean = statistics.mean(values) if values else 0
            spread = max((abs(value - mean) for value in values), default=0)
            cells.append("–" if not values else f"{mean:.3f}" + (f" ± {spread:.3f}" if len(values) > 1 else ""))
        lines.append(f"| {name} | {minutes} | {seeds} | {steps} | " + " | ".join(cells) + " |")

    references = [result for result in results if result["name"] == "references"]
    for name in REFERENCES if references else ():
        seeds = " ".join(str(result["seed"]) for result in references)
        add(name, "–", seeds, "–", [result["rows"][name] for result in references])
    runs: dict[tuple, list[dict]] = {}
    for result in results:
        if result["name"] != "references":
            runs.setdefault((result["minutes"], result["name"]), []).append(result)
    for (minutes, name), found in sorted(runs.items(), key=lambda item: (item[0][0], order.index(item[0][1]))):
        steps = statistics.mean(result["steps"] for result in found)
        seeds = " ".join(str(result["seed"]) for result in found)
        add(name, f"{minutes:g}", seeds, f"{steps:.0f}", [result["scores"] for result in found])
    return "\n".join(lines)


def plot(results: list[dict], path: Path) -> None:
    """nDCG@10 over time: a line a method, its seeds as points."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    runs = [result for result in results if "curve" in result]
    if not runs:
        return
    minutes = max(result["minutes"] for result in runs)
    figure, axes = plt.subplots(figsize=(8, 5))
    for number, name in enumerate(dict.fromkeys(result["name"] for result in runs)):
        chosen = [result["curve"] for result in runs if result["name"] == name and result["minutes"] == minutes]
        if not chosen:
            continue
        points = [list(zip(*moments, strict=True)) for moments in zip(*chosen, strict=False)]
        x, y = ([statistics.mean(values[axis]) for values in points] for axis in (0, 1))
        axes.plot(x, y, marker="o", label=name, color=f"C{number % 10}", linestyle="-" if number < 10 else "--")
        for curve in chosen:
            axes.scatter(*zip(*curve, strict=True), s=8, color=f"C{number % 10}")
    for result in results:
        if result["name"] == "references":
            axes.axhline(
                result["rows"]["BM25"][COLUMNS[0]], color="grey", linewidth=0.8, label=f"BM25, {result['seed']}"
            )
    axes.set(xlabel="minutes of one core", ylabel="docstring → function, nDCG@10")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
