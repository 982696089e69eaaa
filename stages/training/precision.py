"""The precision of matrix products, and the loss scale that fp16 needs.

Weights and optimiser state are fp32 always. Under fp16, small gradients would round to zero, so the loss is multiplied
by a scale that is halved when a gradient overflows and doubled after `GROWTH_STEPS` steps without one (Micikevicius et
al. 2018, "Mixed Precision Training", arXiv:1710.03740; the constants are those of `torch.amp.GradScaler`). Whether a
gradient is finite is known of the whole step on all ranks, so every rank has the same scale.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, Literal

import torch

GROWTH_STEPS = 2000


@dataclass
class LossScale:
    """The scale of the loss; 1 and constant unless `dynamic`."""

    dynamic: bool
    scale: float = 1.0
    steps: int = 0  # since the scale last changed

    @classmethod
    def of(cls, precision: Literal["no", "bf16", "fp16"]) -> LossScale:
        """Dynamic from 65536 for fp16, else 1."""
        return cls(True, 65536.0) if precision == "fp16" else cls(False)

    def update(self, finite: bool) -> bool:
        """Take note of a step. Returns whether it overflowed only because the scale is still being found."""
        if not self.dynamic:
            return False
        if not finite:
            searching = self.scale > 1
            self.scale, self.steps = self.scale * 0.5, 0
            return searching
        self.steps += 1
        if self.steps == GROWTH_STEPS:
            self.scale, self.steps = self.scale * 2, 0
        return False

    def state(self) -> dict[str, float]:
        """What saved progress must hold."""
        return {"scale": self.scale, "steps": self.steps}

    def load_state(self, state: dict[str, Any]) -> None:
        """Put back what `state` gave."""
        self.scale, self.steps = float(state["scale"]), int(state["steps"])


def autocast(device: torch.device, precision: Literal["no", "bf16", "fp16"]) -> contextlib.AbstractContextManager[Any]:
    """Around forward passes: matrix products in this precision."""
    if precision == "no":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16 if precision == "bf16" else torch.float16)
