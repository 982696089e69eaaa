"""Settings of the grpo stage: group-relative policy optimisation on prompts with reward functions.

Names are those of TRL's `GRPOConfig`. This module imports no torch, for `flows` reads it.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from stages.contract import ImportPath, Input
from stages.training.config import TrainingConfig


class Config(TrainingConfig):
    """Settings of the grpo stage."""

    VERSION: ClassVar[int] = 2
    INPUTS: ClassVar[dict[str, Input]] = {
        "model": Input(("checkpoint",), description="The model to train; with beta above 0 the reference too."),
        "prompts": Input(("dataset",), holds=("prompt",), description="The prompts, with the columns of the rewards."),
    }
    OUTPUT: ClassVar[str] = "checkpoint"
    LOSS_IS_POSITIVE: ClassVar[bool] = False
    REPORTS_ENTROPY: ClassVar[bool] = True
    SIDE_OUTPUTS: ClassVar[dict[str, str]] = {"rollouts": "rollouts", "adapter": "adapter"}

    train_batch_size: int = Field(
        256, ge=1, description="Completions of one optimiser step: prompts of the step times num_generations."
    )
    learning_rate: float = Field(1e-6, ge=0, description="Peak learning rate.")
    lr_scheduler_type: Literal["constant", "linear", "cosine", "cosine_with_restarts", "wsd"] = Field(
        "constant", description="How the rate falls after the warmup."
    )
    disable_dropout: bool = Field(True, description="Train without dropout: sampler and trainer must agree.")
    reward_funcs: list[ImportPath] = Field(min_length=1, description="Reward functions, each module:function.")
    reward_weights: list[float] | None = Field(None, description="Weight of each reward function; 1 when empty.")
    num_generations: int = Field(8, ge=2, description="Completions of each prompt: the group that is compared.")
    max_completion_length: int = Field(256, ge=1, description="The longest completion, in tokens.")
    temperature: float = Field(1.0, gt=0, description="Sampling temperature, used in training too.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling; below 1 the samples are off-policy.")
    beta: float = Field(0.0, ge=0, description="Weight of the KL divergence from the initial model; 0 leaves it out.")
    epsilon: float = Field(0.2, ge=0, lt=1, description="The ratio is clipped below at 1 - epsilon.")
    epsilon_high: float | None = Field(
        None, ge=0, description="The ratio is clipped above at 1 + epsilon_high; epsilon when empty."
    )
    num_iterations: int = Field(1, ge=1, description="Optimiser steps on each batch of completions.")
    scale_rewards: bool = Field(True, description="Whether advantages are divided by the group's standard deviation.")
    loss_type: Literal["dapo", "bnpo", "grpo", "dr_grpo"] = Field(
        "dapo",
        description="dapo, bnpo: mean over all tokens of the step; grpo: mean over completions of token means; dr_grpo:"
        " sum over tokens / (completions * max_completion_length).",
    )
    mask_truncated_completions: bool = Field(
        False,
        description="Leave completions that did not end out of the loss (their reward still counts in the group).",
    )
    # Rows that share a forward pass differ in their last bits from rows that do not, so this is identity.
    generation_batch_size: int = Field(256, ge=1, description="Completions sampled together.")

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if self.train_batch_size % self.num_generations:
            raise ValueError(
                f"train_batch_size ({self.train_batch_size}) counts completions and must be a multiple of"
                f" num_generations ({self.num_generations})"
            )
        if self.reward_weights is not None and len(self.reward_weights) != len(self.reward_funcs):
            raise ValueError(
                f"reward_weights has {len(self.reward_weights)} values for {len(self.reward_funcs)} reward_funcs"
            )
        return self

    def prompts_per_batch(self) -> int:
        """Prompts whose completions are sampled together and trained on for num_iterations steps."""
        return self.train_batch_size // self.num_generations

    def total_steps(self, rows: int) -> int:
        """Optimiser steps of a run over `rows` prompts: max_steps, or what num_train_epochs needs."""
        if self.max_steps is not None:
            return self.max_steps
        return max(1, -(-self.total_rows(rows) // self.prompts_per_batch())) * self.num_iterations
