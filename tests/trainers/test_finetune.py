"""Fine-tuning as a whole: each method learns, goes on exactly where it was stopped, and leaves a retriever behind."""

import copy
import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, TrainerCallback

from hub_cards.encoding import encode, prompts_used
from hub_cards.encoding import load_model as load_retriever
from hub_cards.export import publish
from modeling_revela import RevelaForPreTraining
from tests.trainers.finetune_sets import make_encoder, make_task
from trainers import finetune as script
from trainers.arguments import RECIPES, parse_recipe
from trainers.finetune import DataArguments, MethodArguments, train
from trainers.finetune_model import ModelArguments, load_model, merge_adapters, save_result
from trainers.finetune_trainer import FinetuneTrainingArguments, make_loss
from trainers.hard_negatives import load_tensors

CLASSES = (ModelArguments, DataArguments, MethodArguments, FinetuneTrainingArguments)
NDCG = "eval_dev_cosine_ndcg@10"


@pytest.fixture(scope="session")
def encoder(tmp_path_factory):
    return make_encoder(tmp_path_factory.mktemp("finetune") / "encoder")


@pytest.fixture(scope="session")
def task(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("finetune") / "beir")


@pytest.fixture(scope="session")
def judged_task(tmp_path_factory):
    """With two documents a query that are judged and not relevant."""
    return make_task(tmp_path_factory.mktemp("finetune") / "beir", size=64, negatives=2)


@pytest.fixture(scope="session")
def finetune(encoder, task):
    """A run of the script's `train`; options go to whichever config class has them."""

    def run(output_dir, callbacks=None, **options):
        options = {
            "model_name_or_path": str(encoder),
            "train_set": str(task),
            "output_dir": str(output_dir),
            "use_cpu": True,
            "learning_rate": 3e-3,
            "save_strategy": "no",
            "disable_tqdm": True,
            "report_to": "none",
        } | options
        parts = [
            cls(**{name: value for name, value in options.items() if name in cls.__dataclass_fields__})
            for cls in CLASSES
        ]
        assert sum(len(set(options) & set(cls.__dataclass_fields__)) for cls in CLASSES) == len(options)
        return train(*parts, callbacks=callbacks)

    return run


@pytest.fixture(scope="session")
def dpr(finetune, tmp_path_factory):
    """The folder of a retriever that six epochs of in-batch negatives made, and the run's log."""
    folder = tmp_path_factory.mktemp("finetune") / "dpr"
    trainer = finetune(
        folder, num_train_epochs=6, eval_strategy="epoch", eval_on_start=True, document_prompt="passage : "
    )
    return folder, trainer.state.log_history


def logged(log, name):
    return [entry[name] for entry in log if name in entry]


def weights(folder):
    return load_file(folder / "model.safetensors")


def assert_same(first, second):
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


class Stop(TrainerCallback):
    """Breaks a run off after a step, as a lost machine would."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


# Each method learns


def test_dpr_learns_from_nothing_and_leaves_a_retriever(dpr, task):
    folder, log = dpr
    scores = logged(log, NDCG)
    assert len(scores) == 7 and scores[0] < 0.1 and scores[-1] > 0.4
    model = SentenceTransformer(str(folder))
    assert prompts_used(model) == {"query": "", "document": "passage : "}
    assert model.similarity_fn_name == "cosine" and model[1].pooling_mode == "cls"
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["1_Pooling", "2_Normalize"]
    assert not list(folder.rglob("*.bin")) and (folder / "finetune.json").exists()


def test_every_weight_moves_but_what_has_no_part_in_an_embedding(dpr, encoder):
    before, after = load_file(encoder / "model.safetensors"), weights(dpr[0])
    assert before.keys() == after.keys()
    still = {name for name, value in before.items() if torch.equal(value, after[name])}
    assert still == {"pooler.dense.weight", "pooler.dense.bias"}


def test_ance_learns_from_negatives_it_mines_in_rounds(finetune, dpr, tmp_path):
    options = {"model_name_or_path": str(dpr[0]), "method": "ance", "num_negatives": 3, "mining_depth": 20}
    trainer = finetune(tmp_path / "ance", max_steps=40, refresh_every=16, learning_rate=1e-3, **options)
    assert logged(trainer.state.log_history, NDCG)[-1] > logged(dpr[1], NDCG)[-1] + 0.05
    found = {path.stem: load_tensors(path)["negatives"] for path in (tmp_path / "ance" / "negatives").iterdir()}
    # 180 pairs are 12 steps an epoch.
    assert sorted(found) == sorted(
        ["mined-0", "mined-16", "mined-32", *(f"rows-{step}" for step in (0, 12, 16, 24, 32, 36))]
    )
    assert not torch.equal(found["mined-0"], found["mined-16"]) and found["rows-12"].shape == (180, 3)
    # Prompts of the retriever that was fine-tuned are kept.
    assert prompts_used(SentenceTransformer(str(tmp_path / "ance")))["document"] == "passage : "
    assert not list((tmp_path / "ance").glob("checkpoint-*"))


def test_distillation_brings_the_retriever_to_its_teacher(finetune, dpr, tmp_path):
    options = {"model_name_or_path": str(dpr[0]), "method": "distill", "num_negatives": 3, "mining_depth": 20}
    options["cross_encoder_max_length"] = 64
    trainer = finetune(
        tmp_path / "out",
        num_train_epochs=5,
        logging_steps=6,
        learning_rate=1e-3,
        cross_encoder_epochs=2,
        cross_encoder_learning_rate=1e-3,
        cross_encoder_batch_size=16,
        **options,
    )
    losses = logged(trainer.state.log_history, "loss")
    assert losses[-1] < 0.5 * losses[0]
    rows = load_tensors(tmp_path / "out" / "negatives" / "rows-0.safetensors")
    assert rows["scores"].shape == (180, 4) and rows["scores"].std() > 0
    assert (tmp_path / "out" / "cross_encoder" / "config.json").exists()
    # What it taught is as good a teacher for another run.
    again = finetune(
        tmp_path / "again",
        max_steps=2,
        teacher=str(tmp_path / "out" / "cross_encoder"),
        **options,
    )
    assert again.state.global_step == 2
    torch.testing.assert_close(load_tensors(tmp_path / "again" / "negatives" / "rows-0.safetensors"), rows)


def test_cross_encoder_learns_what_is_relevant(encoder, tmp_path):
    from trainers.distillation import score_rows, train_cross_encoder
    from trainers.finetune_data import TrainingSet

    # A document is relevant if it has w0, whatever the query.
    good, bad = [f"w0 w{number} w3" for number in range(4, 20)], [f"w1 w{number} w3" for number in range(4, 20)]
    data = TrainingSet(
        [f"w{number} w2" for number in range(20, 36)], good + bad, [[row] for row in range(16)], [[]] * 16
    )
    negatives = torch.tensor([[16 + row, 16 + (row + 1) % 16] for row in range(16)], dtype=torch.int32)
    args = FinetuneTrainingArguments(
        output_dir=str(tmp_path / "x"), use_cpu=True, report_to="none", disable_tqdm=True, logging_steps=5
    )
    options = {"epochs": 10, "learning_rate": 3e-3, "batch_size": 4, "max_length": 32}
    model = train_cross_encoder(str(encoder), tmp_path / "teacher", data, negatives, args, **options)
    scores = score_rows(model, data, negatives, batch_size=8)
    assert (scores[:, :1] > scores[:, 1:] + 1).all()
    # What is there is read, not trained again.
    read = train_cross_encoder(str(encoder), tmp_path / "teacher", data, negatives, args, **options)
    torch.testing.assert_close(score_rows(read, data, negatives, batch_size=8), scores)


# What must make no difference


def test_grad_cache_gives_the_gradients_of_the_whole_batch(encoder):
    texts = {"query": [f"w{number}" for number in range(12)], "positive": [f"w{number} w1" for number in range(12)]}
    grads = []
    for cached in (0, 5):
        model = load_model(ModelArguments(str(encoder))).eval()
        loss = make_loss(model, "dpr", grad_cache_batch_size=cached)
        loss([model.preprocess(column) for column in texts.values()], None).backward()
        grads.append({name: value.grad for name, value in model.named_parameters() if value.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for name, value in grads[0].items():
        torch.testing.assert_close(grads[1][name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("cached", [0, 5])
def test_matryoshka_is_the_loss_at_each_size_weighted(encoder, cached):
    texts = {"query": [f"w{number}" for number in range(12)], "positive": [f"w{number} w1" for number in range(12)]}
    model = load_model(ModelArguments(str(encoder)), [4, 16]).eval()
    loss = make_loss(
        model, "dpr", 0.1, matryoshka_dims=[4, 16], matryoshka_weights=[3, 2, 1], grad_cache_batch_size=cached
    )
    embeddings = [model.encode(column, convert_to_tensor=True).double() for column in texts.values()]
    expected = 0
    for size, weight in ((4, 3), (16, 2), (32, 1)):
        queries, documents = (torch.nn.functional.normalize(both[:, :size], dim=-1) for both in embeddings)
        expected += weight * torch.nn.functional.cross_entropy(queries @ documents.T / 0.1, torch.arange(12))
    value = loss([model.preprocess(column) for column in texts.values()], None)
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("lora_r", [0, 4])
def test_a_run_that_broke_off_goes_on_exactly(finetune, dpr, tmp_path, lora_r):
    options = {
        "model_name_or_path": str(dpr[0]),
        "method": "ance",
        "num_negatives": 2,
        "mining_depth": 10,
        "refresh_every": 5,
        "max_steps": 15,
        "lora_r": lora_r,
        "save_strategy": "steps",
        "save_steps": 3,
        "learning_rate": 1e-3,
        "logging_steps": 1,
    }
    whole = finetune(tmp_path / "whole", **options)
    with pytest.raises(KeyboardInterrupt):
        finetune(tmp_path / "broken", callbacks=[Stop(8)], **options)
    assert not (tmp_path / "broken" / "modules.json").exists()
    # From within a round, and from the end of one, where the model of the checkpoint has yet to mine; here, and into
    # another folder.
    finetune(tmp_path / "broken", resume_from_checkpoint="true", **options)
    assert_same(weights(tmp_path / "whole"), weights(tmp_path / "broken"))
    for file in (tmp_path / "whole" / "negatives").glob("*-10.safetensors"):
        file.rename(file.with_suffix(".aside"))
    resumed = finetune(tmp_path / "other", resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-10"), **options)
    assert_same(weights(tmp_path / "whole"), weights(tmp_path / "other"))
    assert logged(resumed.state.log_history, "loss") == logged(whole.state.log_history, "loss")
    with pytest.raises(ValueError, match=r"had num_negatives 2, not \d+: resume it as it was"):
        finetune(tmp_path / "whole", resume_from_checkpoint="true", **options | {"num_negatives": 3})
    with pytest.raises(FileExistsError, match="holds an earlier run"):
        finetune(tmp_path / "whole", **options)


def test_given_negatives_are_drawn_anew_each_epoch(finetune, judged_task, tmp_path):
    finetune(tmp_path / "out", train_set=str(judged_task), num_negatives=1, num_train_epochs=2)
    rows = [load_tensors(tmp_path / "out" / "negatives" / f"rows-{step}.safetensors")["negatives"] for step in (0, 3)]
    assert rows[0].shape == (48, 1) and not torch.equal(*rows)


# What comes out


@pytest.mark.parametrize("method", ["dpr", "ance", "distill"])
def test_matryoshka_learns_short_embeddings_and_says_so(finetune, dpr, task, tmp_path, method):
    options = {"method": method, "model_name_or_path": str(dpr[0]), "learning_rate": 1e-3, "max_steps": 40}
    if method != "dpr":
        options |= {"num_negatives": 2, "mining_depth": 10, "max_steps": 2}
    if method == "distill":
        options |= {"cross_encoder_epochs": 0.1, "cross_encoder_max_length": 40}
    finetune(tmp_path / "out", matryoshka_dims=[6], **options)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["matryoshka_dimensions"] == [6, 32]
    model = SentenceTransformer(str(tmp_path / "out"), truncate_dim=6)
    assert model.get_embedding_dimension() == 6
    texts = ["bato w1", "cula w2 w3"]
    whole = SentenceTransformer(str(tmp_path / "out")).encode(texts, convert_to_tensor=True)
    torch.testing.assert_close(
        encode(model, texts, "query"), torch.nn.functional.normalize(whole[:, :6], dim=-1).cpu()
    )
    if method == "dpr":
        from hub_cards.evaluation import evaluate

        models = {"plain": str(dpr[0]), "matryoshka": str(tmp_path / "out")}
        rows = evaluate(models, task, truncate_dims=[6], bm25=False, split="dev", show=False)["rows"]
        scores = {row["model"]: row["scores"]["ndcg_at_10"] for row in rows}
        assert scores["matryoshka (6 dimensions)"] > scores["plain (6 dimensions)"] + 0.05


def test_lora_is_merged_into_what_is_left(finetune, dpr, tmp_path):
    trainer = finetune(
        tmp_path / "out",
        model_name_or_path=str(dpr[0]),
        lora_r=4,
        max_steps=6,
        save_strategy="steps",
        save_steps=6,
        load_best_model_at_end=True,
        eval_strategy="steps",
        eval_steps=3,
    )
    before, after = weights(dpr[0]), weights(tmp_path / "out")
    assert before.keys() == after.keys()
    moved = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert moved == {name for name in before if re.search(r"(query|key|value|dense)\.weight$", name)} - {
        "pooler.dense.weight"
    }
    texts = ["bato w1", "cula w2 w3"]
    reloaded = SentenceTransformer(str(tmp_path / "out"))
    torch.testing.assert_close(encode(reloaded, texts, "query"), encode(trainer.model, texts, "query"))
    # A checkpoint holds the adapters as peft reads them.
    from peft import PeftModel

    adapted = PeftModel.from_pretrained(AutoModel.from_pretrained(dpr[0]), tmp_path / "out" / "checkpoint-6")
    base = SentenceTransformer(str(dpr[0]))
    base[0].model = adapted.merge_and_unload()
    torch.testing.assert_close(encode(base, texts, "query"), encode(reloaded, texts, "query"))


def test_published_retriever_keeps_its_doors(finetune, tiny_lm_folder, tmp_path):
    from transformers import AutoTokenizer

    from hub_cards.eos_tokenizer import append_eos

    model = RevelaForPreTraining.from_backbones(str(tiny_lm_folder), str(tiny_lm_folder))
    (tmp_path / "published").mkdir()
    tokenizer = append_eos(AutoTokenizer.from_pretrained(tiny_lm_folder))
    publish(model, tokenizer, tmp_path / "published", torch.float32)
    out = tmp_path / "out"
    finetune(out, model_name_or_path=str(tmp_path / "published"), max_steps=2, query_prompt="q: ", max_length=48)
    record = json.loads((out / "config.json").read_text())["revela"]
    prompts = {"query_prompt": "q: ", "document_prompt": "passage: "}
    assert record == {"pooling": "eos", **prompts, "normalize": True, "max_length": 48}
    texts = ["the river", "a boat at the bridge " * 20]
    stock = SentenceTransformer(str(out))
    assert type(stock[0].auto_model).__name__ == "LlamaModel"
    ours = AutoModel.from_pretrained(out, trust_remote_code=True)
    for side in ("query", "document"):
        expected = encode(stock, texts, side)
        torch.testing.assert_close(getattr(ours, f"encode_{side}")(texts), expected, rtol=1e-4, atol=1e-5)
    assert not torch.equal(
        weights(out)["layers.0.mlp.up_proj.weight"], weights(tmp_path / "published")["layers.0.mlp.up_proj.weight"]
    )


def test_plain_decoder_is_pooled_at_the_eos_its_tokenizer_appends(tiny_lm_folder):
    model = load_model(ModelArguments(str(tiny_lm_folder), pooling="eos", similarity="dot"))
    features = model.preprocess(["the river", "boats"])
    last = features["attention_mask"].sum(1) - 1
    assert (features["input_ids"].gather(1, last[:, None]) == model.tokenizer.eos_token_id).all()
    assert model[1].pooling_mode == "lasttoken" and len(model) == 2 and model.similarity_fn_name == "dot"


# What is wrong is said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_train_epochs": -1}, "nothing to train"),
        ({"max_length": 2}, "`max_length` is 2, and prompt and special tokens take 2"),
        ({"max_length": 999}, "`max_length` is 999, but .* has positions for"),
        ({"method": "distill", "cross_encoder_max_length": 3}, "`cross_encoder_max_length` is 3, and .* take 4"),
        (
            {"method": "distill", "cross_encoder_max_length": 999},
            "`cross_encoder_max_length` is 999, but .* positions",
        ),
        ({"method": "distill", "teacher": "nowhere"}, "nowhere does not load as a cross-encoder"),
        ({"per_device_train_batch_size": 999, "dataloader_drop_last": True}, "180 pairs are too few for one batch"),
        (
            {"matryoshka_dims": [16, 8]},
            "`matryoshka_dims` are .16, 8.: give whole numbers above 0, each once and rising",
        ),
        ({"matryoshka_dims": [8, 32]}, "`matryoshka_dims` has 32, but the embedding has 32 dimensions"),
        ({"matryoshka_dims": [8], "matryoshka_weights": [1]}, "give one above 0 for each .* and one more"),
        ({"matryoshka_dims": [8], "similarity": "dot"}, "compares by cosine, but .* ranks by dot"),
        ({"method": "ance", "num_negatives": 240, "mining_depth": 240}, "240 documents, too few for 240 negatives"),
    ],
)
def test_settings_that_cannot_be_are_refused(finetune, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        finetune(tmp_path / "out", **options)


def test_pickles_and_foreign_code_are_not_read(finetune, dpr, encoder, tmp_path):
    pickled = tmp_path / "pickled"
    shutil.copytree(encoder, pickled)
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    options = {"method": "distill", "model_name_or_path": str(encoder)}
    for refused in ({"model_name_or_path": str(pickled)}, {**options, "teacher": str(pickled)}):
        with pytest.raises(ValueError, match="pytorch_model.bin is a pickle, which may run code"):
            finetune(tmp_path / "out", **refused)
    shutil.copytree(dpr[0], tmp_path / "foreign")
    modules = (tmp_path / "foreign" / "modules.json").read_text()
    (tmp_path / "foreign" / "modules.json").write_text(
        re.sub(r'"sentence_transformers[^"]*Pooling"', '"os.P"', modules)
    )
    with pytest.raises(ValueError, match="names the module 'os.P', which is not sentence-transformers' own"):
        finetune(tmp_path / "out", model_name_or_path=str(tmp_path / "foreign"))


def test_models_and_folders_that_cannot_be_are_refused(finetune, dpr, tmp_path, task):
    (tmp_path / "pretrained").mkdir()
    (tmp_path / "pretrained" / "config.json").write_text('{"model_type": "retromae"}')
    with pytest.raises(ValueError, match="pre-training checkpoint: publish its encoder with `revela-hub export"):
        finetune(tmp_path / "out", model_name_or_path=str(tmp_path / "pretrained"))
    with pytest.raises(ValueError, match="has a pooling of its own"):
        finetune(tmp_path / "out", model_name_or_path=str(dpr[0]), pooling="mean")
    with pytest.raises(ValueError, match="nowhere does not load as an encoder or retriever"):
        finetune(tmp_path / "out", model_name_or_path=str(tmp_path / "nowhere"))
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "model.safetensors").touch()
    with pytest.raises(FileExistsError, match="no fine-tuning run"):
        finetune(tmp_path / "foreign", overwrite_output=True)
    with pytest.raises(PermissionError, match="safetensors is no folder that can be written .*another --output_dir"):
        finetune(tmp_path / "foreign" / "model.safetensors" / "out")
    with pytest.raises(FileNotFoundError, match="no checkpoint to resume from"):
        finetune(tmp_path / "out", resume_from_checkpoint="true")
    (tmp_path / "rows.jsonl").write_text('{"query": "w1", "positive": "w2"}\n' * 2)
    with pytest.raises(ValueError, match="nothing to evaluate on"):
        finetune(tmp_path / "out", train_set=str(tmp_path / "rows.jsonl"), eval_strategy="epoch")


def test_help_teaches_each_option(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as stopped:
        script.main(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert "accelerate launch trainers/finetune.py" in text and "mines hard negatives with the model itself" in text
    words = " ".join(text.split())
    for cls in CLASSES[:3]:
        for field in cls.__dataclass_fields__.values():
            assert text.count(f"\n  --{field.name} ") == 1 and field.metadata["help"] in words, field.name


RECIPE_FILES = sorted(RECIPES.glob("finetune-*.yaml"))


@pytest.mark.parametrize("path", RECIPE_FILES, ids=lambda path: path.stem)
def test_recipes_hold_the_settings_that_they_name(path, monkeypatch):
    text = path.read_text(encoding="utf-8")
    assert re.match(r"# Tables? [2-5]", text) and f"revela-hub train finetune {path.stem} --" in text
    overrides = ["--train_set", "x", "--fp16", "false", "--use_cpu", "true"]
    if "\nmodel_name_or_path" not in text:
        overrides += ["--model_name_or_path", "x"]
    model, data, method, training = parse_recipe(CLASSES, [str(path), *overrides])
    assert path.stem.endswith(method.method) and training.output_dir == f"runs/{path.stem}"
    assert method.temperature == 1.0 and 8 * training.per_device_train_batch_size == 128
    if method.method == "dpr":
        assert (model.pooling, model.similarity) == ("cls", "dot")
    else:
        # The chain: each begins where the one before it ended.
        assert model.model_name_or_path.removeprefix("runs/") in {other.stem for other in RECIPE_FILES}


def test_recipes_cover_the_tables_of_fine_tuning():
    titles = " ".join(path.read_text(encoding="utf-8").splitlines()[0] for path in RECIPE_FILES)
    assert len(RECIPE_FILES) == 5 and all(number in titles for number in "2345")


def test_what_lora_added_to_bfloat16_weights_is_not_rounded_away(dpr):
    options = ModelArguments(str(dpr[0]), lora_r=4, dtype="bfloat16")
    model = load_model(options)
    adapters = {name: value for name, value in model.named_parameters() if "lora_" in name}
    assert {value.dtype for value in adapters.values()} == {torch.float32}
    torch.manual_seed(0)
    for name, value in adapters.items():
        torch.nn.init.normal_(value, std=0.02 if "lora_A" in name else 0.002)
    texts = ["bato w1", "cula w2 w3"]
    wanted = encode(copy.deepcopy(model).float(), texts, "query")
    merge_adapters(model)
    torch.testing.assert_close(encode(model, texts, "query"), wanted)


def test_an_instruct_lm_embeds_plain_text_in_training_and_when_saved(tiny_lm_folder, tmp_path):
    """sentence-transformers 6 embeds with the tokenizer's chat template what it makes of a plain LM."""
    chatty = tmp_path / "chatty"
    shutil.copytree(tiny_lm_folder, chatty)
    (chatty / "chat_template.jinja").write_text("{% for m in messages %}<s>chat {{ m['content'] }}{% endfor %}")
    texts = ["bato w1", "cula w2 w3"]
    model = load_model(ModelArguments(str(chatty), pooling="eos", query_prompt="query: "))
    plain = load_model(ModelArguments(str(tiny_lm_folder), pooling="eos", query_prompt="query: "))
    wanted = encode(plain, texts, "query")
    torch.testing.assert_close(encode(model, texts, "query"), wanted)
    save_result(model, tmp_path / "saved")
    torch.testing.assert_close(encode(SentenceTransformer(str(tmp_path / "saved")), texts, "query"), wanted)
    raw = [load_retriever(folder).encode(texts) for folder in (chatty, tiny_lm_folder)]
    assert (raw[0] == raw[1]).all()
