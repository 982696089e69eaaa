"""Several processes that are to compute one key: one does, the others wait and take its result."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from folder_locks import freeze

from stages.artifacts import open_store, read_lease, read_result

STAGE, KEY = "toy.counter", "ab" * 32


def wait_for_text(path: Path, text: str) -> None:
    deadline = time.monotonic() + 60
    while text not in path.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_second_process_waits_says_for_whom_and_takes_the_result(toy: Any) -> None:
    events = toy.root / "first.events"
    first = toy.start(toy.spec("first", total=8, pause=0.2, run="golden-otter"), events)
    toy.wait_for_progress(events, 2)
    freeze(first, toy.store)  # for less time than its lease lasts: until the other has begun to wait
    waiting_events = toy.root / "second.events"
    second = toy.start(toy.spec("second", total=8, run="brave-tern"), waiting_events)
    wait_for_text(waiting_events, '"waiting"')
    first.send_signal(signal.SIGCONT)
    assert first.wait(60) == 0
    assert second.wait(60) == 0
    told = toy.parse(waiting_events.read_text())
    [waiting, over] = [event for event in told if event["type"] == "waiting"]
    assert waiting["for"] == f"step first of run golden-otter (process {first.pid} on {os.uname().nodename})"
    assert (waiting["run"], waiting["pid"], over["for"]) == ("golden-otter", first.pid, None)
    assert [event for event in told if event["type"] == "progress"] == []
    result = read_result(open_store(toy.store), STAGE, KEY)
    assert result is not None
    assert (result.run, result.token, result.history) == ("golden-otter", 1, [])
    assert told[-1]["computed"] is False
    assert told[-1]["artifact"] == result.artifact
    assert told[-1]["message"] == "computed by run golden-otter meanwhile"


def test_a_killed_holder_is_followed_at_once_from_its_progress(toy: Any) -> None:
    whole = toy.run(toy.spec("whole", key="cd" * 32, total=10))
    events = toy.root / "first.events"
    first = toy.start(toy.spec("first", total=10, pause=0.2), events)
    toy.wait_for_progress(events, 3)
    first.send_signal(signal.SIGKILL)
    first.wait()
    second = toy.run(toy.spec("second", total=10))
    told = toy.parse(second.stdout)
    assert second.returncode == 0
    assert next(event["at"] for event in told if event["type"] == "resumed") >= 1
    assert told[-1]["artifact"] == toy.parse(whole.stdout)[-1]["artifact"]
    lease = read_lease(open_store(toy.store), KEY)
    assert lease is not None
    assert (lease.holder, lease.token) == (None, 2)


def test_a_frozen_process_that_wakes_up_late_stops_and_overwrites_nothing(toy: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("HEADRACE_LEASE_SECONDS", "1")
    events = toy.root / "first.events"
    first = toy.start(toy.spec("first", total=6, pause=0.2, run="golden-otter"), events)
    toy.wait_for_progress(events, 2)
    freeze(first, toy.store)
    second = toy.run(toy.spec("second", total=6, run="brave-tern"))
    assert second.returncode == 0
    first.send_signal(signal.SIGCONT)
    assert first.wait(60) == 75
    outcome = toy.parse(events.read_text())[-1]
    assert outcome["message"].startswith(f"the lease on key {KEY[:12]} (step first) was taken over")
    assert "stops without publishing" in outcome["message"]
    result = read_result(open_store(toy.store), STAGE, KEY)
    assert result is not None
    assert (result.run, result.token, result.history) == ("brave-tern", 2, [])


def test_a_process_that_waits_can_be_stopped(toy: Any) -> None:
    events = toy.root / "first.events"
    first = toy.start(toy.spec("first", total=200, pause=0.2), events)
    toy.wait_for_progress(events, 1)
    waiting = toy.root / "second.events"
    second = toy.start(toy.spec("second", total=200), waiting)
    wait_for_text(waiting, '"waiting"')
    second.send_signal(signal.SIGTERM)
    assert second.wait(60) == 75
    assert toy.parse(waiting.read_text())[-1]["message"].startswith("stopped while it waited for step first of run")
    first.send_signal(signal.SIGTERM)
    assert first.wait(60) == 75
    lease = read_lease(open_store(toy.store), KEY)
    assert lease is not None
    assert lease.holder is None  # a process that stops gives it up


def test_a_forced_step_is_computed_again_though_another_has_just_done_so(toy: Any) -> None:
    for _ in range(2):
        assert toy.run(toy.spec(forced=True)).returncode == 0
    assert toy.parse(toy.run(toy.spec("again")).stdout)[-1]["computed"] is False
    result = read_result(open_store(toy.store), STAGE, KEY)
    assert result is not None
    assert ([entry["same_bytes"] for entry in result.history], result.token) == ([True], 2)
