"""Every stage as a deployment, so that workers on other machines run the steps of a flow (`--runner workpool`).

The model: `stage/<name>` is a deployment of the flow `stage`. A flow run of it takes the spec and the user's code from
the store, runs the stage with the runner of its own machine (HEADRACE_STAGE_RUNNER: process, or docker), and tells what
the stage says through the store (`flows.runners.relay`). `stage/custom` is for stages of the user's own.

Invariants:
- The stage never outlives the flow that asked for it: without its beats it is told to stop, saves, and ends.
- However the flow run ends, the end is told, unless the machine is lost; then the signs of life end.
- Deploying again changes nothing.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import queue
import shlex
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from prefect import flow, get_client, get_run_logger
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.states import Cancelled, Completed, Failed, State
from prefect.utilities.callables import parameter_schema

from flows.recipe_model import stage_names
from flows.runners.base import Handle, Runner, RunnerError
from flows.runners.container_files import SPEC
from flows.runners.relay import Beats, Channel
from stages.artifacts import StoreError, open_store
from stages.artifacts.variables import seconds_of
from stages.contract import ExitCode, StageSpec

FLOW = "stage"
CUSTOM = "custom"
TAG = "headrace"
SEND_SECONDS = 1.0  # between two batches while there is something to say
ALIVE_SECONDS = 10.0  # between two signs of life
LOST_SECONDS = 90.0  # without a sign of life from the other side, it is taken for lost; HEADRACE_LOST_SECONDS
GRACE = 60.0
_LEVELS = {"debug": logging.DEBUG, "warning": logging.WARNING, "error": logging.ERROR}


def lost_seconds() -> float:
    """How long the other side may give no sign of life: HEADRACE_LOST_SECONDS, or 90.

    Raises:
        RunnerError: the variable is not a number of seconds.
    """
    try:
        return seconds_of("HEADRACE_LOST_SECONDS", LOST_SECONDS, least=ALIVE_SECONDS + 1.0)  # room for a sign of life
    except StoreError as error:
        raise RunnerError(str(error)) from None


def deployment_of(stage: str) -> str:
    """The deployment that runs a stage: "stage/dpo", or "stage/custom" for one of the user's own."""
    return f"{FLOW}/{CUSTOM if '.' in stage else stage}"


# The flow run on the worker's machine


@flow(name=FLOW, flow_run_name="{run}/{step}", persist_result=False, retries=0, validate_parameters=True)
def run_stage(run: str, step: str, stage: str, store: str, channel: str) -> State[Any]:
    """Run one attempt of a step for a flow on another machine. Started by `--runner workpool`, not by hand.

    Args:
        run: the run that the step belongs to.
        step: the recipe's name of the step.
        stage: the stage that it runs.
        store: folder or URL of the artifact store, as this machine reaches it too.
        channel: where in the store the spec is, and where events go.
    """
    relay = Channel(open_store(store), channel)
    logger = get_run_logger()
    teller = _Teller(relay, logger)
    code, verdict = 1, ""
    try:
        with _scratch() as scratch:
            code, verdict = _run_here(relay, scratch, teller)
    except (RunnerError, StoreError) as error:
        verdict = str(error)
    finally:
        teller.end(code, verdict)
    told = f"({code}) {verdict or teller.message}".rstrip()
    if code == ExitCode.DONE:
        return Completed(message=f"step {step} of run {run}")
    return Cancelled(name="Stopped", message=told) if code == ExitCode.STOPPED else Failed(message=told)


@contextmanager
def _scratch() -> Iterator[Path]:
    root = os.environ.get("HEADRACE_SCRATCH") or ("/scratch" if os.access("/scratch", os.W_OK) else None)
    if root is not None:
        Path(root).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="headrace-stage-", dir=root) as folder:
        yield Path(folder)


def _run_here(relay: Channel, scratch: Path, teller: _Teller) -> tuple[int, str]:
    """Start the stage and follow it to its end: its exit code, and the runner's verdict or ""."""
    spec = _unpack(relay, scratch)
    if relay.asked_to_stop() is not None:
        return int(ExitCode.STOPPED), "stopped before it started"
    runner = _runner()
    try:
        handle = runner.start(spec)
        watch = _Watch(relay, handle, teller)
        try:
            for event in handle.events():
                teller.tell(event)
            return handle.wait(), handle.verdict
        except BaseException:  # Prefect's cancellation among them
            handle.stop(GRACE)
            for event in handle.events():
                teller.tell(event)
            raise
        finally:
            watch.end()
    finally:
        runner.close()


def _unpack(relay: Channel, scratch: Path) -> StageSpec:
    with tarfile.open(fileobj=io.BytesIO(relay.unpack())) as archive:
        archive.extractall(scratch / "luggage", filter="data")
    spec = StageSpec.model_validate_json((scratch / "luggage" / SPEC).read_bytes())
    work = scratch / "work"
    work.mkdir()
    roots = [str(scratch / "luggage" / "code" / Path(folder).name) for folder in spec.python_path]
    return spec.model_copy(update={"scratch": str(work), "python_path": roots})


def _runner() -> Runner:
    name = os.environ.get("HEADRACE_STAGE_RUNNER", "process")
    if name == "docker":
        from flows.runners.docker import DockerRunner

        return DockerRunner()
    if name != "process":
        raise RunnerError(f"HEADRACE_STAGE_RUNNER is {name!r} on this worker; set it to process or docker")
    from flows.runners.process import ProcessRunner

    return ProcessRunner(fork_server=False)  # there is but one stage to start


class _Teller:
    """Sends events in batches from a thread of its own, and writes what is worth it to the flow run's log."""

    def __init__(self, relay: Channel, logger: Any) -> None:
        self.message = ""
        self._relay, self._logger = relay, logger
        self._events: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._number = 0
        self._thread = threading.Thread(target=self._send_until_end, name="relay", daemon=True)
        self._thread.start()

    def tell(self, event: dict[str, Any]) -> None:
        """Pass an event on."""
        self._events.put(event)
        match event.get("type"):
            case "log":
                self._logger.log(_LEVELS.get(str(event.get("level")), logging.INFO), "%s", event.get("text"))
            case "resumed" | "saved":
                self._logger.info("%s at step %s", event["type"], event.get("at"))
            case "outcome":
                self.message = str(event.get("message") or "")

    def end(self, code: int, verdict: str) -> None:
        """Say how it ended, and return when all is sent."""
        self._events.put({"type": "end", "code": code, "verdict": verdict})
        self._events.put(None)
        self._thread.join()

    def _send_until_end(self) -> None:
        over = False
        sent = 0.0
        while not over:
            batch: list[dict[str, Any]] = []
            limit = time.monotonic() + SEND_SECONDS
            while not over and time.monotonic() < limit:
                try:
                    event = self._events.get(timeout=max(0.01, limit - time.monotonic()))
                except queue.Empty:
                    break
                over = event is None
                if event is not None:
                    batch.append(event)
            if batch or time.monotonic() - sent > ALIVE_SECONDS:
                self._send(batch)
                sent = time.monotonic()

    def _send(self, batch: list[dict[str, Any]]) -> None:
        """Put a batch, trying again while the store is away: nothing may be left out."""
        self._number += 1
        limit = time.monotonic() + LOST_SECONDS
        while True:
            try:
                self._relay.send(self._number, batch)
                return
            except StoreError as error:
                self._logger.warning("The store is away: %s", error)
                if time.monotonic() > limit:
                    return
                time.sleep(2 * SEND_SECONDS)


class _Watch:
    """Stops the stage when it is asked for, or when the flow that wanted it gives no sign of life."""

    def __init__(self, relay: Channel, handle: Handle, teller: _Teller) -> None:
        self._relay, self._handle, self._teller = relay, handle, teller
        self._lost = lost_seconds()
        self._over = threading.Event()
        threading.Thread(target=self._look, name="watch", daemon=True).start()

    def end(self) -> None:
        self._over.set()

    def _look(self) -> None:
        beats = Beats(self._lost)
        while not self._over.wait(SEND_SECONDS):
            try:
                grace = self._relay.asked_to_stop()
                beats.see(self._relay.last_beat())
            except StoreError:  # what the stage itself does then is its own affair
                continue
            if grace is None and beats.stopped:
                text = "the flow that wanted this gives no sign of life: the stage saves and stops"
                self._teller.tell({"type": "log", "level": "warning", "time": round(time.time(), 3), "text": text})
                grace = GRACE
            if grace is not None:
                self._handle.stop(grace)
                return


# The deployments


# Without a command, Prefect's process worker starts an interpreter that prepares a workspace, and then another one for
# the run. A stage needs no workspace, so the run is started at once, by the interpreter that the worker runs with: it
# stands first in its command line, and elsewhere on another machine than here.
_START = (
    "p=$(tr '\\0' '\\n' < /proc/$PPID/cmdline | head -n 1); "
    'case $p in /*) ;; */*) p=$(readlink /proc/$PPID/cwd)/$p ;; esac; exec "${p:-python}" -P -m flows.service.engine'
)


def deploy_stages(client: SyncPrefectClient, pool: str) -> list[str]:
    """Have a deployment of every stage on a work pool. Returns their names.

    The pool is made, of type process, where there is none of that name.
    """
    try:
        kind = client.read_work_pool(pool).type
    except ObjectNotFound:
        with suppress(ObjectAlreadyExists):
            client.create_work_pool(WorkPoolCreate(name=pool, type="process"))
        kind = client.read_work_pool(pool).type
    flow_id = client.create_flow_from_name(FLOW)
    names = [*stage_names(), CUSTOM]
    for name in names:
        what = "a stage of your own" if name == CUSTOM else f"the stage `{name}`"
        client.create_deployment(
            flow_id,
            name,
            # __module__ is another where this is run as a script
            entrypoint="flows.service.stage_deployments.run_stage",
            work_pool_name=pool,
            tags=[TAG, FLOW],
            description=f"Runs {what} for a flow on another machine (`headrace run RECIPE --runner workpool`).",
            parameter_openapi_schema=parameter_schema(run_stage).model_dump_for_openapi(),
            enforce_parameter_schema=True,
            job_variables={"command": shlex.join(["sh", "-c", _START])} if kind == "process" else {},
            pull_steps=[],
        )
    return [f"{FLOW}/{name}" for name in names]


def main() -> None:
    """`python -m flows.service.stage_deployments --pool NAME`: deploy every stage on a work pool."""
    parser = argparse.ArgumentParser(prog="python -m flows.service.stage_deployments", description=main.__doc__)
    parser.add_argument("--pool", default="headrace", metavar="NAME", help="the work pool (headrace)")
    pool = parser.parse_args().pool
    with get_client(sync_client=True) as client:
        names = deploy_stages(client, pool)
    print(f"{len(names)} deployments on work pool {pool}: {', '.join(names)}")


if __name__ == "__main__":
    main()
