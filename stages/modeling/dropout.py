"""Dropout, switched off for methods that compare log-probabilities with each other."""

from __future__ import annotations

from typing import Any

import torch

from stages.contract import Refused

# What the probabilities of a module are called that act in training alone: dropout, layer drop, a router's jitter.
_NOISE = ("drop", "jitter")


def disable_dropout(model: Any) -> None:
    """Set every dropout of the model to 0, attention's included, and all else that is random in training alone.

    The model's config, which is saved, keeps what it says. A last pass in training mode proves that nothing is left.

    Raises:
        Refused: the model's code takes a probability from its config in each pass, so it cannot be switched off here.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and any(word in name for word in _NOISE):
                setattr(module, name, 0.0)
    if _is_random(model):
        settings = model.config.get_text_config(decoder=True).to_dict()
        left = [
            f"{name} ({value:g})"
            for name, value in sorted(settings.items())
            if isinstance(value, float) and value and any(word in name for word in _NOISE)
        ]
        raise Refused(
            f"the model ({model.config.model_type}) stays random in training although disable_dropout is on; set "
            f"{' and '.join(left) or 'its dropout'} to 0 in its config.json, or disable_dropout to false"
        )


def _is_random(model: Any) -> bool:
    """Whether 16 tokens give other logits in training mode than in evaluation. The random streams stay as they were."""
    embedding = model.get_input_embeddings().weight
    ids = (torch.arange(16, device=embedding.device) * 7919 % embedding.shape[0])[None]

    def logits() -> torch.Tensor:
        passed: torch.Tensor = model(input_ids=ids, use_cache=False).logits.float()
        return passed

    modes = [(module, module.training) for module in model.modules()]
    with torch.random.fork_rng([embedding.device] if embedding.is_cuda else []), torch.no_grad():
        try:
            model.eval()
            without = logits()
            model.train()
            passes = []
            for seed in range(2):
                torch.manual_seed(seed)
                passes.append(logits())
        finally:
            for module, mode in modes:
                module.training = mode
    tolerance = 1e-3 * float(without.abs().max())
    return not all(torch.allclose(without, one, rtol=1e-3, atol=tolerance) for one in passes)
