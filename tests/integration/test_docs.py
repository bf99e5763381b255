"""Every command and snippet of README.md and docs/ runs, in order, as written.

The pages name Hub models and the reader's text; the test puts tiny models and texts at those names, since a local
folder of the same name comes before the Hub.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, AutoTokenizer

from tests.hub_server import HubServer

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    "own-corpus",
    "large-corpora",
    "own-backbone",
    "publish",
    "released",
    "serving",
    "reproduce",
    "benchmarks",
    "scale",
    "retromae",
]
PAGES = [f"docs/{page}.md" for page in PAGES]
# Set-up and long runs, each covered by tests of its own: CI runs `make test`, `make demo` is the demo.
NOT_HERE = ("make ", "python benchmarks/")


def blocks(page: str) -> list[tuple[str, str]]:
    """(language, text) of a page's fenced blocks."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"^```(bash|python)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


LM_TASK = """
task: boats
dataset_path: json
dataset_kwargs: {data_files: {validation: my-lm-tasks/boats.jsonl}}
output_type: multiple_choice
validation_split: validation
doc_to_text: "{{question}}"
doc_to_target: label
doc_to_choice: choices
metric_list: [{metric: acc}]
"""


def put_released(folder: Path, lm: Path, bert: Path) -> None:
    """Released checkpoints under their names: two adapters and RetroMAE's masked LM, made small."""
    shutil.copytree(lm, folder / "my-llama-2")
    for name, base in (("trumancai/Revela-3b", "my-llama-2"), ("castorini/repllama-v1-7b-lora-passage", "gone")):
        config = LoraConfig(target_modules=["q_proj", "v_proj"])
        adapter = get_peft_model(AutoModel.from_pretrained(lm), config)
        adapter.peft_config["default"].base_model_name_or_path = base
        adapter.save_pretrained(folder / name)
    encoder = AutoModelForMaskedLM.from_config(AutoConfig.from_pretrained(bert))
    encoder.save_pretrained(folder / "Shitao" / "RetroMAE")
    AutoTokenizer.from_pretrained(bert).save_pretrained(folder / "Shitao" / "RetroMAE")


@pytest.fixture(scope="module")
def reader(tmp_path_factory, tiny_lm_folder, tiny_bert_folder, text_folder) -> Path:
    """A folder as the pages' reader has it: texts, a labelled task, and the models under their Hub names."""
    folder = tmp_path_factory.mktemp("reader")
    shutil.copytree(text_folder, folder / "my-texts")
    shutil.copytree(tiny_lm_folder, folder / "HuggingFaceTB" / "SmolLM2-135M")
    shutil.copytree(tiny_bert_folder, folder / "google-bert" / "bert-base-uncased")
    task = folder / "my-task"
    (task / "qrels").mkdir(parents=True)
    (task / "corpus.jsonl").write_text('{"_id": "d1", "title": "", "text": "Boats stop at the bank."}\n')
    (task / "queries.jsonl").write_text('{"_id": "q1", "text": "where do boats stop"}\n')
    (task / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td1\t1\n")
    pairs = [
        {"query": f"where is boat {number}", "positive": f"Boat {number} is at pier {number}."} for number in range(8)
    ]
    (folder / "my-pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    tasks = folder / "my-lm-tasks"
    tasks.mkdir()
    (tasks / "boats.jsonl").write_text('{"question": "the boat", "choices": ["bank", "fish"], "label": 0}\n')
    (tasks / "boats.yaml").write_text(LM_TASK)
    put_released(folder, tiny_lm_folder, tiny_bert_folder)
    # `accelerate launch trainers/revela.py` is said from a checkout.
    (folder / "trainers").symlink_to(ROOT / "trainers")
    return folder


@pytest.fixture(scope="module")
def hub():
    """The Hub of the page that pushes: the reader is logged in there as `me`."""
    with HubServer() as hub:
        hub.add_user("hf_me", "me")
        yield hub


@pytest.mark.slow
@pytest.mark.parametrize("pages", [PAGES[:-1], PAGES[-1:]], ids=["revela", "retromae"])
def test_every_command_of_the_pages_runs(reader, hub, tmp_path, pages):
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    environment |= {"PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
    ran = 0
    for page in pages:
        online = hub.environment("hf_me", tmp_path) if page == "docs/publish.md" else {}
        for language, text in blocks(page):
            commands = [text] if language == "python" else text.strip().splitlines()
            for command in commands:
                if command.startswith("accelerate launch "):
                    command += " --use_cpu true"  # docs/reproduce.md tells what a CPU needs
                line = [sys.executable, "-c", command] if language == "python" else ["bash", "-c", command]
                result = subprocess.run(line, cwd=reader, env=environment | online, capture_output=True, text=True)
                assert result.returncode == 0, f"{page}: {command}\n{result.stdout[-2000:]}\n{result.stderr[-2000:]}"
                ran += 1
    assert ran > 7


def test_the_readme_names_only_what_is_there():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    assert links, "the README links its pages"
    for link in links:
        assert (ROOT / link).exists(), link
    commands = [line for language, text in blocks("README.md") if language == "bash" for line in text.splitlines()]
    for command in commands:
        assert command.startswith(NOT_HERE), f"{command!r} is run by no test: move it to a page of docs/"
