"""Slots: how many stages an installation lets run at once, and how many GPUs of a host they may take together.

They are Prefect's global concurrency limits, which `headrace deploy` creates and anybody may change in the UI:
`headrace-steps` counts stages of all runs, `headrace-gpus-HOST` the GPUs of a host. Where there is no such limit,
nothing is asked of the server.

Invariants:
- A step that is a hit takes no slot; one that waits for a slot can be stopped.
- A slot is a lease of a minute that a thread renews: what a killed run held is free a minute later.
- A server that is away stops no stage: it runs without its slot, and the log says so.
- A run that loses the one slot of its deployment (a night that is paused for its approval, or after an outage longer
  than the slot's lease) goes on. Two nights at once are safe: steps are computed once, a reference moves by
  compare-and-swap.
"""

from __future__ import annotations

import contextvars
import platform
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING
from uuid import UUID

import httpx
from prefect import get_client, get_run_logger
from prefect.concurrency.sync import concurrency
from prefect.exceptions import PrefectHTTPStatusError
from prefect.logging.loggers import get_logger
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from flows.recipe_model import Step
from flows.runners.base import RunnerError

if TYPE_CHECKING:
    from flows.execute import Execution

STEPS = "headrace-steps"
LEASE_SECONDS = 60.0  # the shortest that the server grants
_PATIENCE = 5.0  # seconds between two looks at whether a step that waits is still wanted
_RENEWAL_SHARE = 0.25  # of a lease, between two renewals of a deployment's slot
_AWAY = (httpx.HTTPError, PrefectHTTPStatusError, OSError)


def gpu_limit_name(host: str = "") -> str:
    """The name of the limit on the GPUs of a host: this one where none is given."""
    return f"headrace-gpus-{re.sub(r'[^A-Za-z0-9.-]+', '-', host or platform.node())}"


class Slots:
    """The slots of one run.

    Attributes:
        execution: the run; whoever makes the slots sets it.
    """

    execution: Execution

    @contextmanager
    def hold(self, step: Step) -> Iterator[None]:
        """Hold the slots that a stage of a step needs for the time of the block. Waits until they are free, or the run
        is stopped.

        Raises:
            RunnerError: the step asks for more GPUs than the limit has.
        """
        logger = get_run_logger()
        with ExitStack() as stack:
            try:
                for name, count in self._needed(step):
                    self._take(stack, name, count, step.name)
            except _AWAY as error:
                logger.warning("The server cannot say which slots are free (%s); the step runs without", error)
            yield

    def _needed(self, step: Step) -> list[tuple[str, int]]:
        wanted = {STEPS: 1} | ({gpu_limit_name(): step.resources.gpus} if step.resources.gpus else {})
        # Asked once: a server that is away must not hold up a step for as long as Prefect would go on trying.
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}), get_client(sync_client=True) as client:
            limits = {
                limit.name: limit.limit
                for limit in client.read_global_concurrency_limits(limit=200)
                if limit.active and limit.name in wanted
            }
        for name, count in wanted.items():
            if count > limits.get(name, count):
                raise RunnerError(
                    f"step {step.name} needs {count} slots of the concurrency limit {name}, which has {limits[name]}; "
                    "raise the limit in Prefect, or lower resources.gpus"
                )
        return [(name, count) for name, count in wanted.items() if name in limits]

    def _take(self, stack: ExitStack, name: str, count: int, step: str) -> None:
        said = False
        while not self.execution.stopping:
            try:
                stack.enter_context(
                    concurrency(
                        name,
                        occupy=count,
                        timeout_seconds=_PATIENCE,
                        lease_duration=LEASE_SECONDS,
                        raise_on_lease_renewal_failure=False,
                    )
                )
                return
            except TimeoutError:
                if not said:
                    get_run_logger().info("%s waits for a slot of %s", step, name)
                    said = True


def outlive_lost_slots() -> None:
    """Have the flow runs of this process go on without the slot of their deployment where they lose it.

    Prefect ends such a run when its next renewal is refused, minutes later: so it would end every run that is paused
    for longer, for a pause gives the slot up.
    """
    import prefect.flow_engine

    prefect.flow_engine.maintain_concurrency_lease = _keep_deployment_slot


@contextmanager
def _keep_deployment_slot(
    lease_id: UUID,
    lease_duration: float,
    raise_on_lease_renewal_failure: bool = False,
    suppress_warnings: bool = False,
) -> Iterator[None]:
    """What Prefect's `maintain_concurrency_lease` does, but no failure ends the run."""
    over = threading.Event()
    context = contextvars.copy_context()
    name = f"slot {lease_id}"
    thread = threading.Thread(target=context.run, args=(_renew, lease_id, lease_duration, over), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()


def _renew(lease_id: UUID, lease_duration: float, over: threading.Event) -> None:
    pause = 0.0
    while not over.wait(pause):
        try:
            with get_client(sync_client=True) as client:
                client.renew_concurrency_lease(lease_id=lease_id, lease_duration=lease_duration)
            pause = lease_duration * _RENEWAL_SHARE
        except _AWAY as error:
            status = error.response.status_code if isinstance(error, httpx.HTTPStatusError) else 0
            if status in (404, 410):  # given up by a pause, or run out while the server was away
                get_logger("concurrency").info("The run goes on without the slot of its deployment.")
                return
            pause = _PATIENCE
