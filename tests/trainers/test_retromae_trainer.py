"""What a RetroMAE run does to the weights, what it logs, and what must make no difference to it."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from hub_cards.validation import sibling_groups, sibling_retrieval
from modeling_retromae import RetroMAEForPreTraining
from trainers.data.masking import NumberedExamples
from trainers.data.prepared import load_sequences
from trainers.retromae import DataArguments, ModelArguments, load_train_set, load_validation_set, main, train
from trainers.retromae_trainer import RetroMAETrainingArguments

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def run(mlm_folder, sequences_folder):
    """Trains for a few steps; options of the three config classes override."""

    def start(output_dir: Path, encoder="plain", model=None, data=None, callbacks=None, **training):
        model = {"encoder_name_or_path": str(mlm_folder[encoder])} | (model or {})
        data = {"train_sets": [str(sequences_folder)], "max_seq_length": 48, "validation_sequences": 12} | (data or {})
        training = {
            "output_dir": str(output_dir), "use_cpu": True, "max_steps": 3, "learning_rate": 1e-2, "logging_steps": 1,
            "per_device_train_batch_size": 4, "per_device_eval_batch_size": 5, "save_strategy": "no",
            "disable_tqdm": True, "report_to": "none",
        } | training  # fmt: skip
        arguments = RetroMAETrainingArguments(**training)
        return train(ModelArguments(**model), DataArguments(**data), arguments, callbacks=callbacks)

    return start


def largest_difference(first: dict, second: dict) -> float:
    assert first.keys() == second.keys()
    return max((first[name].double() - second[name].double()).abs().max().item() for name in first)


DECODERS = {
    "enhanced": {},
    "basic": {"decoding": "basic", "decoder_layers": 2},
    "dupmae": {"decoder_query": "embeddings", "bow_loss_weight": 0.1},
}


# Learning


@pytest.mark.parametrize("options", DECODERS.values(), ids=DECODERS)
def test_every_trainable_parameter_moves(run, watch, tmp_path, options):
    trainer = run(tmp_path, model=options, callbacks=[watch])
    still = {
        name for name, value in trainer.model.named_parameters() if torch.equal(value.detach(), watch.start[name])
    }
    # A stock BertForMaskedLM has no use for its pooler, and makes none.
    assert not still
    assert any(name.startswith("decoder.") for name in watch.start)


def test_a_long_run_learns(run, logged, tmp_path):
    trainer = run(tmp_path, max_steps=60, learning_rate=3e-3)
    for half in ("encoder", "decoder"):
        losses, hits = logged(trainer, f"{half}_loss"), logged(trainer, f"{half}_accuracy")
        assert sum(losses[-10:]) < 0.9 * sum(losses[:10]), half
        assert sum(hits[-10:]) > sum(hits[:10]), half


def test_bf16_trains_with_float32_weights(run, logged, tmp_path):
    reference = run(tmp_path / "a")
    trainer = run(tmp_path / "b", bf16=True)
    assert {value.dtype for value in trainer.model.parameters()} == {torch.float32}
    assert logged(trainer, "loss") == pytest.approx(logged(reference, "loss"), rel=0.02)
    assert logged(trainer, "loss") != logged(reference, "loss")


# What must make no difference


@pytest.mark.parametrize("name", DECODERS)
def test_split_into_batch_and_accumulation_gives_the_same_update(run, logged, weights, watch, tmp_path, name):
    options = {"model": DECODERS[name], "optim": "sgd", "max_steps": 2, "learning_rate": 0.1}
    whole = run(tmp_path / "a", **options, per_device_train_batch_size=8, callbacks=[watch])
    update = max((value - watch.start[key]).abs().max().item() for key, value in whole.model.named_parameters())
    assert update > 1e-3
    for batch in (1, 4):
        split = run(
            tmp_path / str(batch), **options, per_device_train_batch_size=batch, gradient_accumulation_steps=8 // batch
        )
        assert largest_difference(weights(split), weights(whole)) < 1e-4 * update
        names = ["loss", "encoder_loss", "decoder_loss", "encoder_accuracy", "decoder_accuracy"]
        for key in names + ["bow_loss"] * (name == "dupmae"):
            assert logged(split, key) == pytest.approx(logged(whole, key), rel=1e-5), key


def test_masks_depend_on_seed_and_step_alone(run, logged, tmp_path):
    def losses(name: str, **options):
        return logged(run(tmp_path / name, max_steps=16, learning_rate=1e-3, **options), "loss")

    first = losses("a")
    assert losses("b", dataloader_num_workers=2) == first
    assert losses("c", seed=7) != first


def test_each_epoch_hides_other_words(run, tmp_path):
    trainer = run(tmp_path, max_steps=1)
    examples = trainer.train_dataset
    first = [trainer.data_collator([examples[index]])["labels"] for index in range(4)]
    examples.set_epoch(1)
    second = [trainer.data_collator([examples[index]])["labels"] for index in range(4)]
    assert not all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def test_the_epoch_reaches_the_examples(run, tmp_path):
    trainer = run(tmp_path, max_steps=-1, num_train_epochs=3)
    assert isinstance(trainer.train_dataset, NumberedExamples) and trainer.train_dataset.epoch == 2


def test_persistent_workers_are_refused(tmp_path):
    with pytest.raises(ValueError, match="dataloader_persistent_workers"):
        RetroMAETrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, dataloader_num_workers=1, dataloader_persistent_workers=True
        )


def test_activation_checkpointing_gives_the_same_losses(run, logged, weights, tmp_path):
    plain, trainer = run(tmp_path / "a"), run(tmp_path / "b", gradient_checkpointing=True)
    assert any(getattr(module, "gradient_checkpointing", False) for module in trainer.model.encoder.modules())
    assert logged(trainer, "loss") == pytest.approx(logged(plain, "loss"), rel=1e-6)
    assert largest_difference(weights(trainer), weights(plain)) < 1e-5


# Logs


def test_log_holds_what_the_docstring_promises(run, tmp_path):
    trainer = run(tmp_path, gradient_accumulation_steps=2)
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in entries] == [1, 2, 3]
    for entry in entries:
        assert entry["loss"] == pytest.approx(entry["encoder_loss"] + entry["decoder_loss"], rel=1e-5)
        assert 0 <= entry["encoder_accuracy"] <= 1 and 0 <= entry["decoder_accuracy"] <= 1
        assert entry["tokens_per_second"] > 0 and math.isfinite(entry["grad_norm"]) and "bow_loss" not in entry


def test_first_logged_values_are_those_of_the_model(run, watch, tmp_path):
    trainer = run(tmp_path, model=DECODERS["dupmae"], max_steps=1, learning_rate=0.0, optim="sgd", callbacks=[watch])
    batch = {name: value for name, value in watch.asked[0].items() if name != "num_items_in_batch"}
    with torch.no_grad():
        output = trainer.model(**batch)
    entry = trainer.state.log_history[0]
    for name in ("loss", "encoder_loss", "decoder_loss", "bow_loss", "encoder_accuracy", "decoder_accuracy"):
        assert entry[name] == pytest.approx(float(output[name]), rel=1e-5), name


def test_evaluation_takes_rows_and_measures_the_loss_that_is_trained(run, tmp_path):
    trainer = run(tmp_path, model=DECODERS["dupmae"], max_steps=1)
    measured = trainer.evaluate(trainer.train_dataset.rows.select(range(4)))
    parts = [measured[f"eval_{name}_loss"] for name in ("encoder", "decoder", "bow")]
    assert measured["eval_loss"] == pytest.approx(parts[0] + parts[1] + 0.1 * parts[2])


# Checkpoints


@pytest.fixture(scope="module")
def whole_run(run, tmp_path_factory):
    """Enough steps to reach the third epoch, with checkpoints in the second; whatever draws at random draws."""
    return run(
        tmp_path_factory.mktemp("whole"), encoder="dropout", max_steps=14, gradient_accumulation_steps=2,
        save_strategy="steps", save_steps=1,
    )  # fmt: skip


@pytest.mark.parametrize("step", [6, 8], ids=["within-the-second-epoch", "between-epochs"])
def test_resumed_run_equals_the_uninterrupted_one(run, whole_run, weights, tmp_path, step):
    epochs = {entry["step"]: entry["epoch"] for entry in whole_run.state.log_history}
    assert epochs[6] == 1.5 and epochs[8] == 2 and whole_run.state.epoch > 3
    resumed = run(
        tmp_path, encoder="dropout", max_steps=14, gradient_accumulation_steps=2,
        resume_from_checkpoint=f"{whole_run.args.output_dir}/checkpoint-{step}",
    )  # fmt: skip

    def log(trainer):
        names = ("loss", "encoder_loss", "decoder_loss", "decoder_accuracy", "grad_norm")
        return {e["step"]: [e[name] for name in names] for e in trainer.state.log_history if "encoder_loss" in e}

    assert log(resumed) == log(whole_run)
    assert largest_difference(weights(resumed), weights(whole_run)) == 0


def test_resuming_with_other_options_of_the_model_is_refused(run, whole_run, tmp_path):
    checkpoint = f"{whole_run.args.output_dir}/checkpoint-6"
    with pytest.raises(ValueError, match="`decoder_mask_ratio` 0.5, not 0.7, `pooling` 'cls', not 'mean': "):
        run(
            tmp_path, encoder="dropout", model={"decoder_mask_ratio": 0.7, "pooling": "mean"},
            resume_from_checkpoint=checkpoint,
        )  # fmt: skip
    with pytest.raises(ValueError, match="`encoder_config.attention_probs_dropout_prob` 0.1, not 0.0"):
        run(tmp_path, encoder="plain", resume_from_checkpoint=checkpoint)


def test_checkpoint_loads_as_the_model_that_was_trained(whole_run, weights):
    out = Path(whole_run.args.output_dir)
    loaded = RetroMAEForPreTraining.from_pretrained(out)
    assert largest_difference(weights(whole_run), loaded.state_dict()) == 0
    assert AutoTokenizer.from_pretrained(out)("the river")["input_ids"]
    assert json.loads((out / "config.json").read_text())["model_type"] == "retromae"
    assert not list(out.rglob("training_args.bin")) and not list(out.rglob(".saving*"))
    assert load_file(out / "model.safetensors").keys() >= {"decoder.layers.0.query.weight"}


def test_folder_of_another_run_is_refused(run, whole_run, mlm_folder, tmp_path):
    with pytest.raises(FileExistsError, match="earlier run"):
        run(whole_run.args.output_dir)
    shutil.copytree(mlm_folder["plain"], tmp_path / "encoder")
    with pytest.raises(FileExistsError, match="no RetroMAE run"):
        run(tmp_path / "encoder", overwrite_output=True)


# Evaluation


def test_evaluation_measures_what_the_model_and_hub_cards_measure(run, tmp_path):
    trainer = run(tmp_path, eval_strategy="steps", eval_steps=3)
    (entry,) = (entry for entry in trainer.state.log_history if "eval_runtime" in entry)
    model, collator, rows = trainer.model, trainer.data_collator, trainer.eval_dataset
    assert model.training and len(rows) == 12
    model.eval()
    with torch.no_grad():
        output = model(**collator([rows[index] for index in range(12)]))

        def encode(texts):
            found = [model.embed(**_inputs(collator.tokenizer, text)) for text in texts]
            return torch.nn.functional.normalize(torch.cat(found), dim=-1)

        siblings = sibling_retrieval(sibling_groups(rows.rows), encode, encode)
    for name in ("encoder_loss", "decoder_loss", "loss", "encoder_accuracy", "decoder_accuracy"):
        assert entry[f"eval_{name}"] == pytest.approx(float(output[name]), rel=1e-4), name
    for name, value in siblings.items():
        assert entry[f"eval_sibling_{name}"] == pytest.approx(value, rel=1e-4), name


def _inputs(tokenizer, text: str) -> dict:
    encoded = tokenizer(text, return_tensors="pt")
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}


def test_evaluation_leaves_training_as_it_was(run, weights, tmp_path):
    without = run(tmp_path / "a", encoder="dropout")
    with_it = run(tmp_path / "b", encoder="dropout", eval_strategy="steps", eval_steps=1)
    assert largest_difference(weights(with_it), weights(without)) == 0


# Arguments and the script


def test_sets_mix_and_mistakes_are_errors(run, sequences_folder, tmp_path):
    sets = [str(sequences_folder)] * 2
    mixed = load_train_set(DataArguments(train_sets=sets), seed=0)
    assert len(mixed) == 2 * len(load_sequences(sequences_folder))
    assert len(load_validation_set(DataArguments(train_sets=sets, validation_sequences=3))) == 3
    with pytest.raises(ValueError, match="`train_sets` is empty"):
        load_train_set(DataArguments(), seed=0)
    with pytest.raises(ValueError, match="`max_seq_length` is 300, but .* positions for 256 tokens"):
        run(tmp_path, data={"max_seq_length": 300})
    with pytest.raises(ValueError, match="encoder_mask_ratio"):
        run(tmp_path, model={"encoder_mask_ratio": 1.0})


def test_main_trains_from_a_recipe_and_overrides(mlm_folder, sequences_folder, tmp_path):
    (tmp_path / "r.yaml").write_text(
        f"encoder_name_or_path: {mlm_folder['plain']}\ndecoding: basic\ndecoder_mask_ratio: 7e-1\nmax_seq_length: 48\n"
        "max_steps: 50\nsave_strategy: no\nreport_to: none\nuse_cpu: true\n"
    )
    out = tmp_path / "out"
    main(
        [str(tmp_path / "r.yaml"), "--train_sets", str(sequences_folder), "--output_dir", str(out), "--max_steps", "1"]
    )
    config = json.loads((out / "config.json").read_text())
    assert (config["model_type"], config["decoding"], config["decoder_mask_ratio"]) == ("retromae", "basic", 0.7)
    assert config["mask_token_id"] == AutoTokenizer.from_pretrained(out).mask_token_id
