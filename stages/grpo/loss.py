"""Group-relative policy optimisation: advantages, the clipped loss, the KL estimate, and how tokens are averaged.

The formulas are those of DeepSeekMath (Shao et al. 2024, arXiv:2402.03300), DAPO (Yu et al. 2025, arXiv:2503.14476;
clip range with its own upper bound, averages over tokens) and Dr. GRPO (Liu et al. 2025, arXiv:2503.20783; no division
by the standard deviation or the length); names are TRL's.

Invariants:
- A loss is returned as (sum, weight) so that micro-batches and ranks add up: loss of the step = sum of sums / sum of
  weights.
- Tokens outside the mask add nothing to a sum or a weight, whatever their values are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LossType = Literal["dapo", "bnpo", "grpo", "dr_grpo"]


@dataclass(frozen=True)
class Advantages:
    """Advantages of completions, [groups * generations], and the reward's spread in each group, [groups]."""

    values: Tensor
    group_std: Tensor


def group_advantages(rewards: Tensor, num_generations: int, *, scale_rewards: bool) -> Advantages:
    """Reward less the mean of its group, over the group's standard deviation + 1e-4 when `scale_rewards`.

    Equation 3.2 of Shao et al. 2024 with TRL's 1e-4 and its unbiased standard deviation.

    Args:
        rewards: float [groups * num_generations], the completions of a prompt side by side.
    """
    groups = rewards.view(-1, num_generations)
    centred = groups - groups.mean(dim=1, keepdim=True)
    std = groups.std(dim=1, keepdim=True) if num_generations > 1 else torch.zeros_like(groups)
    # All equal rewards can leave a rounding error as their spread, which division would blow up.
    equal = (groups == groups[:, :1]).all(dim=1, keepdim=True)
    centred, std = centred.masked_fill(equal, 0.0), std.masked_fill(equal, 0.0)
    if scale_rewards:
        centred = centred / (std + 1e-4)
    return Advantages(centred.reshape(-1), std.reshape(-1))


@dataclass(frozen=True)
class TokenLoss:
    """The loss of every token, [rows, length], and which tokens were clipped from below and above (bool)."""

    losses: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


def clipped_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, epsilon: float, epsilon_high: float
) -> TokenLoss:
    """-min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A) with r = exp(logprobs - old_logprobs).

    PPO's clipped objective (Schulman et al. 2017, equation 7) with the two bounds of Yu et al. 2025, equation 10.

    Args:
        logprobs, old_logprobs: [rows, length], under the model and under the model that sampled.
        advantages: [rows].
        mask: 1 where a token counts, [rows, length].
    """
    inside = mask.bool()
    ratio = torch.exp(torch.where(inside, logprobs - old_logprobs, torch.zeros_like(logprobs)))
    advantage = advantages[:, None]
    losses = -torch.minimum(ratio * advantage, ratio.clamp(1 - epsilon, 1 + epsilon_high) * advantage)
    low = inside & (ratio < 1 - epsilon) & (advantage < 0)
    high = inside & (ratio > 1 + epsilon_high) & (advantage > 0)
    return TokenLoss(torch.where(inside, losses, torch.zeros_like(losses)), low, high)


def k3_divergence(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = ref_logprobs - logprobs: an unbiased, non-negative estimate of KL(model || reference).

    Schulman 2020, "Approximating KL Divergence" (k3). [rows, length]; 0 outside the mask.
    """
    difference = torch.where(mask.bool(), ref_logprobs - logprobs, torch.zeros_like(logprobs))
    return torch.exp(difference) - difference - 1


def step_weight(mask: Tensor, loss_type: LossType, max_completion_length: int) -> float:
    """What the summed loss of rows with this mask, [rows, length], is divided by (`reduce_loss` gives the sum)."""
    if loss_type in ("dapo", "bnpo"):
        return float(mask.sum())
    if loss_type == "grpo":
        return float(mask.shape[0])
    return float(mask.shape[0] * max_completion_length)


def reduce_loss(losses: Tensor, mask: Tensor, loss_type: LossType) -> Tensor:
    """Add up token losses [rows, length] to the scalar that `step_weight` divides.

    - "dapo", "bnpo": sum over tokens, later divided by the tokens of the whole step (the two differ in TRL only in
      whether micro-batches are averaged apart, which is never done here).
    - "grpo": sum over rows of the mean over a row's tokens, later divided by the rows.
    - "dr_grpo": sum over tokens, later divided by rows * max_completion_length.

    Rows without tokens (a truncated completion that is masked) add 0 and still count as rows.
    """
    losses = torch.where(mask.bool(), losses, torch.zeros_like(losses))
    if loss_type == "grpo":
        return (losses.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).sum()
    return losses.sum()
