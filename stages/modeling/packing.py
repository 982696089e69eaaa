"""Packed rows: several documents in one row that never see each other.

`segment_ids` [rows, length] numbers the documents of a row (1, 2, ...); 0 is padding. A document's positions start at
0, and attention is causal within a segment. A padded batch without packing is the special case of an attention mask
(1 real, 0 padding).

There are two ways to run a model on such rows. `flatten` leaves the padding out and lays all documents one after the
other, for `stages.modeling.attention`, which needs no mask. A model that cannot (its layers have masks of their own,
such as sliding windows, or it attends by other means than the interface of transformers) gets the rows as they are with
`attention_inputs`, whose masks are dense. `runs_flat` finds out which, by comparing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from stages.modeling import attention
from stages.modeling.attention import Documents

_runs_flat: WeakKeyDictionary[torch.nn.Module, bool] = WeakKeyDictionary()


@dataclass
class Flat:
    """A batch without its padding.

    Attributes:
        input_ids: int64 [1, tokens], row after row.
        position_ids: int64 [1, tokens], from 0 in each document.
        documents: where the documents are.
        place: int64 [rows * length], where each token of the rows is in `input_ids`; -1 for padding.
    """

    input_ids: Tensor
    position_ids: Tensor
    documents: Documents
    place: Tensor

    def inputs(self) -> dict[str, Any]:
        """What the model's forward takes beside `input_ids`."""
        return {"position_ids": self.position_ids, attention.ARGUMENT: self.documents}


def flatten(input_ids: Tensor, segment_ids: Tensor) -> Flat:
    """Lay the documents of `input_ids` [rows, length] one after the other; `segment_ids` as above.

    Raises:
        ValueError: everything is padding.
    """
    segments = segment_ids.long()
    real = segments != 0
    starts = real.clone()
    starts[:, 1:] &= segments[:, 1:] != segments[:, :-1]
    index = real.flatten().nonzero()[:, 0]
    if len(index) == 0:
        raise ValueError("a batch holds nothing but padding")
    flags = starts.flatten()[index]
    first = flags.nonzero()[:, 0]
    lengths = torch.diff(first, append=first.new_tensor([len(index)]))
    positions = torch.arange(len(index), device=index.device) - first[flags.cumsum(0) - 1]
    place = torch.full((segments.numel(),), -1, dtype=torch.int64, device=index.device)
    place[index] = torch.arange(len(index), device=index.device)
    documents = Documents.of(lengths.tolist(), index.device)
    return Flat(input_ids.flatten()[index][None], positions[None], documents, place)


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """No gradient and no dropout (so no draw from the random stream); the modules' modes are put back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def runs_flat(model: torch.nn.Module) -> bool:
    """Whether `model` can run on flattened documents; from then on it attends by `stages.modeling.attention`.

    Found once a model by running two documents together and alone.
    """
    if model not in _runs_flat:
        _runs_flat[model] = _try_flat(model)
    return _runs_flat[model]


def _try_flat(model: Any) -> bool:
    config = model.config
    if config._attn_implementation not in ("sdpa", attention.NAME) or _needs_own_masks(config):
        return False
    embedding = model.get_input_embeddings().weight
    ids = torch.arange(9, device=embedding.device)[None] % embedding.shape[0]
    flat = flatten(ids, torch.tensor([[1, 1, 1, 2, 2, 2, 2, 2, 0]], device=embedding.device))
    with evaluating(model):
        alone = [model(input_ids=part, use_cache=False).logits[0] for part in (ids[:, :3], ids[:, 3:8])]
        config._attn_implementation = attention.NAME
        try:
            together = model(input_ids=flat.input_ids, use_cache=False, **flat.inputs()).logits[0]
        except TypeError:  # its forward does not hand keywords on to the attention
            config._attn_implementation = "sdpa"
            return False
    expected = torch.cat(alone)
    tolerance = 1e-4 if expected.dtype in (torch.float32, torch.float64) else 5e-2
    same = torch.allclose(together.float(), expected.float(), rtol=tolerance, atol=tolerance)
    if not same:
        config._attn_implementation = "sdpa"
    return same


def position_ids_of(segment_ids: Tensor) -> Tensor:
    """Positions within each document, int64 [rows, length], from 0 at each change of segment."""
    length = segment_ids.shape[1]
    index = torch.arange(length, device=segment_ids.device).expand_as(segment_ids)
    starts = torch.zeros_like(segment_ids, dtype=torch.bool)
    starts[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    first = torch.where(starts, index, torch.zeros_like(index)).cummax(dim=1).values
    return index - first


def block_mask(segment_ids: Tensor) -> Tensor:
    """Who may attend to whom: bool [rows, 1, length, length], causal within a segment."""
    length = segment_ids.shape[1]
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    causal = torch.ones(length, length, dtype=torch.bool, device=segment_ids.device).tril()
    return (same & causal)[:, None]


def _single_documents(segment_ids: Tensor) -> bool:
    """Whether each row is one document that starts at the left, with nothing but padding after it."""
    one = (segment_ids == segment_ids[:, :1]) | (segment_ids == 0)
    falling = segment_ids[:, 1:] <= segment_ids[:, :-1]
    return bool(one.all() and falling.all())


def _needs_own_masks(config: Any) -> bool:
    """Whether some layer has a mask other than full causal attention (a sliding window, chunks)."""
    kinds = set(getattr(config, "layer_types", None) or ())
    return bool(kinds - {"full_attention"}) or bool(getattr(config, "sliding_window", None))


def attention_inputs(model: torch.nn.Module, segment_ids: Tensor) -> dict[str, Tensor | None]:
    """What a transformers model needs, beside `input_ids`, to keep the documents of each row apart.

    Args:
        model: a transformers causal LM.
        segment_ids: integer [rows, length]; 0 is padding. An attention mask of zeros and ones will do.

    Returns:
        `attention_mask` and `position_ids`, to be passed to the model's forward with `use_cache=False` (with a cache,
        transformers does not look for documents).
    """
    config: Any = model.config
    if segment_ids.device.type == "cpu" and _single_documents(segment_ids):
        # Padding lies after every real token, so plain causal attention is right, and fastest.
        return {"attention_mask": None, "position_ids": None}
    positions = position_ids_of(segment_ids)
    implementation = config._attn_implementation
    if implementation not in ("sdpa", "eager", attention.NAME) or _needs_own_masks(config):
        # Without a mask, transformers sees from the positions where documents start, and builds each layer's own mask.
        return {"attention_mask": None, "position_ids": positions}
    mask = block_mask(segment_ids)
    if implementation == "eager":
        dtype = next(model.parameters()).dtype
        mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)
    return {"attention_mask": mask, "position_ids": positions}


def keeps_documents_apart(model: torch.nn.Module) -> bool:
    """Whether the model's forward respects `attention_inputs`, found by changing one document of a packed row.

    Models with recurrent or state-space layers carry state across documents whatever the mask says, and would train
    on leaked context without a word. Costs a few forward passes of 8 tokens.
    """
    if runs_flat(model):
        return True
    any_model: Any = model
    embedding = any_model.get_input_embeddings().weight
    segments = torch.tensor([[1, 1, 1, 1, 2, 2, 2, 2]], device=embedding.device)
    first = torch.arange(8, device=embedding.device)[None] % embedding.shape[0]
    second = first.clone()
    second[0, :4] = (first[0, :4] + 1) % embedding.shape[0]
    with evaluating(model):
        extra = attention_inputs(model, segments)
        try:
            logits = [any_model(input_ids=ids, use_cache=False, **extra).logits[0, 4:] for ids in (first, second)]
        except Exception:  # its code takes no positions or no mask of this shape (BLOOM), and says so in its own way
            return False
    return torch.allclose(logits[0].float(), logits[1].float(), rtol=1e-4, atol=1e-4)
