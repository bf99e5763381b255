"""`push` and `pull-check` against a Hub on this machine, by the real client."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

from hub_cards.checkpoints import EXPORT_RECORD, record_graph
from hub_cards.eos_tokenizer import append_eos, save_tokenizer
from hub_cards.export import export
from hub_cards.recorded import CHECK
from modeling_retromae import RetroMAEForPreTraining
from modeling_revela import RevelaForPreTraining
from tests.hub_client import HubClient
from tests.hub_server import HubServer

ROOT = Path(__file__).parents[2]
LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}


@pytest.fixture(scope="module")
def checkpoints(tiny_lm_folder, tiny_bert_folder, tmp_path_factory) -> dict[str, Path]:
    """A checkpoint of each method, trained by nothing but noise."""
    folder = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(0)
    revela = RevelaForPreTraining.from_backbones(
        tiny_lm_folder, tiny_lm_folder, retriever_lora=LORA, query_prompt="query: ", document_prompt="passage: "
    )
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert_folder)
    sizes = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    retromae = RetroMAEForPreTraining.from_encoder(BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), **sizes)))
    with torch.no_grad():
        for parameter in [*revela.parameters(), *retromae.parameters()]:
            if parameter.requires_grad and parameter.ndim:
                parameter += 0.1 * torch.randn_like(parameter)
    revela.save_pretrained(folder / "revela")
    save_tokenizer(append_eos(AutoTokenizer.from_pretrained(tiny_lm_folder)), folder / "revela")
    save_tokenizer(AutoTokenizer.from_pretrained(tiny_lm_folder), folder / "revela" / "lm_tokenizer")
    retromae.save_pretrained(folder / "retromae")
    tokenizer.save_pretrained(folder / "retromae")
    return {"revela": folder / "revela", "retromae": folder / "retromae"}


@pytest.fixture(scope="module")
def exports(checkpoints, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("exports")
    found = {
        "retriever": export(checkpoints["revela"], folder / "retriever", dtype="bfloat16"),
        "encoder": export(checkpoints["retromae"], folder / "encoder"),
        "adapter": export(checkpoints["revela"], folder / "adapter", adapter_only=True),
        "lm": export(checkpoints["revela"], folder / "lm", part="lm"),
    }
    return found


@pytest.fixture
def folder(exports, tmp_path) -> Path:
    """A copy of the retriever's folder, to be changed."""
    return Path(shutil.copytree(exports["retriever"], tmp_path / "retriever"))


@pytest.fixture(scope="module")
def hub():
    with HubServer() as hub:
        hub.add_user("hf_alice", "alice", organisations=["lab"])
        hub.add_user("hf_reads", "alice", role="read")
        hub.add_user("hf_bob", "bob")
        yield hub


@pytest.fixture(scope="module")
def client(hub, tmp_path_factory):
    with HubClient(hub, tmp_path_factory.mktemp("client"), "hf_alice") as client:
        yield client


@pytest.fixture(autouse=True)
def no_faults_left(hub):
    yield
    assert not any(fault.times for fault in hub.faults), "a fault that nothing met"
    hub.faults.clear()


# There and back


LOADED = """
import sys
for name in ("modeling_revela", "modeling_retromae", "trainers", "hub_cards", "revela_hub"):
    sys.modules[name] = None
import torch
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoModelForMaskedLM

name, text = sys.argv[1], "where do boats stop"
found = {"SentenceTransformer": torch.tensor(SentenceTransformer(name, device="cpu").encode_query([text]))}
remote = AutoModel.from_pretrained(name, trust_remote_code=True)
assert type(remote).__name__ == "RevelaModel" and type(AutoModel.from_pretrained(name)).__module__.startswith("transf")
found["AutoModel"] = remote.encode_query([text])
AutoModelForMaskedLM.from_pretrained("alice/encoder")
save_file(found, "found.safetensors")
"""


@pytest.mark.parametrize("name", ["retriever", "encoder"])
def test_what_is_pushed_is_what_was_exported(hub, client, exports, name):
    pushed = client.run("push", exports[name], f"alice/{name}")
    assert pushed.code == 0, pushed.err
    there = hub.repositories[f"alice/{name}"]
    expected = {path.relative_to(exports[name]).as_posix(): path for path in exports[name].rglob("*")}
    expected = {path: file.read_bytes() for path, file in expected.items() if file.is_file()}
    assert {path: data for path, data in there.files().items() if path != ".gitattributes"} == expected
    assert there.messages == ["initial commit", "Push by revela-hub"] and there.tags == {"v1": there.branches["main"]}
    assert not there.private and f"{hub.url}/alice/{name}/commit/{there.branches['main']}" in pushed.out
    row = next(line for line in pushed.out.splitlines() if "model.safetensors" in line)
    assert row.split()[-1] == "LFS" and "LFS" not in next(
        line for line in pushed.out.splitlines() if "/config" in line
    )
    checked = client.run("pull-check", f"alice/{name}", "--revision", "v1")
    assert checked.code == 0, checked.err
    doors = ["SentenceTransformer", "AutoModel", "AutoModel, trust_remote_code=True", "AutoModelForMaskedLM"]
    assert [line.split(": ")[0] for line in checked.out.splitlines()] == doors[: 4 if name == "encoder" else 3]
    assert not hub.storage_saw_token


def test_anyone_loads_it_into_an_empty_cache_without_our_package(hub, client, exports, tmp_path):
    for name in ("retriever", "encoder"):
        assert client.run("push", exports[name], f"alice/{name}").code == 0
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= hub.environment(None, tmp_path / "home") | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", LOADED, "alice/retriever"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    recorded = json.loads((exports["retriever"] / CHECK).read_text())
    expected = torch.tensor(recorded["embeddings"]["query"][:1])
    for door, found in load_file(tmp_path / "found.safetensors").items():
        assert (found - expected).norm() < recorded["tolerance"], door


def test_lm_and_adapter_have_their_own_doors(hub, client, exports, tiny_lm_folder, tmp_path):
    assert client.run("push", exports["lm"], "alice/lm").code == 0
    assert client.run("pull-check", "alice/lm").out.startswith("AutoModelForCausalLM: as recorded")
    refused = client.run("push", exports["adapter"], "alice/adapter").error
    assert "names no base_model" in refused and "--base-model" in refused
    adapter = Path(shutil.copytree(exports["adapter"], tmp_path / "adapter"))
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": "lab/base"}))
    missing = client.run("push", adapter, "alice/adapter").error
    assert "does not load by PeftModel: lab/base is not on the Hub, or is private" in missing
    base = hub.add_repository("lab/base", tiny_lm_folder)
    base.gated = True
    assert f"lab/base is gated: ask for access at {hub.url}/lab/base" in (
        client.run("push", adapter, "alice/adapter", token="hf_bob").error
    )
    base.gated = False
    assert client.run("push", adapter, "alice/adapter").code == 0
    assert client.run("pull-check", "alice/adapter").out.startswith("PeftModel: as recorded")


def test_private_branch_and_pull_request(hub, client, exports):
    assert client.run("push", exports["lm"], "lab/lm", "--private", "--revision", "dev").code == 0
    there = hub.repositories["lab/lm"]
    assert there.private and there.files("main").keys() == {".gitattributes"}
    assert there.files("dev").keys() > {"config.json"} and there.tags == {"v1": there.branches["dev"]}
    there.private = False
    proposed = client.run("push", exports["lm"], "lab/lm", "--create-pr", token="hf_bob")
    assert f"{hub.url}/lab/lm/discussions/1" in proposed.out
    assert there.files("refs/pr/1") == there.files("dev") and len(there.tags) == 1
    assert "lab/lm is there already and public" in client.run("push", exports["lm"], "lab/lm", "--private").error


def test_dry_run_asks_the_hub_nothing(hub, client, exports):
    before = len(hub.requests)
    shown = client.run("push", exports["lm"], "nobody/lm", "--dry-run", token="")
    assert "model.safetensors" in shown.out and "Nothing was sent" in shown.out
    assert len(hub.requests) == before


def test_second_push_makes_the_repository_equal_to_the_folder(hub, client, exports, checkpoints, tmp_path):
    client.run("push", exports["retriever"], "alice/twice")
    there = hub.repositories["alice/twice"]
    assert client.run("push", exports["retriever"], "alice/twice").code == 0
    assert len(there.messages) == 2 and there.tags.keys() == {"v1"}, "nothing new, so no commit"
    replaced = client.run("push", exports["lm"], "alice/twice")
    assert "modules.json is deleted there" in replaced.out and there.tags.keys() == {"v1", "v2"}
    there_now = {path for path in there.files() if path != ".gitattributes"}
    assert there_now == {path.relative_to(exports["lm"]).as_posix() for path in exports["lm"].rglob("*")}
    assert "modules.json" in there.files("v1")


# Interrupted


def test_upload_goes_on_where_it_was_killed(hub, client, exports, tmp_path):
    folder = Path(shutil.copytree(exports["lm"], tmp_path / "lm"))
    # Two large files, the second of which is in the middle of its upload when the process dies.
    (folder / "figure.png").write_bytes(b"\0png" + os.urandom(3000))
    weights = load_file(folder / "model.safetensors")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt", "run": "killed"})
    hub.cut("PUT", "/*")  # that the client mends by itself
    reached = hub.hold("POST", "/api/models/alice/killed/commit/main")
    environment = {**os.environ, **hub.environment("hf_alice", tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "revela_hub", "push", str(folder), "alice/killed"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE) as process:
        assert reached.wait(120), process.kill()
        process.kill()
    assert hub.repositories["alice/killed"].messages == ["initial commit"]
    sent = hub.count("PUT", "/*")
    assert client.run("push", folder, "alice/killed").code == 0
    assert hub.count("PUT", "/*") == sent, "a file that was there is sent again"
    assert hub.repositories["alice/killed"].files()["figure.png"] == (folder / "figure.png").read_bytes()


def test_tag_that_was_not_left_is_left_by_the_next_push(hub, client, exports):
    hub.fail("POST", "/api/models/alice/untagged/tag/*", 503)
    assert "error of its own, 503" in client.run("push", exports["lm"], "alice/untagged").error
    assert client.run("push", exports["lm"], "alice/untagged").code == 0
    assert hub.repositories["alice/untagged"].tags.keys() == {"v1"}


# What the Hub refuses


@pytest.mark.parametrize(
    ("name", "token", "said"),
    [
        ("alice/new", "", "There is no token for the Hub: make one at http"),
        ("alice/new", "hf_wrong", "The Hub does not know the token in HF_TOKEN: make one at http"),
        ("alice/new", "hf_reads", "The token of alice may only read: make one that writes"),
        ("lab/new", "hf_bob", "would belong to lab, and the token is bob's: push to bob/new"),
        ("new", "hf_bob", "A repository's name is org/name"),
        ("a/b/c", "hf_bob", "A repository's name is org/name"),
    ],
)
def test_token_and_name_that_do_not_fit(hub, client, exports, name, token, said):
    assert said in client.run("push", exports["lm"], name, token=token).error
    assert name not in hub.repositories


@pytest.mark.parametrize(
    ("path", "status", "headers", "said"),
    [
        ("/api/repos/create", 403, {"X_Error_Message": "No rights"}, r"does not allow this (No rights): use a token"),
        ("/api/repos/create", 429, {"Retry_After": "7"}, "asked too often: wait 7 seconds, and run the same again"),
        ("/api/repos/create", 502, {}, "The Hub answers with an error of its own, 502"),
        ("/api/models/alice/refused/commit/main", 412, {}, "alice/refused was changed at the same time"),
        ("/api/models/alice/refused/commit/main", 400, {}, "The Hub refuses the request with status 400"),
    ],
)
def test_what_the_hub_refuses_is_told_in_one_line(hub, client, exports, path, status, headers, said):
    hub.fail("POST", path, status, **headers)
    error = client.run("push", exports["lm"], "alice/refused").error
    assert f"{exports['lm']} was not pushed to alice/refused. " in error and said in error


def test_repository_with_files_of_others_is_left_alone(hub, client, exports, tiny_bert_folder):
    there = hub.add_repository("alice/taken", tiny_bert_folder)
    refused = client.run("push", exports["lm"], "alice/taken").error
    assert "alice/taken is there already and holds config.json, which no push wrote: choose another name" in refused
    assert there.messages == ["initial commit", "add folder"]


def test_server_that_is_not_there(hub, client):
    code = """
from huggingface_hub import HfApi
from hub_cards.hub import explain
try:
    HfApi(endpoint="http://127.0.0.1:1").whoami()
except Exception as error:
    print(explain(error))
"""
    assert client.execute(code).out.startswith("There is no connection to http")


# What is refused before anything is sent


def test_folder_that_is_not_as_it_was_exported(hub, client, folder):
    before = len(hub.requests)

    def refused() -> str:
        return client.run("push", folder, "alice/refused", "--dry-run").error

    (folder / "optimizer.pt").write_bytes(b"")
    assert "holds optimizer.pt, which no export wrote" in refused()
    (folder / "optimizer.pt").unlink()
    code = (folder / "modeling_revela.py").read_text()
    (folder / "modeling_revela.py").write_text(code + "\nraise SystemExit('was run')\n")
    assert "is not the modeling_revela.py of this version of revela-hub" in refused()
    (folder / "modeling_revela.py").write_text(code)
    card = (folder / "README.md").read_text()
    (folder / "README.md").write_text(card + "hf_" + "a" * 34)
    assert "README.md holds a token of the Hub" in refused()
    (folder / "README.md").write_text(card.replace("library_name:", "library_name: :"))
    assert "README.md is no model card: its metadata do not parse" in refused()
    (folder / "README.md").write_text(card)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "source": "/data/models/x"}))
    assert "config.json holds the local path '/data/models/x'" in refused()
    (folder / "config.json").write_text(json.dumps(config))
    settings = json.loads((folder / "config_sentence_transformers.json").read_text())
    changed = {**settings, "prompts": {"query": "", "document": ""}}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(changed))
    assert "loaded by SentenceTransformer is" in refused()
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    (folder / "1_Pooling" / "config.json").unlink()
    assert "lacks 1_Pooling/config.json" in refused()
    (folder / EXPORT_RECORD).unlink()
    assert "so no export wrote it: push what `revela-hub export` writes" in refused()
    assert len(hub.requests) == before


def test_what_was_changed_on_the_hub_is_found_and_its_code_not_run(hub, client, folder):
    hub.add_repository("alice/changed", folder)
    assert client.run("pull-check", "alice/changed").code == 0
    weights = {
        name: value + 0.1 * torch.randn_like(value) for name, value in load_file(folder / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    hub.add_repository("alice/changed", folder)
    assert "loaded by SentenceTransformer is" in client.run("pull-check", "alice/changed").error
    (folder / "modeling_revela.py").write_text("raise SystemExit('was run')\n")
    hub.add_repository("alice/code", folder)
    assert "so it is neither run nor sent" in client.run("pull-check", "alice/code").error
    assert "alice/none is not on the Hub" in client.run("pull-check", "alice/none").error


def test_graphs_go_along_as_they_were_recorded_and_are_deleted_when_they_are_gone(hub, client, folder):
    def refused() -> str:
        return client.run("push", folder, "alice/served").error

    for name in ("onnx/model.onnx", "onnx/model.onnx.data", "openvino/openvino_model.bin"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"graph\0" * 8)
    assert "holds onnx/model.onnx, which no export wrote" in refused()
    record_graph(folder, "onnx")
    assert "holds openvino/openvino_model.bin, which no export wrote" in refused()
    record_graph(folder, "openvino")
    assert client.run("push", folder, "alice/served").code == 0
    there = hub.repositories["alice/served"]
    assert {"onnx/model.onnx", "onnx/model.onnx.data", "openvino/openvino_model.bin"} < there.files().keys()

    (folder / "onnx" / "model.onnx.data").write_bytes(b"\0")
    assert "model.onnx.data is not as it was written: write it again by `revela-hub export-onnx" in refused()
    (folder / "onnx" / "model.onnx.data").unlink()
    assert "lacks onnx/model.onnx.data, which the export wrote" in refused()
    (folder / "onnx" / "model.onnx.data").write_bytes(b"graph\0" * 8)
    weights = load_file(folder / "model.safetensors")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt", "run": "another"})
    assert f"{folder / 'onnx'} was made of other weights than those beside it" in refused()

    shutil.rmtree(folder / "onnx")
    shutil.rmtree(folder / "openvino")
    assert client.run("push", folder, "alice/served").code == 0
    assert not any(name.startswith(("onnx", "openvino")) for name in there.files())


def test_export_over_a_folder_with_graphs_drops_them_and_says_so(checkpoints, folder, capsys):
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.onnx").write_bytes(b"graph")
    with pytest.raises(FileExistsError, match="holds onnx, which no export wrote"):
        export(checkpoints["revela"], folder, overwrite=True)
    record_graph(folder, "onnx")
    export(checkpoints["revela"], folder, overwrite=True)
    assert not (folder / "onnx").exists() and "graphs" not in json.loads((folder / EXPORT_RECORD).read_text())
    assert "onnx of the earlier export is not taken over" in capsys.readouterr().err
