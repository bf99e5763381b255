"""In-batch attention against a dense implementation of Eq. 3-9, and what it must never do."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModel

from modeling_revela import RevelaForCausalLM, RevelaForPreTraining
from modeling_revela.in_batch_attention import in_batch_attention_forward
from tests.modeling_revela.dense_reference import dense_revela, mean_loss
from tests.modeling_revela.tiny import (
    FAMILIES,
    KERNELS,
    VOCABULARY,
    make_chunks,
    make_lm,
    pad_chunks,
    random_weights,
    relative_error,
    use_kernel,
)

LENGTHS = (9, 6, 11, 8)

# Stock RMS norms and rotary embeddings compute in float32 even for float64 weights.
TOLERANCE = 2e-6


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("v_norm", [False, True], ids=["plain", "v_norm"])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_dense_equations(family, kernel, v_norm, side):
    lm = make_lm(family)
    chunks = make_chunks(LENGTHS)
    model = RevelaForCausalLM.from_backbone(lm, v_norm=v_norm, in_batch_gate=True)
    with torch.no_grad():
        model.in_batch_gate.uniform_(-1.0, 1.5)
    gate = model.in_batch_gate.data = model.in_batch_gate.data.double()

    ours = random_weights(len(chunks))
    with use_kernel(kernel):
        output = model(**pad_chunks(chunks, side, extra=2), in_batch_weights=ours)
    output.loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in lm.named_parameters()}
    gate_gradient = model.in_batch_gate.grad.clone()

    lm.zero_grad()
    theirs = random_weights(len(chunks))
    gate = gate.detach().clone().requires_grad_()
    h_logits, e_logits = dense_revela(lm, chunks, theirs, v_norm, gate=gate)
    loss = mean_loss(h_logits, chunks)
    loss.backward()

    assert output.loss.item() == pytest.approx(loss.item(), rel=TOLERANCE)
    assert output.next_token_loss.item() == pytest.approx(mean_loss(e_logits, chunks).item(), rel=TOLERANCE)
    assert relative_error(ours.grad, theirs.grad.masked_fill(theirs == 0, 0.0)) < TOLERANCE
    assert relative_error(gate_gradient, gate.grad) < TOLERANCE
    for name, parameter in lm.named_parameters():
        assert relative_error(gradients[name], parameter.grad) < TOLERANCE, name


def test_cross_attention_ignores_the_sliding_window():
    # A token of chunk 1 that no window of its own chunk reaches from the end still moves chunk 0.
    lm = make_lm("mistral", num_hidden_layers=1)
    model = RevelaForCausalLM.from_backbone(lm)
    batch = pad_chunks(make_chunks((9, 9)))
    weights = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    before, after = (_both_streams(model, changed, weights) for changed in (batch, _perturb(batch, row=1, column=0)))
    assert (_moved(before, after)[1, 0]).all()


def test_who_sees_whom():
    """Change one token and see which positions move: [stream, chunk, position], e first."""
    model = RevelaForCausalLM.from_backbone(make_lm())
    batch = pad_chunks(make_chunks((7,) * 5))
    weights = torch.zeros(5, 5, dtype=torch.float64)
    weights[:3, :3] = random_weights(3).detach()  # one group of three chunks, one of two
    weights[3, 4] = weights[4, 3] = 1.0
    row, column = 1, 3
    moved = _moved(_both_streams(model, batch, weights), _both_streams(model, _perturb(batch, row, column), weights))
    expected = torch.zeros(2, 5, 7, dtype=torch.bool)
    expected[:, row, column:] = True  # its own chunk, causally, in both streams
    expected[1, [0, 2]] = True  # all of the other chunks of its group, in h only
    assert torch.equal(moved, expected)


def test_diagonal_shows_a_chunk_its_own_future():
    model = RevelaForCausalLM.from_backbone(make_lm(), include_diagonal=True)
    batch = pad_chunks(make_chunks((7, 7)))
    weights = torch.full((2, 2), 0.5, dtype=torch.float64)
    moved = _moved(
        _both_streams(model, batch, weights), _both_streams(model, _perturb(batch, row=0, column=5), weights)
    )
    assert moved[1].all()
    assert moved[0].sum() == 2


@pytest.mark.parametrize("family", ["llama-gqa", "gpt-neox"])
def test_padding_changes_nothing(family):
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-10 if family == "gpt-neox" else TOLERANCE)):
        lm = make_lm(family, dtype)
        model = RevelaForCausalLM.from_backbone(lm)
        results = []
        for side, extra in (("right", 0), ("right", 5), ("left", 0), ("left", 5)):
            model.zero_grad()
            weights = random_weights(len(LENGTHS), dtype)
            output = model(**pad_chunks(make_chunks(LENGTHS), side, extra), in_batch_weights=weights)
            output.loss.backward()
            gradients = torch.cat([parameter.grad.flatten() for parameter in lm.parameters()])
            results.append((output.loss, output.next_token_loss, weights.grad, gradients))
        for result in results[1:]:
            for value, reference in zip(result, results[0], strict=True):
                assert relative_error(value, reference) < tolerance


def realistic_embeddings(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Query and passage embeddings whose cosines lie as an untrained LM's do: mean about 0.84, deviation 0.04."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(32, generator=generator, dtype=torch.float64)
    noise = torch.randn(2, rows, 32, generator=generator, dtype=torch.float64)
    queries, passages = common + 0.45 * noise
    return queries.requires_grad_(), passages.requires_grad_()


@pytest.mark.parametrize("temperature", [1e-4, 1e-2, 1.0])
@pytest.mark.parametrize("rows", [4, 16, 64])
def test_sparse_is_exact(rows, temperature):
    """The default floor against floor 0, which computes every weight that is not zero."""
    lm = make_lm()
    model = RevelaForPreTraining.from_backbones(
        AutoModel.from_config(lm.config), lm, similarity_temperature=temperature
    )
    default = model.config.weight_floor
    for seed in range(4):
        batch = pad_chunks(make_chunks([5] * rows, seed))
        results, pairs = [], []
        for floor in (default, 0.0):
            model.config.weight_floor = floor
            results.append(_loss_and_gradients(model, lm, batch, *realistic_embeddings(rows, seed)))
            pairs.append(results[-1].pop("pairs"))
        sparse, exact = results
        assert max(relative_error(sparse[name], exact[name]) for name in exact) < 1e-5, seed
        if temperature == 1e-4 and rows == 16:
            assert pairs[0] < 2 * rows < 100 < pairs[1]  # the point of it


@pytest.mark.parametrize("temperature", [1e-4, 1e-2, 1.0])
def test_sparse_equals_the_dense_sum(temperature):
    rows = 4
    lm = make_lm("gpt-neox")  # no float32 inside, so that only the floor can show
    model = RevelaForPreTraining.from_backbones(
        AutoModel.from_config(lm.config), lm, similarity_temperature=temperature, v_norm=False
    )
    for seed in range(3):
        chunks = make_chunks([5] * rows, seed)
        sparse = _loss_and_gradients(model, lm, pad_chunks(chunks), *realistic_embeddings(rows, seed))
        sparse.pop("pairs")
        lm.zero_grad()
        queries, passages = realistic_embeddings(rows, seed)
        cosines = (queries / queries.norm(dim=1, keepdim=True)) @ (passages / passages.norm(dim=1, keepdim=True)).T
        scores = (cosines / temperature).masked_fill(torch.eye(rows, dtype=torch.bool), -torch.inf)
        h_logits, _ = dense_revela(lm, chunks, torch.softmax(scores, dim=-1), v_norm=False)
        loss = mean_loss(h_logits, chunks)
        loss.backward()
        dense = {"loss": loss.detach(), "queries": queries.grad, "passages": passages.grad}
        dense.update((name, parameter.grad) for name, parameter in lm.named_parameters())
        assert max(relative_error(sparse[name], dense[name]) for name in dense) < 1e-5, seed


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("family", ["llama-gqa", "mistral"])
def test_half_precision_on_a_cpu(family, side):
    """Plain products: the loss of the fused kernel, which runs where no gradient is wanted; gradients as float32's."""
    batch = pad_chunks(make_chunks(LENGTHS), side)
    gradients = {}
    for dtype in (torch.float32, torch.bfloat16):
        lm = make_lm(family, dtype)
        model = RevelaForCausalLM.from_backbone(lm)
        weights = random_weights(len(LENGTHS), torch.float32)
        output = model(**batch, in_batch_weights=weights)
        output.loss.backward()
        with torch.no_grad():
            fused = model(**batch, in_batch_weights=weights)
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        assert output.loss.item() == pytest.approx(fused.loss.item(), rel=tolerance)
        gradients[dtype] = torch.cat([parameter.grad.flatten().float() for parameter in lm.parameters()])
    assert relative_error(gradients[torch.bfloat16], gradients[torch.float32]) < 0.1


class _Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("half", ["weights", "autocast"])
def test_half_precision_on_a_cpu_leaves_the_fused_kernel(half):
    # Rotary embeddings leave queries and keys in float32 under autocast: that must not hide the precision.
    model = RevelaForCausalLM.from_backbone(make_lm(dtype=torch.bfloat16 if half == "weights" else torch.float32))
    batch, weights = pad_chunks(make_chunks(LENGTHS)), random_weights(len(LENGTHS), torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=half == "autocast"):
        with _Operators() as plain:
            model(**batch, in_batch_weights=weights)
        with _Operators() as fused, torch.no_grad():
            model(**batch, in_batch_weights=weights)
    assert not [name for name in plain.names if "scaled_dot_product" in name]
    assert [name for name in fused.names if "scaled_dot_product" in name]


@pytest.mark.parametrize("side", ["right", "left"])
def test_autocast_stays_finite_with_mixed_lengths(side):
    lm = make_lm(dtype=torch.float32)
    model = RevelaForCausalLM.from_backbone(lm).train()
    weights = random_weights(4, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(**pad_chunks(make_chunks((2, 17, 5, 9)), side, extra=3), in_batch_weights=weights)
    output.loss.backward()
    assert torch.isfinite(output.loss)
    assert weights.grad.isfinite().all() and weights.grad.abs().sum() > 0
    assert all(parameter.grad.isfinite().all() for parameter in lm.parameters())
    with torch.no_grad():
        exact = model(**pad_chunks(make_chunks((2, 17, 5, 9)), side, extra=3), in_batch_weights=weights)
    assert output.loss.item() == pytest.approx(exact.loss.item(), rel=0.02)


@pytest.mark.parametrize("argument", ["softcap", "s_aux", "position_bias"])
def test_what_changes_the_softmax_is_refused(argument):
    states = torch.zeros(4, 2, 3, 8)
    with pytest.raises(ValueError, match=f"uses .*`{argument}`.*choose a backbone without it"):
        in_batch_attention_forward(nn.Module(), states, states, states, None, **{argument: torch.ones(2)})


def _perturb(batch: dict, row: int, column: int) -> dict:
    input_ids = batch["input_ids"].clone()
    input_ids[row, column] = (input_ids[row, column] + 1) % VOCABULARY
    return {**batch, "input_ids": input_ids}


@torch.no_grad()
def _both_streams(model: RevelaForCausalLM, batch: dict, weights: torch.Tensor) -> torch.Tensor:
    output = model(batch["input_ids"], batch["attention_mask"], in_batch_weights=weights, return_logits=True)
    return torch.stack((output.next_token_logits, output.logits))


def _moved(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    return ((before - after).abs() > 1e-6).any(-1)


def _loss_and_gradients(model, lm, batch, queries, passages) -> dict:
    lm.zero_grad()
    weights, _ = model.similarity_weights(queries, passages)
    output = model(**batch, in_batch_weights=weights)
    output.loss.backward()
    result = {"loss": output.loss.detach(), "queries": queries.grad, "passages": passages.grad}
    result.update((name, parameter.grad.clone()) for name, parameter in lm.named_parameters())
    return {**result, "pairs": output.num_pairs}
