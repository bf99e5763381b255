"""What the demos say on the screen, in one voice."""

import time
import warnings
from collections.abc import Callable
from pathlib import Path

import datasets
from transformers.utils import logging

from hub_cards.beir_folder import load_beir_folder
from hub_cards.search import print_hits, search


def quiet() -> None:
    """Progress bars of training only."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    warnings.filterwarnings("ignore", category=FutureWarning)


def clock() -> tuple[Callable[[], float], Callable[[str], None]]:
    """`minutes()` since now, and `say(text)`, which prints them before a text."""
    started = time.monotonic()

    def minutes() -> float:
        return (time.monotonic() - started) / 60

    def say(text: str) -> None:
        print(f"\n[{minutes():4.1f} min] {text}", flush=True)

    return minutes, say


def take_leave(say: Callable[[str], None], out: Path, retriever: Path, task: Path) -> None:
    """A search with the new retriever in its test set, and how to load it elsewhere."""
    query = next(iter(load_beir_folder(task).queries.values()))
    say(f"Search: {query!r}")
    print_hits(search(str(retriever), task, query, top_k=3))
    say(f"Done. Curves: {out / 'curves.png'}; numbers: {out / 'result.json'}. Load the retriever anywhere:\n")
    print(
        "from sentence_transformers import SentenceTransformer\n"
        f'model = SentenceTransformer("{retriever}")\n'
        'print(model.encode_query(["longest common path"]) @ model.encode_document(["def commonpath(paths): ..."]).T)'
    )
