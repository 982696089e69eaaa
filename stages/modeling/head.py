"""The output head and its loss in one: from hidden states to cross-entropy or log-probabilities, chunk by chunk.

The logits of a batch are rows * vocabulary numbers, and with a vocabulary of 150,000 they are most of what training
holds. Here a chunk of rows goes through head, softmax and loss, and its logits are gone before the next chunk. Both
functions have their own backward (Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", 2024,
arXiv:2411.09009, and Hsu et al., "Liger Kernel", 2024, arXiv:2410.10989, describe the idea):

- `linear_cross_entropy`, whose loss is a sum, knows its gradient in the forward pass: hidden states' and weight's
  gradients are computed there, and the backward pass only scales them.
- `linear_logprobs`, whose values go on into another loss, keeps the log-sum-exp of each row and computes the logits a
  second time in the backward pass; where all logits fit into one chunk, it keeps the probabilities instead.

Invariants:
- Softmax and loss are computed in fp32 (fp64 for fp64 input) whatever the precision of the products.
- Gradients of the weight are summed over chunks in fp32 or better.
- On CUDA, `linear_cross_entropy` is the fused kernel of `liger_kernel` where that package is installed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

CHUNK_LOGITS = {"cpu": 2**20, "cuda": 2**26}  # logits held at once: on a CPU, what its cache holds (4 MiB in fp32)
CHUNK_ROWS = 64  # but at least so many, for a product reads the whole weight (256 rows took 0.9 of the time of 64)


def chunk_rows(width: int, device: torch.device) -> int:
    """Rows whose logits over `width` tokens are held at once."""
    return max(CHUNK_ROWS, CHUNK_LOGITS.get(device.type, CHUNK_LOGITS["cuda"]) // width)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Summed cross-entropy of `labels` under softmax(hidden @ weight.T + bias), without whole logits.

    With smoothing s, a row's loss is (1 - s) * -log p(label) + s * mean over the vocabulary of -log p(token) (Szegedy
    et al., 2016; what `torch.nn.functional.cross_entropy` computes). `z_loss` adds z_loss * logsumexp(logits)^2, which
    keeps logits from drifting (PaLM: Chowdhery et al., 2022, arXiv:2204.02311).

    Args:
        hidden: [rows, size].
        weight: [vocabulary, size].
        labels: int64 [rows], each in [0, vocabulary).
        bias: [vocabulary] or None.
        label_smoothing: s, in [0, 1).
        z_loss: weight of the z-loss, at least 0.

    Returns:
        Three fp32 (fp64) scalars: the loss, with gradient; the summed -log p(label); the summed z-loss, already
        weighted. The latter two have no gradient.
    """
    if hidden.is_cuda and _has_liger() and hidden.dtype != torch.float64 and len(labels):
        return _liger_cross_entropy(hidden, weight, labels, bias, label_smoothing, z_loss)
    wants_grad = torch.is_grad_enabled()
    return _CrossEntropy.apply(hidden, weight, bias, labels, label_smoothing, z_loss, wants_grad)


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float = 1.0,
    return_entropy: bool = False,
) -> tuple[Tensor, Tensor]:
    """log p(label) of each row under softmax((hidden @ weight.T + bias) / temperature), without whole logits.

    Args:
        hidden: [rows, size].
        weight: [vocabulary, size].
        labels: int64 [rows].
        bias: [vocabulary] or None.
        temperature: divides the logits; above 0.
        return_entropy: also compute each row's entropy.

    Returns:
        Two fp32 (fp64) tensors [rows]: the log-probabilities, with gradient; and the entropies in nats, without (zeros
        where they were not asked for).
    """
    wants_grad = torch.is_grad_enabled()
    return _LogProbs.apply(hidden, weight, bias, labels, temperature, return_entropy, wants_grad)


def _product_dtype(hidden: Tensor) -> torch.dtype:
    """The type that matrix products are computed in: autocast's, where it is on."""
    kind = hidden.device.type
    if hidden.dtype != torch.float64 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return hidden.dtype


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _no_autocast(tensor: Tensor) -> torch.autocast:
    return torch.autocast(tensor.device.type, enabled=False)


def _chunks(rows: int, width: int, device: torch.device) -> Iterator[slice]:
    size = chunk_rows(width, device)
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Logits of a chunk, in the type of sums. All three are in the type of products."""
    logits = functional.linear(hidden, weight, bias)
    return logits.to(_sum_dtype(logits))


class _Gradients:
    """The gradients of hidden states, weight and bias, filled chunk by chunk from the gradient of the logits."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: tuple[bool, bool, bool]) -> None:
        self.inputs, self.kernel = hidden, weight
        self.hidden = torch.empty_like(hidden) if needs[0] else None
        self.weight = torch.zeros(weight.shape, dtype=_sum_dtype(weight), device=weight.device) if needs[1] else None
        self.bias = torch.zeros(len(weight), dtype=_sum_dtype(weight), device=weight.device) if needs[2] else None

    def add(self, part: slice, grad_logits: Tensor) -> None:
        if self.bias is not None:
            self.bias += grad_logits.sum(0)
        grad = grad_logits.to(self.kernel.dtype)
        if self.hidden is not None:
            torch.mm(grad, self.kernel, out=self.hidden[part])
        if self.weight is not None:
            if grad.dtype == self.weight.dtype:
                self.weight.addmm_(grad.T, self.inputs[part])
            else:
                self.weight += grad.T @ self.inputs[part]


def _subtract_at(grad: Tensor, labels: Tensor, amount: Tensor | float) -> None:
    """grad[i, labels[i]] -= amount, in place and in a fixed order."""
    column = labels[:, None]
    grad.scatter_(1, column, grad.gather(1, column) - amount)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        smoothing: float,
        z_loss: float,
        wants_grad: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[1], bias is not None and ctx.needs_input_grad[2])
        wants_grad = wants_grad and any(needs)
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        dtype = _product_dtype(hidden)
        with _no_autocast(hidden):
            hidden, weight = hidden.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
            grads = _Gradients(hidden, weight, bias, needs) if wants_grad else None
            loss, nll, extra = (hidden.new_zeros((), dtype=_sum_dtype(hidden)) for _ in range(3))
            for part in _chunks(len(labels), len(weight), hidden.device):
                logits = _logits(hidden[part], weight, bias)
                picked = logits.gather(1, labels[part, None])
                logs = functional.log_softmax(logits, dim=1)
                del logits
                label_logs = logs.gather(1, labels[part, None])
                nll -= label_logs.sum()
                loss -= (1 - smoothing) * label_logs.sum()
                if smoothing:
                    loss -= smoothing * logs.mean(1).sum()
                if z_loss:
                    lse = picked - label_logs
                    extra += z_loss * lse.square().sum()
                if grads is None:
                    continue
                grad = logs.exp_()
                if z_loss:
                    grad *= 1 + 2 * z_loss * lse
                if smoothing:
                    grad -= smoothing / len(weight)
                _subtract_at(grad, labels[part], 1 - smoothing)
                grads.add(part, grad)
                del logs, grad  # or the next chunk's logits would be held beside them
        # Not save_for_backward: the backward pass scales these tensors in place, and so can run once.
        ctx.grads = None if grads is None else [grads.hidden, grads.weight, grads.bias]
        loss += extra
        ctx.mark_non_differentiable(nll, extra)
        return loss, nll, extra

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grads, ctx.grads = ctx.grads, None
        if grads is None:
            raise RuntimeError("linear_cross_entropy: the backward pass of one loss can run only once")
        scaled = [
            None if saved is None else saved.mul_(grad).to(dtype)
            for saved, dtype in zip(grads, ctx.dtypes, strict=True)
        ]
        return (*scaled, None, None, None, None)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        temperature: float,
        want_entropy: bool,
        wants_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[1], bias is not None and ctx.needs_input_grad[2])
        wants_grad = wants_grad and any(needs)
        dtype = _product_dtype(hidden)
        ctx.needs, ctx.temperature, ctx.product_dtype = needs, temperature, dtype
        whole = len(labels) <= chunk_rows(len(weight), hidden.device)
        kept: Tensor | None = None
        with _no_autocast(hidden):
            half, kernel = hidden.to(dtype), weight.to(dtype)
            offset = None if bias is None else bias.to(dtype)
            values = half.new_empty(len(labels), dtype=_sum_dtype(half))
            lse, entropy = torch.empty_like(values), torch.zeros_like(values)
            for part in _chunks(len(labels), len(weight), hidden.device):
                logits = _logits(half[part], kernel, offset)
                if temperature != 1.0:
                    logits /= temperature
                column = labels[part, None]
                logs = functional.log_softmax(logits, dim=1)
                values[part] = logs.gather(1, column)[:, 0]
                lse[part] = logits.gather(1, column)[:, 0] - values[part]
                del logits
                if want_entropy:
                    probabilities = logs.exp()
                    # 0 log 0 is 0: a logit of -inf has no share in the entropy.
                    entropy[part] = -(probabilities * logs.clamp(min=torch.finfo(logs.dtype).min)).sum(1)
                if wants_grad and whole:
                    kept = logs.exp_()
                del logs
        if wants_grad:
            ctx.save_for_backward(hidden, weight, bias, labels, lse, kept)
        ctx.mark_non_differentiable(entropy)
        return values, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, lse, kept = ctx.saved_tensors
        with _no_autocast(hidden):
            half, kernel = hidden.to(ctx.product_dtype), weight.to(ctx.product_dtype)
            offset = None if bias is None else bias.to(ctx.product_dtype)
            grads = _Gradients(half, kernel, offset, ctx.needs)
            scale = (grad / ctx.temperature)[:, None]
            for part in _chunks(len(labels), len(weight), hidden.device):
                if kept is not None:
                    probabilities = kept
                else:
                    logits = _logits(half[part], kernel, offset)
                    if ctx.temperature != 1.0:
                        logits /= ctx.temperature
                    probabilities = logits.sub_(lse[part, None]).exp_()
                    del logits
                grad_logits = probabilities * -scale[part] if kept is not None else probabilities.mul_(-scale[part])
                _subtract_at(grad_logits, labels[part], -scale[part])
                grads.add(part, grad_logits)
                del probabilities, grad_logits
        return (
            None if grads.hidden is None else grads.hidden.to(hidden.dtype),
            None if grads.weight is None else grads.weight.to(weight.dtype),
            None if grads.bias is None else grads.bias.to(bias.dtype),
            None,
            None,
            None,
            None,
        )


@lru_cache(maxsize=1)
def _has_liger() -> bool:
    return importlib.util.find_spec("liger_kernel") is not None


def _liger_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor, Tensor]:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    fused = LigerFusedLinearCrossEntropyLoss(
        lse_square_scale=z_loss,
        label_smoothing=smoothing,
        reduction="sum",
        return_z_loss=True,
        accum_dtype=torch.float32,
    )
    dtype = _product_dtype(hidden)
    result = fused(weight.to(dtype), hidden.to(dtype), labels, None if bias is None else bias.to(dtype))
    loss, extra = result.loss, result.z_loss
    # The kernel does not give the unsmoothed loss, so the sum without the z-loss stands for it.
    return loss, (loss - extra).detach(), extra.detach()
