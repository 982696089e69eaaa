"""Checks made before anything is sampled or trained: that a model can read and end the rows of a dataset.

Each raises `contract.Refused` with one sentence that says what does not fit and how to mend it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from stages.contract import Refused
from stages.modeling.checkpoint import end_of_turn_ids, token_ids


def check_sequences(model: Any, sequences: Iterable[tuple[str, int, int]], *, completion: int = 0) -> None:
    """Refuse rows that the model cannot read: too long for its positions, or with ids beyond its vocabulary.

    Args:
        model: a transformers causal language model.
        sequences: (what to call the row, its length in tokens, its greatest token id).
        completion: how many tokens are going to be added to each row.
    """
    config = model.config.get_text_config(decoder=True)
    positions = getattr(config, "max_position_embeddings", None)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    for name, length, greatest in sequences:
        if length == 0:
            raise Refused(f"{name} has no tokens")
        if positions is not None and length + completion > positions:
            added = f" and {completion} new ones" if completion else ""
            raise Refused(
                f"{name} has {length} tokens{added}, more than the model's {positions} positions. Shorten it or drop"
                f" long rows in the tokenize step"
            )
        if greatest >= vocabulary:
            raise Refused(
                f"{name} has token id {greatest}, and the model's vocabulary ends at {vocabulary - 1}: the dataset was"
                f" made with another tokenizer"
            )


def eos_token_ids(model: Any, tokenizer: Any) -> list[int]:
    """The tokens that end a completion: those of the generation config and the tokenizer's end of turn, in rising
    order.

    Raises:
        Refused: there are none.
    """
    named = getattr(model.generation_config, "eos_token_id", None)
    found = sorted({*token_ids(named), *end_of_turn_ids(tokenizer)})
    if not found:
        raise Refused("the model has no end-of-turn token: set eos_token_id in its generation_config.json")
    return found


def pad_token_id(tokenizer: Any, eos_ids: list[int]) -> int:
    """A token to fill rows with; its value never reaches a result."""
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos_ids[0]
