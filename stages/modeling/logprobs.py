"""Token log-probabilities: the one place where logits become losses, for every stage.

The head runs on target positions only, in chunks, so the logits of a whole batch are never held: a chunk that does not
fit is recomputed in the backward pass. A model whose logits are not simply its output layer applied to its last hidden
state (logit scaling or soft-capping) is noticed by comparing once with the model's own logits, and then goes through
its own forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, overload
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from stages.modeling.packing import attention_inputs

CHUNK_LOGITS = 2**24  # logits held at once: 64 MiB in fp32

_plain_heads: WeakKeyDictionary[torch.nn.Module, bool] = WeakKeyDictionary()


def has_plain_head(model: torch.nn.Module) -> bool:
    """Whether `model(...).logits` is the output layer applied to the last hidden state. Compared once a model."""
    if model not in _plain_heads:
        _plain_heads[model] = _compare_head(model)
    return _plain_heads[model]


def _compare_head(model: Any) -> bool:
    head = model.get_output_embeddings()
    backbone = getattr(model, "base_model", None)
    if head is None or backbone is None or backbone is model:
        return False
    modes = [(module, module.training) for module in model.modules()]
    model.eval()  # dropout would make two passes differ, and must not draw from the random stream
    try:
        with torch.no_grad():
            device = model.get_input_embeddings().weight.device
            ids = (torch.arange(8, device=device) % model.get_input_embeddings().weight.shape[0])[None]
            own = model(input_ids=ids, use_cache=False).logits
            hidden = backbone(input_ids=ids, use_cache=False)[0]
            if hidden.ndim != 3 or hidden.shape[-1] != head.weight.shape[-1]:
                return False
            ours = head(hidden)
            return own.shape == ours.shape and torch.allclose(own.float(), ours.float(), rtol=1e-4, atol=1e-5)
    finally:
        for module, mode in modes:
            module.training = mode


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
        ValueError: both `segment_ids` and `attention_mask`, or a temperature that is not above 0.
    """
    if segment_ids is not None and attention_mask is not None:
        raise ValueError("give segment_ids or attention_mask, not both")
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, not {temperature}")
    apart = segment_ids if segment_ids is not None else attention_mask
    extra = attention_inputs(model, apart) if apart is not None else {}
    targets = target_mask[:, 1:] != 0
    row, column = targets.nonzero(as_tuple=True)  # hidden state at `column` predicts the token at `column + 1`
    labels = input_ids[row, column + 1].long()

    any_model: Any = model
    if has_plain_head(model):
        hidden = any_model.base_model(input_ids=input_ids, use_cache=False, **extra)[0]
        head: Callable[[Tensor], Tensor] = any_model.get_output_embeddings()
        width = any_model.get_output_embeddings().weight.shape[0]
    else:
        hidden = any_model(input_ids=input_ids, use_cache=False, **extra).logits
        head = torch.nn.Identity()
        width = hidden.shape[-1]
    flat = hidden.reshape(-1, hidden.shape[-1]).index_select(0, row * input_ids.shape[1] + column)
    values, entropies = _head_logprobs(flat, labels, head, width, temperature, return_entropy)

    place = (row, column + 1)
    logprobs = torch.zeros(input_ids.shape, dtype=values.dtype, device=input_ids.device).index_put(place, values)
    if not return_entropy:
        return logprobs
    entropy = torch.zeros_like(logprobs).index_put(place, entropies)
    return logprobs, entropy


def _head_logprobs(
    hidden: Tensor,
    labels: Tensor,
    head: Callable[[Tensor], Tensor],
    width: int,
    temperature: float,
    want_entropy: bool,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of `labels` [n], and their distributions' entropies, from hidden states [n, size]."""

    def of_chunk(hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(hidden)
        if logits.dtype != torch.float64:
            logits = logits.float()
        if temperature != 1.0:
            logits = logits / temperature
        values = -functional.cross_entropy(logits, labels, reduction="none")
        if not want_entropy:
            return values, values.detach()
        with torch.no_grad():
            logs = functional.log_softmax(logits, dim=-1)
            return values, -(logs.exp() * logs).sum(-1)

    size = max(1, CHUNK_LOGITS // width)
    if len(labels) <= size:
        return of_chunk(hidden, labels)
    parts = [
        checkpoint(of_chunk, hidden[start : start + size], labels[start : start + size], use_reentrant=False)
        for start in range(0, len(labels), size)
    ]
    return torch.cat([values for values, _ in parts]), torch.cat([entropy for _, entropy in parts])
