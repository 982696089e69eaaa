"""Stages as flow runs on a Prefect work pool: on whatever machines have workers there.

The model: an attempt is a flow run of the deployment `stage/<name>` (`flows.service.stage_deployments`). The spec goes
out and the events come back through a channel in the store (`flows.runners.relay`), so that nothing depends on logs
that a server keeps for a while; Prefect decides where it runs, and shows it beside the flow that asked for it.

Invariants:
- Events are complete and in order, and the exit code is the stage's own, as with the other runners.
- A stop goes through the channel, so that the stage saves even while the Prefect server is away; only a flow run that
  has not started is cancelled in Prefect, and one that does not stop in its time.
- A worker's machine that gives no sign of life is lost: the attempt counts as killed and is made again.
- A flow that is gone gives no sign of life either, and its stages save and stop.
"""

from __future__ import annotations

import contextlib
import contextvars
import queue
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import httpx
from prefect import get_client
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.states import Cancelled, State

from flows.runners.base import RunnerError
from flows.runners.container_files import luggage
from flows.runners.lines import lost_outcome
from flows.runners.memory import parse_size
from flows.runners.relay import Beats, Channel
from flows.service.local_server import configured_api
from flows.service.stage_deployments import ALIVE_SECONDS, deployment_of, lost_seconds
from stages.artifacts import StoreError, open_store
from stages.contract import Resources, StageSpec

GRACE = 60.0
_POLL = 0.5  # seconds between two looks for what a stage has said
_STATE_SECONDS = 5.0  # between two looks at the state of its flow run
_WAITING_SECONDS = 60.0  # after which a stage that no worker takes is told of
_SERVER_ERRORS = (httpx.HTTPError, PrefectHTTPStatusError, OSError)


class WorkPoolRunner:
    """Runs each stage as a flow run of its deployment, on the Prefect server of whoever makes the runner.

    (Prefect keeps its settings and the flow that runs in context variables, which new threads do not have.)
    """

    def __init__(self) -> None:
        self._context = contextvars.copy_context()
        self._lock = threading.Lock()
        self._closed = False
        self._handles: list[WorkPoolHandle] = []
        self._pools: dict[str, tuple[str, str]] = {}

    def start(self, spec: StageSpec) -> WorkPoolHandle:
        """Ask for the stage of `spec`; see `flows.runners.base.Runner`."""
        return self._context.copy().run(self._start, spec)

    def _start(self, spec: StageSpec) -> WorkPoolHandle:
        check_api()
        name = deployment_of(spec.stage)
        pool, kind = self._pool(name, spec.step)
        variables = job_variables(kind, spec.resources)
        channel = Channel.new(open_store(spec.store), spec.run, spec.step)
        _, files = luggage(spec)
        channel.pack(files)
        channel.beat()
        try:
            with self._lock:
                if self._closed:
                    raise RunnerError("the run is being stopped")
                wanted: Any = run_deployment(
                    name,
                    parameters={
                        "run": spec.run,
                        "step": spec.step,
                        "stage": spec.stage,
                        "store": spec.store,
                        "channel": channel.name,
                    },
                    flow_run_name=f"{spec.run}/{spec.step}",
                    timeout=0,
                    job_variables=variables,
                    tags=["headrace", f"run:{spec.run}"],
                )
                handle = WorkPoolHandle(channel, wanted.id, spec.step, pool)
                self._handles = [item for item in self._handles if not item.ended] + [handle]
        except BaseException as error:
            with contextlib.suppress(StoreError):
                channel.remove()
            if isinstance(error, _SERVER_ERRORS):
                raise RunnerError(f"step {spec.step}: the Prefect server does not take {name}: {error}") from None
            raise
        handle.begin()
        return handle

    def close(self) -> None:
        """Stop what still runs, letting it save."""
        with self._lock:
            self._closed = True
        for handle in self._handles:
            handle.ask_to_stop(GRACE)
        for handle in self._handles:
            handle.stop(GRACE)

    def _pool(self, name: str, step: str) -> tuple[str, str]:
        """The work pool of a deployment, and its type."""
        if name not in self._pools:
            try:
                with get_client(sync_client=True) as client:
                    deployment = client.read_deployment_by_name(name)
                    if not deployment.work_pool_name:
                        raise RunnerError(f"step {step}: deployment {name} has no work pool; deploy the stages again")
                    pool = client.read_work_pool(deployment.work_pool_name)
            except ObjectNotFound:
                raise RunnerError(
                    f"step {step}: the Prefect server has no deployment {name}; name a pool with "
                    "`stage_pool` in headrace.yaml, and `headrace deploy`"
                ) from None
            except _SERVER_ERRORS as error:
                raise RunnerError(f"step {step}: the Prefect server cannot be asked for {name}: {error}") from None
            self._pools[name] = (pool.name, pool.type)
        return self._pools[name]


def check_api() -> None:
    """Raises RunnerError unless a Prefect server is configured: one that a run starts for itself has no workers."""
    if configured_api() is None:
        raise RunnerError(
            "--runner workpool needs a Prefect server with workers: set PREFECT_API_URL (`headrace up` starts one)"
        )


def job_variables(kind: str, resources: Resources) -> dict[str, Any]:
    """What a step's resources are in the job variables of a pool (`infra/work-pools`).

    Args:
        kind: type of the pool: process, docker or kubernetes. A process has no such variables; there the stage's own
            runner keeps to them.
    """
    if kind not in ("docker", "kubernetes"):
        return {}
    found: dict[str, Any] = {}
    unit = "" if kind == "kubernetes" else "b"
    for name, size in (("memory", resources.memory), ("shm", resources.shm)):
        if size:
            found[name] = f"{parse_size(size)}{unit}"
    if resources.gpus and kind == "kubernetes":
        found["gpus"] = resources.gpus
    elif resources.gpus:
        request = {"Driver": "nvidia", "Count": resources.gpus, "Capabilities": [["gpu"]]}
        found["device_requests"] = [request]
    return found


class WorkPoolHandle:
    """One flow run of a stage; see `flows.runners.base.Handle`."""

    def __init__(self, channel: Channel, flow_run: UUID, step: str, pool: str) -> None:
        self.verdict = ""
        self.flow_run = flow_run
        self._channel, self._step, self._pool = channel, step, pool
        self._lost = lost_seconds()
        self._events: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._over = threading.Event()
        self._code = 1
        self._heard = False  # whether the stage has said anything
        self._context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=self._context.copy().run, args=(self._follow,), name=f"flow run of {step}", daemon=True
        )
        self._beats = threading.Thread(target=self._beat, name=f"beats for {step}", daemon=True)

    @property
    def ended(self) -> bool:
        return self._over.is_set()

    def begin(self) -> None:
        """Listen, and give signs of life; called once."""
        self._thread.start()
        self._beats.start()

    def events(self) -> Iterator[dict[str, Any]]:
        """The events of the stage as they come, to the end."""
        while (event := self._events.get()) is not None:
            yield event

    def wait(self) -> int:
        """Wait for the end; the exit code, or minus the number of the signal that ended it."""
        self._over.wait()
        return self._code

    def ask_to_stop(self, grace: float) -> None:
        """Have the stage save and stop. Returns at once."""
        if self.ended:
            return
        with contextlib.suppress(StoreError):
            self._channel.ask_to_stop(grace)
        state = self._context.copy().run(self._state)
        if not self._heard and state is not None and (state.is_scheduled() or state.is_pending()):
            self._cancel()

    def stop(self, grace: float) -> None:
        """Ask the stage to save and stop; cancel its flow run where it has not ended some time after `grace`."""
        self.ask_to_stop(grace)
        if not self._over.wait(grace + self._lost / 2):
            self._cancel()
            self._over.wait(self._lost)

    def _cancel(self) -> None:
        self._context.copy().run(self._set_cancelled)

    def _set_cancelled(self) -> None:
        with contextlib.suppress(*_SERVER_ERRORS, ObjectNotFound), get_client(sync_client=True) as client:
            client.set_flow_run_state(self.flow_run, Cancelled(message="Stopped by the run that asked for it"))

    def _state(self) -> State[Any] | None:
        """The state of the flow run; None where the server cannot say."""
        try:
            with get_client(sync_client=True) as client:
                return client.read_flow_run(self.flow_run).state
        except (*_SERVER_ERRORS, ObjectNotFound):
            return None

    def _beat(self) -> None:
        while not self._over.wait(ALIVE_SECONDS):
            with contextlib.suppress(StoreError):
                self._channel.beat()

    def _follow(self) -> None:
        try:
            self._code = self._receive()
        except Exception as error:
            self._note(f"what the stage said cannot be read: {error}")
            self._code = 1
        self._over.set()
        with contextlib.suppress(StoreError):
            self._channel.remove()
        self._events.put(None)

    def _receive(self) -> int:
        """Pass on batch after batch, to the last. Returns the exit code."""
        number = 1
        life = Beats(self._lost)
        looked = reminded = time.monotonic()
        final: State[Any] | None = None
        while True:
            batch = self._next(number)
            if batch is not None:
                self._heard = True
                life.see(number)
                number += 1
                for event in batch:
                    if event.get("type") == "end":
                        self.verdict = str(event.get("verdict") or "")
                        return int(event["code"])
                    self._events.put(event)
                continue
            if final is not None:
                return self._ended_without_a_word(final)
            now = time.monotonic()
            if now - looked > _STATE_SECONDS:
                looked = now
                state = self._state()
                final = state if state is not None and state.is_final() else None
                if final is not None:
                    continue  # its last batch may have come since
            if self._heard and life.stopped:
                self._cancel()
                told = f"lost: the worker's machine has given no sign of life for {self._lost:.0f} s"
                return self._lost_with(-int(signal.SIGKILL), told)
            if not self._heard and now - reminded > _WAITING_SECONDS:
                reminded = now + 10 * _WAITING_SECONDS
                self._note(f"no worker of work pool {self._pool} has taken it yet")
            time.sleep(_POLL)

    def _next(self, number: int) -> list[dict[str, Any]] | None:
        try:
            return self._channel.receive(number)
        except StoreError:  # away; the stage waits for it too
            return None

    def _ended_without_a_word(self, state: State[Any]) -> int:
        """What the final state of a flow run means whose stage never told its end."""
        told = f"its flow run ended as {state.name}{': ' + state.message if state.message else ''}"
        if state.is_cancelled():
            return self._lost_with(-int(signal.SIGTERM), told)
        return self._lost_with(-int(signal.SIGKILL) if state.is_crashed() else 1, told)

    def _lost_with(self, code: int, told: str) -> int:
        self._events.put(lost_outcome(code, told))
        return code

    def _note(self, text: str) -> None:
        self._events.put({"type": "log", "level": "warning", "time": round(time.time(), 3), "text": text})
