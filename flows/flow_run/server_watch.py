"""What a run and its Prefect server owe each other: to hear of a cancellation, and to tell the truth.

The model: a thread reads the flow run's state now and then. The server may be restarted, killed or gone for minutes
meanwhile: stages go on, and the thread notes that it was away.

Invariants:
- A run that somebody cancelled is told so within seconds, also where Prefect's own runner has lost its connection.
- A run that lives is not shown as crashed: where the server, having heard nothing for a while, marked it so, it is
  Running again.
- A run's end waits until the server is there to hear it, for `OUTAGE_SECONDS` at most.
- What the server missed of the tasks' ends while it was away is told to it before the flow ends.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any
from uuid import UUID

import httpx
from prefect import get_client, get_run_logger
from prefect.exceptions import PrefectHTTPStatusError
from prefect.runtime import flow_run
from prefect.states import Running, State

OUTAGE_SECONDS = 3600.0  # how long the end of a run waits for a server that is away
_SETTLE_SECONDS = 5.0  # after an outage, states that were queued meanwhile arrive by themselves
_AWAY = (httpx.HTTPError, PrefectHTTPStatusError, OSError)


class ServerWatch:
    """Watches the current flow run's state on the server; use it as a context manager inside the flow.

    Args:
        on_cancel: called once, from another thread, when somebody has cancelled the run.
        every: seconds between two looks.

    Attributes:
        was_away: whether the server did not answer at some time.
    """

    def __init__(self, on_cancel: Callable[[], None], every: float = 5.0) -> None:
        self.was_away = False
        self._on_cancel = on_cancel
        self._every = every
        self._over = threading.Event()
        self._cancelled = False
        self._flow_run_id = UUID(str(flow_run.get_id()))
        self._logger = get_run_logger()
        # A thread starts with an empty context, and Prefect's settings, such as the server's address, are in ours.
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=lambda: context.run(self._watch), name="server watch", daemon=True)

    def __enter__(self) -> ServerWatch:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(self._every):
            try:
                self._look()
            except _AWAY:
                self.was_away = True

    def _look(self) -> None:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(self._flow_run_id).state
            if state is None or self._over.is_set():
                return
            if (state.is_cancelling() or state.is_cancelled()) and not self._cancelled:
                self._cancelled = True
                self._logger.warning("The run was cancelled: its stages save and stop.")
                self._on_cancel()
            elif state.is_crashed():
                message = "The server heard nothing of the run for a while; the run goes on."
                self._logger.warning(message)
                client.set_flow_run_state(self._flow_run_id, Running(message=message), force=True)

    def wait_until_back(self, limit: float = OUTAGE_SECONDS) -> None:
        """Return once the server answers, or after `limit` seconds: then the end of the run may go unheard."""
        end = time.monotonic() + limit
        said = False
        while True:
            try:
                with get_client(sync_client=True) as client:
                    client.read_flow_run(self._flow_run_id)
                return
            except _AWAY:
                self.was_away = True
            if time.monotonic() > end:
                self._logger.error("The Prefect server did not come back within %.0f s.", limit)
                return
            if not said:
                self._logger.warning("The Prefect server does not answer; the run is over and waits for it.")
                said = True
            time.sleep(min(self._every, 2.0))

    def mend_tasks(self, tasks: Mapping[str, tuple[UUID, State[Any]]]) -> None:
        """Set each task run, by its id, to the state in which it ended, unless the server has it so by now.

        A task run that the server never heard of cannot be made up; the run's pages and the store tell of it.
        """
        end = time.monotonic() + _SETTLE_SECONDS
        wanted = dict(tasks)
        while wanted:
            settled = time.monotonic() > end
            for name, (task_run_id, state) in list(wanted.items()):
                try:
                    with get_client(sync_client=True) as client:
                        known = client.read_task_run(task_run_id).state
                        if known is not None and known.is_final():
                            wanted.pop(name)
                        elif settled:
                            client.set_task_run_state(task_run_id, state, force=True)
                            wanted.pop(name)
                except Exception as error:  # it never heard of the task, or is away again
                    if settled:
                        self._logger.warning("The server could not be told how %s ended: %s", name, error)
                        wanted.pop(name)
            if wanted:
                time.sleep(0.5)
