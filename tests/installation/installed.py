"""A real `headrace up` for tests: a Prefect server with its pages, a worker and deployments, in a folder of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import ArtifactFilter, FlowRunFilter, TaskRunFilter
from prefect.client.schemas.objects import Artifact, FlowRun, TaskRun
from prefect.client.schemas.responses import SetStateStatus
from toy_recipe import write_toy

from stages.artifacts import open_store, read_run

ROOT = Path(__file__).resolve().parent.parent.parent
START = 700  # seconds for what takes half a minute on an idle machine
RUN = 400


class Installed:
    """`headrace up` in a folder, with `headrace.yaml` there.

    Attributes:
        folder: where it was started.
        store_url: its store: `store` there, unless its settings say otherwise.
        said: what the command printed so far.
    """

    def __init__(self, folder: Path, home: Path, environment: dict[str, str] | None = None) -> None:
        self.folder, self.home = folder, home
        self.store_url = str(folder / "store")
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "HEADRACE_"))
        }
        self.environment |= {"HEADRACE_HOME": str(home), "PYTHONPATH": str(ROOT)} | (environment or {})
        self.process: subprocess.Popen[str] | None = None
        self.output = folder / "up.log"

    def start(self, *arguments: str) -> None:
        """Start it and wait until it says that it is ready."""
        with open(self.output, "w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-m", "flows.cli", "up", *(arguments or ("--port", "0", "--browser-port", "0"))],
                cwd=self.folder,
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
            )
        until(lambda: "Ready in" in self.said or self.process.poll() is not None, START, "up")
        assert self.process.poll() is None, self.said

    @property
    def said(self) -> str:
        return self.output.read_text()

    def stop(self) -> int:
        """Ask it to stop, as Ctrl-C does; returns its exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        return self.process.wait(START)

    @property
    def addresses(self) -> dict[str, Any]:
        return json.loads((self.home / "up.json").read_text())

    @property
    def port(self) -> int:
        return int(self.addresses["pages"].rpartition(":")[2])

    def client(self) -> SyncPrefectClient:
        return SyncPrefectClient(self.addresses["api"], httpx_settings={"timeout": 60})

    def child(self, words: str) -> int:
        """The pid of the child of `up` whose command line has these words."""
        assert self.process is not None
        for pid in children(self.process.pid):
            if words in command_line(pid):
                return pid
        raise AssertionError(f"no child of up is {words!r}")

    # Runs

    def submit(self, deployment: str, **parameters: Any) -> UUID:
        """Trigger a run of a deployment; returns the flow run's id."""
        with self.client() as client:
            found = client.read_deployment_by_name(deployment)
            return client.create_flow_run_from_deployment(found.id, parameters=parameters).id

    def read(self, flow_run: UUID) -> FlowRun:
        with self.client() as client:
            return client.read_flow_run(flow_run)

    def ended(self, flow_run: UUID, limit: float = RUN) -> FlowRun:
        """Wait until a run has ended."""
        return self.reached(flow_run, lambda run: run.state is not None and run.state.is_final(), limit)

    def reached(self, flow_run: UUID, test: Callable[[FlowRun], bool], limit: float = RUN) -> FlowRun:
        """Wait until a run passes a test; a server that is away is waited for."""
        found: list[FlowRun] = []

        def look() -> bool:
            try:
                found[:] = [self.read(flow_run)]
            except (httpx.HTTPError, OSError):
                return False
            return test(found[0])

        try:
            until(look, limit, f"run {flow_run}")
        except AssertionError:
            worker = (self.home / "logs" / "worker.log").read_text(errors="replace")[-3000:]
            raise AssertionError(f"{found and found[0].state}\n{self.said}\n{worker}") from None
        return found[0]

    def run(self, deployment: str, **parameters: Any) -> FlowRun:
        """Trigger a run and wait for its end."""
        return self.ended(self.submit(deployment, **parameters))

    def submit_recipe(self, recipe: str, *overrides: str, until: Iterable[str] = (), force: Iterable[str] = ()) -> UUID:
        """Trigger a run of a recipe that is not among those of the form, as the API may where the form is not asked."""
        with self.client() as client:
            found = client.read_deployment_by_name("headrace/pipeline")
            parameters = {"recipe": recipe, "overrides": list(overrides), "until": list(until), "force": list(force)}
            answer = client.request(
                "POST",
                f"/deployments/{found.id}/create_flow_run",
                json={"parameters": found.parameters | parameters, "enforce_parameter_schema": False},
            )
        return UUID(answer.json()["id"])

    def run_recipe(self, recipe: str, *overrides: str, limit: float = RUN) -> FlowRun:
        """Trigger a run of a recipe and wait for its end."""
        return self.ended(self.submit_recipe(recipe, *overrides), limit)

    def tasks(self, flow_run: UUID, expected: int | None = None) -> dict[str, TaskRun]:
        """The task runs of a run by name; with `expected`, once that many have ended on the server."""
        found: list[TaskRun] = []

        def look() -> bool:
            with self.client() as client:
                found[:] = client.read_task_runs(
                    flow_run_filter=FlowRunFilter(id={"any_": [flow_run]}), task_run_filter=TaskRunFilter()
                )
            return expected is None or (
                len(found) == expected and all(item.state is not None and item.state.is_final() for item in found)
            )

        until(look, 60, f"{expected} tasks of {flow_run}")
        return {item.name: item for item in found}

    def pages(self, flow_run: UUID) -> dict[str, Artifact]:
        """The pages (artifacts) that a run has left, by key."""
        with self.client() as client:
            found = client.read_artifacts(
                artifact_filter=ArtifactFilter(), flow_run_filter=FlowRunFilter(id={"any_": [flow_run]})
            )
        return {str(item.key): item for item in found}

    def progress(self, flow_run: UUID, key: str) -> float:
        """The percentage of a progress page; 0 before there is one."""
        page = self.pages(flow_run).get(key)
        return float(page.data) if page is not None else 0.0  # type: ignore[arg-type]

    def document(self, name: str) -> dict[str, Any] | None:
        """What the store knows of a run."""
        return read_run(open_store(self.store_url), name)

    def running_step(self, name: str, step: str) -> bool:
        """Whether a step of a run is being computed."""
        document = self.document(name)
        return document is not None and document["steps"].get(step, {}).get("status") == "running"


def until(test: Callable[[], bool], limit: float, what: str) -> None:
    """Wait until a test passes."""
    end = time.monotonic() + limit
    while not test():
        if time.monotonic() > end:
            raise AssertionError(f"{what}: not within {limit:.0f} s")
        time.sleep(0.2)


def resume(installed: Installed, flow_run: UUID, **answer: object) -> None:
    """As the form of a paused run does, once it is there: the run is paused a moment before its form is saved."""

    def accepted() -> bool:
        with installed.client() as client:
            given = client.resume_flow_run(flow_run, run_input=dict(answer))
        return given.status == SetStateStatus.ACCEPT

    until(accepted, 60, "the answer is taken")


def children(pid: int) -> list[int]:
    """The direct children of a process."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(item) for item in task.read_text().split()]
    return found


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def processes_of(flow_run: UUID) -> list[int]:
    """Every living process that a flow run has started: its engine, fork server and stages, by their environment."""
    mark = f"PREFECT__FLOW_RUN_ID={flow_run}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            alive = folder.joinpath("stat").read_text().rpartition(")")[2].split()[0] != "Z"
            if alive and mark in folder.joinpath("environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def engine_of(flow_run: UUID) -> int:
    """The process of a flow run itself."""
    return next(pid for pid in processes_of(flow_run) if "flows.service.engine" in command_line(pid))


def gone(flow_run: UUID) -> None:
    """Wait until no process of a flow run is left."""
    until(lambda: not processes_of(flow_run), 120, f"end of all processes of {flow_run}")


def kill(pids: Iterable[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


SETTINGS = """\
store: store
recipes: [toy.yaml, quickstart]
nightly:
  production: {recipe: toy.yaml, gate: ["exact_match >= 0.1"], warm_start: better.model}
"""


def prepared(folder: Path) -> Installed:
    """A folder with the toy recipe and settings, for a `headrace up` that is not started yet."""
    folder.mkdir(exist_ok=True)
    write_toy(folder)
    (folder / "headrace.yaml").write_text(SETTINGS)
    return Installed(folder, folder / "home")


def copy_mini(folder: Path) -> None:
    """Have the quickstart in miniature, `mini.yaml`, in a folder."""
    for name in ("mini.yaml", "mini_rewards.py"):
        shutil.copy(ROOT / "tests" / "end_to_end" / name, folder / name)
