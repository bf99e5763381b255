"""The card of a published folder: what it says comes from the run, its snippets run, and nothing private is in it."""

import json
import re
import shutil
import socket
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard, parse_eval_result_entries
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMaskedLM
from typer.testing import CliRunner

import revela_hub
from hub_cards.card import RECIPE, TRAINING_RECORD, check_card, is_as_written, write_card
from hub_cards.checkpoints import EXPORT_RECORD
from hub_cards.evaluation import evaluate
from hub_cards.export import export
from hub_cards.privacy import check_private, clean_configs, hub_id
from hub_cards.push import push
from hub_cards.recipes import recipe
from trainers import retromae, revela
from trainers.arguments import parse_recipe
from trainers.data.prepare import PrepareConfig, prepare
from trainers.retromae_trainer import RetroMAETrainingArguments
from trainers.revela_trainer import RevelaTrainingArguments

TOKEN = "hf_" + "AbCdEfGhIj" * 4
BASE = "HuggingFaceTB/SmolLM2-135M"


@pytest.fixture(scope="module")
def secret(tmp_path_factory) -> Path:
    """A folder whose name must not come out: models, texts and runs lie in it."""
    return tmp_path_factory.mktemp("home-of-mallory")


@pytest.fixture(scope="module")
def runs(secret, tiny_lm_folder, tiny_bert_folder, text_folder):
    """Runs of four steps, of Revela and of RetroMAE, with what is private wherever there is room for it."""
    for name, folder in (("texts", text_folder), ("llama", tiny_lm_folder), ("bert", tiny_bert_folder)):
        shutil.copytree(folder, secret / name)
    AutoModelForMaskedLM.from_pretrained(tiny_bert_folder).save_pretrained(secret / "bert")
    for name in ("llama", "bert"):
        # As older releases wrote them.
        for file in ("config.json", "tokenizer_config.json"):
            config = json.loads((secret / name / file).read_text())
            config |= {"_name_or_path": str(secret / name), "special_tokens_map_file": str(secret / "map.json")}
            (secret / name / file).write_text(json.dumps(config))
    common = {"validation_share": 0.2}
    prepare(PrepareConfig(str(secret / "texts"), str(secret / "groups"), group_size=4, max_words=30, **common))
    prepare(
        PrepareConfig(
            str(secret / "texts"),
            str(secret / "sequences"),
            "retromae",
            tokenizer=str(secret / "bert"),
            max_seq_length=64,
            **common,
        )  # fmt: skip
    )
    training = {
        "use_cpu": True, "max_steps": 4, "logging_steps": 1, "save_steps": 2, "eval_strategy": "steps",
        "eval_steps": 2, "report_to": "none", "disable_tqdm": True, "learning_rate": 1e-2, "hub_token": TOKEN,
        "run_name": str(secret / "my-run"), "deepspeed": None,
    }  # fmt: skip
    revela.train(
        revela.ModelArguments(str(secret / "llama"), retriever_lora_r=4, lm_lora_r=4, similarity_temperature=0.01),
        revela.DataArguments([str(secret / "groups")], max_length=64, validation_groups=4),
        RevelaTrainingArguments(output_dir=str(secret / "revela"), **training),
    )
    retromae.train(
        retromae.ModelArguments(str(secret / "bert")),
        retromae.DataArguments([str(secret / "sequences")], max_seq_length=64, validation_sequences=8),
        RetroMAETrainingArguments(
            output_dir=str(secret / "retromae"), **(training | {"per_device_train_batch_size": 4})
        ),
    )
    emissions = "timestamp,project_name,emissions,energy_consumed,region\n2026-01-01,x,0.00123456,0.25,Hesse\n"
    (secret / "revela" / "emissions.csv").write_text(emissions)
    return {"revela": secret / "revela", "retromae": secret / "retromae"}


@pytest.fixture(scope="module")
def published(runs, tmp_path_factory) -> Path:
    """All kinds of export, side by side, the base model at its Hub name and text to search beside them."""
    folder = tmp_path_factory.mktemp("published")
    export(runs["revela"], folder / "retriever")
    export(runs["revela"] / "checkpoint-2", folder / "adapter", adapter_only=True)
    export(runs["revela"], folder / "lm", part="lm")
    export(runs["revela"], folder / "lm-adapter", part="lm", adapter_only=True)
    export(runs["retromae"], folder / "encoder")
    export(runs["retromae"], folder / "encoder-mean", pooling="mean")
    shutil.copytree(runs["revela"].parent / "llama", folder / BASE)
    shutil.copytree(runs["revela"].parent / "texts", folder / "my-texts")
    for kind in ("adapter", "lm-adapter"):
        write_card(folder / kind, base_model=BASE)
    return folder


KINDS = ("retriever", "adapter", "lm", "lm-adapter", "encoder", "encoder-mean")


def card_of(folder: Path) -> ModelCard:
    return ModelCard.load(folder / "README.md")


def blocks(folder: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", card_of(folder).text, flags=re.MULTILINE | re.DOTALL)


# Snippets


def test_every_snippet_runs_where_we_are_not_installed_and_the_doors_agree(published, runs, elsewhere, tmp_path):
    code = "\n".join(
        [
            "import os, torch",
            "os.chdir(folders['at'])",
            "for kind, snippets in folders['snippets'].items():",
            "    for number, snippet in enumerate(snippets):",
            "        scope = {}",
            "        exec(snippet, scope)",
            "        if 'queries' in scope:",
            "            rows = [torch.as_tensor(scope[side]) for side in ('queries', 'passages')]",
            "            found[f'{kind} {number}'] = torch.cat(rows).contiguous()",
            "from sentence_transformers import SentenceTransformer",
            "merged = SentenceTransformer(folders['merged'], device='cpu')",
            "found['merged'] = torch.as_tensor(merged.encode_query(['where do boats stop?']))",
        ]
    )
    snippets = {kind: blocks(published / kind, "python") for kind in KINDS}
    assert {kind: len(found) for kind, found in snippets.items()} == {
        "retriever": 3, "adapter": 1, "lm": 1, "lm-adapter": 1, "encoder": 4, "encoder-mean": 4,
    }  # fmt: skip
    merged = export(runs["revela"] / "checkpoint-2", tmp_path / "merged", card=False)
    found = elsewhere(code, [], {"at": str(published), "snippets": snippets, "merged": str(merged)})
    for kind in ("retriever", "encoder", "encoder-mean"):
        for number in (1, 2):
            assert (found[f"{kind} {number}"] - found[f"{kind} 0"]).abs().max() < 1e-5, (kind, number)
    assert torch.pdist(found["retriever 0"]).min() > 1e-4 and len(found["adapter 0"]) == 3
    assert (found["adapter 0"][:1] - found["merged"]).abs().max() < 1e-5


def test_search_command_of_the_card_runs(published, monkeypatch):
    monkeypatch.chdir(published)
    command = blocks(published / "retriever", "bash")[0].strip()
    words = re.findall(r'"[^"]*"|\S+', command)
    done = CliRunner().invoke(revela_hub.app, [word.strip('"') for word in words[1:]])
    assert done.exit_code == 0 and "boat" in done.output.lower(), done.output


# What it says


def test_card_says_what_the_run_was(published, runs):
    text = card_of(published / "retriever").text
    summary = json.loads((runs["revela"].parent / "groups" / "prepare.json").read_text())
    assert f"{summary['documents']['train']} documents" in text
    assert f"{summary['groups']['train']['groups']} groups of 4 chunks, at most 30 words a chunk" in text
    assert re.search(r"4 steps, \d+ seconds, about [\d.]+( thousand)? tokens on .*; 0.25 kWh and 0.00123 kg CO₂", text)
    assert "`query: ` before queries, `passage: ` before passages" in text and "256 tokens" in text
    assert f"transformers {json.loads((published / 'retriever' / TRAINING_RECORD).read_text())['versions']['transformers']}" in text  # fmt: skip # noqa: E501
    # One list, without blank lines within, and dtypes as torch calls them.
    assert re.search(
        r"\n- \*\*Parameters:\*\* [^\n]*float32\n- \*\*Maximum[^\n]*\n- \*\*Prompts[^\n]*\n- \*\*Embedding", text
    )
    assert "cai2025revela" in text and "xiao2022retromae" in card_of(published / "encoder").text


def test_hash_of_the_card_is_that_of_the_commands_it_names(published, runs):
    import subprocess

    command = "sha256sum train-*.parquet | sha256sum"
    assert command in card_of(published / "retriever").text
    folder = runs["revela"].parent / "groups"
    digest = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True, check=True).stdout.split()
    assert digest[0] in card_of(published / "retriever").text


def test_recipe_of_the_folder_gives_the_options_of_the_run(published, runs, tmp_path):
    classes = (revela.ModelArguments, revela.DataArguments, RevelaTrainingArguments)
    given = ["--retriever_name_or_path", "x", "--train_sets", "y", "--output_dir", str(tmp_path), "--use_cpu", "true"]
    model, data, training = parse_recipe(classes, [str(published / "retriever" / RECIPE), *given])
    assert (model.retriever_lora_r, model.lm_lora_r, model.similarity_temperature) == (4, 4, 0.01)
    assert (data.max_length, data.validation_groups) == (64, 4)
    assert (training.learning_rate, training.max_steps, training.eval_steps) == (1e-2, 4, 2)
    options = yaml.safe_load((published / "retriever" / RECIPE).read_text())
    assert "lr_scheduler_type" not in options and "hub_token" not in options and "use_cpu" not in options


@pytest.mark.parametrize(
    ("kind", "method", "option"),
    [("retriever", "revela", "retriever_name_or_path"), ("encoder", "retromae", "encoder_name_or_path")],
)
def test_recipe_names_the_base_model_or_says_which_option_to_add(published, tmp_path, kind, method, option):
    folder = Path(shutil.copytree(published / kind, tmp_path / "out"))
    text = (folder / RECIPE).read_text()
    assert f"# Add --{option} YOUR_BASE_MODEL: it was a folder" in text and "# Add --train_sets prepared: " in text
    command = (
        f"revela-hub train {method} recipe.yaml --{option} YOUR_BASE_MODEL --train_sets prepared --output_dir run"
    )
    assert command in card_of(folder).text
    write_card(folder, base_model=BASE)
    assert yaml.safe_load((folder / RECIPE).read_text())[option] == BASE
    assert f"--{option}" not in (folder / RECIPE).read_text()
    assert f"revela-hub train {method} recipe.yaml --train_sets prepared --output_dir run" in card_of(folder).text


def test_second_model_that_was_a_folder_is_to_be_added_to_the_recipe():
    training = {
        "method": "revela",
        "options": {"seed": 1},
        "local_models": ["retriever_name_or_path", "lm_name_or_path"],
    }
    text = recipe(training, BASE)
    assert yaml.safe_load(text) == {"retriever_name_or_path": BASE, "seed": 1}
    assert "# Add --lm_name_or_path YOUR_MODEL" in text


@pytest.mark.parametrize(
    ("kind", "library", "pipeline", "relation"),
    [
        ("retriever", "sentence-transformers", "sentence-similarity", None),
        ("adapter", "peft", "feature-extraction", "adapter"),
        ("lm", "transformers", "text-generation", None),
        ("lm-adapter", "peft", "text-generation", "adapter"),
        ("encoder", "sentence-transformers", "sentence-similarity", None),
    ],
)
def test_metadata(published, kind, library, pipeline, relation):
    data = card_of(published / kind).data
    assert (data.library_name, data.pipeline_tag, data.get("base_model_relation")) == (library, pipeline, relation)
    assert ("retromae" if kind == "encoder" else "revela") in data.tags
    # What nobody said is left out: the base models lie in local folders.
    assert data.base_model == (BASE if "adapter" in kind else None)
    assert data.license is None and data.language is None and data.datasets is None
    check_card(published / kind)


def test_pictures_are_there_and_have_a_light_ground(published):
    from matplotlib.image import imread

    figures = published / "retriever" / "figures"
    assert {path.name for path in figures.iterdir()} == {"training.png", "in_batch_attention.png"}
    assert [path.name for path in (published / "encoder" / "figures").iterdir()] == ["training.png"]
    for path in figures.iterdir():
        corner = imread(path)[0, 0]
        assert corner[:3].min() > 0.9 and (len(corner) == 3 or corner[3] == 1)


def test_adapter_config_gets_the_base_model_it_is_told(published):
    config = json.loads((published / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == BASE


# What it must not say


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_private_is_in_any_file(published, secret, kind):
    planted = [str(secret).encode(), b"mallory", TOKEN.encode(), b"Hesse"]
    if len(socket.gethostname()) > 4:
        planted.append(socket.gethostname().encode())
    files = [path for path in (published / kind).rglob("*") if path.is_file()]
    assert len(files) > 6
    for path in files:
        for word in planted:
            assert word not in path.read_bytes(), (path, word)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("README.md", "see /home/mallory/runs/best", "local path '/home/mallory/runs/best'"),
        ("README.md", "see ~/runs/best", "local path"),
        ("README.md", "see C:\\Users\\mallory", "local path"),
        ("notes.txt", f"token {TOKEN}", "a token of the Hub: take it out, and revoke it"),
        ("config_more.json", '{"deep": [{"name": "/data7/mallory/base"}]}', "local path '/data7/mallory/base'"),
        ("modeling_x.py", f'TOKEN = "{TOKEN}"', "a token"),
    ],
)
def test_what_is_private_is_found(published, tmp_path, file, text, message):
    folder = Path(shutil.copytree(published / "encoder", tmp_path / "out"))
    check_card(folder)
    with (folder / file).open("a") as out:
        out.write(text + "\n")
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        check_card(folder)
    assert file in str(caught.value)


def test_name_of_the_machine_is_found(published, tmp_path, monkeypatch):
    folder = Path(shutil.copytree(published / "encoder", tmp_path / "out"))
    (folder / "notes.md").write_text("trained on gpu-node-17 at night")
    check_private(folder)
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-node-17")
    with pytest.raises(ValueError, match=r"notes.md holds this machine's name, 'gpu-node-17'"):
        check_private(folder)


def test_what_is_private_is_found_between_the_weights_of_a_graph(tmp_path):
    torch.manual_seed(0)
    weights = torch.randn(200_000).numpy().tobytes()
    graph = tmp_path / "model.onnx"
    graph.write_bytes(weights + b"\x0a\x1c/model/layers.0/mlp/Add_output_0" + weights)
    check_private(tmp_path)
    for private, message in (
        (b'File "/work/main/lib/modeling_bert.py", line 7', "holds the local path '/work/main/lib/modeling_bert.py'"),
        (TOKEN.encode(), "holds a token of the Hub"),
    ):
        graph.write_bytes(weights + b"\x12\x40" + private + b"\x00" + weights)
        with pytest.raises(ValueError, match=f"model.onnx {re.escape(message)}"):
            check_private(tmp_path)


@pytest.mark.parametrize(
    "text", ["https://huggingface.co/a/b/c", "and/or", "1/2/3", "[x](figures/a.png)", "</a></b>", "a /v1/embeddings b"]
)
def test_what_is_no_path_passes(tmp_path, text):
    (tmp_path / "README.md").write_text(text)
    (tmp_path / "config.json").write_text(json.dumps({"a": text if " " in text else "models/x", "template": text}))
    check_private(tmp_path)


def test_local_path_that_looks_like_a_hub_id_is_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert hub_id("runs/base") == "runs/base"
    (tmp_path / "runs" / "base").mkdir(parents=True)
    assert hub_id("runs/base") is None and hub_id("/a/b") is None and hub_id("../b") is None
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "runs/base", "r": 4}')
    clean_configs(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config == {"base_model_name_or_path": None, "r": 4}


# Results


def write_results(path: Path, task: dict, rows: list[tuple]) -> Path:
    kept = [
        {"model": model, "role": role, "task": name, "scores": {"ndcg_at_10": score, "recall_at_100": 0.9}} | more
        for model, role, name, score, more in rows
    ]
    found = {"task": task, "rows": kept, "versions": {"mteb": "2.0"}, "date": "2026-01-02T03:04:05+00:00"}
    path.write_text(json.dumps(found))
    return path


@pytest.fixture
def with_results(published, tmp_path) -> Path:
    folder = Path(shutil.copytree(published / "retriever", tmp_path / "model"))
    local = write_results(
        tmp_path / "local.json",
        {"name": "my-task", "kind": "beir_folder", "split": "test", "num_queries": 2, "num_documents": 1000},
        [
            ("BM25", "baseline", "my-task", 0.5, {}),
            (str(tmp_path / "secrets" / "SmolLM2-135M"), "baseline", "my-task", 0.2, {}),
            (str(folder), "model", "my-task", 0.61234, {}),
            (f"{folder} (standardised)", "model", "my-task", 0.7, {}),
        ],
    )
    dataset = {"dataset": {"path": "mteb/scifact", "revision": "abc"}}
    mteb = write_results(
        tmp_path / "mteb.json",
        {"name": "BEIR", "kind": "mteb", "tasks": ["SciFact", "NFCorpus"]},
        [
            (BASE, "baseline", "SciFact", 0.1, dataset),
            (str(folder), "model", "SciFact", 0.4, dataset),
            (BASE, "baseline", "NFCorpus", 0.3, dataset),
            (str(folder), "model", "NFCorpus", 0.2, dataset),
            (str(folder), "model", "mean", 0.3, {}),
        ],
    )
    write_card(folder, results=[local, mteb], base_model=BASE, license="apache-2.0", language=["en"])
    return folder


def test_results_stand_in_the_text_the_index_and_the_hubs_files(with_results):
    card = card_of(with_results)
    lines = card.text.splitlines()
    assert "my-task (2 queries, 1,000 documents):" in lines and "| BM25 | 0.500 | 0.900 |" in lines
    assert f"| {BASE} (base model) | 0.200 | 0.900 |" in lines
    assert "| model (standardised) | **0.700** | 0.900 |" in lines
    assert f"| nDCG@10 | {BASE} (base model) | model |" in lines and "| SciFact | 0.100 | **0.400** |" in lines
    assert "| mean | – | 0.300 |" in lines
    index = {(result.dataset_name, result.metric_type): result.metric_value for result in card.data.eval_results}
    assert index == {
        ("my-task", "ndcg_at_10"): 0.61234, ("my-task", "recall_at_100"): 0.9, ("SciFact", "ndcg_at_10"): 0.4,
        ("SciFact", "recall_at_100"): 0.9, ("NFCorpus", "ndcg_at_10"): 0.2, ("NFCorpus", "recall_at_100"): 0.9,
    }  # fmt: skip
    assert card.data.metrics == ["ndcg_at_10", "recall_at_100"] and card.data.license == "apache-2.0"
    files = {path.name: path for path in (with_results / ".eval_results").iterdir()}
    assert set(files) == {"SciFact.yaml", "NFCorpus.yaml"}
    (entry,) = parse_eval_result_entries(yaml.safe_load(files["SciFact.yaml"].read_text()))
    assert (entry.dataset_id, entry.dataset_revision, entry.value) == ("mteb/scifact", "abc", 40.0)
    assert entry.source_url == "https://github.com/embeddings-benchmark/mteb/" and entry.source_name
    check_card(with_results)


def test_what_was_said_before_stays(with_results):
    write_card(with_results, language=["de"], origin="These weights were found.", repo_id="org/name")
    card = card_of(with_results)
    assert (card.data.license, card.data.language, card.data.base_model) == ("apache-2.0", ["de"], BASE)
    assert "These weights were found." in card.text and "| SciFact | 0.100 | **0.400** |" in card.text
    assert 'SentenceTransformer("org/name")' in card.text and '"model"' not in card.text
    check_card(with_results)


def test_card_that_was_edited_is_told_from_one_that_was_written(with_results):
    assert is_as_written(with_results)
    with (with_results / "README.md").open("a") as card:
        card.write("By hand.\n")
    assert not is_as_written(with_results)
    edited = (with_results / "README.md").read_text()
    push(with_results, "org/name", dry_run=True)
    assert (with_results / "README.md").read_text() == edited
    write_card(with_results)
    assert is_as_written(with_results)
    before = {path: path.read_bytes() for path in with_results.rglob("*") if path.is_file()}
    push(with_results, "org/name", dry_run=True)
    assert before == {path: path.read_bytes() for path in with_results.rglob("*") if path.is_file()}


def test_files_of_the_card_belong_to_the_export(with_results):
    files = {path.relative_to(with_results).as_posix() for path in with_results.rglob("*")}
    assert files == set(json.loads((with_results / EXPORT_RECORD).read_text())["files"])


def test_what_was_said_outlives_an_export_over_it_and_results_do_if_the_weights_are_the_same(
    with_results, runs, capsys
):
    said = card_of(with_results)
    export(runs["revela"], with_results, overwrite=True)
    again = card_of(with_results)
    for card in (said, again):
        assert (card.data.license, card.data.language, card.data.base_model) == ("apache-2.0", ["en"], BASE)
        assert "| SciFact | 0.100 | **0.400** |" in card.text
    scores = [[(one.dataset_name, one.metric_value) for one in card.data.eval_results] for card in (said, again)]
    assert len(scores[0]) == 6 and sorted(scores[0]) == sorted(scores[1])
    assert "left out" not in capsys.readouterr().err
    assert (with_results / ".eval_results" / "SciFact.yaml").exists()
    check_card(with_results)
    export(runs["revela"] / "checkpoint-2", with_results, overwrite=True)
    other = card_of(with_results).data
    assert (other.license, other.language, other.base_model) == ("apache-2.0", ["en"], BASE)
    assert other.eval_results is None and not (with_results / ".eval_results").exists()
    told = capsys.readouterr().err
    assert "the results of my-task, BEIR were measured on other weights and are left out of the card" in told
    export(runs["revela"], with_results, overwrite=True, card=False)
    write_card(with_results)
    assert card_of(with_results).data.license == "apache-2.0"


def test_what_was_said_of_another_base_or_text_is_left_out(with_results, runs, tmp_path, capsys):
    other = Path(shutil.copytree(runs["revela"], tmp_path / "other"))
    record = json.loads((other / TRAINING_RECORD).read_text())
    record["data"][0]["sha256"] = "of another text"
    (other / TRAINING_RECORD).write_text(json.dumps(record))
    export(other, with_results, overwrite=True)
    data = card_of(with_results).data
    assert (data.license, data.language) == (None, None) and data.base_model == BASE
    assert "license, language were said of a model of another base or text" in capsys.readouterr().err


def test_card_edited_by_hand_is_not_exported_over(with_results, runs):
    with (with_results / "README.md").open("a") as card:
        card.write("By hand.\n")
    with pytest.raises(FileExistsError, match="README.md was edited after it was written, which would be lost"):
        export(runs["revela"], with_results, overwrite=True)
    assert "By hand." in (with_results / "README.md").read_text()
    (with_results / "README.md").unlink()
    export(runs["revela"], with_results, overwrite=True)
    assert card_of(with_results).data.license == "apache-2.0"


@pytest.mark.parametrize(
    ("models", "message"),
    [(["a/b", "c/d"], "rows of a/b, c/d, and which of them is"), ([], "rows of no model"), (None, "holds no results")],
)
def test_results_of_others_are_refused_and_nothing_is_written(published, tmp_path, models, message):
    folder = Path(shutil.copytree(published / "encoder", tmp_path / "out"))
    before = (folder / "README.md").read_text()
    path = tmp_path / "results.json"
    rows = [(model, "model", "t", 0.5, {}) for model in models or ()]
    write_results(path, {"name": "t", "kind": "beir_folder"}, rows) if models is not None else path.write_text("[]")
    with pytest.raises(ValueError, match=re.escape(message)):
        write_card(folder, results=[path])
    assert (folder / "README.md").read_text() == before and not (folder / ".card.partial").exists()


def test_results_are_of_the_model_whose_files_were_measured(published, beir_folder, tmp_path):
    folder = Path(shutil.copytree(published / "retriever", tmp_path / "model"))
    out, options = tmp_path / "results.json", {"bm25": False, "show": False, "truncate_dims": [4]}
    evaluate({"someone/else": str(published / "encoder")}, beir_folder, out=out, **options)
    with pytest.raises(ValueError, match="was measured on someone/else, with other files than .*/model has"):
        write_card(folder, results=[out])
    evaluate({"called otherwise": str(folder)}, beir_folder, out=out, **options)
    (folder / "onnx").mkdir()
    for added in ("LICENSE", "NOTICE.txt", "CITATION.cff", "logo.svg", "onnx/model.onnx"):
        (folder / added).write_text("beside")
    write_card(folder, results=[out], license="mit")
    own = [line for line in card_of(folder).text.splitlines() if line.startswith("| model |")]
    assert len(own) == 1 and len(card_of(folder).data.eval_results) == 4
    # Trained on: the same name, and another model.
    weights = load_file(folder / "model.safetensors")
    save_file({name: value * 1.01 for name, value in weights.items()}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="was measured on called otherwise, with other files"):
        write_card(folder, results=[out])
    # On the Hub a commit names the files.
    found = json.loads(out.read_text())
    for row in found["rows"]:
        row |= {"model": row["model"].replace("called otherwise", "me/mine"), "fingerprint": "c" * 40}
    out.write_text(json.dumps(found))
    write_card(folder, results=[out], repo_id="me/mine")
    with pytest.raises(ValueError, match="was measured on me/mine, with other files"):
        write_card(folder, results=[out], repo_id="me/another")


# Cards that must not be published


def breakers():
    def no_card(folder):
        (folder / "README.md").unlink()

    def broken_yaml(folder):
        (folder / "README.md").write_text("---\na: [\n---\n# x\n")

    def no_tags(folder):
        card = card_of(folder)
        card.data.tags = None
        card.save(folder / "README.md")

    def lost_picture(folder):
        (folder / "figures" / "training.png").unlink()

    def path_as_base(folder):
        card = card_of(folder)
        card.data.base_model = "../base"
        card.save(folder / "README.md")

    def eval_without_task(folder):
        (folder / ".eval_results").mkdir()
        (folder / ".eval_results" / "x.yaml").write_text("- dataset: {id: mteb/x}\n  value: 1.0\n")

    def eval_without_number(folder):
        (folder / ".eval_results").mkdir()
        (folder / ".eval_results" / "x.yaml").write_text("- dataset: {id: mteb/x, task_id: x}\n  value: good\n")

    return {
        no_card: "has no README.md: write one with `revela-hub card",
        broken_yaml: "is no model card: its metadata do not parse (while parsing",
        no_tags: "names no tags",
        lost_picture: "shows figures/training.png, which is not in the folder",
        path_as_base: "'../base' is no id on the Hub",
        eval_without_task: "no results as the Hub has them ('task_id')",
        eval_without_number: "must have a number",
    }


@pytest.mark.parametrize(("breaks", "message"), breakers().items(), ids=lambda value: getattr(value, "__name__", ""))
def test_card_that_is_wrong_is_refused(published, tmp_path, breaks, message):
    folder = Path(shutil.copytree(published / "encoder", tmp_path / "out"))
    breaks(folder)
    with pytest.raises(ValueError, match=re.escape(message)):
        check_card(folder)


def test_adapter_without_a_base_model_is_not_fit_to_publish(runs, tmp_path):
    folder = export(runs["revela"], tmp_path / "adapter", adapter_only=True)
    assert "## Load it" not in card_of(folder).text
    with pytest.raises(ValueError, match="names no base_model: say it with .* --base-model"):
        check_card(folder)


def test_checkpoint_gets_no_card(runs):
    with pytest.raises(ValueError, match="is no published model: write one with `revela-hub export"):
        write_card(runs["revela"])
    assert not (runs["revela"] / "README.md").exists()


@pytest.mark.parametrize(
    ("kind", "gone", "lacking"),
    [
        ("retriever", "1_Pooling/config.json", "1_Pooling/config.json"),
        ("retriever", "tokenizer.json", "a tokenizer (tokenizer.json)"),
        ("retriever", "model.safetensors", "weights (model.safetensors)"),
        ("encoder", "config.json", "config.json"),
        ("adapter", "adapter_model.safetensors", "weights (adapter_model.safetensors)"),
        ("lm", "model.safetensors", "weights (model.safetensors)"),
    ],
)
def test_folder_that_is_not_whole_gets_no_card(published, tmp_path, kind, gone, lacking):
    folder = Path(shutil.copytree(published / kind, tmp_path / "out"))
    (folder / gone).unlink()
    (folder / "README.md").unlink()
    done = CliRunner().invoke(revela_hub.app, ["card", str(folder)])
    assert done.exit_code == 2 and done.output.count("\n") == 1
    assert f"{folder} is not whole: it lacks {lacking}. Write it again" in done.output
    assert not (folder / "README.md").exists()


def test_folder_whose_weights_were_cut_off_gets_no_card(published, tmp_path):
    folder = Path(shutil.copytree(published / "encoder", tmp_path / "out"))
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-8])
    with pytest.raises(ValueError, match="no whole safetensors file"):
        write_card(folder)


def test_folder_that_nothing_is_known_of_gets_a_card(published, tmp_path):
    folder = Path(shutil.copytree(published / "retriever", tmp_path / "found"))
    for name in (TRAINING_RECORD, RECIPE, EXPORT_RECORD, "README.md"):
        (folder / name).unlink()
    write_card(folder, origin="Converted from the authors' release.", base_model=BASE)
    text = card_of(folder).text
    assert "Converted from the authors' release." in text and 'SentenceTransformer("found")' in text
    for heading in ("## Training", "## Results", "## Reproduce", "## Cite"):
        assert heading not in text
    check_card(folder)


def test_command_writes_what_it_is_told(published, tmp_path):
    folder = Path(shutil.copytree(published / "retriever", tmp_path / "out"))
    options = ["--license", "mit", "--language", "en", "--dataset", "org/text", "--repo-id", "org/name"]
    done = CliRunner().invoke(revela_hub.app, ["card", str(folder), *options])
    assert done.exit_code == 0, done.output
    data = card_of(folder).data
    assert (data.license, data.language, data.datasets) == ("mit", ["en"], ["org/text"])
    done = CliRunner().invoke(revela_hub.app, ["card", str(folder), "--base-model", "/home/mallory/base"])
    assert done.exit_code == 2 and done.output.count("\n") == 1 and "no id on the Hub" in done.output
