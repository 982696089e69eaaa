"""Settings of the rollout stage: completions of prompts sampled from a checkpoint, and scored.

Names are those of TRL's `GRPOConfig`. This module imports no torch, for `flows` reads it.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from stages.contract import ImportPath, Input, NotIdentity, StageConfig


class Config(StageConfig):
    """Settings of the rollout stage."""

    VERSION: ClassVar[int] = 1
    INPUTS: ClassVar[dict[str, Input]] = {
        "model": Input(("checkpoint",), description="The model to sample from."),
        "prompts": Input(("dataset",), holds=("prompt",), description="The prompts."),
    }
    OUTPUT: ClassVar[str] = "rollouts"

    reward_funcs: list[ImportPath] = Field(min_length=1, description="Reward functions, each module:function.")
    reward_weights: list[float] | None = Field(None, description="Weight of each reward function; 1 when empty.")
    num_generations: int = Field(8, ge=1, description="Completions of each prompt.")
    max_completion_length: int = Field(256, ge=1, description="The longest completion, in tokens.")
    temperature: float = Field(1.0, ge=0, description="Sampling temperature; 0 takes the likeliest token.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling: the probability that is kept.")
    limit: int | None = Field(None, ge=1, description="Take only the first prompts, this many.")
    split: Literal["train", "validation"] = Field("train", description="The split of the prompts.")
    # Random numbers are drawn block by block, and rows that share a forward pass differ in their last bits from rows
    # that do not, so both sizes are identity.
    prompts_per_block: int = Field(32, ge=1, description="Prompts sampled together, and saved together.")
    generation_batch_size: int = Field(256, ge=1, description="Completions in one forward pass.")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Precision of the weights and activations.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of the random numbers.")
    save_seconds: Annotated[float, NotIdentity()] = Field(30.0, gt=0, description="Seconds between saves of progress.")

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if self.reward_weights is not None and len(self.reward_weights) != len(self.reward_funcs):
            raise ValueError(
                f"reward_weights has {len(self.reward_weights)} values for {len(self.reward_funcs)} reward_funcs"
            )
        if self.temperature == 0 and self.num_generations > 1:
            raise ValueError("num_generations above 1 at temperature 0 gives equal completions; raise temperature")
        return self

    def reads_splits(self) -> dict[str, tuple[str, str]]:
        """The split of the prompts."""
        return {"prompts": (self.split, "split")}
