"""Saved progress: everything that decides how a run goes on.

A snapshot is a folder: `model.safetensors`, `optimizer.safetensors`, `objective.safetensors`, `state.json` (step,
random streams, skip counters, seconds spent) and `training.jsonl` (the records so far). It is written after an
optimiser step, so that nothing of a step is half done. Restoring copies into tensors that PyTorch allocated: memory
mapped from a file may lie on other boundaries, where vectorised sums can differ in the last bit.

Tensors are saved whole, whatever ranks they were sharded over: a run may go on with another number of ranks.
"""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stages.training.distributed import Trained, placed_like, rank, whole
from stages.training.optimizers import load_optimizer_tensors, optimizer_tensors

FORMAT = 2


class OtherFormat(Exception):
    """Saved progress of another version, which cannot be read."""


@dataclass
class Progress:
    """How far a run is.

    Attributes:
        step: optimiser steps done.
        skipped: steps skipped because of a non-finite loss or gradient.
        skipped_in_a_row: how many of the latest steps were skipped.
        seconds: wall-clock seconds spent training, over all attempts.
        scaler: state of the loss scale.
    """

    step: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    seconds: float = 0.0
    scaler: dict[str, Any] = field(default_factory=dict)


def _model_tensors(trained: Trained) -> dict[str, Tensor]:
    """Trained parameters and persistent buffers by name, tied ones once; frozen ones are as they were loaded."""
    kept = set(trained.model.state_dict(keep_vars=True))
    buffers = {name: buffer for name, buffer in trained.module.named_buffers() if name in kept}
    return {name: param for name, param in trained.parameters.items() if param.requires_grad} | buffers


def _random_streams() -> tuple[dict[str, Any], dict[str, Tensor]]:
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    plain = {
        "python": [version, list(words), gauss],
        "numpy": [str(kind), np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
    }
    tensors = {"random/cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        tensors["random/cuda"] = torch.cuda.get_rng_state()
    return plain, tensors


def _set_random_streams(plain: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    version, words, gauss = plain["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = plain["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(tensors["random/cpu"])
    if "random/cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["random/cuda"])


def _packed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The whole tensors in the memory of rank 0; nothing on other ranks, which only help to collect them."""
    packed = {}
    for name, tensor in tensors.items():
        full = whole(tensor.detach())
        if rank() == 0:
            packed[name] = full.cpu().contiguous()  # safetensors refuses views; a scalar optimiser slot may be one
    return packed


def write_snapshot(
    folder: Path,
    progress: Progress,
    trained: Trained,
    optimizers: list[torch.optim.Optimizer],
    extra: dict[str, Tensor],
    records: Path,
) -> None:
    """Write a whole snapshot into the new folder `folder`. All ranks call it, and rank 0 writes.

    Args:
        folder: a path that does not exist yet.
        progress: where the run is, after an optimiser step.
        trained: the model, with its weights as they are now.
        optimizers: their state as it is now.
        extra: what the objective adds.
        records: the training.jsonl so far, copied.
    """
    weights = _packed(_model_tensors(trained))
    moments = _packed(dict(optimizer_tensors(trained.parameters, optimizers)))
    if rank() != 0:
        return
    folder.mkdir(parents=True)
    plain, streams = _random_streams()
    save_file(weights, folder / "model.safetensors")
    save_file(moments | _packed(streams), folder / "optimizer.safetensors")
    save_file(_packed(extra), folder / "objective.safetensors")
    shutil.copyfile(records, folder / "training.jsonl")
    state = {
        "format": FORMAT,
        "step": progress.step,
        "skipped": progress.skipped,
        "skipped_in_a_row": progress.skipped_in_a_row,
        "seconds": progress.seconds,
        "scaler": progress.scaler,
        "random": plain,
    }
    (folder / "state.json").write_text(json.dumps(state))


def read_snapshot(
    folder: Path, trained: Trained, optimizers: list[torch.optim.Optimizer], records: Path
) -> tuple[Progress, dict[str, Tensor]]:
    """Put a snapshot back into model, optimisers, random streams and `records`, on every rank by itself.

    Returns:
        The progress, and the objective's extra tensors.

    Raises:
        OtherFormat: the snapshot was written by another version of this module; nothing is changed.
        ValueError: the snapshot is of another model.
    """
    state = json.loads((folder / "state.json").read_text())
    if state.get("format") != FORMAT:
        raise OtherFormat(f"saved progress has format {state.get('format')!r}, and this version reads {FORMAT}")
    saved, live = load_file(folder / "model.safetensors"), _model_tensors(trained)
    if saved.keys() != live.keys():
        odd = sorted(saved.keys() ^ live.keys())[0]
        raise ValueError(f"saved progress in {folder} is of another model: {odd!r} is in only one of them")
    with torch.no_grad():
        for name, tensor in live.items():
            if tensor.shape != saved[name].shape:
                raise ValueError(f"saved progress in {folder} is of another model: {name!r} has another shape")
            tensor.copy_(placed_like(saved[name].to(tensor.device), tensor))
    tensors = load_file(folder / "optimizer.safetensors")
    streams = {name: tensors.pop(name) for name in list(tensors) if name.startswith("random/")}
    load_optimizer_tensors(trained.parameters, optimizers, tensors)
    extra = {name: tensor.clone() for name, tensor in load_file(folder / "objective.safetensors").items()}
    shutil.copyfile(folder / "training.jsonl", records)
    _set_random_streams(state["random"], streams)
    progress = Progress(state["step"], state["skipped"], state["skipped_in_a_row"], state["seconds"], state["scaler"])
    return progress, extra
