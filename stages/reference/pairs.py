"""Batches of preference pairs, and the log-probabilities of their completions: what reference, dpo and evaluate share.

A batch of B pairs is 2B rows: the chosen completions, then the rejected ones, each after its prompt, padded on the
right.

Invariant:
A completion's log-probabilities depend on its own prompt and tokens only; padding and neighbours do not reach them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages.contract import Refused
from stages.modeling.logprobs import token_logprobs
from stages.sampling.batches import completion_batch
from stages.sampling.checks import check_sequences
from stages.tokenize.dataset import Preference


def pair_batch(pairs: Sequence[Preference]) -> dict[str, Tensor]:
    """The 2B rows of B pairs, chosen before rejected; see `completion_batch`."""
    chosen = [(pair.prompt_ids, pair.chosen_ids) for pair in pairs]
    return completion_batch(chosen + [(pair.prompt_ids, pair.rejected_ids) for pair in pairs])


def pair_logprobs(model: Any, pairs: Sequence[Preference]) -> list[tuple[list[float], list[float]]]:
    """Log-probability of every completion token of each pair: (chosen, rejected), without gradient."""
    batch = pair_batch(pairs)
    device = model.device
    with torch.no_grad():
        values = token_logprobs(
            model,
            batch["input_ids"].to(device),
            batch["target_mask"].to(device),
            attention_mask=batch["attention_mask"].to(device),
        ).cpu()
    rows = [values[row, mask].tolist() for row, mask in enumerate(batch["target_mask"])]
    return list(zip(rows[: len(pairs)], rows[len(pairs) :], strict=True))


def check_pairs(model: Any, pairs: Sequence[Preference]) -> None:
    """Refuse pairs that cannot be used with this model.

    Raises:
        Refused: no rows, an id twice, an empty prompt or completion, a row too long, or ids beyond the vocabulary.
    """
    if not pairs:
        raise Refused("the preference dataset has no rows")
    seen: set[str] = set()
    for pair in pairs:
        if pair.id in seen:
            raise Refused(f"the preference dataset has the id {pair.id} twice; ids must be unique")
        seen.add(pair.id)
        for name, ids in (("prompt", pair.prompt_ids), ("chosen", pair.chosen_ids), ("rejected", pair.rejected_ids)):
            if not ids:
                raise Refused(f"pair {pair.id}: its {name} has no tokens")
    for name in ("chosen", "rejected"):
        rows = ((f"pair {p.id} ({name})", [*p.prompt_ids, *getattr(p, f"{name}_ids")]) for p in pairs)
        check_sequences(model, ((label, len(ids), max(ids)) for label, ids in rows))


def pair_hash(pair: Preference) -> str:
    """A hash of the token ids of a pair, by which a stored reference knows the pair it was computed for."""
    text = "|".join(",".join(map(str, ids)) for ids in (pair.prompt_ids, pair.chosen_ids, pair.rejected_ids))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def weights_hash(checkpoint: Path) -> str:
    """A hash of the weights and configuration of a checkpoint folder: equal exactly where the model is the same."""
    total = hashlib.sha256()
    for path in [checkpoint / "config.json", *sorted(checkpoint.glob("*.safetensors"))]:
        with path.open("rb") as file:
            total.update(f"{path.name}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()
