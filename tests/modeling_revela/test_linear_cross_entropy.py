"""Chunked cross-entropy of a linear head against torch's own on full logits."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from modeling_revela import linear_cross_entropy as module
from modeling_revela.linear_cross_entropy import linear_cross_entropy
from tests.modeling_revela.tiny import relative_error

TOKENS, WIDTH, VOCABULARY = 37, 16, 50


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    # Five tokens at a time, the last two alone.
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 5 * VOCABULARY)


def make_tensors(dtype=torch.float64, bias=True):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64)
    offsets = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64)
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    tensors = [tensor.to(dtype).requires_grad_() for tensor in (hidden, weight, offsets)]
    return (*tensors, targets) if bias else (*tensors[:2], None, targets)


def stock(hidden, weight, bias, targets, scale=1.0, softcap=None):
    logits = nn.functional.linear(hidden, weight, bias).double() * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return nn.functional.cross_entropy(logits, targets, reduction="sum")


def loss_and_gradients(function, tensors, **options):
    # Not a plain backward(): the incoming gradient must be honoured.
    loss = function(*tensors, **options)
    (loss * 0.3).backward()
    return [loss.detach(), *(tensor.grad for tensor in tensors[:3] if tensor is not None)]


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("softcap", [None, 3.0], ids=["", "softcap"])
@pytest.mark.parametrize("scale", [1.0, 0.2], ids=["", "scale"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_equals_torch(dtype, tolerance, scale, softcap, bias):
    ours = loss_and_gradients(linear_cross_entropy, make_tensors(dtype, bias), scale=scale, softcap=softcap)
    theirs = loss_and_gradients(stock, make_tensors(torch.float64, bias), scale=scale, softcap=softcap)
    assert ours[0].dtype == dtype
    for value, reference in zip(ours, theirs, strict=True):
        assert value.dtype == dtype
        assert relative_error(value, reference) < tolerance


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_gradients_of_what_is_trained_only(frozen):
    tensors = make_tensors()
    tensors[frozen].requires_grad_(False)
    linear_cross_entropy(*tensors).backward()
    reference = make_tensors()
    stock(*reference).backward()
    for index in range(3):
        if index == frozen:
            assert tensors[index].grad is None
        else:
            assert relative_error(tensors[index].grad, reference[index].grad) < 1e-12


def test_no_gradient_no_graph():
    with torch.no_grad():
        assert not linear_cross_entropy(*make_tensors()).requires_grad
    loss = linear_cross_entropy(*(tensor.detach() for tensor in make_tensors()))
    assert loss.item() == pytest.approx(stock(*make_tensors()).item()) and not loss.requires_grad


def test_bfloat16_autocast_of_float32_weights():
    tensors = make_tensors(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(*tensors)
    loss.backward()
    assert loss.dtype == torch.float32
    reference = make_tensors()
    expected = stock(*reference)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=5e-3)
    for tensor, exact in zip(tensors[:3], reference[:3], strict=True):
        assert tensor.grad.dtype == torch.float32
        assert relative_error(tensor.grad, exact.grad) < 0.02


def test_bfloat16_weights_sum_in_float32(monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 1)  # a chunk a token: what is summed in bfloat16 shows
    tensors = make_tensors(torch.bfloat16)
    loss = linear_cross_entropy(*tensors)
    loss.backward()
    assert loss.dtype == torch.float32 and tensors[1].grad.dtype == torch.bfloat16
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors[:3]]
    stock(*exact, tensors[3]).backward()
    assert relative_error(tensors[1].grad, exact[1].grad) < 5e-3


def test_large_logits_stay_finite():
    tensors = make_tensors(torch.float32)
    loss = linear_cross_entropy(*tensors, scale=1e4)
    loss.backward()
    assert loss.isfinite() and all(tensor.grad.isfinite().all() for tensor in tensors[:3])


class _LargestTensor(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_never_holds_all_logits():
    tensors = make_tensors(torch.float32)
    with _LargestTensor() as largest:
        linear_cross_entropy(*tensors, scale=0.5, softcap=3.0).backward()
    assert largest.elements == VOCABULARY * WIDTH  # the gradient of the weight; five rows of logits are smaller
    with _LargestTensor() as largest:
        stock(*make_tensors(torch.float32)).backward()
    assert largest.elements == TOKENS * VOCABULARY  # the measure can tell
