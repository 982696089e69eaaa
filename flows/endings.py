"""How steps and runs end, and what an exit code tells of an end that the stage itself could not tell."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class StepResult:
    """How a step ended.

    Attributes:
        status: "cached": its result was there; "done": it ran; "skipped": a step that it needs did not end well.
        seconds: time it took in this run.
        message: for what did not end well, why, in one sentence; for what another run computed meanwhile, which.
        code: exit code of the last attempt, minus the signal's number for a signal; None where no process ran.
        saved_step: for a stopped or failed step, the step at which progress is saved, if any is.
        kept: for a step that halted itself, the digest of a checkpoint of that moment; not the step's result.
    """

    step: str
    status: Literal["cached", "done", "failed", "stopped", "skipped"]
    key: str | None = None
    artifact: str | None = None
    outputs: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    message: str = ""
    code: int | None = None
    reason: str = ""
    attempts: int = 0
    saved_step: int | None = None
    kept: str | None = None

    @property
    def ok(self) -> bool:
        return self.status in ("cached", "done")


@dataclass(frozen=True)
class RunResult:
    """How a run ended: "done" only if every step did."""

    run: str
    state: Literal["done", "failed", "stopped"]
    steps: dict[str, StepResult]
    seconds: float

    @property
    def ok(self) -> bool:
        return self.state == "done"


def ending(code: int) -> str:
    """What is known of an attempt that said nothing of its end."""
    try:
        name = signal.Signals(-code).name if code < 0 else ""
    except ValueError:
        name = f"signal {-code}"
    if name:
        return f"killed by {name}{' (out of memory?)' if code == -signal.SIGKILL else ''}"
    return f"ended with exit code {code} and said nothing; `headrace logs` shows what it printed"


def was_killed(code: int) -> bool:
    """Whether a signal from outside ended the process. A process that aborts or faults itself has crashed."""
    number = -code if code < 0 else code - 128  # 137 is what shells and containers make of SIGKILL
    return number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
