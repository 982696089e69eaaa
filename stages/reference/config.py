"""Settings of the reference stage: per-token log-probabilities of preference pairs under a checkpoint.

This module imports no torch, for `flows` reads it.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from stages.contract import Input, NotIdentity, StageConfig


class Config(StageConfig):
    """Settings of the reference stage."""

    VERSION: ClassVar[int] = 1
    INPUTS: ClassVar[dict[str, Input]] = {
        "model": Input(("checkpoint",), description="The reference model."),
        "data": Input(("dataset",), holds=("preference",), description="The pairs to score."),
    }
    OUTPUT: ClassVar[str] = "logprobs"

    # Rows that share a forward pass differ in their last bits from rows that do not, so this is identity.
    per_device_eval_batch_size: int = Field(32, ge=1, description="Pairs in one forward pass.")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Precision of the weights and activations.")
    save_seconds: Annotated[float, NotIdentity()] = Field(60.0, gt=0, description="Seconds between saves of progress.")
