"""RevelaForCausalLM: a causal LM with in-batch attention, which without weights is its backbone."""

import copy

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    MambaConfig,
    MambaForCausalLM,
)

from modeling_revela import RevelaForCausalLM
from tests.modeling_revela.tiny import (
    FAMILIES,
    VOCABULARY,
    checkpoint_activations,
    make_chunks,
    make_lm,
    pad_chunks,
    random_weights,
    relative_error,
)

LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}


@pytest.fixture
def batch():
    return pad_chunks(make_chunks((9, 6, 8)))


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("family", ["llama-gqa", "mistral", "gemma3", "gpt-neox"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_without_weights_it_is_the_backbone(family, side):
    batch = pad_chunks(make_chunks((9, 6, 8)), side)
    stock = make_lm(family, torch.float32)
    model = RevelaForCausalLM.from_backbone(copy.deepcopy(stock), in_batch_gate=True).eval()
    expected, output = stock(**batch), model(**batch)
    assert torch.equal(output.logits, expected.logits)
    assert torch.equal(output.loss, expected.loss)


def test_without_weights_num_items_in_batch_divides_the_loss(batch):
    stock = make_lm(dtype=torch.float32)
    model = RevelaForCausalLM.from_backbone(copy.deepcopy(stock)).eval()
    found = model(**batch, num_items_in_batch=torch.tensor(100)).loss
    assert torch.equal(found, stock(**batch, num_items_in_batch=torch.tensor(100)).loss)
    assert found.item() == pytest.approx(model(**batch).loss.item() * (9 + 6 + 8 - 3) / 100, rel=1e-5)


def test_generates_as_the_backbone():
    batch = pad_chunks(make_chunks((9, 6, 8)), "left")
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    stock = make_lm(dtype=torch.float32)
    model = RevelaForCausalLM.from_backbone(copy.deepcopy(stock)).eval()
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    generated = model.generate(**inputs, **options)
    assert generated.shape[1] == 9 + 8
    assert torch.equal(generated, stock.generate(**inputs, **options))


@pytest.mark.parametrize("family", FAMILIES)
def test_next_token_loss_is_the_stock_loss(family, batch):
    stock = make_lm(family)
    expected = stock(**batch).loss
    output = RevelaForCausalLM.from_backbone(stock)(**batch, in_batch_weights=random_weights(3))
    assert output.next_token_loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert output.in_batch_loss.item() != pytest.approx(expected.item(), rel=1e-3)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("GraniteForCausalLM", {"logits_scaling": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.3}),
        ("CohereForCausalLM", {"logit_scale": 0.4}),
        ("OPTForCausalLM", {"ffn_dim": 40}),  # learned positions
        ("Olmo2ForCausalLM", {}),
    ],
)
def test_heads_and_positions_of_other_families(architecture, changes, batch):
    import transformers

    architecture = getattr(transformers, architecture)
    sizes = {key: value for key, value in FAMILIES["llama-gqa"]().to_dict().items() if key in _SHARED_SIZES}
    torch.manual_seed(0)
    stock = architecture(architecture.config_class(**sizes, **changes, initializer_range=0.3)).double().eval()
    expected = stock(**batch).loss
    output = RevelaForCausalLM.from_backbone(stock)(**batch, in_batch_weights=random_weights(3))
    assert output.next_token_loss.item() == pytest.approx(expected.item(), rel=1e-6)
    with torch.no_grad():
        output = stock.eval() and RevelaForCausalLM.from_backbone(stock)(
            batch["input_ids"], batch["attention_mask"], in_batch_weights=random_weights(3), return_logits=True
        )
    real = batch["attention_mask"].bool()
    assert relative_error(output.next_token_logits[real], stock(**batch).logits[real]) < 1e-6


_SHARED_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"),
)


def test_logits_only_where_they_are_asked_for(batch):
    model = RevelaForCausalLM.from_backbone(make_lm())
    weights = random_weights(3)
    scored = model(**batch, in_batch_weights=weights)
    assert scored.logits is None and scored.next_token_logits is None
    unlabelled = model(batch["input_ids"], batch["attention_mask"], in_batch_weights=weights)
    assert unlabelled.logits.shape == (3, 9, VOCABULARY)
    assert unlabelled.next_token_logits is None and unlabelled.loss is None
    both = model(**batch, in_batch_weights=weights, return_logits=True)
    assert both.logits.shape == both.next_token_logits.shape == (3, 9, VOCABULARY)
    assert torch.equal(both.logits, unlabelled.logits)
    assert not torch.allclose(both.logits, both.next_token_logits)


def test_only_dual_loss_trains_on_the_e_stream(batch):
    lm = make_lm()
    results = {}
    for dual_loss in (False, True):
        for score_e in (False, True):
            model = RevelaForCausalLM.from_backbone(lm, dual_loss=dual_loss)
            lm.zero_grad()
            output = model(**batch, in_batch_weights=random_weights(3), return_next_token_loss=score_e)
            output.loss.backward()
            results[dual_loss, score_e] = output, gradients(lm)
    plain, plain_gradients = results[False, True]
    assert not plain.next_token_loss.requires_grad
    assert torch.equal(plain.loss, plain.in_batch_loss)
    assert results[False, False][0].next_token_loss is None
    dual, dual_gradients = results[True, False]  # scored whatever was asked
    assert dual.loss.item() == pytest.approx((plain.in_batch_loss + plain.next_token_loss).item())
    lm.zero_grad()
    lm(**batch).loss.backward()
    for name, parameter in lm.named_parameters():
        assert torch.equal(plain_gradients[name], results[False, False][1][name])
        assert relative_error(dual_gradients[name], plain_gradients[name] + parameter.grad) < 1e-5, name


def test_num_items_in_batch_makes_any_split_of_the_groups_equal():
    lm = make_lm("gpt-neox")
    model = RevelaForCausalLM.from_backbone(lm, dual_loss=True)
    groups = [make_chunks(lengths, seed) for seed, lengths in enumerate([(9, 4), (5, 6), (3, 8)])]
    weights = torch.zeros(6, 6, dtype=torch.float64)
    for start in (0, 2, 4):
        weights[start, start + 1] = weights[start + 1, start] = 1.0
    items = sum(len(chunk) - 1 for group in groups for chunk in group)
    whole = model(**pad_chunks(sum(groups, [])), in_batch_weights=weights, num_items_in_batch=torch.tensor(items))
    whole.loss.backward()
    expected = gradients(lm)
    lm.zero_grad()
    parts = []
    for split in (groups[:1], groups[1:]):
        rows = 2 * len(split)
        part = model(**pad_chunks(sum(split, [])), in_batch_weights=weights[:rows, :rows], num_items_in_batch=items)
        part.loss.backward()
        parts.append(part)
    assert sum(part.loss.item() for part in parts) == pytest.approx(whole.loss.item(), rel=1e-9)
    assert sum(part.next_token_loss.item() for part in parts) == pytest.approx(whole.next_token_loss.item(), rel=1e-9)
    assert sum(part.num_target_tokens.item() for part in parts) == items == whole.num_target_tokens.item()
    for name, gradient in gradients(lm).items():
        assert relative_error(gradient, expected[name]) < 1e-9, name
    # Without it a loss is the mean over its own tokens.
    alone = model(**pad_chunks(sum(groups, [])), in_batch_weights=weights)
    assert alone.loss.item() == pytest.approx(whole.loss.item(), rel=1e-9)


def test_a_part_of_a_step_without_a_target_adds_nothing(batch):
    lm = make_lm()
    model = RevelaForCausalLM.from_backbone(lm)
    batch["labels"][:] = -100
    for items in (torch.tensor(7), torch.tensor(0)):
        output = model(**batch, in_batch_weights=random_weights(3), num_items_in_batch=items)
        output.loss.backward()
        assert output.loss == output.next_token_loss == output.num_target_tokens == 0
    assert all(not parameter.grad.any() for parameter in lm.parameters())


def test_first_token_after_left_padding_is_no_target():
    chunks = make_chunks((9, 4))
    model = RevelaForCausalLM.from_backbone(make_lm())
    for side in ("left", "right"):
        output = model(**pad_chunks(chunks, side, extra=1), in_batch_weights=random_weights(2))
        assert output.num_target_tokens == 8 + 3


@pytest.mark.parametrize("family", ["llama-gqa", "gemma3", "gpt-neox"])
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_activation_checkpointing_changes_nothing(family, lora, batch):
    torch.manual_seed(0)
    lm = make_lm(family)
    model = RevelaForCausalLM.from_backbone(lm, in_batch_gate=True, in_batch_gate_init=0.7, lm_lora=lora).train()
    results = []
    for checkpointing in (False, True):
        if checkpointing:
            checkpoint_activations(model, use_reentrant=False)
        model.zero_grad()
        weights = random_weights(3)
        output = model(**batch, in_batch_weights=weights)
        output.loss.backward()
        results.append({"loss": output.loss.detach(), "weights": weights.grad, **gradients(model)})
    plain, checkpointed = results
    assert set(plain) == set(checkpointed)
    assert plain["weights"].abs().sum() > 0 and plain["in_batch_gate"].abs().sum() > 0
    for name, value in plain.items():
        assert relative_error(checkpointed[name], value) < 1e-9, name


@pytest.mark.parametrize("options", [{"use_reentrant": True}, {}], ids=["asked for", "torch's default"])
def test_reentrant_checkpointing_is_refused(batch, options):
    model = RevelaForCausalLM.from_backbone(make_lm()).train()
    checkpoint_activations(model, **options)
    with pytest.raises(ValueError, match=r'use_reentrant": False'):
        model(**batch, in_batch_weights=random_weights(3))
    (getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable)()
    assert torch.isfinite(model(**batch, in_batch_weights=random_weights(3)).loss)


def test_gate(batch):
    lm = make_lm()
    model = RevelaForCausalLM.from_backbone(lm, in_batch_gate=True, in_batch_gate_init=0.0)
    assert model.in_batch_gate.shape == (2, 4)
    closed = model(**batch, in_batch_weights=random_weights(3))
    assert closed.in_batch_loss.item() == pytest.approx(closed.next_token_loss.item(), rel=1e-6)
    closed.loss.backward()
    assert (model.in_batch_gate.grad != 0).all()  # shut, yet it learns
    with torch.no_grad():
        model.in_batch_gate.fill_(1.0)
    opened = model(**batch, in_batch_weights=random_weights(3))
    assert RevelaForCausalLM.from_backbone(lm).in_batch_gate is None
    ungated = RevelaForCausalLM.from_backbone(lm)(**batch, in_batch_weights=random_weights(3))
    assert opened.loss.item() == pytest.approx(ungated.loss.item(), rel=1e-9)
    assert RevelaForCausalLM.from_backbone(lm, in_batch_gate=True).in_batch_gate.unique().item() == pytest.approx(0.05)


def test_lora_starts_as_the_backbone_and_trains_alone(batch):
    lm = make_lm()
    expected = RevelaForCausalLM.from_backbone(copy.deepcopy(lm))(**batch, in_batch_weights=random_weights(3)).loss
    model = RevelaForCausalLM.from_backbone(lm, lm_lora=LORA)
    output = model(**batch, in_batch_weights=random_weights(3))
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-9)
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trainable == {name for name, _ in model.named_parameters() if "lora_" in name} != set()
    output.loss.backward()
    # At the start only B has a gradient, since B is zero.
    assert all(gradient.abs().sum() > 0 for name, gradient in gradients(model).items() if "lora_B" in name)
    assert set(gradients(model)) == trainable


def test_freeze_lm(batch):
    model = RevelaForCausalLM.from_backbone(make_lm(), freeze_lm=True, in_batch_gate=True)
    weights = random_weights(3)
    model(**batch, in_batch_weights=weights).loss.backward()
    assert set(gradients(model)) == {"in_batch_gate"}
    assert weights.grad.abs().sum() > 0


@pytest.mark.parametrize("padding_side", ["right", "left"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_frozen_lm_gives_the_gradients_of_a_trained_one(padding_side, checkpointing):
    batch = pad_chunks(make_chunks((5, 9, 7)), side=padding_side)
    lm, results = make_lm(dtype=torch.float64), []
    for freeze_lm in (False, True):
        model = RevelaForCausalLM.from_backbone(copy.deepcopy(lm), freeze_lm=freeze_lm, in_batch_gate=True).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        rows = []
        model.backbone.get_decoder().layers[0].register_forward_hook(
            lambda module, args, output, rows=rows: rows.append((len(args[0]), torch.is_grad_enabled()))
        )
        weights = random_weights(3)
        output = model(**batch, in_batch_weights=weights, return_logits=True)
        output.loss.backward()
        results.append((output.loss, output.next_token_loss, output.logits, weights.grad, model.in_batch_gate.grad))
        # The plain stream of a frozen LM leaves no activations.
        assert rows[:2] == ([(3, False), (3, True)] if freeze_lm else [(6, True)] + rows[1:2])
    for trained, frozen in zip(*results, strict=True):
        assert torch.allclose(trained, frozen, rtol=1e-9, atol=1e-12)


def test_weights_as_float32_in_a_wider_model_and_in_half(batch):
    for dtype in (torch.float64, torch.bfloat16):
        weights = random_weights(3, torch.float32)
        RevelaForCausalLM.from_backbone(make_lm(dtype=dtype))(**batch, in_batch_weights=weights).loss.backward()
        assert weights.grad.dtype == torch.float32 and weights.grad.isfinite().all()


class TestErrors:
    def test_group_of_one(self):
        model = RevelaForCausalLM.from_backbone(make_lm())
        with pytest.raises(ValueError, match="at least two chunks"):
            model(**pad_chunks(make_chunks((5,))), in_batch_weights=torch.ones(1, 1))

    @pytest.mark.parametrize("shape", [(3, 2), (2, 2), (3,), (3, 3, 1)])
    def test_weights_of_the_wrong_shape(self, batch, shape):
        with pytest.raises(ValueError, match=r"must be \(3, 3\)"):
            RevelaForCausalLM.from_backbone(make_lm())(**batch, in_batch_weights=torch.ones(shape))

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_weights_that_are_not_finite(self, batch, value):
        weights = random_weights(3).detach()
        weights[1, 2] = value
        with pytest.raises(ValueError, match="not finite"):
            RevelaForCausalLM.from_backbone(make_lm())(**batch, in_batch_weights=weights)

    def test_chunk_without_tokens(self, batch):
        batch["attention_mask"][1] = 0
        with pytest.raises(ValueError, match="Row 1 .*no real token"):
            RevelaForCausalLM.from_backbone(make_lm())(**batch, in_batch_weights=random_weights(3))

    def test_nothing_to_predict(self, batch):
        batch["labels"][:] = -100
        with pytest.raises(ValueError, match="no token to predict"):
            RevelaForCausalLM.from_backbone(make_lm())(**batch, in_batch_weights=random_weights(3))

    def test_attention_soft_cap(self):
        config = FAMILIES["gemma2"]().to_dict()
        lm = AutoModelForCausalLM.from_config(Gemma2Config(**{**config, "attn_logit_softcapping": 50.0}))
        with pytest.raises(ValueError, match="attn_logit_softcapping"):
            RevelaForCausalLM.from_backbone(lm)

    def test_backbone_that_bypasses_the_attention_interface(self):
        lm = BloomForCausalLM(BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=1, n_head=2))
        with pytest.raises(ValueError, match="BloomForCausalLM by-passes .* Choose a backbone"):
            RevelaForCausalLM.from_backbone(lm)

    def test_backbone_without_attention(self, batch):
        lm = MambaForCausalLM(MambaConfig(vocab_size=VOCABULARY, hidden_size=16, state_size=4, num_hidden_layers=1))
        model = RevelaForCausalLM.from_backbone(lm)
        with pytest.raises(ValueError, match="No layer of MambaModel reached in-batch attention"):
            model(**batch, in_batch_weights=random_weights(3, torch.float32))

    def test_head_that_is_more_than_a_linear_map(self):
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 40}
        lm = BertLMHeadModel(BertConfig(vocab_size=VOCABULARY, **sizes, is_decoder=True))
        with pytest.raises(ValueError, match="BertLMHeadModel makes its logits by more"):
            RevelaForCausalLM.from_backbone(lm)

    def test_lora_on_the_head(self):
        with pytest.raises(ValueError, match="leave the head out of LoRA"):
            RevelaForCausalLM.from_backbone(make_lm(), lm_lora={**LORA, "target_modules": ["q_proj", "lm_head"]})

    def test_unknown_option(self):
        with pytest.raises(ValueError, match="no field 'v_nrom'"):
            RevelaForCausalLM.from_backbone(make_lm(), v_nrom=False)
