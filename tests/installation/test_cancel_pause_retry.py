"""Control of runs: cancelled, approved or not, retried, shared and limited, each by the API that the pages call."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from uuid import UUID

import pytest
from installed import Installed, gone, processes_of, resume, until
from prefect.client.schemas.filters import FlowRunFilter
from prefect.states import Cancelling, Scheduled

from stages.artifacts import open_store, read_ref, results


def cancel(installed: Installed, flow_run: UUID) -> None:
    """As the page's Cancel does."""
    with installed.client() as client:
        client.set_flow_run_state(flow_run, Cancelling())


def start_held(installed: Installed, hold: Path, *overrides: str) -> UUID:
    """Start the toy recipe and wait until its step `better` stays at its second training step, until `hold` is gone."""
    hold.touch()
    flow_run = installed.submit("headrace/pipeline", recipe="toy.yaml", overrides=[*overrides, f"better.hold={hold}"])
    until(Path(f"{hold}.here").exists, 300, "better runs")
    return flow_run


def test_a_cancelled_run_saves_ends_and_a_retry_goes_on_from_there(installed: Installed, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    flow_run = start_held(installed, hold, "better.rate=0.41", "better.max_steps=6")
    cancel(installed, flow_run)
    run = installed.ended(flow_run)
    assert run.state is not None
    assert run.state.is_cancelled()
    gone(flow_run)
    document = installed.document(run.name)
    assert document is not None
    assert document["steps"]["better"]["status"] == "stopped"
    assert document["steps"]["better"]["saved_step"] == 2

    hold.unlink()
    with installed.client() as client:  # the page's Retry
        client.set_flow_run_state(flow_run, Scheduled(name="AwaitingRetry"))
    run = installed.reached(flow_run, lambda run: run.state is not None and run.state.is_completed())
    resumed = installed.document(f"{run.name}-2")
    assert resumed is not None
    assert [resumed["steps"][step]["status"] for step in ("words", "model")] == ["cached", "cached"]
    assert "saved progress at step 2" in resumed["steps"]["better"]["reason"]


@pytest.mark.slow
def test_a_stage_that_does_not_listen_is_killed_before_the_worker_gives_up(
    installed: Installed, tmp_path: Path
) -> None:
    flow_run = start_held(installed, tmp_path / "hold", "better.rate=0.42", "better.ignore_stop=true")
    cancel(installed, flow_run)
    run = installed.ended(flow_run)
    assert run.state is not None
    assert run.state.is_cancelled()
    gone(flow_run)  # sooner than a stage whose flow was killed gives up


@pytest.mark.slow
def test_a_promotion_waits_for_a_person_and_nobodys_answer_means_no(installed: Installed) -> None:
    installed.run("headrace/pipeline", recipe="toy.yaml", overrides=["better.rate=0.43"])
    store = open_store(installed.folder / "store")

    def ask(**parameters: object) -> UUID:
        flow_run = installed.submit("promote/promote", artifact="better", ref="asked", approve=True, **parameters)
        installed.reached(flow_run, lambda run: run.state_name == "Paused")
        return flow_run

    flow_run = ask()
    told: list[str] = []

    def described() -> bool:
        with installed.client() as client:
            inputs = client.filter_flow_run_input(flow_run, key_prefix="paused", limit=10, exclude_keys=set())
        told[:] = [str(item.value) for item in inputs if item.key.endswith("description")]
        return bool(told)

    until(described, 60, "the form of the approval")
    assert "exact match" in told[0]
    assert "Shall **asked** name" in told[0]
    resume(installed, flow_run, promote=False, why="not today")
    run = installed.ended(flow_run)
    assert (run.state_name, run.state and run.state.message) == ("Not approved", "not promoted: not today")

    run = installed.ended(ask(approve_hours=0.002))
    assert run.state_name == "Not approved"
    assert "nobody answered" in str(run.state and run.state.message)
    assert "asked" not in {ref for ref in _refs(installed)}

    flow_run = ask()
    resume(installed, flow_run, promote=True, why="looks right")
    assert installed.ended(flow_run).state_name == "Promoted"
    assert "looks right" in read_ref(store, "asked").history[-1].why


def _refs(installed: Installed) -> list[str]:
    from stages.artifacts import ref_names

    return ref_names(open_store(installed.folder / "store"))


@pytest.mark.slow
def test_two_runs_at_once_compute_a_shared_step_once(installed: Installed) -> None:
    recipe = "toy.yaml"
    overrides = ["model.rate=0.44", "model.max_steps=60", "model.pause=0.1"]
    both = [
        installed.submit("headrace/pipeline", recipe=recipe, overrides=[*overrides, f"better.rate={rate}"])
        for rate in (0.45, 0.46)
    ]
    names = [installed.ended(flow_run).name for flow_run in both]
    documents = [installed.document(name) for name in names]
    found = [document["steps"]["model"] for document in documents if document]
    assert len({step["artifact"] for step in found}) == 1
    assert sorted(step["status"] for step in found) == ["cached", "done"]
    key = found[0]["key"]
    made = [item for item in results(open_store(installed.folder / "store"), "toy.train") if item.key == key]
    assert len(made) == 1
    assert made[0].history == []


@pytest.mark.slow
def test_twenty_triggers_of_a_night_leave_one_running(installed: Installed) -> None:
    overrides = ["better.rate=0.47", "better.max_steps=6000", "better.pause=0.1"]
    first = installed.submit("nightly/production", overrides=overrides)
    installed.reached(first, lambda run: run.state_name == "Running")
    others = [installed.submit("nightly/production", overrides=overrides) for _ in range(19)]
    for other in others:
        assert installed.ended(other).state_name == "Cancelled"
    with installed.client() as client:
        running = client.read_flow_runs(flow_run_filter=FlowRunFilter(state={"type": {"any_": ["RUNNING", "PENDING"]}}))
    assert [run.id for run in running] == [first]
    cancel(installed, first)
    installed.ended(first)
    gone(first)


@pytest.mark.slow
def test_stages_share_the_slots_of_the_installation(installed: Installed) -> None:
    from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate, GlobalConcurrencyLimitUpdate

    with installed.client() as client:
        client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name="headrace-steps", limit=1))
    try:
        recipe = "toy.yaml"
        pauses = ["words.bad=false", "model.pause=0.3"]
        both = [
            installed.submit("headrace/pipeline", recipe=recipe, overrides=[*pauses, f"model.rate={rate}"])
            for rate in (0.48, 0.49)
        ]
        names = [installed.ended(flow_run).name for flow_run in both]
        store = open_store(installed.folder / "store")
        rows = sorted(
            (item.started, item.finished)
            for stage in ("toy.train", "toy.report")
            for item in results(store, stage)
            if item.run in names
        )
        assert len(rows) == 6
        for (_, ended), (begun, _) in pairwise(rows):
            assert ended <= begun, "two stages ran at once"
        with installed.client() as client:
            until(
                lambda: client.read_global_concurrency_limit_by_name("headrace-steps").active_slots == 0, 120, "slots"
            )
    finally:
        with installed.client() as client:
            client.update_global_concurrency_limit("headrace-steps", GlobalConcurrencyLimitUpdate(active=False))
    assert not processes_of(both[0])
