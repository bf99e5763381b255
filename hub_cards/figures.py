"""The pictures of a model card. They bring a light ground of their own, which dark pages leave as it is."""

from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

# What is drawn of a trainer's log, a panel each: title -> key -> label.
_PANELS = {
    "loss (nats a token)": {
        "in_batch_loss": "with in-batch attention",
        "next_token_loss": "without",
        "encoder_loss": "encoder",
        "decoder_loss": "decoder",
        "bow_loss": "bag of words",
    },
    "what other chunks save (nats a token)": {
        "in_batch_gain": "training",
        "eval_retrieval_gain": "held out, over uniform weights",
    },
    "masked accuracy": {"encoder_accuracy": "encoder", "decoder_accuracy": "decoder"},
    "loss": {"finetune_loss": "loss"},
    "held out: nDCG@10": {"dev_ndcg_at_10": "nDCG@10"},
    "held out: sibling nDCG@10": {"eval_sibling_ndcg_at_10": "sibling nDCG@10"},
}
LOGGED = tuple(key for keys in _PANELS.values() for key in keys)
_COLOURS = ("#0b6e99", "#d1603d", "#6a8d3a")
_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8a8f98",
    "xtick.color": "#50555e",
    "ytick.color": "#50555e",
    "text.color": "#23262b",
    "axes.labelcolor": "#23262b",
    "axes.titlecolor": "#23262b",
    "figure.facecolor": "#fbfaf8",
    "axes.facecolor": "#fbfaf8",
    "savefig.facecolor": "#fbfaf8",
}


def draw_curves(history: list[dict], path: Path) -> bool:
    """
    Draw a trainer's log as PNG, one panel a kind of measure.

    Args:
        history: entries with `step` and some of `LOGGED`.

    Returns:
        Whether there was anything to draw.
    """
    curves = {
        title: {
            label: points
            for key, label in keys.items()
            if len(points := [(entry["step"], entry[key]) for entry in history if key in entry]) > 1
        }
        for title, keys in _PANELS.items()
    }
    curves = {title: lines for title, lines in curves.items() if lines}
    if not curves:
        return False
    with rc_context(_STYLE):
        figure = Figure(figsize=(3.3 * len(curves), 2.5), layout="constrained")
        for axes, (title, lines) in zip(
            figure.subplots(1, len(curves), squeeze=False)[0], curves.items(), strict=True
        ):
            for colour, (label, points) in zip(_COLOURS, lines.items(), strict=False):
                steps, values = zip(*points, strict=True)
                marker = "o" if len(points) < 12 else None
                axes.plot(steps, values, color=colour, label=label, linewidth=1.6, marker=marker, markersize=3)
            axes.set_title(title, loc="left")
            axes.set_xlabel("step")
            axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
            axes.yaxis.set_major_locator(MaxNLocator(4))
            axes.grid(axis="y", color="#e3e1dc", linewidth=0.7)
            if len(lines) > 1:
                axes.legend(frameon=False, fontsize=8)
        figure.savefig(path, dpi=160)
    return True


def draw_attention(pictures: list[dict], path: Path) -> None:
    """
    Draw in-batch attention at three checkpoints in the manner of Revela's Fig. 6, as PNG.

    Above, the weights that each chunk (a row) gives to the others of its group; chunks of one document share a letter.
    Below, the LM's loss for each token of each chunk.

    Args:
        pictures: in the order of the steps: `step`, `documents` (B), `weights` (B, B) and `losses` (B lists of
            nats, one a token). The first, the middle and the last are drawn.
    """
    chosen = [pictures[index] for index in sorted({0, len(pictures) // 2, len(pictures) - 1})]
    documents = chosen[0]["documents"]
    # Chunks of a document side by side, so that what belongs together makes a block.
    order = sorted(range(len(documents)), key=documents.__getitem__)
    names = _chunk_names([documents[index] for index in order])
    most = max(max(map(len, picture["losses"])) for picture in chosen)
    top = max(max(map(max, (row for row in picture["losses"] if row)), default=1.0) for picture in chosen)
    with rc_context(_STYLE):
        figure = Figure(figsize=(3.2 * len(chosen) + 0.4, 5.0), layout="constrained")
        grid = figure.subplots(2, len(chosen), squeeze=False, height_ratios=(3, 2))
        for column, picture in enumerate(chosen):
            upper, lower = grid[0][column], grid[1][column]
            weights = [[picture["weights"][row][other] for other in order] for row in order]
            weights = upper.imshow(weights, cmap="Blues", vmin=0, vmax=1)
            upper.set_xticks(range(len(names)), names)
            upper.set_title(f"step {picture['step']:,}", loc="left")
            padded = [
                row + [float("nan")] * (most - len(row)) for row in (picture["losses"][index] for index in order)
            ]
            losses = lower.imshow(padded, cmap="OrRd", vmin=0, vmax=top, aspect="auto", interpolation="nearest")
            count = sum(map(len, picture["losses"]))
            lower.set_title(f"mean loss {sum(map(sum, picture['losses'])) / max(count, 1):.3f}", loc="left")
            lower.set_xlabel("token")
            for axes in (upper, lower):
                axes.set_yticks(range(len(names)), names if column == 0 else [])
                axes.tick_params(length=0)
                for spine in axes.spines.values():
                    spine.set_visible(False)
        figure.colorbar(weights, ax=grid[0], label="weight", shrink=0.8)
        figure.colorbar(losses, ax=grid[1], label="loss (nats)", shrink=0.9)
        figure.savefig(path, dpi=160)


def _chunk_names(documents: list[int]) -> list[str]:
    """A1, A2, B1, …: a letter a document, a number a chunk."""
    seen: dict[int, int] = {}
    names = []
    for document in documents:
        seen[document] = seen.get(document, 0) + 1
        names.append(f"{chr(ord('A') + document)}{seen[document]}")
    return names


__all__ = ["LOGGED", "draw_attention", "draw_curves"]
