"""
What int8 costs in nDCG@10: of weights (ONNX, quantised by sentence-transformers), and of embeddings.

    revela-hub export-onnx demo_output/retriever
    python3 -m venv onnx-env && onnx-env/bin/pip install "sentence-transformers[onnx]"
    python benchmarks/int8.py --onnx-python onnx-env/bin/python --out benchmarks/int8.md

The retriever and the task are `make demo`'s. sentence-transformers' ONNX back-end needs optimum, and that transformers
4, hence an environment of its own: there the same texts are embedded by torch, by ONNX in float32 and with int8
weights. Here the rankings are scored, all ways in the same run.
"""

import argparse
import json
import platform
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import torch
from sentence_transformers.util import quantize_embeddings

from hub_cards import ranking
from hub_cards.beir_folder import load_beir_folder
from hub_cards.retrieval_metric.retrieval_metric import score_run

ENCODE = """
import json, sys, time
from pathlib import Path
import numpy as np
from sentence_transformers import SentenceTransformer, export_dynamic_quantized_onnx_model
model, texts, out, kind = json.loads(sys.argv[1])
texts = json.load(open(texts))
kwargs = {"torch": {"torch_dtype": "float32"}, "onnx": {"file_name": "onnx/model.onnx"}}
for way in ("torch", "onnx", "int8"):
    if way == "int8":
        export_dynamic_quantized_onnx_model(loaded, kind, out)
        kwargs[way] = {"file_name": "onnx/" + next(Path(out, "onnx").glob("*int8*.onnx")).name}
    backend = "torch" if way == "torch" else "onnx"
    where = out if way == "int8" else model
    loaded = SentenceTransformer(where, device="cpu", backend=backend, model_kwargs=kwargs[way])
    start = time.perf_counter()
    for side in ("query", "document"):
        found = getattr(loaded, f"encode_{side}")(texts[side], batch_size=16, normalize_embeddings=True)
        np.save(f"{out}/{way}-{side}.npy", found)
    print(json.dumps({"way": way, "seconds": time.perf_counter() - start}), flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("demo_output/retriever"))
    parser.add_argument("--task", type=Path, default=Path("demo_output/stdlib/docstring2function"))
    parser.add_argument("--onnx-python", required=True, help="Python that has sentence-transformers[onnx].")
    parser.add_argument("--kind", default="avx2", help="arm64, avx2, avx512 or avx512_vnni, as the CPU has it.")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    task = load_beir_folder(args.task, "test")
    sides = {"query": task.queries, "document": task.corpus}

    def ndcg(queries: np.ndarray, documents: np.ndarray) -> float:
        scores, indices = ranking.top_k(torch.from_numpy(queries).float(), torch.from_numpy(documents).float(), 100)
        names = list(task.corpus)
        run = {
            query: {names[index]: score for index, score in zip(*ranked, strict=True)}
            for query, *ranked in zip(task.queries, indices.tolist(), scores.tolist(), strict=True)
        }
        return score_run(run, task.qrels)["ndcg_at_10"]

    rows, found = [], {}
    with tempfile.TemporaryDirectory() as folder:
        texts = Path(folder) / "texts.json"
        texts.write_text(json.dumps({side: list(named.values()) for side, named in sides.items()}))
        # A copy of all but the float32 graph, for the int8 one to lie in.
        subprocess.run(["cp", "-r", str(args.model), f"{folder}/model"], check=True)
        for file in Path(folder, "model", "onnx").glob("*"):
            file.unlink()
        given = json.dumps([str(args.model.resolve()), str(texts), f"{folder}/model", args.kind])
        done = subprocess.run([args.onnx_python, "-c", ENCODE, given], check=True, capture_output=True, text=True)
        seconds = {found["way"]: found["seconds"] for found in map(json.loads, done.stdout.splitlines())}
        for way in seconds:
            found[way] = [np.load(f"{folder}/model/{way}-{side}.npy") for side in sides]
        sizes = [
            path.stat().st_size
            for path in (args.model / "onnx" / "model.onnx", *Path(folder, "model", "onnx").glob("*int8*"))
        ]
    whole = ndcg(*found["torch"])
    for title, way in (
        ("torch, float32", "torch"),
        ("ONNX, float32", "onnx"),
        (f"ONNX, int8 weights ({args.kind})", "int8"),
    ):
        cosine = float(np.mean([(a * b).sum(1).mean() for a, b in zip(found[way], found["torch"], strict=True)]))
        rows.append((title, ndcg(*found[way]), cosine, seconds[way]))
    queries, documents = found["torch"]
    ranges = np.stack([documents.min(0), documents.max(0)])
    packed = [quantize_embeddings(side, "int8", ranges=ranges) for side in (queries, documents)]
    rows.append(("torch, documents' embeddings int8, queries' float32", ndcg(queries, packed[1]), None, None))
    rows.append(("torch, all embeddings int8", ndcg(*packed), None, None))
    lines = [
        "# int8, what it costs",
        "",
        f"    python benchmarks/int8.py --onnx-python onnx-env/bin/python --kind {args.kind} --out benchmarks/int8.md",
        "",
        "| | nDCG@10 | against torch | mean cosine with torch's | seconds |",
        "| --- | --- | --- | --- | --- |",
    ]
    for title, score, cosine, took in rows:
        shown = ("–" if cosine is None else f"{cosine:.5f}", "–" if took is None else f"{took:.0f}")
        lines.append(f"| {title} | {score:.4f} | {score - whole:+.4f} | {shown[0]} | {shown[1]} |")
    lines += [
        "",
        f"{args.model.name} of `make demo` on its docstring → function task: {len(task.queries)} queries, "
        f"{len(task.corpus)} functions, {documents.shape[1]} dimensions. The graph has {sizes[0] / 1e6:.0f} MB in "
        f"float32 and {sizes[1] / 1e6:.0f} MB in int8. Embeddings are "
        "quantised by `quantize_embeddings` to the range of each dimension over the documents. Seconds are of the "
        f"machine as it was, shared with other work ({platform.processor() or platform.machine()}).",
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if args.out is not None:
        args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
