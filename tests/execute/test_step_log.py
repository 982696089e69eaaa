"""The stored log of a step while it runs: what a silent stage said last, and a store that is away for a moment."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from flows.step_log import StepLog
from stages.artifacts import FolderStore, StoreError, open_store, read_log


class Absent(FolderStore):
    """A folder that can be away."""

    away = False

    def append(self, key: str, data: bytes) -> None:
        if self.away:
            raise StoreError("the store is away")
        super().append(key, data)


def logged(store: FolderStore, wanted: list[int]) -> list[int]:
    """The numbers in the log, once they are as wanted or ten seconds have passed."""
    limit = time.monotonic() + 10
    while (found := [event["n"] for event in read_log(store, "r", "s")]) != wanted and time.monotonic() < limit:
        time.sleep(0.05)
    return found


def test_what_a_stage_says_before_a_long_silence_is_stored(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert isinstance(store, FolderStore)
    with StepLog(store, "r", "s") as log:
        log.add({"n": 1})
        log.add({"n": 2})
        assert logged(store, [1, 2]) == [1, 2]
        log.add({"n": 3})
        assert logged(store, [1, 2, 3]) == [1, 2, 3]
        log.add({"n": 4})
    assert logged(store, [1, 2, 3, 4]) == [1, 2, 3, 4]


def test_a_store_that_is_back_before_the_next_event_costs_nothing(tmp_path: Path) -> None:
    store = Absent(tmp_path)
    with StepLog(store, "r", "s") as log:
        store.away = True
        log.add({"n": 1})
        time.sleep(2)
        store.away = False
        log.add({"n": 2})
    assert logged(store, [1, 2]) == [1, 2]


def test_a_store_that_stays_away_is_told(tmp_path: Path) -> None:
    store = Absent(tmp_path)
    store.away = True
    with pytest.raises(StoreError, match="is away"), StepLog(store, "r", "s") as log:
        log.add({"n": 1})
