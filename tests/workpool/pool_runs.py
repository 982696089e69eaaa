"""A work pool with workers, and recipes of toy stages that are run on it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from toy_stages import Toys

from flows.endings import RunResult
from flows.execute import Execution, run_all
from flows.plan import make_plan
from flows.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[2]
LOST = "45"  # HEADRACE_LOST_SECONDS
Event = dict[str, Any]


class Pool:
    """A work pool with the stage deployments, and its workers. Worker N gives its stages WORKER=N."""

    def __init__(self, api: str, folder: Path) -> None:
        self.name = f"pool-{uuid.uuid4().hex[:8]}"
        self.folder = folder
        self.environment = os.environ | {
            "PREFECT_API_URL": api,
            "PYTHONPATH": str(ROOT),
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "HEADRACE_LOST_SECONDS": LOST,
        }
        deploy = [sys.executable, "-m", "flows.service.stage_deployments", "--pool", self.name]
        for _ in range(2):  # twice changes nothing
            done = subprocess.run(deploy, env=self.environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
        self.said = done.stdout
        self.workers: list[subprocess.Popen[bytes]] = []

    def start_worker(self) -> subprocess.Popen[bytes]:
        """A worker that runs one step at a time."""
        number = len(self.workers) + 1
        command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", self.name, "--type", "process"]
        with open(self.folder / f"worker-{number}.log", "wb") as log:
            worker = subprocess.Popen(
                [*command, "--limit", "1", "--name", f"worker-{number}"],
                env=self.environment | {"WORKER": str(number)},
                cwd=self.folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.workers.append(worker)
        return worker

    def stop(self) -> None:
        for worker in self.workers:
            if worker.poll() is None:
                os.killpg(worker.pid, signal.SIGTERM)
        for worker in self.workers:
            try:
                worker.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(worker.pid, signal.SIGKILL)
                worker.wait()


class Runs:
    """Runs recipes of toy stages on the pool, and keeps the events of the last run."""

    def __init__(self, toys: Toys) -> None:
        self.toys = toys
        self.events: list[Event] = []
        self.react: Callable[[Event], None] = lambda event: None
        self.execution: Execution | None = None
        self.count = 0

    def hear(self, event: Event) -> None:
        self.events.append(event)
        self.react(event)

    def __call__(self, path: str, *overrides: str, workers: int = 2) -> RunResult:
        from flows.runners.workpool import WorkPoolRunner

        self.events.clear()
        self.count += 1
        plan = make_plan(load_recipe(path, overrides), self.toys.store)
        runner = WorkPoolRunner()
        try:
            self.execution = Execution(plan, runner=runner, run_id=f"run-{self.count}", listener=self.hear)
            return run_all(self.execution, workers=workers)
        finally:
            runner.close()
