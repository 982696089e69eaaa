"""Runs whose process is gone, told to the server: what `headrace up` does now and then for the worker of this machine.

A worker says itself how a flow's process ended. It cannot where it was killed with it, or the machine went down: the
server then shows the run as running for ever. Here the runs of the work pool are compared with the processes of this
machine.

Invariants:
- A run is only touched when its process was missing at two looks in a row, or everything has been stopped.
- One that somebody had cancelled is Cancelled; any other is scheduled again and goes on from what is saved, up to
  `ATTEMPTS` attempts, then it is Crashed.
- A stage that another flow asked for (`flows.service.stage_deployments`) is left alone: that flow notices its loss, and
  makes a new attempt.
"""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

from prefect import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.states import AwaitingRetry, Cancelled, Crashed, State

from flows.service.stage_deployments import FLOW

ATTEMPTS = 3
PENDING_SECONDS = 90.0  # that a worker may take to start a process
_STOPPED_SECONDS = 600.0  # how old a crash may be that the end of `headrace up` has caused


def reconcile(pool: str, missing_before: set[str] | None) -> set[str]:
    """Look at the runs of a work pool once. Returns the ids of those whose process is missing.

    Args:
        missing_before: what the last look returned; None where this is the end of `headrace up`, so that runs without a
            process, and those that the stopped worker has just called crashed, are to go on at the next start.

    Raises:
        httpx.HTTPError: the server does not answer.
    """
    alive = flow_processes()
    if alive is None:
        return set()
    missing: set[str] = set()
    with get_client(sync_client=True) as client:
        types = [StateType.RUNNING, StateType.CANCELLING, StateType.PENDING, StateType.PAUSED]
        if missing_before is None:
            types.append(StateType.CRASHED)
        found = client.read_flow_runs(
            flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=types))),
            work_pool_filter=WorkPoolFilter(name=WorkPoolFilterName(any_=[pool])),
            limit=200,
        )
        for run in found:
            if FLOW in run.tags or str(run.id) in alive or not _is_overdue(run, missing_before is None):
                continue
            missing.add(str(run.id))
            if missing_before is None or str(run.id) in missing_before:
                client.set_flow_run_state(UUID(str(run.id)), _truth(run), force=True)
    return missing


def _is_overdue(run: FlowRun, stopping: bool) -> bool:
    state = run.state
    if state is None:
        return False
    age = datetime.now(UTC) - state.timestamp
    if state.type == StateType.CRASHED:
        return age < timedelta(seconds=_STOPPED_SECONDS) and "termination" in str(state.message)
    return stopping or state.type != StateType.PENDING or age > timedelta(seconds=PENDING_SECONDS)


def _truth(run: FlowRun) -> State[None]:
    assert run.state is not None
    if run.state.type == StateType.CANCELLING:
        return Cancelled(message="It was cancelled, and its process is gone.")
    if (run.run_count or 0) >= ATTEMPTS:
        return Crashed(message=f"Its process is gone, for the {run.run_count}th time. Retry goes on from what is done.")
    return AwaitingRetry(
        scheduled_time=datetime.now(UTC),
        message=f"Its process on {platform.node()} is gone; it goes on from what is done.",
    )


def flow_processes(api: str = "") -> dict[str, int] | None:
    """Flow run id -> pid of the processes on this machine, of a server's runs only where its API is given; None where
    that cannot be known."""
    processes = Path("/proc")
    if not (processes / "self" / "environ").exists():
        return None
    found = {}
    for entry in os.scandir(processes):
        if not entry.name.isdigit():
            continue
        try:
            folder = processes / entry.name
            if b"flows.service.engine" not in (folder / "cmdline").read_bytes():
                continue
            pairs = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            environment = dict(pair.partition("=")[::2] for pair in pairs)
            if "PREFECT__FLOW_RUN_ID" in environment and api in ("", environment.get("PREFECT_API_URL")):
                found[environment["PREFECT__FLOW_RUN_ID"]] = int(entry.name)
        except OSError:  # it ended meanwhile, or is another user's
            continue
    return found
