"""What Ctrl-C, SIGTERM and SIGHUP mean: to the command before a run has begun, and to a run.

Signals are handled in the main thread only; elsewhere both blocks do nothing. A signal that was ignored when the
command started stays so: `nohup headrace run` outlives its terminal, and a job in a script's background its Ctrl-C.

A command that a signal stopped exits with 128 and the number of the first one, as programs do that it ends outright.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the command needs this module before it knows whether it runs anything
    from flows.execute import Execution

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INTERRUPTED = 128 + signal.SIGINT
LEAVE_SECONDS = 3.0
_first: int | None = None  # the number of the first signal that was heard


class Interrupted(KeyboardInterrupt):
    """A signal asks the command to end.

    A class of its own: where KeyboardInterrupt itself passes through an `exec` of text (a dataclass has one), Python
    ends the process by SIGINT in the end, whatever the exit code.
    """


def exit_code() -> int:
    """Of a command that was stopped: by the first signal it heard, or, having heard none, as Ctrl-C does."""
    return INTERRUPTED if _first is None else 128 + _first


@contextmanager
def interrupting(leave: Callable[[], None] | None = None) -> Iterator[None]:
    """For the time of the block, SIGTERM and SIGHUP raise KeyboardInterrupt as Ctrl-C does.

    What was heard before counts no more for `exit_code`.

    Args:
        leave: for a block in which the interrupt may wait for somebody who does not answer: called `LEAVE_SECONDS`
            later if the block has not ended by then, and followed by the end of the process.
    """
    global _first
    _first = None
    ended = threading.Event()

    def interrupt(number: int, frame: object) -> None:
        if leave is not None:
            leave_after(ended, leave)
        raise Interrupted

    try:
        with _handling(interrupt):
            yield
    finally:
        ended.set()


def leave_after(ended: threading.Event, leave: Callable[[], None]) -> None:
    """End this process in `LEAVE_SECONDS`, after a call of `leave`, unless `ended` is set by then. Returns at once."""

    def wait() -> None:
        if not ended.wait(LEAVE_SECONDS):
            try:
                leave()
            finally:
                os._exit(exit_code())

    threading.Thread(target=wait, name="leave", daemon=True).start()


@contextmanager
def stopping(execution: Execution, on_signal: Callable[[int], None]) -> Iterator[None]:
    """For the time of the block, a signal stops the run: running stages save and end. The second one kills them.

    Nothing is raised, so that the run ends in its own way and every step is told. (Prefect would raise on SIGTERM.)

    Args:
        on_signal: called with how many signals have come so far.
    """
    count = 0

    def stop(number: int, frame: object) -> None:
        nonlocal count
        count += 1
        execution.stop(kill=count > 1)
        on_signal(count)

    with _handling(stop):
        yield


@contextmanager
def _handling(handler: Callable[[int, object], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def hear(number: int, frame: object) -> None:
        global _first
        _first = _first or number
        handler(number, frame)

    heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, hear) for number in heard}
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)
