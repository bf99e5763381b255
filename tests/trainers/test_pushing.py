"""`push_to_hub` of a training run, against a Hub on this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sentence_transformers import SentenceTransformer

from tests.hub_client import HubClient
from tests.hub_server import HubServer
from trainers.checkpoints import damage
from trainers.data.prepared import load_groups


@pytest.fixture(scope="module")
def hub():
    with HubServer() as hub:
        hub.add_user("hf_alice", "alice")
        yield hub


@pytest.fixture(scope="module")
def client(hub, tmp_path_factory):
    with HubClient(hub, tmp_path_factory.mktemp("client"), "hf_alice") as client:
        yield client


@pytest.fixture
def train(client, tiny_lm_folder, prepared_folder, mlm_folder, sequences_folder):
    """Runs two steps of a method's script, a checkpoint each, in the process that knows the Hub."""

    def run(method: str, output_dir: Path, *options, token: str | None = None):
        model = {
            "revela": ["--retriever_name_or_path", tiny_lm_folder, "--train_sets", prepared_folder, "--lm_lora_r", 2],
            "retromae": ["--encoder_name_or_path", mlm_folder["plain"], "--train_sets", sequences_folder,
                         "--max_seq_length", 48, "--per_device_train_batch_size", 4],
            "contriever": ["--model_name_or_path", tiny_lm_folder, "--train_sets", prepared_folder, "--lora_r", 2,
                           "--pooling", "eos", "--max_length", 48, "--per_device_train_batch_size", 2],
        }[method]  # fmt: skip
        common = "--use_cpu true --max_steps 2 --save_steps 1 --report_to none --disable_tqdm true --push_to_hub true"
        arguments = [*map(str, model), "--output_dir", str(output_dir), *common.split(), *options]
        code = f"from trainers.{method} import main; from trainers.arguments import run_script\n"
        return client.execute(f"{code}run_script(lambda: main({arguments!r}))", token)

    return run


STATE = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "manifest.json"}


def pushed(hub, name: str) -> dict[str, bytes]:
    return {path: data for path, data in hub.repositories[name].files().items() if path != ".gitattributes"}


LOADED = """
import sys
for name in ("modeling_revela", "modeling_retromae", "trainers", "hub_cards", "revela_hub"):
    sys.modules[name] = None
from transformers import AutoModelForPreTraining, AutoTokenizer
for name in sys.argv[1:]:
    model, info = AutoModelForPreTraining.from_pretrained(name, trust_remote_code=True, output_loading_info=True)
    assert not info["missing_keys"], info
    AutoTokenizer.from_pretrained(name)
"""


def test_each_save_and_the_end_are_pushed_and_load_anywhere(hub, train, tmp_path):
    for method in ("revela", "retromae"):
        output = tmp_path / f"run-{method}"
        done = train(method, output, "--hub_model_id", f"alice/{method}", "--hub_always_push", "true")
        assert done.code == 0, done.err[-3000:]
        repository = hub.repositories[f"alice/{method}"]
        steps = [f"Training in progress, step {step}" for step in (1, 2)]
        assert repository.messages == ["initial commit", *steps, "End of training"], done.err[-2000:]
        files = pushed(hub, f"alice/{method}")
        assert not STATE & files.keys() and {"config.json", "model.safetensors", "README.md"} <= files.keys()
        assert ("lm_tokenizer/tokenizer.json" in files) == (method == "revela")
        assert files["model.safetensors"] == (output / "model.safetensors").read_bytes()
        for commit in repository.commits.values():
            for path, file in commit.items():
                assert str(tmp_path.parent.parent).encode() not in file.data, f"a local path in {path}"
                assert b"hf_alice" not in file.data and not path.startswith((".saving", ".pushing", "checkpoint-"))
        assert json.loads(files["training_args.json"])["output_dir"] == f"run-{method}"
        assert json.loads((output / "training_args.json").read_text())["output_dir"] == str(output)
        assert not (output / ".pushing").exists()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= hub.environment(None, tmp_path / "home")
    command = [sys.executable, "-c", LOADED, "alice/revela", "alice/retromae"]
    loaded = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert loaded.returncode == 0, loaded.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "folders"),
    [("checkpoint", {"last-checkpoint": 2}), ("all_checkpoints", {"checkpoint-1": 1, "checkpoint-2": 2})],
)
def test_state_is_pushed_where_the_strategy_asks_and_can_be_resumed_from(hub, train, tmp_path, strategy, folders):
    name = f"alice/{strategy}"
    # On this machine one is kept; on the Hub as many as the strategy says.
    options = ["--hub_always_push", "true", "--save_total_limit", "1"]
    done = train("retromae", tmp_path / "run", "--hub_model_id", name, "--hub_strategy", strategy, *options)
    assert done.code == 0, done.err[-3000:]
    files = pushed(hub, name)
    assert not STATE & files.keys()
    assert {path.partition("/")[0] for path in files if "checkpoint" in path} == folders.keys()
    for folder, step in folders.items():
        downloaded = tmp_path / "again" / f"checkpoint-{step}"
        for path, data in files.items():
            if path.startswith(f"{folder}/"):
                assert str(tmp_path).encode() not in data, path
                target = downloaded / path.removeprefix(f"{folder}/")
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data)
        assert STATE <= {path.name for path in downloaded.iterdir()} and damage(downloaded) is None
        assert json.loads((downloaded / "trainer_state.json").read_text())["global_step"] == step
    # The first of them is gone on from here as it was there.
    resumed = train("retromae", tmp_path / "resumed", "--hub_model_id", name, "--hub_strategy", "end",
                    "--resume_from_checkpoint", str(tmp_path / "again" / f"checkpoint-{min(folders.values())}"),
                    "--max_steps", "3")  # fmt: skip
    assert resumed.code == 0, resumed.err[-3000:]


@pytest.mark.slow
def test_only_the_end_is_pushed_where_the_strategy_says_so(hub, train, tmp_path):
    ended = train("retromae", tmp_path / "end", "--hub_model_id", "alice/end", "--hub_strategy", "end")
    assert ended.code == 0 and hub.repositories["alice/end"].messages == ["initial commit", "End of training"]


def test_failed_pushes_are_told_and_the_run_is_saved(hub, train, tmp_path):
    hub.fail("POST", "/api/models/alice/failed/commit/main", 403, times=9, X_Error_Message="No rights")
    done = train("retromae", tmp_path / "run", "--hub_model_id", "alice/failed")
    (line,) = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert done.code == 2 and f"{tmp_path / 'run'} is saved, but was not pushed to alice/failed. The Hub does" in line
    assert "Training in progress, step 1: was not pushed to alice/failed. The Hub does not allow this" in done.err
    assert (tmp_path / "run" / "model.safetensors").exists() and damage(tmp_path / "run" / "checkpoint-2") is None
    hub.faults.clear()
    done = train("retromae", tmp_path / "second", "--hub_model_id", "alice/failed", token="hf_wrong")
    assert done.code == 2 and "error: The Hub does not know the token in HF_TOKEN: make one at" in done.err


def test_a_fine_tuned_retriever_is_pushed_once_it_is_whole(hub, train, prepared_folder, tmp_path):
    output = tmp_path / "run"
    done = train("contriever", output, "--hub_model_id", "alice/pairs")
    assert done.code == 0, done.err[-3000:]
    assert hub.repositories["alice/pairs"].messages == ["initial commit", "End of training"]
    files = pushed(hub, "alice/pairs")
    assert {"modules.json", "model.safetensors", "training_record.json", "revela_check.json"} <= files.keys()
    assert not [path for path in files if path.startswith("checkpoint-") or path == "finetune.json"]
    card = files["README.md"].decode()
    assert "alice/pairs" in card and "push_to_hub" not in card + files["recipe.yaml"].decode()
    texts = [row["texts"][0] for row in load_groups(prepared_folder, "train")]
    for path, data in files.items():
        assert str(tmp_path.parent.parent).encode() not in data, f"a local path in {path}"
        assert not [text for text in texts if text[:40].encode() in data], f"a training text in {path}"
    assert SentenceTransformer(str(output)).encode("boats").shape == (32,)
    assert not (output / ".pushing").exists()
