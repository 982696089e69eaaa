"""A person's approval inside a flow run: it pauses, its page shows a form, and nobody's answer in time means no.

Invariants:
- Only an explicit yes approves: an unanswered form, one resumed without a yes, and a lapse of time do not.
- A server that is away while the run waits loses nothing: the run goes on asking.
- Each attempt of a run asks anew, for what it shows may have changed; but an answer that came while the run's process
  was gone is taken.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import httpx
from prefect import get_client, get_run_logger, pause_flow_run
from prefect.client.schemas.responses import SetStateStatus
from prefect.exceptions import FlowPauseTimeout, PrefectHTTPStatusError
from prefect.input import RunInput, delete_flow_run_input, read_flow_run_input
from prefect.input.run_input import keyset_from_base_key
from prefect.runtime import flow_run
from pydantic import Field

POLL_SECONDS = 3
MARGIN_SECONDS = 3600  # that the pause lasts beyond the time to answer


class Approval(RunInput):
    """The form that a person fills in to resume a run that asks."""

    promote: bool = Field(False, title="Promote it", description="Whether the reference shall name this model.")
    why: str = Field("", title="Why", description="The reason, for the reference's history.")


@dataclass(frozen=True)
class Answer:
    """What came of asking: `why` is the person's reason, or says that nobody answered."""

    approved: bool
    why: str


def ask(question: str, hours: float) -> Answer:
    """Pause the current flow run and ask a person.

    Args:
        question: Markdown above the form.
        hours: how long to wait for an answer.
    """
    attempt = flow_run.get_run_count() or 1
    for number in range(1, attempt):
        if (given := _take(f"approval-{number}")) is not None:
            return Answer(bool(given.promote), given.why)
    key = f"approval-{attempt}"
    form = Approval.with_initial_data(description=question, promote=False, why="")
    seconds = max(1, round(hours * 3600))
    get_run_logger().info("The run waits for an approval, for %g hours at most.", hours)
    lapse = _Lapse(seconds)
    try:
        try:
            given = pause_flow_run(
                wait_for_input=form, timeout=seconds + MARGIN_SECONDS, poll_interval=POLL_SECONDS, key=key
            )
        except FlowPauseTimeout:
            given = None
        except (httpx.HTTPError, PrefectHTTPStatusError):
            given = _go_on_asking(key, time.monotonic() + seconds + MARGIN_SECONDS)
    finally:
        lapse.end()
    if given is None or lapse.came:
        return Answer(False, f"nobody answered within {hours:g} hours")
    _take(key)
    return Answer(bool(given.promote), given.why)


class _Lapse:
    """Resumes the paused run with a no when the time to answer is over.

    Prefect fails a run whose pause has timed out, whatever the flow does then; so the pause itself lasts longer.

    Attributes:
        came: whether the time was over before anybody answered.
    """

    def __init__(self, seconds: float) -> None:
        self.came = False
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=self._wait, args=(UUID(str(flow_run.get_id())), seconds), name="lapse", daemon=True
        )
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        self._thread.join()

    def _wait(self, flow_run_id: UUID, seconds: float) -> None:
        pause = seconds
        while not self._over.wait(pause):
            pause = POLL_SECONDS
            try:
                with get_client(sync_client=True) as client:
                    answer = client.resume_flow_run(flow_run_id, run_input={"promote": False, "why": ""})
            except (httpx.HTTPError, PrefectHTTPStatusError):  # the server is away
                continue
            if answer.status == SetStateStatus.ACCEPT:  # else it is not paused yet, or a person was first
                self.came = True
                return


def _go_on_asking(key: str, end: float) -> Approval | None:
    """Wait for an answer after the server was away. The form is on the server already."""
    flow_run_id = UUID(str(flow_run.get_id()))
    while time.monotonic() < end:
        try:
            with get_client(sync_client=True) as client:
                state = client.read_flow_run(flow_run_id).state
                if state is not None and state.is_running():
                    return _load(key)
        except (httpx.HTTPError, PrefectHTTPStatusError):
            pass
        time.sleep(POLL_SECONDS)
    return None


def _load(key: str) -> Approval | None:
    """The answer that was given to a pause, if any."""
    value: Any = read_flow_run_input(keyset_from_base_key(f"paused-{key}")["response"], UUID(str(flow_run.get_id())))
    return Approval(**value) if value else None


def _take(key: str) -> Approval | None:
    """The answer that was given to a pause, if any; it is used up by that."""
    answer = _load(key)
    if answer is not None:
        delete_flow_run_input(
            keyset_from_base_key(f"paused-{key}")["response"], flow_run_id=UUID(str(flow_run.get_id()))
        )
    return answer
