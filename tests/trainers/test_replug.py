"""REPLUG against its equations, token by token, and as a training run."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hub_cards.export import export
from modeling_revela import RevelaForPreTraining
from trainers import replug
from trainers.replug import ModelArguments
from trainers.replug_trainer import ReplugTrainer, ReplugTrainingArguments, pairwise_nll, replug_loss
from trainers.revela import DataArguments, train

TEXTS = ["the boat stops at the bank", "books on trains", "a fisher sells fish at the old market near the bridge"]


@pytest.fixture(scope="module")
def lm(tiny_lm_folder):
    return AutoModelForCausalLM.from_pretrained(tiny_lm_folder, dtype=torch.float64).eval()


@pytest.fixture(scope="module")
def chunks(tiny_lm_folder):
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm_folder)
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer(TEXTS, padding=True, padding_side="right", return_tensors="pt")


def plain_nll(lm, context: list[int], chunk: list[int]) -> list[float]:
    """-log g of each token of a chunk after its context, one forward pass a token."""
    losses = []
    for position, token in enumerate(chunk):
        before = torch.tensor([context + chunk[:position]])
        with torch.no_grad():
            losses.append(-float(lm(before).logits[0, -1].log_softmax(-1)[token]))
    return losses


@pytest.mark.parametrize("score", ["sum", "mean"])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_pairwise_likelihood_is_that_of_one_sequence_at_a_time(lm, chunks, score, batch_size):
    ids = [row[mask.bool()].tolist() for row, mask in zip(chunks["input_ids"], chunks["attention_mask"], strict=True)]
    visible = ~torch.eye(3, dtype=torch.bool)
    visible[0, 2] = False
    found = pairwise_nll(lm, chunks["input_ids"], chunks["attention_mask"], visible, batch_size, score)
    for i in range(3):
        for j in range(3):
            if not visible[i, j]:
                assert found[i, j] == math.inf
                continue
            losses = plain_nll(lm, ids[j], ids[i])
            expected = sum(losses) if score == "sum" else sum(losses) / len(losses)
            assert float(found[i, j]) == pytest.approx(expected, rel=1e-5)


def test_a_bos_before_every_chunk_is_not_scored_in_the_middle(lm, chunks):
    ids, mask = chunks["input_ids"], chunks["attention_mask"]
    bos = torch.full((3, 1), lm.config.bos_token_id)
    ids, mask = torch.cat((bos, ids), 1), torch.cat((torch.ones_like(bos), mask), 1)
    visible = ~torch.eye(3, dtype=torch.bool)
    found = pairwise_nll(lm, ids, mask, visible)
    context, chunk = ids[1][mask[1].bool()].tolist(), ids[0][mask[0].bool()].tolist()
    assert float(found[0, 1]) == pytest.approx(sum(plain_nll(lm, context, chunk[1:])), rel=1e-5)


def test_loss_and_gradient_are_those_of_the_equations():
    generator = torch.Generator().manual_seed(0)
    similarities = torch.rand(4, 4, generator=generator, dtype=torch.float64).float().requires_grad_()
    nll = 5 * torch.rand(4, 4, generator=generator)
    nll.fill_diagonal_(math.inf)
    loss, retriever, lm_weights = replug_loss(similarities, nll, 0.3, 0.7)
    loss.backward()
    expected, gradient = 0.0, torch.zeros(4, 4)
    for i in range(4):
        others = [j for j in range(4) if j != i]
        p = torch.softmax(torch.tensor([similarities[i, j].item() / 0.3 for j in others]).double(), 0)
        q = torch.softmax(torch.tensor([-float(nll[i, j]) / 0.7 for j in others]).double(), 0)
        expected += float((q * (q / p).log()).sum()) / 4
        for index, j in enumerate(others):
            gradient[i, j] = float(p[index] - q[index]) / 0.3 / 4
            assert float(retriever[i, j]) == pytest.approx(float(p[index]), rel=1e-5)
            assert float(lm_weights[i, j]) == pytest.approx(float(q[index]), rel=1e-5)
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    assert torch.allclose(similarities.grad, gradient, atol=1e-6)


def test_one_hot_distributions_give_a_finite_loss():
    nll = torch.tensor([[math.inf, 1.0, 900.0], [1.0, math.inf, 900.0], [900.0, 1.0, math.inf]])
    similarities = torch.tensor([[1.0, -1.0, 1.0], [1.0, 1.0, -1.0], [1.0, 1.0, 1.0]], requires_grad=True)
    loss, _, _ = replug_loss(similarities, nll, 1e-3, 1e-3)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(similarities.grad).all()


@pytest.fixture(scope="module")
def run_replug(tiny_lm_folder, prepared_folder):
    def run(output_dir, model=None, data=None, callbacks=None, **training):
        model = {"retriever_name_or_path": str(tiny_lm_folder), "similarity_temperature": 0.05} | (model or {})
        data = {"train_sets": [str(prepared_folder)], "max_length": 48, "validation_groups": 6} | (data or {})
        training = {
            "output_dir": str(output_dir),
            "use_cpu": True,
            "max_steps": 3,
            "learning_rate": 1e-2,
            "lm_temperature": 1.0,
            "logging_steps": 1,
            "save_strategy": "no",
            "disable_tqdm": True,
            "report_to": "none",
        } | training
        arguments = ModelArguments(**model), DataArguments(**data), ReplugTrainingArguments(**training)
        return train(*arguments, callbacks=callbacks, trainer_class=ReplugTrainer)

    return run


def test_the_retriever_learns_what_the_frozen_lm_says(run_replug, watch, logged, tmp_path):
    options = {"max_steps": 40, "per_device_train_batch_size": 4, "do_eval": True}
    trainer = run_replug(tmp_path, model={"retriever_lora_r": 4}, callbacks=[watch], **options)
    losses = logged(trainer, "loss")
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    for name, value in trainer.model.named_parameters():
        assert torch.equal(value.detach(), watch.start[name]) != ("lora_" in name), name
    # Groups of four: twelve ordered pairs each.
    assert logged(trainer, "lm_sequences")[:5] == [48.0] * 5
    assert {"max_weight", "lm_max_weight", "weight_entropy", "lm_weight_entropy", "mean_cosine"} <= set(
        trainer.state.log_history[0]
    )
    assert {"eval_sibling_ndcg_at_10"} <= set(trainer.evaluate())


@pytest.mark.parametrize(("groups", "accumulation"), [(2, 2), (4, 1)])
def test_split_into_batch_and_accumulation_gives_the_same_update(
    run_replug, weights, logged, tmp_path, groups, accumulation
):
    options = {"optim": "sgd", "max_steps": 2}
    one = run_replug(tmp_path / "a", gradient_accumulation_steps=4, **options)
    other = run_replug(
        tmp_path / "b", per_device_train_batch_size=groups, gradient_accumulation_steps=accumulation, **options
    )
    assert logged(other, "loss") == pytest.approx(logged(one, "loss"), rel=1e-5)
    first, second = weights(one), weights(other)
    assert max((first[name] - second[name]).abs().max().item() for name in first) < 1e-6


def test_its_checkpoint_resumes_exactly_and_is_revelas(run_replug, logged, weights, tmp_path):
    whole = run_replug(tmp_path / "whole", max_steps=4)
    run_replug(tmp_path / "parts", max_steps=4, save_strategy="steps", save_steps=2)
    resumed = run_replug(
        tmp_path / "resumed", max_steps=4, resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-2")
    )
    assert logged(resumed, "loss") == logged(whole, "loss")
    first, second = weights(whole), weights(resumed)
    assert all(torch.equal(first[name], second[name]) for name in first)
    with pytest.raises(ValueError, match="`similarity_temperature` 0.05, not 0.1: "):
        model = {"similarity_temperature": 0.1}
        run_replug(tmp_path / "other", model, resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-2"))
    model = RevelaForPreTraining.from_pretrained(tmp_path / "parts" / "checkpoint-2")
    assert model.config.freeze_lm and model.config.similarity_temperature == 0.05
    assert (export(tmp_path / "parts" / "checkpoint-2", tmp_path / "out") / "modules.json").is_file()


@pytest.mark.parametrize(
    "options, message",
    [({"lm_temperature": 0.0}, "lm_temp"), ({"lm_score": "product"}, "lm_score"), ({"lm_batch_size": 0}, "lm_batch")],
)
def test_what_cannot_be_is_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        ReplugTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **options)


def test_the_script_teaches(capsys):
    with pytest.raises(SystemExit):
        replug.main(["--help"])
    shown = capsys.readouterr().out
    assert "distils a frozen LM" in shown and "--lm_temperature" in shown and "--lm_learning_rate" not in shown
