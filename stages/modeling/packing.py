"""Packed rows: several documents in one row that never see each other.

`segment_ids` [rows, length] numbers the documents of a row (1, 2, ...); 0 is padding. A document's positions start at
0, and attention is causal within a segment. Padding is a segment of its own, so that no row of the attention is empty
(which would give NaN). A padded batch without packing is the special case of an attention mask (1 real, 0 padding).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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
    if implementation not in ("sdpa", "eager") or _needs_own_masks(config):
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
    on leaked context without a word. Costs two forward passes of 8 tokens.
    """
    any_model: Any = model
    embedding = any_model.get_input_embeddings().weight
    segments = torch.tensor([[1, 1, 1, 1, 2, 2, 2, 2]], device=embedding.device)
    first = torch.arange(8, device=embedding.device)[None] % embedding.shape[0]
    second = first.clone()
    second[0, :4] = (first[0, :4] + 1) % embedding.shape[0]
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            extra = attention_inputs(model, segments)
            logits = [any_model(input_ids=ids, use_cache=False, **extra).logits[0, 4:] for ids in (first, second)]
        return torch.allclose(logits[0].float(), logits[1].float(), rtol=1e-4, atol=1e-4)
    finally:
        for module, mode in modes:
            module.training = mode
