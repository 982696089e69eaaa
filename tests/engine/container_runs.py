"""Recipes of toy stages, run in containers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import docker
from toy_stages import Toys

from flows.endings import RunResult
from flows.execute import Execution, run_all
from flows.plan import make_plan
from flows.recipe import load_recipe
from flows.runners import engine
from flows.runners.docker import DockerRunner

ROOT = Path(__file__).resolve().parents[2]
Event = dict[str, Any]


def containers(client: docker.DockerClient, installation: str) -> list[Any]:
    """The containers of an installation, running or not."""
    labels = {"label": f"{engine.INSTALLATION}={installation}"}
    return list(client.containers.list(all=True, filters=labels, ignore_removed=True))


class Runs:
    """Runs recipes of toy stages in containers, on a folder store unless told otherwise; keeps the last events."""

    def __init__(self, toys: Toys) -> None:
        self.toys = toys
        self.events: list[Event] = []
        self.react: Callable[[Event], None] = lambda event: None
        self.runner: DockerRunner | None = None
        self.execution: Execution | None = None
        self.count = 0

    def hear(self, event: Event) -> None:
        self.events.append(event)
        self.react(event)

    def __call__(self, path: str, *overrides: str, store: str | None = None, **options: Any) -> RunResult:
        self.events.clear()
        self.count += 1
        plan = make_plan(load_recipe(path, overrides), store or self.toys.store)
        runner = self.runner or DockerRunner(**options)
        try:
            self.execution = Execution(plan, runner=runner, run_id=f"run-{self.count}", listener=self.hear)
            return run_all(self.execution)
        finally:
            if self.runner is None:
                runner.close()

    def texts(self) -> list[str]:
        return [str(event.get("text", "")) for event in self.events if event["type"] == "log"]


def start(folder: Path, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Start `headrace` in a folder; its events are on standard output."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "flows.cli", *arguments],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        **options,
    )


def events_of(process: subprocess.Popen[str]) -> tuple[int, list[dict[str, Any]]]:
    """Read a command to its end: its exit code and its events."""
    assert process.stdout is not None
    lines = process.stdout.read().splitlines()
    process.stdout.close()
    events = []
    for line in lines:
        try:
            events.append(json.loads(line))
        except ValueError:
            events.append({"type": "text", "text": line})
    return process.wait(), events
