"""SimCSE and TSDAE on prepared groups: what a step is given, that it learns, and what cannot be."""

import pytest
import torch
from sentence_transformers import SentenceTransformer

from trainers import unsupervised
from trainers.arguments import parse_recipe
from trainers.contriever import load_train_set
from trainers.finetune_model import ModelArguments
from trainers.finetune_trainer import FinetuneTrainingArguments
from trainers.unsupervised import UnsupervisedArguments, delete_words, train

CLASSES = (ModelArguments, UnsupervisedArguments, FinetuneTrainingArguments)


def run(folder, prepared_folder, out, *options):
    arguments = [
        *("--model_name_or_path", str(folder), "--train_sets", str(prepared_folder), "--max_length", "48"),
        *("--learning_rate", "1e-3", "--max_steps", "12", "--per_device_train_batch_size", "8", "--use_cpu", "true"),
        *("--output_dir", str(out), "--save_strategy", "no", "--report_to", "none", "--disable_tqdm", "true"),
        *("--logging_steps", "2", "--logging_first_step", "true", *options),
    ]
    return train(*parse_recipe(CLASSES, arguments))


@pytest.mark.parametrize(
    "options",
    [
        ("--objective", "simcse", "--eval_strategy", "steps", "--eval_steps", "6"),
        ("--objective", "tsdae", "--pooling", "cls"),
    ],
    ids=["simcse", "tsdae"],
)
def test_an_encoder_learns_and_is_left_as_a_retriever(options, tiny_bert_folder, prepared_folder, tmp_path):
    trainer = run(tiny_bert_folder, prepared_folder, tmp_path / "run", *options)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    if "simcse" in options:
        assert any("eval_dev_cosine_ndcg@10" in entry for entry in trainer.state.log_history)
    model = SentenceTransformer(str(tmp_path / "run"), device="cpu")
    before = SentenceTransformer(str(tiny_bert_folder), device="cpu")[0].auto_model.state_dict()
    after = model[0].auto_model.state_dict()
    moved = [name for name in before if name in after and not torch.equal(before[name], after[name])]
    assert len(moved) > len(before) // 2


def test_a_decoder_learns_by_the_dropout_of_lora(tiny_lm_folder, prepared_folder, tmp_path):
    options = ("--pooling", "eos", "--lora_r", "8", "--lora_dropout", "0.1")
    trainer = run(tiny_lm_folder, prepared_folder, tmp_path / "run", *options)
    assert trainer.state.global_step == 12
    assert (tmp_path / "run" / "modules.json").exists()


def test_what_has_no_dropout_or_no_decoder_is_told_what_to_do(tiny_lm_folder, prepared_folder, tmp_path):
    with pytest.raises(ValueError, match="no dropout.*--lora_dropout"):
        run(tiny_lm_folder, prepared_folder, tmp_path / "run", "--pooling", "eos")
    with pytest.raises(ValueError, match="cannot rebuild the texts.*--decoder_name_or_path"):
        run(tiny_lm_folder, prepared_folder, tmp_path / "run", "--pooling", "eos", "--objective", "tsdae")
    with pytest.raises(ValueError, match="no weights to tie"):
        options = ("--pooling", "eos", "--objective", "tsdae", "--lora_r", "8")
        run(tiny_lm_folder, prepared_folder, tmp_path / "run", *options)


def test_tsdae_does_not_go_on_without_its_decoder(tiny_bert_folder, prepared_folder, tmp_path):
    options = ("--objective", "tsdae", "--save_strategy", "steps", "--save_steps", "6")
    run(tiny_bert_folder, prepared_folder, tmp_path / "run", *options)
    with pytest.raises(ValueError, match="leaves TSDAE's decoder out"):
        checkpoint = str(tmp_path / "run" / "checkpoint-6")
        run(tiny_bert_folder, prepared_folder, tmp_path / "run", *options, "--resume_from_checkpoint", checkpoint)


def test_a_chunk_is_paired_with_itself_whole_or_damaged(prepared_folder):
    sets = {
        objective: load_train_set(UnsupervisedArguments([str(prepared_folder)], objective=objective), seed=0)
        for objective in ("simcse", "tsdae")
    }
    data = sets["simcse"]
    assert all(data.queries[query] == data.documents[document] for query, document in data.pairs)
    data = sets["tsdae"]
    kept = [len(data.queries[query].split()) for query, _ in data.pairs]
    whole = [len(data.documents[document].split()) for _, document in data.pairs]
    assert sum(kept) / sum(whole) == pytest.approx(0.4, abs=0.05)


def test_words_are_deleted_by_the_seed_and_one_is_left():
    text = "one two three four five six seven eight"
    assert delete_words(text, 0.6, "0 1") == delete_words(text, 0.6, "0 1") != delete_words(text, 0.6, "0 2")
    assert delete_words("alone", 0.999, "0") == "alone"


@pytest.mark.parametrize(
    "options, message",
    [({"objective": "bow"}, "objective"), ({"deletion_ratio": 1.0}, "deletion_ratio"), ({"temperature": 0}, "temper")],
)
def test_what_cannot_be_is_refused_before_anything_is_read(options, message):
    with pytest.raises(ValueError, match=message):
        UnsupervisedArguments(**options)


def test_the_script_teaches(capsys):
    with pytest.raises(SystemExit):
        unsupervised.main(["--help"])
    shown = capsys.readouterr().out
    assert "dropout" in shown and "--deletion_ratio" in shown
