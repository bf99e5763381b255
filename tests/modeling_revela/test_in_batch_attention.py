"""In-batch attention against a dense implementation of Eq. 3-9, and what it must never do."""

import pytest
import torch

from modeling_revela import RevelaForCausalLM
from tests.modeling_revela.dense_reference import dense_revela, mean_loss
from tests.modeling_revela.tiny import FAMILIES, make_chunks, make_lm, pad_chunks, random_weights, relative_error

LENGTHS = (9, 6, 11, 8)

# Stock RMS norms and rotary embeddings compute in float32 even for float64 weights.
TOLERANCE = 2e-6


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("v_norm", [False, True], ids=["plain", "v_norm"])
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_dense_equations(family, v_norm, side):
    lm = make_lm(family)
    chunks = make_chunks(LENGTHS)
    model = RevelaForCausalLM.from_backbone(lm, v_norm=v_norm, in_batch_gate=True)
    with torch.no_grad():
        model.in_batch_gate.uniform_(-1.0, 1.5)
    gate = model.in_batch_gate.data = model.in_batch_gate.data.double()

    ours = random_weights(len(chunks))
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
