"""What the store knows while a stage is silent: what it said last, and that its run goes on."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from toy_stages import Toys

from flows import record
from flows.execute import execute
from flows.plan import make_plan
from flows.recipe import load_recipe
from flows.runners.process import ProcessRunner
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


def test_a_run_is_heard_of_while_its_stages_are_silent(toys: Toys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "HEARTBEAT", 0.1)
    plan = make_plan(load_recipe(toys.recipe("a: {stage: COUNT, total: 1, delay: 2.0}")), toys.store)
    runner = ProcessRunner(fork_server=False, gpus=[])
    thread = threading.Thread(target=execute, args=(plan,), kwargs={"runner": runner, "run_id": "r"})
    marks: set[str] = set()
    thread.start()
    while thread.is_alive():
        marks |= {info.mark for info in plan.store.list("runs/")}
        thread.join(0.05)
    runner.close()
    assert len(marks) > 10  # of which four are changes of its state
