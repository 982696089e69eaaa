"""A training stage with troubles that come to one rank at one step."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from stages.contract import Input, NotIdentity
from stages.training.config import TrainingConfig


class Config(TrainingConfig):
    """Trains a tiny model on packed rows."""

    INPUTS: ClassVar[dict[str, Input]] = {"data": Input(("dataset",))}
    OUTPUT: ClassVar[str] = "checkpoint"

    trouble: Annotated[str, NotIdentity()] = ""  # "nan", "refuse", "raise", "hang" or "kill"
    trouble_rank: Annotated[int, NotIdentity()] = 1
    trouble_step: Annotated[int, NotIdentity()] = 3
    pause: Annotated[float, NotIdentity()] = 0.0
    # Instead of rows: weight and summed loss of the micro-batches of every step.
    batches: tuple[tuple[float, float], ...] = ()
    dropout: float = Field(0.0, ge=0)
