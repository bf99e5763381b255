"""The `revela-hub` command: its help, its errors, what it hands on to the packages and to accelerate."""

import dataclasses
import json
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoTokenizer
from typer.main import get_command
from typer.testing import CliRunner

import revela_hub
from hub_cards.embed import EmbedConfig
from hub_cards.eos_tokenizer import append_eos
from modeling_revela import RevelaForPreTraining
from trainers import retromae, revela
from trainers.arguments import parse_recipe
from trainers.data.collator import GroupCollator
from trainers.data.prepare import PrepareConfig
from trainers.data.prepared import load_groups
from trainers.launching import Launch

ROOT = Path(__file__).parent.parent
runner = CliRunner(env={"COLUMNS": "200", "REVELA_DEBUG": None})


def run(*arguments: object):
    return runner.invoke(revela_hub.app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def prepared(text_folder, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("prepared") / "set"
    done = run("prepare", text_folder, "--out", out, "--group-size", 4, "--validation-share", 0.1)
    assert done.exit_code == 0, done.output
    return out


@pytest.fixture(scope="module")
def checkpoint(tiny_lm_folder, tmp_path_factory) -> Path:
    """A pre-training checkpoint as the trainer leaves it, its adapters not zero."""
    folder = tmp_path_factory.mktemp("checkpoint")
    model = RevelaForPreTraining.from_backbones(
        tiny_lm_folder, tiny_lm_folder, retriever_lora={"r": 2}, similarity_temperature=1.0
    )
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(folder)
    append_eos(AutoTokenizer.from_pretrained(tiny_lm_folder)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_lm_folder).save_pretrained(folder / "lm_tokenizer")
    return folder


def test_help_needs_no_heavy_import():
    code = (
        "import sys, revela_hub\n"
        "try: revela_hub.app(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'datasets', 'pyarrow', 'numpy', 'sentence_transformers', 'accelerate'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("prepare", "train", "export", "evaluate", "search", "embed"):
        assert f"\n  {name} " in done.stdout


@pytest.mark.parametrize("name", ["export", "evaluate", "search"])
def test_every_option_is_explained_and_an_example_given(name):
    command = get_command(revela_hub.app).commands[name]
    for parameter in command.params:
        assert parameter.help and parameter.help.endswith((".", "quotes")), parameter.name
    assert f"\nrevela-hub {name} " in command.help
    shown = run(name, "--help").stdout
    assert all(option in shown for parameter in command.params for option in parameter.opts if option[0] == "-")


def test_options_of_prepare_are_the_fields_of_its_config():
    shown = run("prepare", "--help").stdout
    for field in dataclasses.fields(PrepareConfig):
        option = "source" if field.name == "source" else "--" + field.name.replace("_", "-")
        option = field.metadata.get("option", option)
        assert option in shown, option
        assert field.metadata["help"].split()[0] in shown
    assert "[default: 120]" in shown and "revela-hub prepare docs/ --out prepared/" in shown


def test_options_of_embed_are_the_fields_of_its_config_and_of_launching():
    shown = run("embed", "--help").stdout
    for field in (*dataclasses.fields(EmbedConfig), *dataclasses.fields(Launch)):
        option = field.name if field.name in ("model", "corpus") else "--" + field.name.replace("_", "-")
        assert option in shown and field.metadata["help"].split()[0] in shown, option
    assert "[default: 10000]" in shown and "revela-hub embed retriever/ docs/ --out embeddings/" in shown


def test_embed_hands_back_that_its_process_failed(text_folder, tmp_path):
    done = run("embed", tmp_path / "no-model", text_folder, "--out", tmp_path / "out", "--launch-config", "cpu")
    assert done.exit_code not in (0, None) and "accelerate launch" in done.stderr
    assert not (tmp_path / "out").exists()


def test_prepare_writes_what_its_options_say(prepared):
    settings = json.loads((prepared / "prepare.json").read_text())["settings"]
    assert (settings["group_size"], settings["validation_share"], settings["max_words"]) == (4, 0.1, 120)
    assert list(prepared.glob("train-*.parquet"))


def test_exported_checkpoint_is_measured_and_searched(checkpoint, prepared, text_folder, tmp_path):
    retriever, results = tmp_path / "retriever", tmp_path / "results.json"
    done = run("export", checkpoint, retriever, "--max-length", 64)
    assert done.exit_code == 0, done.output
    assert SentenceTransformer(str(retriever)).max_seq_length == 64
    adapter = run("export", checkpoint, tmp_path / "adapter", "--adapter-only")
    assert adapter.exit_code == 0 and (tmp_path / "adapter" / "adapter_model.safetensors").is_file(), adapter.output

    options = ("--groups", prepared, "--max-length", 64, "--gain-groups", 2, "--out", results)
    done = run("evaluate", checkpoint, "--baseline", retriever, *options)
    assert done.exit_code == 0, done.output
    rows = {row["model"]: row["scores"] for row in json.loads(results.read_text())["rows"]}
    # The retrieval gain needs the LM, which only the checkpoint has.
    assert set(rows) == {str(checkpoint), str(retriever)}
    assert "retrieval_gain" not in rows[str(retriever)]

    model = RevelaForPreTraining.from_pretrained(checkpoint).eval()
    tokenizers = (AutoTokenizer.from_pretrained(path) for path in (checkpoint, checkpoint / "lm_tokenizer"))
    collator = GroupCollator(*tokenizers, max_length=64, retriever_max_length=64)
    groups = load_groups(prepared, "validation").select(range(2))
    with torch.no_grad():
        outputs = [model(**collator([group])) for group in groups]
    tokens = torch.tensor([int(output.num_target_tokens) for output in outputs])
    losses = torch.tensor([float(output.in_batch_loss) for output in outputs])
    expected = float((losses * tokens).sum() / tokens.sum())
    assert rows[str(checkpoint)]["in_batch_loss"] == pytest.approx(expected, rel=1e-5)

    done = run("search", checkpoint, text_folder, "a boat")
    assert done.exit_code == 2 and f"first, with `revela-hub export {checkpoint} retriever/`" in done.stderr
    done = run("search", retriever, text_folder, "a boat on the river", "--top-k", 2)
    assert done.exit_code == 0, done.output
    assert "1. " in done.stdout and "2. " in done.stdout and "3. " not in done.stdout and ".txt#" in done.stdout


def test_errors_are_one_line_unless_debugging(tmp_path):
    arguments = ("prepare", tmp_path / "nothing", "--out", tmp_path / "out")
    done = run(*arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and "nothing" in done.stderr
    debugged = run("--debug", *arguments)
    assert isinstance(debugged.exception, (ValueError, OSError)) and str(debugged.exception) in done.stderr
    by_variable = runner.invoke(revela_hub.app, list(map(str, arguments)), env={"REVELA_DEBUG": "1"})
    assert type(by_variable.exception) is type(debugged.exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("prepare", "docs"), "--out"),
        (("prepare", "docs", "--out", "x", "--kind", "poetry"), "kind"),
        (("prepare", "docs", "--out", "x", "--group-sise", "4"), "--group-sise"),
        (("evaluate", "model"), "one of --task (with labels), --groups"),
        (("evaluate", "model", "--task", "SciFact", "--groups", "x"), "one of --task (with labels), --groups"),
        (("evaluate", "model", "--task", "SciFact", "--num-processes", "2"), "are for --benchmark alone"),
        (("evaluate", "model", "--benchmark", "nq", "--split", "dev"), "takes models alone"),
        (("evaluate", "model", "--benchmark", "ciro"), "choose one of coir, bright"),
        (("search", "model", "no-such-folder", "query"), "no-such-folder"),
        (("embed", "model", "no-such-folder", "--out", "x"), "no-such-folder"),
        (("embed", "model", "docs", "--out", "x", "--format", "csv"), "choose one of parquet, numpy"),
        (("embed", "model", "docs", "--out", "x", "--num-processes", "0"), "num_processes is 0"),
        (("train", "revela", "--machine-rank", "-1"), "machine_rank is -1"),
        (("train", "revela", "no-such-recipe"), "revela-smollm2-135m-wikipedia"),
        (("train", "revela", "--launch-config", "no-such-config"), "cpu, ddp, fsdp2, single, zero1, zero2, zero3"),
    ],
)
def test_mistakes_exit_with_2_and_say_what_is_wrong(arguments, message):
    done = run(*arguments)
    assert done.exit_code == 2, done.output
    assert message in done.stderr and "Traceback" not in done.stderr


def test_train_lists_each_recipe_with_its_table():
    lines = run("train", "--list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == sorted(path.stem for path in revela_hub.RECIPES.glob("*.yaml"))
    assert all("Table" in line for line in lines if line.startswith(("revela-", "retromae-")))


@pytest.mark.parametrize(
    ("method", "fields"),
    [
        ("revela", ("--retriever_name_or_path", "--train_sets", "--similarity_dtype")),
        ("retromae", ("--encoder_name_or_path", "--train_sets", "--decoder_mask_ratio")),
        ("finetune", ("--model_name_or_path", "--train_set", "--refresh_every")),
    ],
)
def test_train_help_shows_launching_and_the_fields_of_the_script(method, fields):
    assert f"\n  {method} " in run("train", "--help").stdout
    command = [sys.executable, "-m", "revela_hub", "train", method, "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--launch-config" in done.stdout and "cpu, ddp, fsdp2, single, zero1, zero2, zero3" in done.stdout
    for option in (*fields, "--per_device_train_batch_size"):
        assert option in done.stdout
    example = done.stdout.partition(f"revela-hub train {method} ")[2].partition("example:")[2].split()
    assert (revela_hub.RECIPES / f"{example[3]}.yaml").is_file(), example
    with open(revela_hub.RECIPES / f"{example[3]}.yaml", encoding="utf-8") as file:
        assert "Table" in file.readline()


def _next_arguments(output: str, script, training_arguments) -> tuple:
    """What the script makes of the command that `prepare` prints."""
    (command,) = re.findall("Next: revela-hub train (.*)", output)
    classes = (script.ModelArguments, script.DataArguments, training_arguments)
    return parse_recipe(classes, [*shlex.split(command)[1:], "--use_cpu", "true"])


@pytest.mark.parametrize("share", [0, 0.3])
def test_prepare_prints_a_next_command_that_runs(text_folder, tmp_path, share):
    out = tmp_path / "my groups"
    done = run("prepare", text_folder, "--out", out, "--validation-share", share, "--group-size", 4)
    assert done.exit_code == 0, done.output
    model, data, training = _next_arguments(done.stdout, revela, revela.RevelaTrainingArguments)
    assert data.train_sets == [str(out)] and model.retriever_name_or_path and training.output_dir == "run"
    assert (training.eval_strategy != "no") == training.load_best_model_at_end == (share > 0)


def test_prepare_for_retromae_names_the_next_command(text_folder, tiny_bert_folder, tmp_path):
    options = ("--for", "retromae", "--tokenizer", tiny_bert_folder, "--max-seq-length", 64)
    done = run("prepare", text_folder, "--out", tmp_path / "out", *options)
    assert done.exit_code == 0, done.output
    model, data, training = _next_arguments(done.stdout, retromae, retromae.RetroMAETrainingArguments)
    assert (model.encoder_name_or_path, data.train_sets) == (str(tiny_bert_folder), [str(tmp_path / "out")])
    assert training.eval_strategy == "no" and data.max_seq_length == 64
    assert json.loads((tmp_path / "out" / "prepare.json").read_text())["settings"]["max_seq_length"] == 64
    done = run("prepare", text_folder, "--out", tmp_path / "b", "--for", "retromae")
    assert done.exit_code == 2 and "tokenizer is missing" in done.stderr


@pytest.fixture
def stand_in_script(tmp_path, monkeypatch):
    """A script in the place of a method's, which tells what it was started with and fails in a way of its own."""
    (tmp_path / "trainers").mkdir()
    (tmp_path / "trainers" / "toy.py").write_text(
        "import json, os, sys\n"
        "from pathlib import Path\n"
        "seen = {'argv': sys.argv[1:], 'rank': os.environ.get('RANK'), 'world': os.environ.get('WORLD_SIZE')}\n"
        "Path(__file__).with_name(f\"seen-{seen['rank']}.json\").write_text(json.dumps(seen))\n"
        "sys.exit('--fail' in sys.argv)\n"
    )
    monkeypatch.setattr(revela_hub, "HERE", tmp_path)

    def start(*arguments: str, **launch):
        with pytest.raises(revela_hub.typer.Exit) as stopped:
            revela_hub._launch("toy", list(arguments), Launch("cpu", **launch), wants_help=False)
        return stopped.value.exit_code, [json.loads(path.read_text()) for path in sorted(tmp_path.rglob("seen-*"))]

    return start


def test_train_hands_arguments_on_and_the_exit_code_back(stand_in_script):
    code, seen = stand_in_script("--name", "two words", "--list", "a", "b")
    assert code == 0
    assert seen[0]["argv"] == ["--name", "two words", "--list", "a", "b", "--use_cpu", "true"]
    code, seen = stand_in_script("--use_cpu=false", "--fail")
    assert code == 1
    assert seen[0]["argv"] == ["--use_cpu=false", "--fail"]


def test_train_starts_two_processes_on_a_cpu(stand_in_script):
    code, seen = stand_in_script(num_processes=2)
    assert code == 0
    assert [(one["rank"], one["world"], one["argv"]) for one in seen] == [
        ("0", "2", ["--use_cpu", "true"]),
        ("1", "2", ["--use_cpu", "true"]),
    ]


def test_train_starts_one_process_on_each_of_two_machines(stand_in_script):
    from concurrent.futures import ThreadPoolExecutor

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def machine(rank: int):
        machines = {"num_machines": 2, "main_process_ip": "127.0.0.1", "main_process_port": port}
        return stand_in_script(num_processes=2, machine_rank=rank, **machines)

    with ThreadPoolExecutor() as machines:
        ends = list(machines.map(machine, (0, 1)))
    assert [code for code, _ in ends] == [0, 0]
    assert {(one["rank"], one["world"]) for _, seen in ends for one in seen} == {("0", "2"), ("1", "2")}


def test_console_command_prints_its_version():
    command = [sys.executable, "-m", "revela_hub", "--version"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "0.1.0")
