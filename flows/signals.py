"""What Ctrl-C, SIGTERM and SIGHUP mean: to the command before a run has begun, and to a run.

Signals are handled in the main thread only; elsewhere both blocks do nothing. A signal that was ignored when the
command started stays so: `nohup headrace run` outlives its terminal, and a job in a script's background its Ctrl-C.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the command needs this module before it knows whether it runs anything
    from flows.execute import Execution

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def interrupting() -> Iterator[None]:
    """For the time of the block, SIGTERM and SIGHUP raise KeyboardInterrupt as Ctrl-C does."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    with _handling(interrupt):
        yield


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
    heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)
