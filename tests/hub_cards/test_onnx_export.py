"""ONNX beside a published folder: equal to torch, here and through sentence-transformers' own back-end."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoTokenizer

from hub_cards.eos_tokenizer import append_eos
from hub_cards.export import publish
from hub_cards.onnx_export import export_onnx
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
