"""The stored log of a step that runs: what the stage says is there a second later, also while it says nothing more."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any, Self

from stages.artifacts import Store, StoreError, append_log

SECONDS = 1.0  # events are at most about this much behind in the stored log


class StepLog:
    """Adds the events of one step to its log, several at a time; what is left when the block ends too.

    Events that a store which is away did not take are tried again with those that follow.
    """

    def __init__(self, store: Store, run: str, step: str) -> None:
        self._store, self._run, self._step = store, run, step
        self._unwritten: list[dict[str, Any]] = []
        self._written = time.monotonic()
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._write_by_time, name=f"log of {step}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()
        self._write()

    def add(self, event: dict[str, Any]) -> None:
        """Take an event.

        Raises:
            StoreError: it was time to write, and the store cannot be written.
        """
        with self._lock:
            self._unwritten.append(event)
            if self._is_due():
                self._write()

    def _is_due(self) -> bool:
        return bool(self._unwritten) and time.monotonic() - self._written > SECONDS

    def _write(self) -> None:
        append_log(self._store, self._run, self._step, self._unwritten)
        self._unwritten, self._written = [], time.monotonic()

    def _write_by_time(self) -> None:
        while not self._end.wait(SECONDS / 2):
            with self._lock, suppress(StoreError):  # whoever adds or ends says it, where the store is still away
                if self._is_due():
                    self._write()
