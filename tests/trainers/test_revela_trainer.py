"""What a training run does to the weights, what it logs, and what must make no difference to it."""

import math

import pytest
import torch
from transformers import AutoTokenizer, TrainerCallback

from modeling_revela import RevelaForPreTraining

LOSSES = {"loss", "in_batch_loss", "next_token_loss", "in_batch_gain"}
HEALTH = {"max_weight", "weight_entropy", "learning_chunks", "mean_cosine", "pairs", "tokens_per_second"}


def largest_difference(first: dict, second: dict) -> float:
    assert first.keys() == second.keys()
    return max((first[name].double() - second[name].double()).abs().max().item() for name in first)


# Learning


@pytest.mark.parametrize(
    ("retriever", "options"),
    [
        ("tiny_lm_folder", {"retriever_lora_r": 4, "lm_lora_r": 4}),
        ("tiny_lm_folder", {"trainable_temperature": True}),
        ("tiny_lm_folder", {"freeze_lm": True, "retriever_lora_r": 4}),
        ("tiny_bert_folder", {"pooling": "mean", "lm_lora_r": 4}),
        ("tiny_bert_folder", {"pooling": "cls", "retriever_lora_r": 4, "in_batch_gate": False}),
    ],
    ids=["lora", "full", "frozen-lm", "bert-mean", "bert-cls-lora"],
)
def test_every_trainable_parameter_moves_and_no_other(
    run_training, watch, request, tiny_lm_folder, tmp_path, retriever, options
):
    names = {
        "retriever_name_or_path": str(request.getfixturevalue(retriever)),
        "lm_name_or_path": str(tiny_lm_folder),
    }
    trainer = run_training(tmp_path, model=names | options, callbacks=[watch])
    trainable = {name for name, value in trainer.model.named_parameters() if value.requires_grad}
    moved = {
        name for name, value in trainer.model.named_parameters() if not torch.equal(value.detach(), watch.start[name])
    }
    assert moved == trainable
    assert any(name.startswith("retriever.") for name in moved)
    assert any(name.startswith("lm.backbone.") for name in moved) != options.get("freeze_lm", False)
    assert ("lm.in_batch_gate" in moved) == options.get("in_batch_gate", True)
    assert ("log_temperature" in moved) == options.get("trainable_temperature", False)
    for half in ("retriever", "lm"):
        if options.get(f"{half}_lora_r"):
            assert {name for name in moved if name.startswith(half)} <= {
                name for name in trainable if "lora_" in name or name == "lm.in_batch_gate"
            }


def test_bf16_trains_with_float32_weights(run_training, logged, lora, tmp_path):
    reference = run_training(tmp_path / "a", model=lora)
    trainer = run_training(tmp_path / "b", model=lora, bf16=True)
    assert {value.dtype for value in trainer.model.parameters()} == {torch.float32}
    assert logged(trainer, "loss") == pytest.approx(logged(reference, "loss"), rel=0.02)
    assert logged(trainer, "loss") != logged(reference, "loss")


def test_frozen_base_may_be_bf16_while_adapters_are_float32(run_training, logged, lora, tmp_path):
    trainer = run_training(tmp_path, model=lora | {"dtype": "bfloat16"}, bf16=True)
    for name, value in trainer.model.named_parameters():
        assert value.dtype == (torch.float32 if value.requires_grad else torch.bfloat16), name
    assert all(map(math.isfinite, logged(trainer, "loss")))


def test_lm_keeps_its_own_special_tokens(run_training, tiny_bert_folder, tiny_lm_folder, tmp_path):
    names = {"retriever_name_or_path": str(tiny_bert_folder), "lm_name_or_path": str(tiny_lm_folder)}
    trainer = run_training(tmp_path, model=names | {"pooling": "mean"}, max_steps=1)
    config = trainer.model.config.lm_config
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (0, 1, None)


# What must make no difference


@pytest.fixture(scope="module")
def one_group_a_pass(run_training, tmp_path_factory):
    return run_training(tmp_path_factory.mktemp("run"), optim="sgd", max_steps=2, gradient_accumulation_steps=4)


@pytest.mark.parametrize(("groups", "accumulation"), [(2, 2), (4, 1)])
def test_split_into_batch_and_accumulation_gives_the_same_update(
    run_training, logged, weights, watch, one_group_a_pass, tmp_path, groups, accumulation
):
    trainer = run_training(
        tmp_path,
        callbacks=[watch],
        optim="sgd",
        max_steps=2,
        per_device_train_batch_size=groups,
        gradient_accumulation_steps=accumulation,
    )
    # 1e-6 of the update, which itself is far from zero.
    update = max(
        (value.detach() - watch.start[name]).abs().max().item() for name, value in trainer.model.named_parameters()
    )
    assert update > 1e-3
    assert largest_difference(weights(trainer), weights(one_group_a_pass)) < 1e-4 * update
    assert logged(trainer, "loss") == pytest.approx(logged(one_group_a_pass, "loss"), rel=1e-6)
    for name in ("in_batch_loss", "next_token_loss"):
        # Means of means over groups of unequal length, so not the same to the last digit.
        assert logged(trainer, name) == pytest.approx(logged(one_group_a_pass, name), rel=1e-2)
    # Counted a pass; a weight that lies at the floor may fall on either side of it.
    assert logged(trainer, "pairs") == pytest.approx([groups * n for n in logged(one_group_a_pass, "pairs")], rel=0.1)


def test_dual_loss_too_is_the_same_for_any_split(run_training, logged, tmp_path):
    dual = {"dual_loss": True}
    one = run_training(tmp_path / "a", model=dual, gradient_accumulation_steps=4, max_steps=2, optim="sgd")
    four = run_training(tmp_path / "b", model=dual, per_device_train_batch_size=4, max_steps=2, optim="sgd")
    assert logged(one, "loss") == pytest.approx(logged(four, "loss"), rel=1e-6)
    sums = [a + b for a, b in zip(logged(four, "in_batch_loss"), logged(four, "next_token_loss"), strict=True)]
    assert logged(four, "loss") == pytest.approx(sums, rel=1e-6)


def test_groups_of_one_pass_never_see_each_other(run_training, tmp_path):
    trainer = run_training(tmp_path, max_steps=1)
    rows = [trainer.train_dataset[index] for index in range(3)]
    model = trainer.model.eval()
    with torch.no_grad():
        together = model(**trainer.data_collator(rows))
        apart = [model(**trainer.data_collator([row])) for row in rows]
        changed = model(**trainer.data_collator([rows[0], {**rows[1], "texts": rows[2]["texts"]}]))
    blocks = torch.block_diag(*(output.in_batch_weights for output in apart))
    assert torch.allclose(together.in_batch_weights, blocks, atol=1e-5)
    assert (together.in_batch_weights[blocks == 0] == 0).all()
    targets = torch.stack([output.num_target_tokens for output in apart])
    losses = torch.stack([output.in_batch_loss for output in apart])
    assert torch.allclose(together.in_batch_loss, (targets * losses).sum() / targets.sum(), rtol=1e-5)
    assert torch.allclose(changed.in_batch_weights[:4, :4], apart[0].in_batch_weights, atol=1e-5)


def test_data_order_depends_on_the_seed_alone(run_training, logged, lora, tmp_path):
    def order(name, **training):
        model = training.pop("model", {})
        run = run_training(
            tmp_path / name, model=model, max_steps=7, include_num_input_tokens_seen="non_padding", **training
        )
        return logged(run, "num_input_tokens_seen"), logged(run, "loss")

    tokens, losses = order("a")
    assert order("b", dataloader_num_workers=2) == (tokens, losses)
    # What the model draws at random must not shift the data.
    assert order("c", model=lora | {"retriever_lora_dropout": 0.5})[0] == tokens
    assert order("d", seed=7)[0] != tokens


def test_scoring_the_plain_stream_changes_nothing_and_is_done_at_logged_steps_only(
    run_training, logged, weights, watch, tmp_path
):
    every = run_training(tmp_path / "a", max_steps=5, logging_steps=1)
    trainer = run_training(
        tmp_path / "b", max_steps=5, logging_steps=2, logging_first_step=True, callbacks=[watch],
        gradient_accumulation_steps=1,
    )  # fmt: skip
    assert [asked["return_next_token_loss"] for asked in watch.asked] == [True, True, False, True, False]
    assert [entry["step"] for entry in trainer.state.log_history if "next_token_loss" in entry] == [1, 2, 4]
    assert largest_difference(weights(trainer), weights(every)) == 0
    assert logged(trainer, "next_token_loss")[0] == logged(every, "next_token_loss")[0]


def test_plain_stream_is_scored_where_logging_steps_is_a_share(run_training, watch, tmp_path):
    run_training(tmp_path, max_steps=4, logging_steps=0.5, callbacks=[watch])
    assert [asked["return_next_token_loss"] for asked in watch.asked] == [False, True, False, True]


@pytest.mark.parametrize("options", [{}, {"retriever_lora_r": 4, "lm_lora_r": 4}], ids=["full", "lora"])
def test_activation_checkpointing_gives_the_same_losses(run_training, logged, weights, tmp_path, options):
    plain = run_training(tmp_path / "a", model=options)
    trainer = run_training(tmp_path / "b", model=options, gradient_checkpointing=True)
    assert any(getattr(module, "gradient_checkpointing", False) for module in trainer.model.retriever.modules())
    assert any(getattr(module, "gradient_checkpointing", False) for module in trainer.model.lm.modules())
    assert logged(trainer, "loss") == pytest.approx(logged(plain, "loss"), rel=1e-6)
    assert largest_difference(weights(trainer), weights(plain)) < 1e-5


def test_reentrant_checkpointing_is_refused(run_training, tmp_path):
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    with pytest.raises(ValueError, match="use_reentrant"):
        run_training(tmp_path, max_steps=1, **options)


# Logs


def test_log_holds_what_the_docstring_promises(run_training, tmp_path):
    trainer = run_training(tmp_path, model={"trainable_temperature": True}, gradient_accumulation_steps=2)
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in entries] == [1, 2, 3]
    for entry in entries:
        for name in LOSSES | HEALTH | {"gate", "temperature"}:
            assert math.isfinite(entry[name]), name
        assert entry["in_batch_gain"] == pytest.approx(entry["next_token_loss"] - entry["in_batch_loss"], abs=1e-5)
        assert entry["loss"] == pytest.approx(entry["in_batch_loss"], rel=0.02)
        assert 1 / 3 <= entry["max_weight"] <= 1 and 0 <= entry["weight_entropy"] <= math.log(3) + 1e-6
        assert 0 <= entry["learning_chunks"] <= 1 and 0 < entry["pairs"] <= 12 and -1 <= entry["mean_cosine"] <= 1
        assert entry["tokens_per_second"] > 0
    assert entries[0]["temperature"] == pytest.approx(0.01, rel=0.5) and entries[0]["temperature"] != 0.01


def test_log_without_gate_and_trained_temperature_leaves_them_out(run_training, tmp_path):
    trainer = run_training(tmp_path, model={"in_batch_gate": False}, max_steps=1)
    assert {"gate", "temperature"}.isdisjoint(trainer.state.log_history[0])


def test_first_logged_values_are_those_of_the_model(run_training, watch, tmp_path):
    trainer = run_training(
        tmp_path, model={"in_batch_gate_init": -0.05}, max_steps=1, optim="sgd", learning_rate=0.0, callbacks=[watch]
    )
    batch = {name: value for name, value in watch.asked[0].items() if torch.is_tensor(value)}
    batch.pop("num_items_in_batch")
    with torch.no_grad():
        output = trainer.model(**batch)
    entry, weights = trainer.state.log_history[0], output.in_batch_weights
    assert entry["in_batch_loss"] == pytest.approx(output.in_batch_loss.item(), rel=1e-5)
    assert entry["next_token_loss"] == pytest.approx(output.next_token_loss.item(), rel=1e-5)
    assert entry["max_weight"] == pytest.approx(weights.amax(-1).mean().item(), rel=1e-4)
    entropy = -(weights * weights.clamp(min=1e-30).log()).sum(-1).mean().item()
    assert entry["weight_entropy"] == pytest.approx(entropy, rel=1e-3)
    assert entry["learning_chunks"] == pytest.approx((weights.amax(-1) < 0.999).float().mean().item())
    floor = 1e-7 * weights.topk(2, dim=-1).values[:, 1].max()
    assert entry["pairs"] == (weights > floor).sum().item() == output.num_pairs
    cosines = output.similarities[~torch.eye(4, dtype=torch.bool)]
    assert entry["mean_cosine"] == pytest.approx(cosines.mean().item(), rel=1e-4)
    assert entry["gate"] == pytest.approx(0.05)


# Learning rates of the parts


def rates(trainer) -> dict[str, tuple[float, float]]:
    names = {value: name for name, value in trainer.model.named_parameters()}
    return {
        names[value]: (group["initial_lr"], group["weight_decay"])
        for group in trainer.optimizer.param_groups
        for value in group["params"]
    }


def test_each_part_has_its_learning_rate_and_decay(run_training, tmp_path):
    options = {"learning_rate": 1e-3, "lm_learning_rate": 1e-4, "gate_learning_rate": 5e-2, "weight_decay": 0.1}
    trainer = run_training(tmp_path, model={"trainable_temperature": True}, max_steps=1, **options)
    found = rates(trainer)
    assert found.keys() == {name for name, value in trainer.model.named_parameters() if value.requires_grad}
    assert found["lm.in_batch_gate"] == found["log_temperature"] == (5e-2, 0.0)
    assert found["retriever.layers.0.self_attn.q_proj.weight"] == (1e-3, 0.1)
    assert found["lm.backbone.model.layers.0.self_attn.q_proj.weight"] == (1e-4, 0.1)
    assert found["retriever.norm.weight"] == (1e-3, 0.0)
    assert found["lm.backbone.model.layers.0.input_layernorm.weight"] == (1e-4, 0.0)


def test_learning_rates_that_are_left_out(run_training, tmp_path):
    found = rates(run_training(tmp_path, max_steps=1, learning_rate=1e-3))
    assert found["lm.in_batch_gate"][0] == pytest.approx(2e-2)
    assert {rate for name, (rate, _) in found.items() if name != "lm.in_batch_gate"} == {1e-3}


# Evaluation


def test_evaluation_measures_what_hub_cards_measures(run_training, tmp_path):
    from hub_cards.validation import first_part, retrieval_gain, sibling_retrieval

    trainer = run_training(tmp_path, model={"dual_loss": True}, eval_strategy="steps", eval_steps=3, max_steps=3)
    (entry,) = (entry for entry in trainer.state.log_history if "eval_runtime" in entry)
    model, collator, groups = trainer.model, trainer.data_collator, trainer.eval_dataset
    assert model.training and len(groups) == 6
    gain = retrieval_gain(model, (collator([row]) for row in groups))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)

    @torch.no_grad()
    def encode(prompt):
        return lambda texts: torch.cat(
            [model.eval().embed(**tokenizer(prompt + text, return_tensors="pt").to("cpu")) for text in texts]
        )

    siblings = sibling_retrieval(groups, encode("query: "), encode("passage: "))
    for name, value in gain.items():
        assert entry[f"eval_{name}"] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    for name, value in siblings.items():
        assert entry[f"eval_sibling_{name}"] == pytest.approx(value, rel=1e-4), name
    # With `dual_loss` the loss holds the plain stream as well; what is compared with uniform weights must not.
    assert entry["eval_uniform_loss"] - entry["eval_in_batch_loss"] == pytest.approx(entry["eval_retrieval_gain"])
    assert entry["eval_in_batch_loss"] < 8
    assert first_part("one two three four") == "one two"


def test_evaluation_leaves_training_as_it_was(run_training, weights, lora, tmp_path):
    options = {"model": lora | {"retriever_lora_dropout": 0.2, "lm_lora_dropout": 0.2}}
    without = run_training(tmp_path / "a", **options)
    with_it = run_training(tmp_path / "b", **options, eval_strategy="steps", eval_steps=1, eval_on_start=True)
    assert largest_difference(weights(with_it), weights(without)) == 0


def test_best_model_by_sibling_retrieval_is_kept_and_loaded(run_training, logged, weights, tmp_path):
    trainer = run_training(
        tmp_path,
        max_steps=5,
        learning_rate=3e-2,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=2,
        load_best_model_at_end=True,
    )
    measured = logged(trainer, "eval_sibling_ndcg_at_10")
    best = measured.index(max(measured)) + 1
    assert trainer.args.metric_for_best_model == "eval_sibling_ndcg_at_10" and trainer.args.greater_is_better
    assert best != 5, "the last step is the best: the test would not see whether the best is loaded"
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [f"checkpoint-{best}", "checkpoint-5"]
    kept = RevelaForPreTraining.from_pretrained(tmp_path / f"checkpoint-{best}").state_dict()
    written = RevelaForPreTraining.from_pretrained(tmp_path).state_dict()
    assert largest_difference(weights(trainer), kept) == 0
    assert largest_difference(written, kept) == 0


class Script(TrainerCallback):
    """Measures what it is told to, by step."""

    def __init__(self, values: list[float]):
        self.values = values

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        metrics["eval_scripted"] = self.values[state.global_step - 1]


@pytest.mark.parametrize(("values", "best", "named"), [([9, 1, 2, 3], 1, None), ([1, 2, 9, 3], 3, "checkpoint-2")])
def test_best_that_was_measured_but_not_saved_is_not_named(run_training, tmp_path, values, best, named):
    trainer = run_training(
        tmp_path,
        max_steps=4,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=2,
        metric_for_best_model="eval_scripted",
        greater_is_better=True,
        callbacks=[Script(values)],
    )
    assert trainer.state.best_global_step == best
    assert trainer.state.best_model_checkpoint == (named and str(tmp_path / named))
