"""ONNX beside a published folder: equal to torch, here and through sentence-transformers' own back-end."""

import hashlib
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoTokenizer

from hub_cards.checkpoints import EXPORT_RECORD, check_graphs
from hub_cards.encoding import load_model
from hub_cards.eos_tokenizer import append_eos
from hub_cards.export import publish
from hub_cards.onnx_export import _require_equal, export_onnx
from hub_cards.privacy import check_private
from modeling_revela import RevelaForPreTraining

TEXTS = ["the river", "a boat at the bridge near the market " * 5, "boats"]
# sentence-transformers' ONNX back-end needs a transformers older than ours.
PACKAGES = [f"torch=={torch.__version__.partition('+')[0]}", "sentence-transformers[onnx]"]


@pytest.fixture(scope="module")
def published(tiny_lm_folder, tiny_bert_folder, tmp_path_factory):
    folders = {}
    for name, source, pooling in (("llama", tiny_lm_folder, "eos"), ("bert", tiny_bert_folder, "mean")):
        model = RevelaForPreTraining.from_backbones(str(source), str(tiny_lm_folder), pooling=pooling)
        tokenizer = AutoTokenizer.from_pretrained(source)
        folders[name] = tmp_path_factory.mktemp("published") / name
        folders[name].mkdir()
        publish(model, append_eos(tokenizer) if pooling == "eos" else tokenizer, folders[name], torch.float32)
    return folders


def test_what_cannot_be_exported_is_told_of(published, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="is no published folder: it has no modules.json"):
        export_onnx(tmp_path)
    (published["bert"] / "onnx").mkdir()
    with pytest.raises(FileExistsError, match="is there already: pass --overwrite"):
        export_onnx(published["bert"])
    (published["bert"] / "onnx").rmdir()
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ImportError, match=r"pip install 'revela-hub\[onnx\]'"):
        export_onnx(published["bert"])
    assert not list(published["bert"].glob("*onnx*"))


def test_graph_that_gives_nan_is_told_from_one_that_is_equal(published):
    """As optimum-intel's of a Llama."""
    model = load_model(published["bert"], device="cpu")

    def hidden(inputs):
        return (
            model[0]
            .auto_model(**{name: torch.from_numpy(value) for name, value in inputs.items()})[0]
            .detach()
            .numpy()
        )

    _require_equal(model, hidden, "OpenVINO", published["bert"])
    for wrong in (float("nan"), 1.0):
        with pytest.raises(ValueError, match="OpenVINO of .* gives embeddings .* apart from torch's: nothing was"):
            _require_equal(
                model, lambda inputs, by=wrong: hidden(inputs)[..., ::-1].copy() * by, "OpenVINO", published["bert"]
            )


def test_graph_says_nothing_of_this_machine_and_is_recorded(published):
    for package in ("onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    (published["bert"] / EXPORT_RECORD).write_text('{"files": ["config.json"]}')
    content = export_onnx(published["bert"]).read_bytes()
    record = json.loads((published["bert"] / EXPORT_RECORD).read_text())
    assert record["files"] == ["config.json", "onnx", "onnx/model.onnx"]
    assert record["graphs"]["onnx"]["files"] == {"onnx/model.onnx": hashlib.sha256(content).hexdigest()}
    check_graphs(published["bert"])
    (published["bert"] / EXPORT_RECORD).unlink()
    assert b"stack_trace" not in content and b".py" not in content and b"site-packages" not in content
    check_private(published["bert"])
    shutil.rmtree(published["bert"] / "onnx")


@pytest.mark.slow
def test_openvino_is_equal_to_torch_for_encoders_and_decoders(published):
    for package in ("onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    openvino = pytest.importorskip("openvino")
    for folder in published.values():
        file = export_onnx(folder, openvino=True)
        assert sorted(path.name for path in (folder / "openvino").iterdir()) == ["openvino_model.bin", file.name]
        check_private(folder)
        assert not (folder / "onnx").exists()
        compiled = openvino.compile_model(str(file), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        model = load_model(folder, device="cpu")
        features = model.preprocess(TEXTS)
        inputs = {name: features[name].numpy() for name in ("input_ids", "attention_mask")}
        with torch.no_grad():
            hidden = model[0].auto_model(**{name: features[name] for name in inputs})[0]
        apart = (torch.from_numpy(compiled(inputs)[0]) - hidden).abs()[features["attention_mask"].bool()]
        assert apart.max() < 1e-5
        shutil.rmtree(folder / "openvino")


@pytest.mark.slow
def test_onnx_is_equal_to_torch_here_and_in_sentence_transformers(published, tmp_path):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    files = [export_onnx(folder) for folder in published.values()]
    assert all(file.is_file() for file in files)
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    python = venv / "bin" / "python"
    done = subprocess.run([python, "-m", "pip", "install", "-q", *PACKAGES], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"sentence-transformers[onnx] does not install here: {done.stderr[-300:]}")
    code = """
import json, sys
import numpy as np
from sentence_transformers import SentenceTransformer, export_dynamic_quantized_onnx_model
folder, out, texts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
model = SentenceTransformer(folder, device="cpu", backend="onnx", model_kwargs={"file_name": "onnx/model.onnx"})
found = {"onnx": model.encode_query(texts)}
found["torch"] = SentenceTransformer(folder, device="cpu").encode_query(texts)
export_dynamic_quantized_onnx_model(model, "avx2", folder)
options = {"file_name": "onnx/model_quint8_avx2.onnx"}
found["int8"] = SentenceTransformer(folder, device="cpu", backend="onnx", model_kwargs=options).encode_query(texts)
np.savez(out, **found)
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    for folder in published.values():
        out = tmp_path / "found.npz"
        subprocess.run([python, "-c", code, folder, out, json.dumps(TEXTS)], check=True, env=environment)
        found = np.load(out)
        expected = SentenceTransformer(str(folder), device="cpu").encode_query(TEXTS)
        # Two releases of transformers, two run-times: float32 rounding and no more.
        np.testing.assert_allclose(found["torch"], expected, atol=1e-5)
        np.testing.assert_allclose(found["onnx"], expected, atol=1e-5)
        assert ((found["int8"] * expected).sum(1) > 0.99).all()
