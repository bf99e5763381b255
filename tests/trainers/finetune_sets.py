"""A small retrieval task that a tiny encoder learns in seconds: a query has two rare words, its document both."""

import json
import random
from pathlib import Path

import torch
from transformers import BertConfig, BertModel, BertTokenizerFast

TOPICS = [start + end for start in "bcdfghjklm" for end in ("ato", "iru", "ome", "ula")]
FILLERS = [f"w{number}" for number in range(40)]


def make_encoder(folder: Path, dropout: float = 0.1) -> Path:
    """A random BERT of two layers whose vocabulary is the task's words."""
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *TOPICS, *FILLERS, "query", "passage", ":"]
    BertTokenizerFast(vocab={token: index for index, token in enumerate(vocabulary)}).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.1,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    BertModel(config).save_pretrained(folder)
    return folder


def make_task(folder: Path, size: int = 240, negatives: int = 0) -> Path:
    """A folder in BEIR's format: three quarters of the queries in qrels/train.tsv, the others in qrels/dev.tsv."""
    generator = random.Random(0)
    pairs = [(first, second) for first in TOPICS for second in TOPICS if first < second]
    generator.shuffle(pairs)
    documents, queries = [], []
    for first, second in pairs[:size]:
        fill = generator.choices(FILLERS, k=11)
        documents.append(" ".join([first, *fill[:6], second, *fill[6:10]]))
        queries.append(f"{second} {fill[10]} {first}")
    judged = {"train": [], "dev": []}
    for number in range(size):
        split = "train" if number % 4 else "dev"
        judged[split].append((number, number, 1))
        others = [other for other in range(size) if other != number]
        judged[split] += [(number, other, 0) for other in generator.sample(others, negatives)]
    (folder / "qrels").mkdir(parents=True)
    for name, letter, texts in (("corpus", "d", documents), ("queries", "q", queries)):
        lines = [json.dumps({"_id": f"{letter}{number}", "text": text}) for number, text in enumerate(texts)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for split, rows in judged.items():
        lines = ["query-id\tcorpus-id\tscore", *(f"q{query}\td{document}\t{grade}" for query, document, grade in rows)]
        (folder / "qrels" / f"{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder
