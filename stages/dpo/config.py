"""Settings of the dpo stage: direct preference optimisation from stored reference log-probabilities.

Names are those of TRL's `DPOConfig`. This module imports no torch, for `flows` reads it.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from stages.contract import Input
from stages.training.config import TrainingConfig


class Config(TrainingConfig):
    """Settings of the dpo stage."""

    VERSION: ClassVar[int] = 2
    INPUTS: ClassVar[dict[str, Input]] = {
        "model": Input(("checkpoint",), description="The model to train, as a rule the one the reference is of."),
        "data": Input(("dataset",), holds=("preference",), description="Preference pairs."),
        "reference": Input(("logprobs",), description="The reference's log-probabilities of these pairs."),
    }
    OUTPUT: ClassVar[str] = "checkpoint"

    train_batch_size: int = Field(32, ge=1, description="Pairs of one optimiser step, over all ranks.")
    learning_rate: float = Field(1e-6, ge=0, description="Peak learning rate.")
    disable_dropout: bool = Field(True, description="Train without dropout, as the reference was computed.")
    beta: float = Field(0.1, gt=0, description="Strength of the tie to the reference; lower strays further.")
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="Share of pairs taken to be labelled the wrong way round (conservative DPO)."
    )
    rpo_alpha: float | None = Field(
        None,
        ge=0,
        description="Weight of an added negative log-likelihood of the chosen completions, a mean over their tokens.",
    )
