"""A published folder's model as ONNX, for sentence-transformers' `backend="onnx"`, onnxruntime and TEI on CPUs.

sentence-transformers exports through optimum, which for ONNX wants transformers 4 today, and gives a decoder a graph
that asks for `position_ids`, which sentence-transformers does not pass. Here torch exports: the graph takes token ids
and mask alone, whatever the backbone, and what it says is compared with the model's before anything is written.
OpenVINO's form is made of that graph, as of a decoder's optimum-intel makes one that gives NaN.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from hub_cards.checkpoints import check_folder, record_graph
from hub_cards.encoding import load_model

TOLERANCE = 1e-3
"""How far, in cosine distance of an embedding, ONNX may be from torch; float32 rounding stays below 1e-5."""
_TEXTS = (
    ["where do boats stop"],
    ["a", "Boats stop at the bank, and a fisher sells fish there.", "trains cross the bridge to the city " * 8],
)


def export_onnx(folder: str | Path, overwrite: bool = False, openvino: bool = False) -> Path:
    """
    Write `onnx/model.onnx` into a published folder: float32, any batch and length.

    The folder's `revela_export.json` notes the files and the weights that they were made of, for `push` to check.

    Args:
        folder: what `revela-hub export` or fine-tuning wrote.
        overwrite: replace an earlier export.
        openvino: write `openvino/openvino_model.xml`, with its weights beside it, instead.

    Returns:
        The path of the ONNX file, of 2 GB and more its weights lie beside it; or of OpenVINO's.

    Raises:
        FileExistsError: for an earlier export; ImportError: without onnx, onnxscript and onnxruntime, or openvino;
        ValueError: for a folder that does not load, or where ONNX, or OpenVINO in float32, and torch part by more than
        `TOLERANCE`.
    """
    folder = Path(folder)
    out = folder / ("openvino" if openvino else "onnx")
    if not (folder / "modules.json").is_file():
        raise ValueError(
            f"{folder} is no published folder: it has no modules.json. Write one with `revela-hub export`."
        )
    if out.exists() and not overwrite:
        raise FileExistsError(f"{out} is there already: pass --overwrite.")
    try:
        import onnxruntime
        import onnxscript  # noqa: F401 (torch.onnx needs it, and onnx with it)

        if openvino:
            import openvino as run_time  # noqa: F401
    except ImportError as error:
        extra = "openvino" if openvino else "onnx"
        raise ImportError(
            f"{error.name} is not installed, which exporting needs: pip install 'revela-hub[{extra}]'"
        ) from None
    check_folder(folder)
    options = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    model = load_model(folder, device="cpu", model_kwargs=options).eval()
    staging = folder / f".onnx.{os.getpid()}.partial"
    try:
        staging.mkdir()
        file = staging / "model.onnx"
        _export(_HiddenStates(model[0].auto_model), _tokens(model, _TEXTS[1]), file)
        session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        _require_equal(model, lambda inputs: session.run(None, inputs)[0], "ONNX", folder)
        if openvino:
            converted = _to_openvino(file)
            compiled = run_time.compile_model(str(converted), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
            _require_equal(model, lambda inputs: compiled(inputs)[0], "OpenVINO", folder)
            del compiled  # it holds the weights' file
            for path in staging.glob("*.onnx*"):
                path.unlink()
            file = converted
        if out.exists():
            shutil.rmtree(out)
        os.replace(staging, out)
        record_graph(folder, out.name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return out / file.name


class _HiddenStates(nn.Module):
    def __init__(self, backbone: nn.Module):
        super().__init__()
        self.backbone = backbone
        self.options = {"use_cache": False} if hasattr(backbone.config, "use_cache") else {}

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.backbone(input_ids=input_ids, attention_mask=attention_mask, **self.options).last_hidden_state


def _tokens(model, texts: list[str]) -> dict[str, torch.Tensor]:
    encoded = model.preprocess(texts)
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}


def _export(module: nn.Module, inputs: dict[str, torch.Tensor], file: Path) -> None:
    free = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    program = torch.onnx.export(
        module,
        kwargs=inputs,
        dynamo=True,
        input_names=list(inputs),
        output_names=["last_hidden_state"],
        dynamic_shapes=dict.fromkeys(inputs, free),
        verbose=False,
    )
    # Of each node torch notes where on this machine the code lies that it comes from.
    for node in program.model.graph.all_nodes():
        node.metadata_props.clear()
    size = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    program.save(str(file), external_data=size > 1.9e9)  # one file of protobuf may have 2 GB


def _to_openvino(file: Path) -> Path:
    import openvino

    target = file.with_name("openvino_model.xml")
    openvino.save_model(openvino.convert_model(str(file)), str(target), compress_to_fp16=False)
    return target


def _require_equal(model, run: Callable[[dict], object], name: str, folder: Path) -> None:
    apart = max(_apart(model, run, texts) for texts in _TEXTS)
    # Turned round, as NaN is no distance either.
    if not apart <= TOLERANCE:
        raise ValueError(f"{name} of {folder} gives embeddings {apart:.2g} apart from torch's: nothing was written.")


@torch.no_grad()
def _apart(model, run: Callable[[dict], object], texts: list[str]) -> float:
    """The largest cosine distance between the embeddings of the same texts; NaN if one of them is."""
    features = model.preprocess(texts)
    inputs = {name: features[name].numpy() for name in ("input_ids", "attention_mask")}
    hidden = torch.from_numpy(run(inputs))
    expected = model(dict(features))["sentence_embedding"]
    found = dict(features) | {"token_embeddings": hidden}
    for module in list(model)[1:]:
        found = module(found)
    return float((1 - torch.cosine_similarity(expected, found["sentence_embedding"])).max())


__all__ = ["TOLERANCE", "export_onnx"]
