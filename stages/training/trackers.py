"""Experiment trackers: TensorBoard, MLflow, Weights & Biases and Trackio, through accelerate's classes for them.

A tracker is shown what `training.jsonl` and the display hold and decides nothing. A run is called after its step and a
hash of its settings and inputs: an attempt that goes on is drawn into the same curve, other settings into another one.
Where it writes to, and its secrets, come from its own environment variables (`TENSORBOARD_LOGGING_DIR`,
`MLFLOW_TRACKING_URI`, `WANDB_API_KEY`, `TRACKIO_DIR`, ...). A tracker that fails while a run goes on is reported once
and left out from then on; one that is not installed is refused before the first step, for accelerate would leave it out
without a word.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

from stages.contract import Refused, StageContext
from stages.training.config import TrainingConfig

PROJECT = "headrace"
MODULES = {
    "tensorboard": ("tensorboard", "tensorboardX"),
    "mlflow": ("mlflow",),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
}


class Trackers:
    """The trackers of a run that still work; `log` and `close` do nothing where there is none."""

    def __init__(self, context: StageContext[Any], trackers: list[Any]) -> None:
        self.context = context
        self.trackers = trackers

    def log(self, record: dict[str, Any], **more: float) -> None:
        """Show one line of training.jsonl (its `step` is the step) and further figures."""
        if not self.trackers:
            return
        values = {name: value for name, value in (record | more).items() if name != "step" and value is not None}
        self._each("log", values, step=record["step"])

    def close(self) -> None:
        """Let every tracker write what it still holds."""
        self._each("finish")

    def _each(self, method: str, *args: Any, **kwargs: Any) -> None:
        for tracker in list(self.trackers):
            try:
                getattr(tracker, method)(*args, **kwargs)
            except Exception as error:  # whatever a service or its client may raise; training does not depend on it
                self.trackers.remove(tracker)
                self.context.log(f"tracker {tracker.name} failed and is left out: {error}", "warning")


def start_trackers(context: StageContext[Any], config: TrainingConfig, *, main: bool = True) -> Trackers:
    """Start what `report_to` names.

    Args:
        context: gives the run's name in the trackers, with the config.
        config: stored by each tracker as the run's settings.
        main: whether this is the rank that reports; another one gets no tracker.

    Raises:
        Refused: a tracker's package is not installed, or it cannot be started.
    """
    started: list[Any] = []
    for name in config.report_to if main else []:
        if not any(importlib.util.find_spec(module) for module in MODULES[name]):
            raise Refused(f"report_to names {name}, which is not installed; pip install {MODULES[name][0]}")
        tracker = _tracker(name, run_name(context, config))
        tracker.main_process_only = False  # this rank is the one that reports; accelerate need not find out
        try:
            tracker.start()
            tracker.store_init_configuration(_settings(config))
        except Exception as error:
            raise Refused(f"report_to: {name} cannot be started: {error}") from error
        started.append(tracker)
    return Trackers(context, started)


def run_name(context: StageContext[Any], config: TrainingConfig) -> str:
    """The recipe's name of the step (the stage's, where there is none), and a hash of what decides how it goes."""
    step = context.step or type(config).__module__.split(".")[-2]
    decisive = json.dumps([config.identity(), context.digests], sort_keys=True)
    return f"{step}-{hashlib.sha256(decisive.encode()).hexdigest()[:8]}"


def _tracker(name: str, run: str) -> Any:
    from accelerate import PartialState
    from accelerate.tracking import MLflowTracker, TensorBoardTracker, TrackioTracker, WandBTracker

    PartialState()  # accelerate's log messages need it
    if name == "tensorboard":
        return TensorBoardTracker(run, Path(os.environ.get("TENSORBOARD_LOGGING_DIR", "runs")))
    if name == "mlflow":
        return MLflowTracker(experiment_name=PROJECT, run_name=run)
    if name == "wandb":
        return WandBTracker(PROJECT, name=run)
    return TrackioTracker(PROJECT, name=run)


def _settings(config: TrainingConfig) -> dict[str, Any]:
    return {
        name: value if isinstance(value, bool | int | float | str) else str(value)
        for name, value in config.model_dump().items()
    }
