"""Dropout, switched off for methods that compare log-probabilities with each other."""

from __future__ import annotations

import torch


def disable_dropout(model: torch.nn.Module) -> None:
    """Set every dropout of the model to 0, attention's included. Its config, which is saved, keeps what it says."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]
