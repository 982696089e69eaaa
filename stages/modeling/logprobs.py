"""Token log-probabilities and losses: the one place where hidden states become losses, for every stage.

The head runs on target positions only, in chunks with a backward of their own (`stages.modeling.head`), so the logits
of a whole batch are never held. Documents are kept apart, and padding left out, by `stages.modeling.packing`.

A model whose logits are not simply its output layer applied to what that layer is given (soft-capping), or whose output
layer is no plain linear one, is noticed by comparing once with the model's own logits, and then goes through its own
forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, overload
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from stages.modeling.head import chunk_rows, linear_cross_entropy, linear_logprobs
from stages.modeling.packing import attention_inputs, evaluating, flatten, runs_flat

_plain_heads: WeakKeyDictionary[torch.nn.Module, bool] = WeakKeyDictionary()


def has_plain_head(model: torch.nn.Module) -> bool:
    """Whether `model(...).logits` is a linear output layer and nothing more. Compared once a model."""
    if model not in _plain_heads:
        runs_flat(model)  # the other thing that is found out by running the model, which a wrapped one should not be
        _plain_heads[model] = _compare_head(model)
    return _plain_heads[model]


def forget_head(model: torch.nn.Module) -> None:
    """Look anew the next time, for the model's output layer may have been replaced."""
    _plain_heads.pop(model, None)


def _compare_head(model: Any) -> bool:
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear):
        return False
    with evaluating(model):
        embedding = model.get_input_embeddings().weight
        ids = (torch.arange(8, device=embedding.device) % embedding.shape[0])[None]
        own = model(input_ids=ids, use_cache=False).logits
        hidden = _before_head(model, input_ids=ids)
        if hidden.ndim != 3 or hidden.shape[-1] != head.in_features:
            return False
        ours = functional.linear(hidden, head.weight, head.bias)
        return own.shape == ours.shape and torch.allclose(own.float(), ours.float(), rtol=1e-4, atol=1e-5)


@contextmanager
def _without_head(head: Any) -> Iterator[None]:
    """Let the output layer give back what it is given.

    The model's own forward still runs from its first line to its last, with every hook that a wrapper (data parallel,
    sharding) has put on it; calling the layers below it would go round them.
    """
    head.forward = lambda hidden: hidden
    try:
        yield
    finally:
        del head.forward


def _before_head(model: Any, **inputs: Any) -> Tensor:
    """What the output layer is given: [rows, length, size]."""
    with _without_head(model.get_output_embeddings()):
        return model(use_cache=False, **inputs).logits


class _Targets:
    """The target tokens of a batch: where they are, their labels, and what predicts them.

    Attributes:
        row, column: int64 [targets]; the hidden state at `column` predicts the token at `column + 1`.
        labels: int64 [targets].
        hidden: [targets, size], what the output layer is given; the logits themselves where `plain` is False.
        plain: whether the model has a plain head.
    """

    def __init__(
        self,
        model: Any,
        input_ids: Tensor,
        target_mask: Tensor,
        segment_ids: Tensor | None,
        attention_mask: Tensor | None,
    ) -> None:
        if segment_ids is not None and attention_mask is not None:
            raise ValueError("give segment_ids or attention_mask, not both")
        apart = segment_ids if segment_ids is not None else attention_mask
        self.row, self.column = (target_mask[:, 1:] != 0).nonzero(as_tuple=True)
        self.labels = input_ids[self.row, self.column + 1].long()
        self.plain = has_plain_head(model)
        inputs: dict[str, Any] = {"input_ids": input_ids}
        place = self.row * input_ids.shape[1] + self.column
        if apart is not None and runs_flat(model):
            flat = flatten(input_ids, apart)
            inputs = {"input_ids": flat.input_ids, **flat.inputs()}
            place = flat.place[place]
            if bool((place < 0).any()):
                raise ValueError("a target token follows padding, so nothing predicts it")
        elif apart is not None:
            inputs |= attention_inputs(model, apart)
        hidden = _before_head(model, **inputs) if self.plain else model(use_cache=False, **inputs).logits
        self.hidden = hidden.reshape(-1, hidden.shape[-1]).index_select(0, place)


def token_loss(
    model: torch.nn.Module,
    input_ids: Tensor,
    target_mask: Tensor,
    *,
    segment_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Summed cross-entropy (nats) of the target tokens, each given the earlier tokens of its document.

    Args:
        model, input_ids, target_mask, segment_ids, attention_mask: as for `token_logprobs`.
        label_smoothing, z_loss: as for `stages.modeling.head.linear_cross_entropy`.

    Returns:
        fp32 (fp64) scalars: the loss, with gradient; the sum of -log p(target); the weighted z-loss that is in it.

    Raises:
        ValueError: as for `token_logprobs`.
    """
    targets = _Targets(model, input_ids, target_mask, segment_ids, attention_mask)
    if targets.plain:
        head: Any = model.get_output_embeddings()  # type: ignore[operator]
        return linear_cross_entropy(
            targets.hidden, head.weight, targets.labels, head.bias, label_smoothing=label_smoothing, z_loss=z_loss
        )

    def of_chunk(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = logits if logits.dtype == torch.float64 else logits.float()
        loss = functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=label_smoothing)
        nll = functional.cross_entropy(logits, labels, reduction="sum").detach() if label_smoothing else loss.detach()
        extra = z_loss * logits.logsumexp(-1).square().sum() if z_loss else torch.zeros_like(nll)
        return loss + extra, nll, extra.detach()

    parts = _in_chunks(of_chunk, targets)
    loss, nll, extra = (torch.stack(values).sum() for values in zip(*parts, strict=True))
    return loss, nll, extra


@overload
def token_logprobs(
    model: torch.nn.Module,
    input_ids: Tensor,
    target_mask: Tensor,
    *,
    segment_ids: Tensor | None = ...,
    attention_mask: Tensor | None = ...,
    temperature: float = ...,
    return_entropy: Literal[False] = ...,
) -> Tensor: ...
@overload
def token_logprobs(
    model: torch.nn.Module,
    input_ids: Tensor,
    target_mask: Tensor,
    *,
    segment_ids: Tensor | None = ...,
    attention_mask: Tensor | None = ...,
    temperature: float = ...,
    return_entropy: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def token_logprobs(
    model: torch.nn.Module,
    input_ids: Tensor,
    target_mask: Tensor,
    *,
    segment_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    temperature: float = 1.0,
    return_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probabilities of the target tokens, each given the earlier tokens of its document.

    Args:
        model: a transformers causal LM.
        input_ids: integer [rows, length].
        target_mask: bool or integer [rows, length], nonzero where the token is a target; column 0 is never one.
        segment_ids: integer [rows, length], documents of packed rows (0 is padding).
        attention_mask: integer [rows, length], 1 for real tokens; left or right padding. Not with `segment_ids`.
        temperature: divides the logits.
        return_entropy: also return the entropy (nats) of each target's distribution, without gradient.

    Returns:
        float32 (float64 for a float64 model) [rows, length]: entry t is log p(input_ids[:, t] | earlier tokens of the
        document), 0 where the mask is 0; with `return_entropy`, a pair of such tensors.

    Raises:
        ValueError: both `segment_ids` and `attention_mask`, a temperature that is not above 0, a batch of nothing but
            padding, or a target that follows padding.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, not {temperature}")
    targets = _Targets(model, input_ids, target_mask, segment_ids, attention_mask)
    if targets.plain:
        head: Any = model.get_output_embeddings()  # type: ignore[operator]
        values, entropies = linear_logprobs(
            targets.hidden,
            head.weight,
            targets.labels,
            head.bias,
            temperature=temperature,
            return_entropy=return_entropy,
        )
    else:

        def of_chunk(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            logits = logits if logits.dtype == torch.float64 else logits.float()
            logits = logits / temperature
            values = -functional.cross_entropy(logits, labels, reduction="none")
            if not return_entropy:
                return values, values.detach()
            with torch.no_grad():
                logs = functional.log_softmax(logits, dim=-1)
                return values, -(logs.exp() * logs).sum(-1)

        parts = _in_chunks(of_chunk, targets)
        values, entropies = (torch.cat(tensors) for tensors in zip(*parts, strict=True))

    place = (targets.row, targets.column + 1)
    logprobs = torch.zeros(input_ids.shape, dtype=values.dtype, device=input_ids.device).index_put(place, values)
    if not return_entropy:
        return logprobs
    return logprobs, torch.zeros_like(logprobs).index_put(place, entropies)


def _in_chunks(of_chunk: Callable[..., tuple[Tensor, ...]], targets: _Targets) -> list[tuple[Tensor, ...]]:
    """`of_chunk(logits, labels)` over chunks of the targets; several are computed again in the backward pass."""
    logits, labels = targets.hidden, targets.labels
    size = chunk_rows(logits.shape[-1], logits.device)
    if len(labels) <= size:
        return [of_chunk(logits, labels)]
    return [
        checkpoint(of_chunk, logits[start : start + size], labels[start : start + size], use_reentrant=False)
        for start in range(0, len(labels), size)
    ]
