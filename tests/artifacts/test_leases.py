"""Leases: one holder at a time, expiry, take-over, and fencing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from folder_locks import freeze

from stages.artifacts import (
    Damaged,
    Lease,
    LeaseLost,
    Result,
    Store,
    StoreError,
    WorkArea,
    acquire,
    publish,
    read_lease,
    read_result,
    write_result,
)

KEY = "ab" * 32
HOLDER = """
import sys, time
from stages.artifacts import acquire, open_store
about = {"stage": "count", "step": "a", "run": sys.argv[3]}
lease = acquire(open_store(sys.argv[1]), sys.argv[2], seconds=float(sys.argv[4]), **about)
print("held", lease.token, flush=True)
time.sleep(600)
"""


def take(store: Store, run: str = "run-1", seconds: float = 30.0, **options: Any) -> Lease:
    lease = acquire(store, KEY, stage="count", step="a", run=run, seconds=seconds, **options)
    assert lease is not None
    return lease


def holder(store: Store, run: str = "other", seconds: float = 30.0) -> subprocess.Popen[str]:
    """A process that holds the lease, once this returns, until it is killed."""
    command = [sys.executable, "-c", HOLDER, store.url, KEY, run, str(seconds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("held")
    return process


def a_result(tmp_path: Path, store: Store, text: str, run: str = "run-1") -> Result:
    folder = tmp_path / f"made-{text}"
    folder.mkdir()
    (folder / "a.txt").write_text(text)
    times = {"started": "2026-11-30T10:00:00.000+00:00", "finished": "2026-11-30T10:00:01.000+00:00"}
    artifact = publish(store, folder, "report")
    return Result(artifact=artifact, kind="report", stage="count", step="a", key=KEY, run=run, **times)


def test_a_held_lease_is_not_given_to_another_and_a_released_one_is(store: Store) -> None:
    first = take(store, inputs=["sha256:" + "0" * 64])
    record = read_lease(store, KEY)
    assert record is not None
    assert (record.token, record.run, record.pid, record.inputs) == (1, "run-1", os.getpid(), ["sha256:" + "0" * 64])
    told: list[str] = []
    refused = acquire(
        store, KEY, stage="count", step="b", run="run-2", on_wait=lambda r: told.append(r.run), give_up=lambda: True
    )
    assert refused is None
    assert told == ["run-1"]
    first.release()
    first.release()  # once more does nothing
    second = take(store, "run-2")
    assert second.token == 2
    second.check()
    with pytest.raises(LeaseLost, match="was taken over by step a of run run-2"):
        first.check()
    second.release()
    released = read_lease(store, KEY)
    assert released is not None
    assert (released.holder, released.token) == (None, 2)


def test_a_waiting_process_gets_the_lease_when_it_is_released(store: Store) -> None:
    first = take(store, seconds=2.0)
    told: list[str] = []
    threading.Timer(0.5, first.release).start()
    second = take(store, "run-2", on_wait=lambda record: told.append(record.who()))
    assert second.token == 2
    assert told == [f"step a of run run-1 (process {os.getpid()} on {os.uname().nodename})"]
    second.release()


def test_a_heartbeat_keeps_a_lease_for_longer_than_it_lasts(store: Store) -> None:
    lease = take(store, seconds=1.0)
    begun = time.monotonic()
    refused = acquire(store, KEY, stage="count", step="a", run="run-2", give_up=lambda: time.monotonic() - begun > 2.5)
    assert refused is None
    lease.check()
    record = read_lease(store, KEY)
    assert record is not None
    assert record.beat > 3
    lease.release()


def test_a_killed_holder_on_this_host_is_followed_at_once(store: Store) -> None:
    process = holder(store, seconds=3600.0)
    process.kill()
    process.wait()
    lease = take(store)  # it would expire in an hour
    assert lease.token == 2
    lease.release()


def test_a_holder_in_another_process_namespace_is_never_taken_for_dead(store: Store) -> None:
    """A container's process is not in this host's list, or another process has its number."""
    lease = take(store)
    record = read_lease(store, KEY)
    assert record is not None
    lease.release()
    assert record.model_copy(update={"pid": 2**22 + 1}).is_dead()
    assert record.model_copy(update={"born": "1"}).is_dead()  # the number was given to a later process
    assert not record.model_copy(update={"pid": 2**22 + 1, "place": record.place + "1"}).is_dead()
    assert not record.model_copy(update={"pid": 2**22 + 1, "place": ""}).is_dead()
    assert not record.is_dead()


def test_a_frozen_holder_is_taken_over_after_its_time_and_can_publish_nothing_when_it_wakes(
    tmp_path: Path, store: Store
) -> None:
    """The frozen process is this one's first lease, whose thread is stopped as SIGSTOP would stop it."""
    frozen = take(store, seconds=1.0)
    frozen._end.set()  # no heartbeat any more
    begun = time.monotonic()
    second = take(store, "run-2")
    assert time.monotonic() - begun > 1.0
    assert second.token == 2
    write_result(store, a_result(tmp_path, store, "second", "run-2"), second)
    second.release()
    late = a_result(tmp_path, store, "first")
    with pytest.raises(LeaseLost, match="fencing token 2"):
        write_result(store, late, frozen)
    stored = read_result(store, "count", KEY)
    assert stored is not None
    assert (stored.run, stored.token, stored.history) == ("run-2", 2, [])
    work = WorkArea(store, KEY, tmp_path / "scratch", lease=frozen)
    folder = tmp_path / "progress"
    folder.mkdir()
    (folder / "step").write_text("3")
    work.save(3, folder)
    with pytest.raises(StoreError, match="stops without publishing"):
        work.wait()
    assert work.steps() == []


def test_a_holder_that_wakes_between_its_check_and_its_write_cannot_overwrite(tmp_path: Path, store: Store) -> None:
    """The write is conditional on what was there before the check, so a successor's result in between wins."""
    first = take(store)
    result = a_result(tmp_path, store, "first")
    other = a_result(tmp_path, store, "second", "run-2").model_copy(update={"token": 2})
    check = first.check

    def check_then_freeze() -> None:
        check()
        first.check = check  # type: ignore[method-assign]
        write_result(store, other)

    first.check = check_then_freeze  # type: ignore[method-assign]
    with pytest.raises(LeaseLost, match="fencing token 2"):
        write_result(store, result, first)
    stored = read_result(store, "count", KEY)
    assert stored is not None
    assert (stored.run, stored.history) == ("run-2", [])
    first.release()


def test_a_real_process_stopped_by_sigstop_loses_its_lease_and_says_so_when_it_goes_on(
    tmp_path: Path, store: Store
) -> None:
    script = HOLDER.replace("time.sleep(600)", "while not lease.lost:\n    time.sleep(0.05)\nprint(lease.reason)")
    command = [sys.executable, "-c", script, store.url, KEY, "other", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held 1\n"
        freeze(process, tmp_path / "store")
        lease = take(store)
        assert lease.token == 2
        process.send_signal(signal.SIGCONT)
        said, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    assert said.startswith(f"the lease on key {KEY[:12]} (step a) was taken over by step a of run run-1 (process ")
    assert "because this process did not renew it in time; it stops without publishing" in said
    lease.release()


def test_a_lease_that_is_deleted_under_its_holder_is_lost_and_its_token_never_used_again(
    tmp_path: Path, store: Store
) -> None:
    lease = take(store)
    write_result(store, a_result(tmp_path, store, "x"), lease)
    store.delete(f"leases/{KEY}.json")
    with pytest.raises(LeaseLost, match="was removed from the store"):
        lease.check()
    assert lease.lost
    second = take(store, after=lambda: 1)  # the token of the result
    assert second.token == 2
    second.release()


def test_an_unreadable_lease_is_named_and_never_overwritten(store: Store) -> None:
    store.put(f"leases/{KEY}.json", b"{}")
    with pytest.raises(Damaged, match="is not a lease: key: Field required; delete it if no run of this step"):
        take(store)
    lease = json.dumps({"x": "y"})
    store.put(f"leases/{KEY}.json", lease.encode())
    with pytest.raises(Damaged, match="is not a lease"):
        read_lease(store, KEY)
    assert store.get(f"leases/{KEY}.json").decode() == lease


def test_the_time_of_a_lease_is_a_setting_that_is_checked(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("0", "soon", "nan"):
        monkeypatch.setenv("HEADRACE_LEASE_SECONDS", text)
        with pytest.raises(StoreError, match="HEADRACE_LEASE_SECONDS is"):
            acquire(store, KEY, stage="count", step="a", run="run-1")
    monkeypatch.setenv("HEADRACE_LEASE_SECONDS", "12.5")
    lease = acquire(store, KEY, stage="count", step="a", run="run-1")
    assert lease is not None
    record = read_lease(store, KEY)
    assert record is not None
    assert record.seconds == 12.5
    lease.release()
