"""Rows of prompt and completion as one padded batch: the shape in which dpo, grpo and reference read a model.

Invariant: targets are the tokens of the completion, its end-of-turn token included, and never those of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def completion_batch(rows: Sequence[tuple[Sequence[int], Sequence[int]]], pad_id: int = 0) -> dict[str, Tensor]:
    """Put (prompt, completion) rows into one batch, padded on the right; `pad_id` is any valid token id.

    Returns:
        `input_ids` int64, `attention_mask` int64 and `target_mask` bool, all [rows, length].
    """
    width = max(len(prompt) + len(completion) for prompt, completion in rows)
    input_ids = torch.full((len(rows), width), pad_id)
    attention_mask = torch.zeros(len(rows), width, dtype=torch.int64)
    target_mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for row, (prompt, completion) in enumerate(rows):
        end = len(prompt) + len(completion)
        input_ids[row, :end] = torch.tensor([*prompt, *completion])
        attention_mask[row, :end] = 1
        target_mask[row, len(prompt) : end] = True
    return {"input_ids": input_ids, "attention_mask": attention_mask, "target_mask": target_mask}
