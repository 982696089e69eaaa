"""What a run survives, each produced for real: server, flow, worker or all of it killed, frozen or locked."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
from installed import Installed, engine_of, gone, kill, processes_of, resume, until
from prefect.states import Cancelling, Scheduled

from stages.artifacts import open_store, read_nights, read_ref

pytestmark = pytest.mark.slow

LATE = ("Late", "Cancelled")  # what waits for a worker; where there is no slot for it, the server cancels it


def start(installed: Installed, rate: float, steps: int = 250) -> UUID:
    """Start a run whose step `better` takes a while, and wait until it has made progress."""
    overrides = [f"better.rate={rate}", f"better.max_steps={steps}", "better.pause=0.2"]
    flow_run = installed.submit("headrace/pipeline", recipe="toy.yaml", overrides=overrides)
    until(lambda: installed.progress(flow_run, "toy-better-progress") > 0, 300, "progress of better")
    return flow_run


def submitted_when_up(installed: Installed, deployment: str, **parameters: Any) -> UUID:
    """Trigger a run as soon as the server is there again."""
    found: list[UUID] = []

    def submit() -> bool:
        try:
            found.append(installed.submit(deployment, **parameters))
        except (httpx.HTTPError, OSError):
            return False
        return True

    until(submit, 300, "the server is there again")
    return found[0]


def check_ended_well(installed: Installed, flow_run: UUID) -> None:
    """The run is Completed, its document done, its tasks ended as the server tells, and nothing of it is left."""
    run = installed.ended(flow_run)
    assert run.state_name == "Completed", run.state
    gone(flow_run)
    document = installed.document(run.name)
    assert document is not None
    assert document["state"] == "done"
    tasks = installed.tasks(flow_run)
    assert {name: task.state and task.state.is_completed() for name, task in tasks.items()} == dict.fromkeys(
        ["words", "model", "better", "report"], True
    )
    until(lambda: no_slot_held(installed), 120, "all slots are free")


def no_slot_held(installed: Installed) -> bool:
    with installed.client() as client:
        return all(limit.active_slots == 0 for limit in client.read_global_concurrency_limits(limit=200))


def test_a_killed_server_is_started_again_and_the_run_ends_well(installed: Installed) -> None:
    flow_run = start(installed, 0.51)
    kill([installed.child("flows.service.local_server")])
    check_ended_well(installed, flow_run)
    assert "The server ended with code -9; it is started again" in installed.said


def test_a_server_that_hangs_for_a_minute_loses_nothing(installed: Installed) -> None:
    flow_run = start(installed, 0.52, steps=100)
    server = installed.child("flows.service.local_server")
    os.kill(server, signal.SIGSTOP)
    try:
        time.sleep(60)  # the run ends meanwhile
    finally:
        os.kill(server, signal.SIGCONT)
    check_ended_well(installed, flow_run)


def test_a_cancellation_while_the_worker_is_lost_is_heard_by_the_run_itself(installed: Installed) -> None:
    flow_run = start(installed, 0.53, steps=3000)
    kill([installed.child("prefect worker start")])
    with installed.client() as client:
        client.set_flow_run_state(flow_run, Cancelling())
    run = installed.ended(flow_run)
    assert run.state is not None
    assert run.state.is_cancelled()
    gone(flow_run)
    document = installed.document(run.name)
    assert document is not None
    assert document["steps"]["better"]["saved_step"] > 0


def test_a_run_outlives_its_worker(installed: Installed) -> None:
    flow_run = start(installed, 0.54)
    kill([installed.child("prefect worker start")])
    check_ended_well(installed, flow_run)


def test_a_killed_flow_leaves_nothing_behind_and_a_retry_goes_on(installed: Installed) -> None:
    flow_run = start(installed, 0.55)
    kill([engine_of(flow_run)])
    assert installed.ended(flow_run).state_name == "Crashed"
    gone(flow_run)
    time.sleep(10)  # a worker may tell of it twice, and a retry between the two would be taken back by the second
    with installed.client() as client:
        client.set_flow_run_state(flow_run, Scheduled(name="AwaitingRetry"))
    run = installed.reached(flow_run, lambda run: run.state is not None and run.state.is_completed())
    resumed = installed.document(f"{run.name}-2")
    assert resumed is not None
    assert "saved progress at step" in resumed["steps"]["better"]["reason"]


def test_a_run_whose_flow_and_worker_are_killed_together_is_scheduled_again(installed: Installed) -> None:
    flow_run = start(installed, 0.56)
    kill([installed.child("prefect worker start"), engine_of(flow_run)])
    run = installed.reached(flow_run, lambda run: (run.run_count or 0) == 2 and run.state_name == "Completed")
    assert run.state_name == "Completed"
    gone(flow_run)


def test_a_locked_database_holds_nothing_up_for_good(installed: Installed) -> None:
    flow_run = start(installed, 0.57, steps=100)
    database = sqlite3.connect(installed.home / "prefect.db", timeout=60, isolation_level=None)
    database.execute("BEGIN EXCLUSIVE")
    time.sleep(25)
    database.execute("ROLLBACK")
    database.close()
    check_ended_well(installed, flow_run)


def test_all_of_it_killed_at_once_is_there_again_and_the_run_goes_on(own: Installed) -> None:
    own.start()
    flow_run = start(own, 0.58)
    before = own.addresses
    assert own.process is not None
    kill([own.process.pid, engine_of(flow_run)])
    own.process.wait()
    gone(flow_run)
    own.start("--port", before["pages"].rpartition(":")[2], "--browser-port", "0")
    run = own.reached(flow_run, lambda run: (run.run_count or 0) == 2 and run.state_name == "Completed")
    document = own.document(f"{run.name}-2")
    assert document is not None
    assert "saved progress at step" in document["steps"]["better"]["reason"]
    gone(flow_run)


def test_stopping_saves_what_runs_and_the_next_start_goes_on(own: Installed) -> None:
    own.start()
    flow_run = start(own, 0.59)
    assert own.stop() == 0
    assert not processes_of(flow_run)
    own.start()
    run = own.reached(flow_run, lambda run: (run.run_count or 0) == 2 and run.state_name == "Completed")
    document = own.document(f"{run.name}-2")
    assert document is not None
    assert document["steps"]["words"]["status"] == "cached"
    assert "saved progress at step" in document["steps"]["better"]["reason"]


@pytest.mark.timeout(1500)
def test_a_night_outlives_an_outage_in_which_its_slot_had_to_be_renewed(own: Installed, tmp_path: Path) -> None:
    own.start()
    hold = tmp_path / "hold"
    hold.touch()
    overrides = ["better.rate=0.81", "better.max_steps=4", f"better.hold={hold}"]
    flow_run = own.submit("nightly/production", overrides=overrides)
    until(Path(f"{hold}.here").exists, 300, "better runs")
    begun = own.read(flow_run).start_time
    assert begun is not None
    assert own.process is not None
    # Prefect renews the slot of the deployment 225 seconds after the run has begun, and tries three times.
    time.sleep(max(0.0, begun.timestamp() + 215 - time.time()))
    os.kill(own.process.pid, signal.SIGSTOP)  # or it would start the server again at once
    try:
        kill([own.child("flows.service.local_server")])
        time.sleep(45)
        assert processes_of(flow_run)
    finally:
        os.kill(own.process.pid, signal.SIGCONT)
    second = submitted_when_up(own, "nightly/production", overrides=overrides)
    assert own.ended(second).state_name == "Cancelled"  # the slot is still the first one's
    hold.unlink()
    run = own.ended(flow_run)
    assert (run.state_name, run.run_count) == ("Promoted", 1), run.state


@pytest.mark.timeout(1500)
def test_a_night_waits_for_its_approval_though_its_slot_is_given_up_meanwhile(installed: Installed) -> None:
    flow_run = installed.submit("nightly/production", overrides=["better.rate=0.84"], approve=True)
    installed.reached(flow_run, lambda run: run.state_name == "Paused")
    time.sleep(245)  # longer than until Prefect renews the slot, which a paused run has no more
    assert installed.read(flow_run).state_name == "Paused"
    resume(installed, flow_run, promote=True, why="looks right")
    assert installed.ended(flow_run).state_name == "Promoted"


@pytest.mark.timeout(1500)
def test_an_approval_of_what_was_measured_beside_another_model_promotes_nothing(installed: Installed) -> None:
    installed.run("nightly/production", overrides=["better.rate=0.85"])
    flow_run = installed.submit("nightly/production", overrides=["better.rate=0.86"], approve=True)
    installed.reached(flow_run, lambda run: run.state_name == "Paused")
    second = installed.run("nightly/production", overrides=["better.rate=0.87"])
    assert second.state_name == "Promoted", second.state
    resume(installed, flow_run, promote=True, why="looks right")
    run = installed.ended(flow_run)
    assert run.state_name == "Refused", run.state
    assert "somebody moved it" in str(run.state and run.state.message)
    store = open_store(installed.store_url)
    night = next(item for item in read_nights(store, "production").nights if item.id.startswith(str(second.id)))
    assert read_ref(store, "production").artifact == night.artifact


def test_late_nights_do_not_pile_up_behind_a_worker_that_was_away(installed: Installed) -> None:
    worker = installed.child("prefect worker start")
    os.kill(worker, signal.SIGSTOP)
    try:
        overrides = ["better.rate=0.82", "better.max_steps=40", "better.pause=0.5"]
        nights = [installed.submit("nightly/production", overrides=overrides) for _ in range(6)]
        until(lambda: all(installed.read(night).state_name in LATE for night in nights), 300, "all nights are late")
    finally:
        os.kill(worker, signal.SIGCONT)
    ended = [installed.ended(night).state_name for night in nights]
    assert sorted(ended) == ["Cancelled"] * 5 + ["Promoted"]


def test_a_night_that_begins_late_has_the_date_for_which_it_was_scheduled(installed: Installed) -> None:
    due = datetime.now(UTC) - timedelta(days=2)
    with installed.client() as client:
        deployment = client.read_deployment_by_name("nightly/production")
        flow_run = client.create_flow_run_from_deployment(
            deployment.id, parameters={"overrides": ["better.rate=0.83"]}, state=Scheduled(scheduled_time=due)
        )
    assert installed.ended(flow_run.id).state_name == "Promoted"
    night = read_nights(open_store(installed.store_url), "production").nights[-1]
    assert night.id.startswith(str(flow_run.id))
    assert night.date == due.date().isoformat()
