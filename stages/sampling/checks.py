"""Checks made before anything is sampled or trained: that a model and a dataset fit each other.

Each raises `contract.Refused` with one sentence that says what does not fit and how to mend it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stages.contract import Refused
from stages.tokenize.dataset import tokenizer_folder

# Parts of tokenizer.json that say how batches are padded, not which ids a text gets.
_NOT_TOKENS = ("padding", "truncation", "version")


def check_same_tokenizer(model_folder: Path, dataset_folder: Path, *, model: str, dataset: str) -> None:
    """Refuse a model whose tokenizer is not the one that the dataset was made with.

    Args:
        model, dataset: what the message calls them, such as "input model".
    """
    ours, theirs = _tokenizer(model_folder), _tokenizer(tokenizer_folder(dataset_folder))
    if ours is not None and theirs is not None and ours != theirs:
        raise Refused(
            f"{model} and {dataset} have different tokenizers: the token ids would mean other text. Give {dataset}'s"
            f" tokenize step the tokenizer of that model"
        )


def _tokenizer(folder: Path) -> dict[str, Any] | None:
    path = folder / "tokenizer.json"
    if not path.exists():
        return None  # a tokenizer without the fast form; the vocabulary check still holds
    content = json.loads(path.read_text(encoding="utf-8"))
    return {name: value for name, value in content.items() if name not in _NOT_TOKENS}


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
    """The tokens that end a completion: those of the generation config and the tokenizer's own, in rising order.

    Raises:
        Refused: there are none.
    """
    named = getattr(model.generation_config, "eos_token_id", None)
    ids = set(named if isinstance(named, list | tuple) else [named]) | {tokenizer.eos_token_id}
    found = sorted(token for token in ids if token is not None)
    if not found:
        raise Refused("the model has no end-of-turn token: set eos_token_id in its generation_config.json")
    return found


def pad_token_id(tokenizer: Any, eos_ids: list[int]) -> int:
    """A token to fill rows with; its value never reaches a result."""
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos_ids[0]
