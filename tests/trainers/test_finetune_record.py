"""What fine-tuning leaves word of, and the card that comes of it: the right method, the counts, nothing local."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from pytest import approx
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Normalize, Pooling, Transformer

from hub_cards.card import RECIPE, TRAINING_RECORD, write_card
from hub_cards.encoding import encode
from hub_cards.export import export
from hub_cards.privacy import check_private
from hub_cards.push import check as check_for_push
from tests.trainers.finetune_sets import make_encoder, make_task
from trainers import contriever, finetune, unsupervised
from trainers.arguments import parse_recipe


@pytest.fixture(scope="module")
def secret(tmp_path_factory) -> Path:
    """A folder whose name must not come out."""
    folder = tmp_path_factory.mktemp("home-of-mallory")
    make_encoder(folder / "encoder")
    make_task(folder / "task", size=24, negatives=2)
    return folder


def run(main, out: Path, *options: str) -> Path:
    common = "--use_cpu true --max_steps 4 --save_strategy no --report_to none --disable_tqdm true --logging_steps 2"
    common += " --per_device_train_batch_size 4 --eval_strategy steps --eval_steps 2 --seed 7"
    main([*map(str, options), "--output_dir", str(out), *common.split()])
    return out


def card_of(folder: Path) -> tuple[str, ModelCard]:
    """The card, once it is known that nothing local is in it, nor in what it is made of and what it brings along."""
    card = ModelCard.load(write_card(folder))
    for name in ("README.md", TRAINING_RECORD, RECIPE):
        assert "mallory" not in (folder / name).read_text()
    published = folder.with_name("published")
    published.mkdir()
    for name in ("README.md", TRAINING_RECORD, RECIPE):
        shutil.copy(folder / name, published)
    check_private(published)
    assert "figures/training.png" in card.text and (folder / "figures" / "training.png").is_file()
    assert "4 steps, " in card.text and "CPU threads" in card.text and ", sentence-transformers " in card.text
    return card.text, card


def options_of(folder: Path) -> dict:
    return yaml.safe_load((folder / RECIPE).read_text())


def test_contrastive_fine_tuning_is_told_and_goes_on_counting(secret, tmp_path):
    model = ("--model_name_or_path", secret / "encoder", "--train_set", secret / "task")
    folder = run(finetune.main, tmp_path / "run", *model, "--num_negatives", "2")
    text, card = card_of(folder)
    assert "trained with [DPR](https://arxiv.org/abs/2004.04906), on queries with relevant documents." in text
    assert "18 pairs of a query and a relevant document, 24 documents" in text and "dpr" in card.data.tags
    assert "revela-hub train finetune recipe.yaml --model_name_or_path YOUR_BASE_MODEL --train_set YOUR_DATA" in text
    assert "seed: 7" in text and "num_negatives: 2" in text and "prepare" not in text
    assert set(options_of(folder)) == {
        "num_negatives", "max_steps", "seed", "logging_steps", "per_device_train_batch_size", "eval_strategy",
        "eval_steps", "save_strategy",
    }  # fmt: skip
    history = json.loads((folder / TRAINING_RECORD).read_text())["log_history"]
    assert [entry["step"] for entry in history if "finetune_loss" in entry] == [2, 4]
    assert [entry["step"] for entry in history if "dev_ndcg_at_10" in entry] == [2, 4]
    classes = (finetune.ModelArguments, finetune.DataArguments, finetune.MethodArguments)
    given = ["--model_name_or_path", "x", "--train_set", "y", "--output_dir", str(tmp_path), "--use_cpu", "true"]
    again = parse_recipe((*classes, finetune.FinetuneTrainingArguments), [str(folder / RECIPE), *given])
    assert again[2].num_negatives == 2 and again[3].seed == 7 and again[3].max_steps == 4


def test_time_of_a_run_that_goes_on_is_that_of_all_its_parts(secret, tmp_path):
    model = ("--model_name_or_path", secret / "encoder", "--train_set", secret / "task", "--num_negatives", "0")
    saved = ("--save_strategy", "steps", "--save_steps", "2", "--resume_from_checkpoint")

    def again(resumed: str) -> dict:
        main = finetune.main
        run(lambda argv: main([*argv, *saved, resumed]), tmp_path / "run", *model)
        return json.loads((tmp_path / "run" / TRAINING_RECORD).read_text())

    again("false")
    checkpoint = tmp_path / "run" / "checkpoint-2"
    record = json.loads((checkpoint / TRAINING_RECORD).read_text())
    assert record["step"] == 2 and record["seconds"] > 0 and record["method"] == "dpr"
    (checkpoint / TRAINING_RECORD).write_text(json.dumps(record | {"seconds": 5000.0}))
    assert 5000 < again(str(checkpoint))["seconds"] < 5600


def test_distillation_is_told_with_its_teacher_left_out_as_a_folder(secret, tmp_path):
    model = ("--model_name_or_path", secret / "encoder", "--train_set", secret / "task", "--method", "distill")
    small = ("--num_negatives", "2", "--mining_depth", "8", "--cross_encoder_max_length", "40")
    text, card = card_of(run(finetune.main, tmp_path / "run", *model, *small, "--cross_encoder", secret / "encoder"))
    assert "trained with [distillation from a cross-encoder](https://arxiv.org/abs/2205.12035), on queries" in text
    assert "method: distill" in text and "distill" in card.data.tags and "cross_encoder_max_length: 40" in text
    assert "--cross_encoder YOUR_MODEL" in text


@pytest.mark.parametrize(
    ("main", "options", "name", "tag", "script"),
    [
        (contriever.main, (), "Contriever", "contriever", "contriever"),
        (unsupervised.main, ("--objective", "simcse"), "SimCSE", "simcse", "unsupervised"),
        (unsupervised.main, ("--objective", "tsdae"), "TSDAE", "tsdae", "unsupervised"),
    ],
)
def test_unsupervised_methods_are_told(secret, tiny_bert_folder, prepared_folder, tmp_path, main, options, name, tag,
                                       script):  # fmt: skip
    shutil.copytree(prepared_folder, tmp_path / "mallory-text")
    shutil.copytree(tiny_bert_folder, tmp_path / "mallory-bert")
    model = ("--model_name_or_path", tmp_path / "mallory-bert", "--train_sets", tmp_path / "mallory-text")
    folder = run(main, tmp_path / "run", *model, "--max_length", "32", *options)
    text, card = card_of(folder)
    assert f"trained with [{name}](https://arxiv.org/abs/" in text and "on raw text, without labels" in text
    groups = json.loads((prepared_folder / "prepare.json").read_text())["groups"]["train"]["groups"]
    assert f"{groups} groups of 4 chunks, at most 30 words a chunk" in text and tag in card.data.tags
    record = json.loads((folder / TRAINING_RECORD).read_text())
    assert record["examples"] > 23 and f"{record['examples']:,} examples were made of it." in text
    command = f"revela-hub train {script} recipe.yaml --model_name_or_path YOUR_BASE_MODEL --train_sets prepared"
    assert command in text and "revela-hub prepare YOUR_TEXT --out prepared" in text and "max_length: 32" in text


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_a_fine_tuned_retriever_is_exported_to_what_push_takes(secret, tmp_path, similarity):
    options = ("--model_name_or_path", secret / "encoder", "--train_set", secret / "task", "--similarity", similarity)
    sizes = ("--matryoshka_dims", "8") if similarity == "cosine" else ()
    folder = run(finetune.main, tmp_path / "run", *options, *sizes, "--query_prompt", "ask: ", "--max_length", "24")
    out = export(folder, tmp_path / "published")
    check_for_push(out)
    texts = ["bato w1", "cula w2 w3 " * 20]
    before, after = (SentenceTransformer(str(path)) for path in (folder, out))
    for side in ("query", "document"):
        torch.testing.assert_close(encode(after, texts, side), encode(before, texts, side))
    assert after.similarity_fn_name == similarity and after.max_seq_length == 24
    assert getattr(after[0].auto_model.config, "matryoshka_dimensions", None) == ([8, 32] if sizes else None)
    assert "trained with [DPR]" in (out / "README.md").read_text() and (out / "figures" / "training.png").is_file()
    with pytest.raises(ValueError, match="exported already"):
        export(out, tmp_path / "again")
    with pytest.raises(ValueError, match="its only part is the retriever"):
        export(folder, tmp_path / "again", part="lm")


def test_a_retriever_that_would_embed_otherwise_when_published_is_refused(secret, tmp_path):
    def saved(name: str, pooling: Pooling, *more, **options) -> Path:
        transformer = Transformer(str(secret / "encoder"))
        SentenceTransformer(modules=[transformer, pooling, *more], **options).save_pretrained(str(tmp_path / name))
        return tmp_path / name

    mean = Pooling(32, "mean")
    for folder, message in (
        (saved("without-prompt", Pooling(32, "mean", include_prompt=False)), "of all tokens"),
        (saved("euclidean", mean, similarity_fn_name="euclidean"), "ranks by euclidean"),
        (saved("last", Pooling(32, "lasttoken")), "appends no EOS"),
        (saved("max", Pooling(32, "max")), "with pooling max"),
    ):
        with pytest.raises(ValueError, match=message):
            export(folder, tmp_path / "published")
    # Unit length, by whatever they are compared.
    out = export(saved("dot", mean, Normalize(), similarity_fn_name="dot"), tmp_path / "published")
    assert SentenceTransformer(str(out)).encode("bato").dot(SentenceTransformer(str(out)).encode("bato")) == approx(1)
