"""Settings of the pretrain stage: the shape of a new model, and how it is trained. Imports no torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from stages.contract import Input
from stages.training.config import TokenLossConfig


class Config(TokenLossConfig):
    """Train a causal language model from random weights, or go on from a checkpoint, on packed text or chat rows."""

    VERSION = 1
    INPUTS: ClassVar[dict[str, Input]] = {
        "data": Input(("dataset",), ("text", "chat"), description="Packed rows; its tokenizer becomes the model's."),
        "model": Input(
            ("checkpoint",), required=False, description="Go on from these weights; the sizes below are then unused."
        ),
    }
    OUTPUT = "checkpoint"

    architecture: Literal["qwen3", "llama"] = Field("qwen3", description="Architecture of a new model.")
    hidden_size: int = Field(128, ge=1, description="Width of the residual stream.")
    num_hidden_layers: int = Field(3, ge=1, description="Decoder layers.")
    num_attention_heads: int = Field(4, ge=1, description="Query heads.")
    num_key_value_heads: int | None = Field(
        None, ge=1, description="Key and value heads; num_attention_heads when empty."
    )
    head_dim: int | None = Field(
        None, ge=2, description="Size of a head; hidden_size / num_attention_heads when empty."
    )
    intermediate_size: int | None = Field(
        None, ge=1, description="Width of the feed-forward layers; three times hidden_size when empty."
    )
    tie_word_embeddings: bool = Field(True, description="Share one matrix between embedding and output head.")
    rope_theta: float = Field(10_000.0, gt=0, description="Base of the rotary position embedding.")
    max_position_embeddings: int | None = Field(
        None, ge=1, description="Longest sequence the model is for; the row length of the data when empty."
    )
    initializer_range: float = Field(0.02, gt=0, description="Standard deviation of the initial weights.")

    @model_validator(mode="after")
    def _check_heads(self) -> Config:
        if self.num_attention_heads % self.key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.key_value_heads})"
            )
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size ({self.hidden_size}) must be a multiple of num_attention_heads "
                f"({self.num_attention_heads}), or head_dim must be given"
            )
        if self.head_size % 2:
            raise ValueError(f"head_dim ({self.head_size}) must be even, for rotary positions turn pairs")
        return self

    @property
    def key_value_heads(self) -> int:
        """Key and value heads, the default filled in."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """Size of a head, the default filled in."""
        return self.head_dim or self.hidden_size // self.num_attention_heads
