"""Settings of the evaluate stage: any number of checkpoints measured on the same data, with a report.

This module imports no torch, for `flows` reads it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from stages.contract import ImportPath, Input, NotIdentity, StageConfig

# The columns of a report's table: (metric, heading, whether it is a share). Those that no model has are left out.
COLUMNS = (
    ("bits_per_byte", "bits/byte", False),
    ("exact_match", "exact match", True),
    ("sampled", "sampled", True),
    ("shows_work", "shows work", True),
    ("sampled_showing_work", "right when shown", True),
    ("preference_accuracy", "preference accuracy", True),
    ("mean_completion_tokens", "tokens", False),
)


class Config(StageConfig):
    """Settings of the evaluate stage. What is measured depends on the inputs given: text, prompts, preferences."""

    VERSION: ClassVar[int] = 1
    INPUTS: ClassVar[dict[str, Input]] = {
        "models": Input(("checkpoint",), many=True, description="The checkpoints to compare."),
        "text": Input(("dataset",), holds=("text", "chat"), required=False, description="Rows for bits per byte."),
        "prompts": Input(("dataset",), holds=("prompt",), required=False, description="Prompts to answer and score."),
        "preferences": Input(("dataset",), holds=("preference",), required=False, description="Pairs to rank."),
    }
    OUTPUT: ClassVar[str] = "report"

    score: ImportPath | None = Field(
        None,
        description="module:function in the shape of a reward that gives 1 for a right completion and 0 for a wrong"
        " one; needed with prompts.",
    )
    style: ImportPath | None = Field(
        None, description="module:function in the same shape that says whether a completion shows its work (1 or 0)."
    )
    max_new_tokens: int = Field(64, ge=1, description="The longest completion, in tokens.")
    sampled: int = Field(0, ge=0, description="Completions of each prompt at `temperature`, beside the greedy one.")
    temperature: float = Field(1.0, gt=0, description="Temperature of the sampled completions.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus of the sampled completions.")
    text_split: Literal["validation", "train"] = Field("validation", description="The split of text to measure.")
    prompts_split: Literal["validation", "train"] = Field("train", description="The split of prompts to answer.")
    preferences_split: Literal["validation", "train"] = Field("train", description="The split of pairs to rank.")
    # Rows that share a forward pass differ in their last bits from rows that do not, so batch sizes are identity.
    per_device_eval_batch_size: int = Field(32, ge=1, description="Rows or pairs in one forward pass.")
    generation_batch_size: int = Field(256, ge=1, description="Completions sampled together.")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Precision of the weights and activations.")
    num_samples_shown: int = Field(3, ge=0, description="Prompts whose answers the report shows, the first ones.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of the sampled completions, the same for every model.")
    save_seconds: Annotated[float, NotIdentity()] = Field(
        30.0, gt=0, description="Seconds between saves of progress; a model that is measured is one part."
    )

    def inputs_problem(self, given: Collection[str]) -> str:
        """Something to measure is there, and answers are scored."""
        if not {"text", "prompts", "preferences"} & set(given):
            return "nothing to measure: give at least one of the inputs text, prompts and preferences"
        if "prompts" in given and self.score is None:
            return "input prompts needs `score`, a module:function that gives 1 for a right completion and 0 else"
        return ""

    def reads_splits(self) -> dict[str, tuple[str, str]]:
        """The split of each dataset that is measured."""
        fields = {"text": "text_split", "prompts": "prompts_split", "preferences": "preferences_split"}
        return {name: (getattr(self, field), field) for name, field in fields.items()}
