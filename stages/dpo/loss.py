"""The loss of direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290).

All functions work row by row and return sums or one value a row; the training loop divides by the number of pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


@dataclass(frozen=True)
class PairLoss:
    """What the loss gives for each pair, [pairs] each.

    Attributes:
        losses: the loss.
        chosen_rewards: beta * (log-probability under the model - under the reference) of the chosen completion; no
            gradient.
        rejected_rewards: the same of the rejected one.
    """

    losses: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor


def sigmoid_loss(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
) -> PairLoss:
    """-(1 - s) log sigmoid(m) - s log sigmoid(-m), with m = beta * ((chosen - ref_chosen) - (rejected - ref_rejected)).

    Equation 7 of Rafailov et al. 2023; s is `label_smoothing`, the share of labels taken to be flipped (conservative
    DPO, Mitchell 2023). TRL calls it `loss_type="sigmoid"`.

    Args:
        chosen_logps, rejected_logps: summed log-probabilities of the completions under the model, [pairs].
        ref_chosen_logps, ref_rejected_logps: the same under the reference, [pairs].
        beta: strength of the tie to the reference, above 0.
        label_smoothing: in [0, 0.5).
    """
    chosen_rewards = beta * (chosen_logps - ref_chosen_logps)
    rejected_rewards = beta * (rejected_logps - ref_rejected_logps)
    margins = chosen_rewards - rejected_rewards
    losses = -(1 - label_smoothing) * logsigmoid(margins) - label_smoothing * logsigmoid(-margins)
    return PairLoss(losses, chosen_rewards.detach(), rejected_rewards.detach())


def completion_sums(logprobs: Tensor, mask: Tensor) -> Tensor:
    """Sum of the log-probabilities of each row's target tokens: [rows, length] and its mask -> [rows]."""
    return torch.where(mask.bool(), logprobs, torch.zeros_like(logprobs)).sum(dim=-1)
