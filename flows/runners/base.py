"""What `flows.execute` asks of a runner: to start one stage process somewhere and follow it to its end.

Invariants of every runner:
- `Handle.events` ends only when the stage has ended, and has then given every event that the stage wrote.
- A stage never outlives its flow, whatever ends the flow: it is told to stop, saves, and ends.
- Standard error of the stage, and stray prints, come as log events with level "stderr".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from stages.contract import StageSpec


class RunnerError(Exception):
    """The stage cannot be started here; the message says what to change."""


class Handle(Protocol):
    """One attempt of one stage.

    Attributes:
        verdict: why the runner itself ended the stage (its memory limit), in one sentence; empty otherwise. An attempt
            that ended so is not tried again.
    """

    verdict: str

    def events(self) -> Iterator[dict[str, Any]]:
        """The events of the stage as they come, to the end. May be called once."""

    def stop(self, grace: float) -> None:
        """Ask the stage to save and stop; kill it if it still runs after `grace` seconds. Returns when it has ended."""

    def wait(self) -> int:
        """Wait for the end. Returns the exit code; minus the signal's number where a signal ended the stage."""


class Runner(Protocol):
    """Where stages run."""

    def start(self, spec: StageSpec) -> Handle:
        """Start the stage. `spec.scratch` is an existing, empty folder.

        Raises:
            RunnerError: it cannot be started here.
        """

    def close(self) -> None:
        """Stop what still runs, letting it save, and free what the runner holds."""
