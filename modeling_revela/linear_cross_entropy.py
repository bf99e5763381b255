"""Cross-entropy of a linear head that never holds the logits of all tokens at once."""

import torch
from torch import nn
from torch.autograd.function import once_differentiable

# Logits held at a time: 2^24 float32 numbers, 64 MiB.
_CHUNK_ELEMENTS = 2**24


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    scale: float = 1.0,
    softcap: float | None = None,
) -> torch.Tensor:
    """
    Summed cross-entropy of `softcap(scale · (hidden · weightᵀ + bias))`, in nats.

    Gradients are made chunk by chunk in the forward pass, while the logits are at hand, so that they need neither be
    kept nor computed again. Softmax and sum are float32 (float64 for float64 inputs); products follow autocast.

    Args:
        hidden: (N, d).
        weight: (V, d); bias: (V,) or `None`.
        targets: (N,) int64, all valid.

    Returns:
        A scalar.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    tensors = (hidden, weight) if bias is None else (hidden, weight, bias)
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return _LinearCrossEntropy.apply(hidden, weight, bias, targets, scale, softcap, needs_grad)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, scale, softcap, needs_grad):
        accumulate = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        wanted = [needs_grad and needed for needed in ctx.needs_input_grad[:3]]
        grad_hidden = torch.empty_like(hidden) if wanted[0] else None
        grad_weight = torch.zeros_like(weight, dtype=accumulate) if wanted[1] else None
        grad_bias = torch.zeros_like(bias, dtype=accumulate) if wanted[2] else None
        total = hidden.new_zeros((), dtype=accumulate)
        step = max(1, _CHUNK_ELEMENTS // weight.shape[0])
        with torch.autocast(device_type=hidden.device.type, enabled=False):
            for start in range(0, hidden.shape[0], step):
                part, target = hidden[start : start + step], targets[start : start + step, None]
                logits = nn.functional.linear(part, weight, bias).to(accumulate)
                if scale != 1.0:
                    logits *= scale
                if softcap is not None:
                    logits = softcap * torch.tanh(logits / softcap)
                normaliser = logits.logsumexp(-1, keepdim=True)
                total += (normaliser - logits.gather(-1, target)).sum()
                if not any(wanted):
                    continue
                slope = None if softcap is None else 1 - (logits / softcap) ** 2
                grad = logits.sub_(normaliser).exp_()
                grad.scatter_add_(-1, target, grad.new_full((), -1.0).expand(target.shape))
                if slope is not None:
                    grad *= slope
                if scale != 1.0:
                    grad *= scale
                if wanted[2]:
                    grad_bias += grad.sum(0)
                grad = grad.to(hidden.dtype)
                if wanted[0]:
                    grad_hidden[start : start + step] = grad @ weight
                if wanted[1]:
                    grad_weight += grad.T @ part
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_total):
        grads = [
            None if grad is None else (grad * grad_total).to(dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*grads, None, None, None, None)


__all__ = ["linear_cross_entropy"]
