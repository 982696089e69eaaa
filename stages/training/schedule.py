"""Learning-rate schedules, as plain functions of the step.

The factor multiplies the peak rate. With steps counted from 0, a warmup of W steps and a horizon of H steps:

- warmup, step < W: (step + 1) / (W + 1), so that the first step already learns and step W is the first at the peak;
- constant: 1;
- linear: from 1 at step W down to `min_lr_ratio` at step H (which is one past the last step, so no step is wasted);
- cosine: half a cosine between the same ends (Loshchilov and Hutter, "SGDR", 2017, without restarts);
- cosine_with_restarts: the steps from W to H in `num_cycles` equal parts, each such a half cosine from 1 (SGDR,
  equation 5, with periods of one length; a restart comes at the first step of a part);
- wsd: 1 until step H - D, then linear to `min_lr_ratio` at step H, where D is `decay_ratio` of H (Hu et al., "MiniCPM",
  2024).

From step H on the factor stays where it ended.
"""

from __future__ import annotations

import math

from stages.training.config import TrainingConfig


def warmup_length(config: TrainingConfig, horizon: int) -> int:
    """Steps of warmup, at most the horizon."""
    steps = config.warmup_steps
    if steps is None:
        steps = math.ceil(config.warmup_ratio * horizon)
    return min(steps, horizon)


def learning_rate_factor(config: TrainingConfig, step: int, total_steps: int) -> float:
    """The share of the peak rate that step `step` (from 0) trains with.

    Args:
        config: the settings; `schedule_steps` is the horizon where it is given.
        step: optimiser step, from 0.
        total_steps: length of the run, the horizon where `schedule_steps` is empty.
    """
    horizon = config.schedule_steps or total_steps
    warmup = warmup_length(config, horizon)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    floor = config.min_lr_ratio
    if config.lr_scheduler_type == "constant":
        return 1.0
    start = warmup
    if config.lr_scheduler_type == "wsd":
        start = max(warmup, horizon - math.ceil(config.decay_ratio * horizon))
    progress = min(1.0, max(0.0, (step - start) / max(1, horizon - start)))
    if config.lr_scheduler_type == "cosine_with_restarts" and progress < 1:
        # In whole numbers, so that rounding moves no restart by a step.
        progress = (step - start) * config.num_cycles % (horizon - start) / (horizon - start)
    if config.lr_scheduler_type in ("cosine", "cosine_with_restarts"):
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
    return floor + (1 - floor) * (1 - progress)
