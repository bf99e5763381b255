"""Settings that cannot be are refused before anything is loaded."""

import os

import pytest

from trainers import finetune, finetune_model, retromae, revela
from trainers.checks import cap_workers, check_steps
from trainers.finetune_trainer import FinetuneTrainingArguments

REVELA_MODEL, REVELA_DATA = (revela.ModelArguments, "a"), (revela.DataArguments,)
RETROMAE_MODEL, RETROMAE_DATA = (retromae.ModelArguments, "a"), (retromae.DataArguments,)
FINETUNE_MODEL, FINETUNE_DATA = (finetune_model.ModelArguments, "a"), (finetune.DataArguments, "a")
METHOD = (finetune.MethodArguments,)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (REVELA_MODEL, {"retriever_lora_r": -4}, "`retriever_lora_r` must be at least 0, not -4"),
        (REVELA_MODEL, {"lm_lora_r": -1}, "`lm_lora_r` must be at least 0"),
        (REVELA_MODEL, {"lm_lora_alpha": 0}, "`lm_lora_alpha` must be at least 1"),
        (REVELA_MODEL, {"retriever_lora_dropout": 1.0}, "`retriever_lora_dropout` must be at least 0 and below 1"),
        (REVELA_MODEL, {"dtype": "float99"}, "No dtype 'float99': choose one of float32, bfloat16, float16"),
        (REVELA_MODEL, {"freeze_lm": True, "lm_lora_r": 4}, "`lm_lora_r` 4 would not be trained: pass --lm_lora_r 0"),
        (REVELA_MODEL, {"similarity_temperature": 0.0}, "`similarity_temperature` must be above 0"),
        (REVELA_MODEL, {"pooling": "max"}, "`pooling` must be one of eos, cls, mean"),
        (REVELA_DATA, {"max_length": 1}, "`max_length` must be at least 2, not 1"),
        (REVELA_DATA, {"retriever_max_length": 0}, "`retriever_max_length` must be at least 1"),
        (REVELA_DATA, {"validation_groups": 0}, "`validation_groups` must be at least 1"),
        (REVELA_DATA, {"group_size": 1}, "`group_size` must be at least 2"),
        (REVELA_DATA, {"train_sets": ["a"], "train_weights": [1, 2]}, "`train_sets` has 1 sets and .* 2 weights"),
        (REVELA_DATA, {"train_sets": ["a", "b"], "train_weights": [1, 0]}, "each must be above 0"),
        (RETROMAE_MODEL, {"dtype": "float99"}, "No dtype 'float99'"),
        (RETROMAE_MODEL, {"encoder_mask_ratio": 1.0}, "`encoder_mask_ratio` must lie between 0 and 1"),
        (RETROMAE_DATA, {"max_seq_length": 0}, "`max_seq_length` must be at least 1, not 0"),
        (RETROMAE_DATA, {"validation_sequences": -1}, "`validation_sequences` must be at least 1"),
        (RETROMAE_DATA, {"train_sets": ["a", "b"], "train_weights": [1]}, "2 sets and `train_weights` 1 weights"),
        (FINETUNE_MODEL, {"max_length": -3}, "`max_length` must be at least 1"),
        (FINETUNE_MODEL, {"lora_r": -4}, "`lora_r` must be at least 0"),
        (FINETUNE_MODEL, {"dtype": "double"}, "No dtype 'double'"),
        (FINETUNE_MODEL, {"pooling": "max"}, "No pooling 'max': choose one of cls, mean, eos"),
        (FINETUNE_MODEL, {"similarity": "euclidean"}, "No similarity 'euclidean': choose one of cosine, dot"),
        (FINETUNE_DATA, {"dev_queries": 0}, "`dev_queries` must be at least 1, not 0"),
        (FINETUNE_DATA, {"dev_documents": -1}, "`dev_documents` must be at least 1"),
        (METHOD, {"method": "dual"}, "No method 'dual': choose one of dpr, ance, distill"),
        (METHOD, {"mining_skip": -5}, "`mining_skip` must be at least 0, not -5"),
        (METHOD, {"refresh_every": -3}, "`refresh_every` must be at least 0"),
        (METHOD, {"grad_cache_batch_size": -2}, "`grad_cache_batch_size` must be at least 0"),
        (METHOD, {"method": "ance", "num_negatives": 0}, "`num_negatives` must be 1 or more for ance"),
        (METHOD, {"method": "ance", "mining_depth": 2}, "`mining_depth` 2 leaves too few"),
        (METHOD, {"temperature": 0.0}, "`temperature` must be above 0"),
        (METHOD, {"cross_encoder_epochs": -1.0}, "`cross_encoder_epochs` must be above 0"),
        (METHOD, {"cross_encoder_batch_size": 0}, "`cross_encoder_batch_size` must be at least 1"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_value_out_of_range_is_an_error_that_names_it(kind, options, message):
    cls, *needed = kind
    with pytest.raises(ValueError, match=message):
        cls(*needed, **options)


def test_values_at_their_bounds_pass():
    revela.ModelArguments("a", retriever_lora_r=0, lm_lora_alpha=1, freeze_lm=True, dtype="bfloat16")
    revela.DataArguments(train_sets=["a"], train_weights=[2.0], max_length=2, group_size=2)
    finetune.DataArguments("a", dev_queries=None, dev_documents=1)
    finetune.MethodArguments(mining_skip=0, refresh_every=0, num_negatives=0, mining_depth=0)


@pytest.mark.parametrize("epochs", [-1.0, 0.0, float("nan")])
def test_training_without_a_step_is_an_error(tmp_path, epochs):
    options = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none"}
    with pytest.raises(ValueError, match="`num_train_epochs` is .* nothing to train"):
        check_steps(FinetuneTrainingArguments(num_train_epochs=epochs, **options))
    check_steps(FinetuneTrainingArguments(num_train_epochs=epochs, max_steps=1, **options))


def test_workers_are_no_more_than_a_process_has_cores(monkeypatch, tmp_path, caplog):
    cores = len(os.sched_getaffinity(0))
    args = FinetuneTrainingArguments(output_dir=str(tmp_path), use_cpu=True, dataloader_num_workers=cores)
    cap_workers(args)
    assert args.dataloader_num_workers == cores and not caplog.records
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(2 * cores))
    cap_workers(args)
    assert args.dataloader_num_workers == 1
    args.dataloader_num_workers = cores + 4
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    with caplog.at_level("WARNING", logger="trainers"):
        cap_workers(args)
    assert args.dataloader_num_workers == cores
    assert f"`dataloader_num_workers` is {cores} instead of {cores + 4}" in caplog.text
