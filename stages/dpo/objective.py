"""DPO as the training loop sees it: which pairs a step takes, and their summed loss.

Invariants:
- The reference is matched to a pair by its id, and only used when it was computed for exactly those token ids.
- A model that is its own reference starts with margin 0 and loss ln 2; `check_start` proves it before training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stages.contract import Refused
from stages.dpo.config import Config
from stages.dpo.loss import completion_sums, sigmoid_loss
from stages.modeling.logprobs import token_logprobs
from stages.reference.logprobs import ReferenceRow
from stages.reference.pairs import pair_batch, pair_hash, pair_logprobs
from stages.tokenize.dataset import Preference
from stages.training.distributed import rows_per_pass
from stages.training.loop import Figures, MicroBatch
from stages.training.order import batch_rows

# Greatest difference of a token's log-probability between the reference stage and here, at equal weights: float32
# differs by some 1e-5 between batch shapes, bfloat16 by some 1e-1.
TOLERANCE = {"float32": 2e-3, "bfloat16": 0.5}
CHECKED_PAIRS = 32


def match_reference(pairs: Sequence[Preference], rows: dict[str, ReferenceRow]) -> list[ReferenceRow]:
    """The reference of every pair, in the order of `pairs`.

    Raises:
        Refused: a pair has no reference, or one computed for other tokens.
    """
    matched = []
    for pair in pairs:
        row = rows.get(pair.id)
        if row is None:
            raise Refused(f"input reference has no row for pair {pair.id}: run a reference step on the same data")
        for name in ("chosen", "rejected"):
            tokens, values = len(getattr(pair, f"{name}_ids")), len(getattr(row, f"{name}_logprobs"))
            if tokens != values:
                raise Refused(
                    f"input reference has {values} log-probabilities for the {name} completion of pair {pair.id}, which"
                    f" has {tokens} tokens: run a reference step on the same data"
                )
        if row.pair != pair_hash(pair):
            raise Refused(
                f"input reference was computed for other token ids of pair {pair.id}: run a reference step on the same"
                f" data"
            )
        if not all(math.isfinite(value) for value in (*row.chosen_logprobs, *row.rejected_logprobs)):
            raise Refused(f"input reference has a log-probability of pair {pair.id} that is not finite")
        matched.append(row)
    return matched


def check_start(model: Any, pairs: Sequence[Preference], reference: Sequence[ReferenceRow], dtype: str) -> float:
    """Compare the first pairs' log-probabilities under the untrained model with the reference, token by token.

    Returns:
        The greatest difference.

    Raises:
        Refused: it is beyond what rounding explains, so margin and loss would not start at 0 and ln 2.
    """
    worst = 0.0
    for pair, row, values in zip(pairs, reference, pair_logprobs(model, pairs), strict=True):
        for name, ours, theirs in zip(
            ("chosen", "rejected"), values, (row.chosen_logprobs, row.rejected_logprobs), strict=True
        ):
            for place, (mine, stored) in enumerate(zip(ours, theirs, strict=True)):
                difference = abs(mine - stored)
                if not difference <= TOLERANCE[dtype]:
                    raise Refused(
                        f"input reference does not fit the model although the weights are the same: token {place} of"
                        f" the {name} completion of pair {pair.id} has log-probability {mine:.4f}, stored {stored:.4f}."
                        f" Run the reference step again (--force)"
                    )
                worst = max(worst, difference)
    return worst


class PairObjective:
    """The objective of a DPO run; implements `stages.training.loop.Objective`."""

    def __init__(self, config: Config, pairs: Sequence[Preference], reference: Sequence[ReferenceRow]) -> None:
        self.config = config
        self.pairs = pairs
        self.reference_sums = [(math.fsum(row.chosen_logprobs), math.fsum(row.rejected_logprobs)) for row in reference]
        self.limit = None if config.max_steps is not None else config.total_rows(len(pairs))

    def micro_batches(self, step: int) -> list[MicroBatch]:
        """The pairs of an optimiser step (from 0), in forward passes of `rows_per_pass` pairs."""
        config = self.config
        indices = batch_rows(len(self.pairs), config.train_batch_size, config.seed, step, self.limit).tolist()
        # The NLL term is a mean over the chosen tokens of the whole step, however it is cut into forward passes.
        chosen_tokens = sum(len(self.pairs[index].chosen_ids) for index in indices)
        size = rows_per_pass(config, len(indices))
        batches = []
        for start in range(0, len(indices), size):
            part = indices[start : start + size]
            tensors = pair_batch([self.pairs[index] for index in part])
            sums = torch.tensor([self.reference_sums[index] for index in part], dtype=torch.float32)
            tensors["ref_chosen_logps"], tensors["ref_rejected_logps"] = sums[:, 0], sums[:, 1]
            tensors["nll_scale"] = torch.tensor(len(indices) / chosen_tokens)
            batches.append(MicroBatch(tensors, float(len(part)), int(tensors["attention_mask"].sum())))
        return batches

    def loss(self, model: Any, batch: MicroBatch) -> tuple[Tensor, Figures]:
        """The loss summed over the pairs of the batch, and sums of TRL's metrics."""
        tensors = batch.tensors
        logprobs = token_logprobs(
            model, tensors["input_ids"], tensors["target_mask"], attention_mask=tensors["attention_mask"]
        )
        sums = completion_sums(logprobs, tensors["target_mask"])
        chosen, rejected = sums.chunk(2)
        pair_loss = sigmoid_loss(
            chosen,
            rejected,
            tensors["ref_chosen_logps"],
            tensors["ref_rejected_logps"],
            beta=self.config.beta,
            label_smoothing=self.config.label_smoothing,
        )
        loss = pair_loss.losses.sum()
        margins = pair_loss.chosen_rewards - pair_loss.rejected_rewards
        metrics: Figures = {
            "rewards/chosen": pair_loss.chosen_rewards.sum(),
            "rewards/rejected": pair_loss.rejected_rewards.sum(),
            "rewards/margins": margins.sum(),
            "rewards/accuracies": (margins > 0).float().sum(),
            "logps/chosen": chosen.detach().sum(),
            "logps/rejected": rejected.detach().sum(),
        }
        if self.config.rpo_alpha is not None:
            nll = -chosen.sum() * tensors["nll_scale"]
            loss = loss + self.config.rpo_alpha * nll
            metrics["nll_loss"] = nll.detach()
        return loss, metrics

    def state(self) -> dict[str, Tensor]:
        """Nothing: the data of a step is a function of the step."""
        return {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Nothing to load."""

    def metrics(self) -> dict[str, float]:
        """Nothing beside what `loss` reports."""
        return {}
