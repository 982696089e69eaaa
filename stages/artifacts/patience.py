"""Waiting for a store that is away: what a run does, and nothing else.

A command that a person waits for says within a minute that a store cannot be reached. A run has hours of work that can
wait, so its processes try again for minutes, and say so: once when a store is away, and once when it is back.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from stages.artifacts.variables import seconds_of

WAIT_SECONDS = 600.0
_PAUSE = 5.0  # seconds between two attempts, at most
_LOG = logging.getLogger("headrace.store")
_T = TypeVar("_T")

_lock = threading.Lock()
_seconds = 0.0  # for which this process waits
_tell: Callable[[str], None] = _LOG.warning
_enough = threading.Event()
_away: dict[str, float] = {}  # what is away -> since when, by a clock that never jumps


def wait_for_stores(tell: Callable[[str], None] = _LOG.warning) -> None:
    """From now on, let requests of this process wait for a store that is away, instead of failing.

    They do so for HEADRACE_STORE_WAIT seconds (600 when left out), counted from the first failure.

    Args:
        tell: is given a sentence when a store is away, and when it is back.

    Raises:
        StoreError: the variable is no number of seconds from 0 to 86400.
    """
    global _seconds, _tell
    _seconds, _tell = seconds_of("HEADRACE_STORE_WAIT", WAIT_SECONDS, least=0.0), tell
    _enough.clear()


def stop_waiting() -> None:
    """Let requests that wait fail now, and later ones at once: this process is to end."""
    _enough.set()


def patiently(
    request: Callable[[], _T], is_away: Callable[[Exception], bool], store: str, again: Callable[[], None]
) -> _T:
    """Make a request, again and again while a store is away.

    Args:
        is_away: whether an error of the request says that the store cannot be reached for the moment.
        store: what is told of, such as "bucket models".
        again: called before each attempt but the first.
    """
    failed = 0
    while True:
        try:
            answer = request()
        except Exception as error:
            if not is_away(error):
                _is_back(store)  # it has answered
            elif _may_wait(store, error):
                failed += 1
                _enough.wait(random.uniform(0.2, 1.0) * min(_PAUSE, 2.0**failed))
                again()
                continue
            raise
        _is_back(store)
        return answer


def _may_wait(store: str, error: Exception) -> bool:
    if not _seconds or _enough.is_set():
        return False
    now = time.monotonic()
    with _lock:
        first = store not in _away
        since = _away.setdefault(store, now)
    if first:
        clock = time.strftime("%H:%M:%S")
        why = str(error).strip().split("\n")[0]
        _tell(f"{store} is away since {clock}, waiting for it up to {_seconds / 60:.0f} min ({why})")
    return now - since < _seconds


def _is_back(store: str) -> None:
    if store not in _away:
        return
    with _lock:
        since = _away.pop(store, None)
    if since is not None:
        _tell(f"{store} is back after {time.monotonic() - since:.0f} s")
