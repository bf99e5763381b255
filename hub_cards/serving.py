"""What text-embeddings-inference (TEI) and vLLM make of a published folder, told from its files: neither is started.

Their rules are those of their source: TEI as of early 2026 (commit 9afd2491: `router/src/lib.rs` reads the folder,
`backends/candle/src/lib.rs` chooses the architecture, `backends/candle/src/models/*.rs` name fields and weights), vLLM
likewise (`vllm/model_executor/models/registry.py` and `adapters.py`, `vllm/transformers_utils/config.py`,
`vllm/config/model.py`). Newer releases may take more.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

_MODULES = "sentence_transformers.models."
_MENDED = "write the folder again with this revela-hub (export, or fine-tune)"


@dataclass
class Verdict:
    """Whether a server takes a folder: `problems` are what it fails at or gets wrong, `notes` what to tell it."""

    server: str
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def serves(self) -> bool:
        return not self.problems


@dataclass(frozen=True)
class _Architecture:
    """How TEI reads a `model_type`: what may stand before a weight's name, what config.json must say, and where."""

    first_weight: str
    prefixes: tuple[str, ...]
    fields: tuple[str, ...] = ()
    poolings: tuple[str, ...] = ("cls_token", "mean_tokens")
    gpu_only: bool = False


_ANY_POOLING = ("cls_token", "mean_tokens", "lasttoken")
_DECODER = {"first_weight": "embed_tokens.weight", "fields": ("rope_theta", "rms_norm_eps"), "poolings": _ANY_POOLING}
_WORDS = "embeddings.word_embeddings.weight"
_ROBERTA = _Architecture(_WORDS, ("", "roberta.", "xlm-roberta.", "camembert."), ("layer_norm_eps",))
_TEI = {
    "bert": _Architecture(_WORDS, ("", "bert."), ("layer_norm_eps",)),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "modernbert": _Architecture(
        "embeddings.tok_embeddings.weight", ("", "model."), ("global_rope_theta", "local_rope_theta")
    ),
    # FlashMistral, which serves Llama too, looks for no prefix.
    "llama": _Architecture(prefixes=("",), gpu_only=True, **_DECODER),
    "mistral": _Architecture(prefixes=("",), gpu_only=True, **_DECODER),
    "qwen2": _Architecture(prefixes=("", "model."), gpu_only=True, **_DECODER),
    "qwen3": _Architecture(prefixes=("", "model."), **_DECODER),
}
# Classes that vLLM's registry has for embedding; of a `*Model` it takes the `*ForCausalLM` of the same name as well.
_VLLM = {"BertModel", "RobertaModel", "RobertaForMaskedLM", "XLMRobertaModel", "ModernBertModel", "Gemma3TextModel"}
_VLLM |= {
    f"{name}Model" for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Phi3", "Olmo2", "GPTNeoX")
}


def check_serving(folder: str | Path) -> list[Verdict]:
    """
    Whether TEI and vLLM serve a published folder as it is, and what to tell them.

    Args:
        folder: on disk.

    Returns:
        A verdict for each server.

    Raises:
        FileNotFoundError: if there is no config.json; ValueError: for one that is no JSON object.
    """
    folder = Path(folder)
    config = _read(folder / "config.json")
    if config is None:
        raise FileNotFoundError(f"{folder} holds no model: it has no config.json.")
    pooling, problems = _sentence_transformers(folder)
    problems += _tokenizer(folder, pooling, config)
    names = _weight_names(folder)
    if not names:
        problems.append("there are no safetensors: save the model again")
    prompts = (_read(folder / "config_sentence_transformers.json") or {}).get("prompts") or {}
    prompts = {name: text for name, text in prompts.items() if text}
    return [
        _check_tei(folder, config, pooling, names, prompts, list(problems)),
        _check_vllm(config, prompts, list(problems)),
    ]


def _read(path: Path) -> dict | list | None:
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}): copy it or write it again.") from error


def _sentence_transformers(folder: Path) -> tuple[str | None, list[str]]:
    """The pooling that the servers find, and what they do not understand."""
    problems = []
    modules = _read(folder / "modules.json")
    # vLLM goes by the names of sentence-transformers up to 5; TEI does not look.
    kinds = [module.get("type", "") for module in modules or []]
    if not modules or kinds[1:2] != [f"{_MODULES}Pooling"]:
        problems.append(f"modules.json names no {_MODULES}Pooling in second place: {_MENDED}")
    if others := [kind for kind in kinds[2:] if kind != f"{_MODULES}Normalize"]:
        problems.append(f"modules.json has {others[0]!r} after the pooling, which is left out when serving")
    modes = _read(folder / "1_Pooling" / "config.json") or {}
    # TEI requires both keys; vLLM takes the key that is true.
    if not {"pooling_mode_cls_token", "pooling_mode_mean_tokens"} <= modes.keys():
        problems.append(f"1_Pooling/config.json lacks pooling_mode_cls_token and the like: {_MENDED}")
    chosen = [name.removeprefix("pooling_mode_") for name, value in modes.items() if value is True]
    chosen = [name for name in chosen if name in _ANY_POOLING]
    lengths = _read(folder / "sentence_bert_config.json") or {}
    if not {"max_seq_length", "do_lower_case"} <= lengths.keys():
        problems.append(f"sentence_bert_config.json lacks max_seq_length or do_lower_case: {_MENDED}")
    return (chosen[0] if len(chosen) == 1 else None), problems


def _tokenizer(folder: Path, pooling: str | None, config: dict) -> list[str]:
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        return ["there is no tokenizer.json, and TEI reads no other: take a backbone with a fast tokenizer"]
    ids = Tokenizer.from_file(str(file)).encode("a").ids
    eos = config.get("eos_token_id")
    if pooling == "lasttoken" and ids[-1] not in (eos if isinstance(eos, list) else [eos]):
        # The token whose state is the embedding has to come from the file: nobody else appends it.
        return ["tokenizer.json appends no EOS, which the embedding is read from: append it in its post-processor"]
    return []


def _weight_names(folder: Path) -> set[str]:
    from safetensors import safe_open

    names: set[str] = set()
    for file in folder.glob("model*.safetensors"):
        with safe_open(file, "np") as weights:
            names |= set(weights.keys())
    return names


def _check_tei(
    folder: Path, config: dict, pooling: str | None, names: set[str], prompts: dict, problems: list[str]
) -> Verdict:
    verdict = Verdict("text-embeddings-inference", problems)
    kind = config.get("model_type")
    known = _TEI.get(kind)
    if known is None:
        verdict.problems.append(f"model_type {kind!r} is none of those checked here: {', '.join(_TEI)}")
        return verdict
    if pooling is not None and pooling not in known.poolings:
        verdict.problems.append(f"{kind} is not pooled by {pooling} there, only by {', '.join(known.poolings)}")
    if names and not any(f"{prefix}{known.first_weight}" in names for prefix in known.prefixes):
        wanted = " or ".join(f"{prefix}{known.first_weight}" for prefix in known.prefixes)
        verdict.problems.append(f"the weights have no {wanted}, by which {kind} is read")
    for name in ("architectures", "max_position_embeddings", *known.fields):
        if config.get(name) is None:
            verdict.problems.append(f"config.json lacks `{name}`, which must be there for {kind}")
    if "pad_token_id" in config and not isinstance(config["pad_token_id"], int):
        verdict.problems.append("config.json has a `pad_token_id` that is no number: set it or leave it out")
    if kind in ("llama", "mistral"):
        size, heads = config.get("hidden_size", 0), config.get("num_attention_heads", 1)
        if config.get("rope_scaling") is not None:
            verdict.problems.append(
                "scaled rotary positions (`rope_scaling`) are not implemented for Llama and Mistral"
            )
        if config.get("head_dim") not in (None, size // heads):
            verdict.problems.append(
                f"a `head_dim` other than hidden_size / heads, {size // heads}, is not implemented"
            )
    if kind == "qwen3" and not isinstance(config.get("eos_token_id"), int):
        verdict.problems.append("config.json must have one number as `eos_token_id`")
    if known.gpu_only:
        where = "a GPU with flash attention, in float16"
        has_onnx = (folder / "onnx" / "model.onnx").is_file()
        cpu = (
            "its ONNX backend looks for onnx/model.onnx, which is here"
            if has_onnx
            else "on CPUs write ONNX first: revela-hub export-onnx"
        )
        verdict.notes.append(f"needs {where} (bfloat16 weights are converted); {cpu}")
    if prompts:
        verdict.notes.append(f'the client names the prompt: "prompt_name": {_names(prompts)}')
    verdict.notes.append("longer texts are cut with --auto-truncate, otherwise refused")
    return verdict


def _check_vllm(config: dict, prompts: dict, problems: list[str]) -> Verdict:
    import transformers

    verdict = Verdict("vLLM", problems)
    architecture = (config.get("architectures") or [""])[0]
    stock = getattr(transformers, architecture, None)
    if architecture not in _VLLM:
        if architecture.endswith("Model") and getattr(stock, "_supports_attention_backend", False):
            verdict.notes.append(
                f"{architecture} is none of its own models, so transformers runs it: --model-impl transformers"
            )
        else:
            base = architecture.replace("ForMaskedLM", "Model")
            mend = f": save it without its head, as {base}" if base in _VLLM and base != architecture else ""
            verdict.problems.append(f"the architecture {architecture!r} is not among its embedding models{mend}")
    if config.get("dtype", config.get("torch_dtype")) == "float32":
        verdict.notes.append("float32 weights are converted to 16 bits unless --dtype float32 is given")
    if prompts:
        verdict.notes.append(
            f"prompts are not applied: the client puts {_names(prompts, texts=True)} before its texts"
        )
    if sizes := config.get("matryoshka_dimensions"):
        verdict.notes.append(f'"dimensions" in a request may be {", ".join(map(str, sizes))}')
    verdict.notes.append('longer texts are refused unless a request says "truncate_prompt_tokens": -1')
    return verdict


def _names(prompts: dict, texts: bool = False) -> str:
    return " or ".join(json.dumps(text if texts else name) for name, text in prompts.items())


__all__ = ["Verdict", "check_serving"]
