"""What is written down of a run: its document in the store, and the state of the code's repository."""

from __future__ import annotations

import os
import platform
import subprocess
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import stages
from flows.endings import StepResult
from flows.plan import Plan
from stages.artifacts import Damaged, Store, StoreError, processes, read_run, write_run

HEARTBEAT = 60.0  # seconds


def run_document(plan: Plan, run_id: str) -> dict[str, Any]:
    """The document of a run that has just begun.

    It holds id, recipe (name), recipe_path, recipe_text, overrides, parameters, until, force, accept_code, store,
    sources ("step.input" -> digest of what comes from outside the run), host, pid, place and born (which process that
    is, see `stages.artifacts.processes`), heartbeat (seconds after which the document is written again at the latest
    while the run goes on), state ("running", then "done", "failed" or "stopped"; "killed" where the process could not
    say its end), started, finished (ISO 8601, UTC), seconds, and `steps`: for each step stage, needs,
    inputs, status, reason, key, artifact, outputs, seconds, metrics, message, code, attempts, saved_step, kept, logs,
    started, finished.
    """
    recipe = plan.recipe
    return {
        "id": run_id,
        "recipe": recipe.name,
        "recipe_path": str(recipe.path),
        "recipe_text": recipe.text,
        "overrides": list(recipe.overrides),
        "parameters": recipe.parameters,
        "until": list(plan.until),
        "force": sorted(plan.force),
        "accept_code": sorted(plan.accept_code),
        "store": plan.store.url,
        "sources": {f"{step}.{name}": source.digest for (step, name), source in plan.sources.items() if source.digest},
        "host": platform.node(),
        "pid": os.getpid(),
        "place": processes.place(),
        "born": processes.born(os.getpid()),
        "heartbeat": HEARTBEAT,
        "state": "running",
        "started": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "finished": None,
        "seconds": None,
        "steps": {
            planned.step: {
                "stage": planned.stage,
                "needs": list(planned.needs),
                "inputs": {name: ref.text for name, ref in recipe.steps[planned.step].inputs.items()},
                "status": "waiting",
                "reason": planned.reason,
                "key": planned.key,
                "artifact": None,
                "outputs": {},
                "seconds": None,
                "metrics": {},
                "message": "",
                "code": None,
                "attempts": 0,
                "saved_step": None,
                "kept": None,
                "logs": None,
            }
            for planned in plan.steps
        },
    }


class Heartbeat:
    """Calls `write` every `HEARTBEAT` seconds from `start` to `stop`; a store that is away does not matter to it."""

    def __init__(self, write: Callable[[], None]) -> None:
        self._write = write
        self._over = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    def _beat(self) -> None:
        while not self._over.wait(HEARTBEAT):
            with suppress(StoreError):
                self._write()


def step_document(result: StepResult) -> dict[str, Any]:
    """What the run's document holds of a step that has ended."""
    return {name: value for name, value in asdict(result).items() if name != "step"}


def record_killed(store: Store, runs: Iterable[str]) -> None:
    """Write down of runs whose process on this machine is gone that they were killed, so that others see it too."""
    for name in runs:
        with suppress(Damaged, ValueError):
            if (run := read_run(store, name)) is not None and run.get("state") == "killed":
                write_run(store, run)


def git_state() -> dict[str, Any] | None:
    """The commit of the repository that this code is in, and whether files of it differ; None where there is none."""
    folder = Path(stages.__file__ or "").parent
    command = ["git", "-C", str(folder)]
    try:
        commit = subprocess.run([*command, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True)
        changed = subprocess.run(
            [*command, "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit.stdout.strip(), "changed": bool(changed.stdout.strip())}
