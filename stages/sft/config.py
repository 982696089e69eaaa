"""Settings of supervised fine-tuning. Imports no torch."""

from __future__ import annotations

from typing import ClassVar

from stages.contract import Input
from stages.training.config import TokenLossConfig


class Config(TokenLossConfig):
    """Fine-tune a checkpoint on chats: only the assistant's turns are trained on."""

    VERSION = 1
    INPUTS: ClassVar[dict[str, Input]] = {
        "model": Input(("checkpoint",), description="The weights to start from."),
        "data": Input(("dataset",), ("chat",), description="Packed chats, tokenized with the model's tokenizer."),
    }
    OUTPUT = "checkpoint"
