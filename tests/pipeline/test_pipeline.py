"""The Prefect flow against a real, temporary Prefect server: states, edges, logs and pages are read back by its API."""

from __future__ import annotations

import base64
import inspect
import re
import threading
import time
import uuid
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import prefect.flow_engine
import pytest
from prefect import get_client
from prefect.client.schemas.filters import ArtifactFilter, FlowRunFilter, LogFilter, TaskRunFilter
from prefect.states import Cancelled
from prefect.testing.utilities import prefect_test_harness
from toy_recipe import write_toy

from flows.flow_run import slots
from flows.pipeline import Session, pipeline, run_in_prefect
from flows.plan import make_plan
from flows.recipe import load_recipe
from stages.artifacts import read_run


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    with prefect_test_harness(server_startup_timeout=120):
        yield


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = write_toy(tmp_path / "toy-recipe")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(path.parent))
    return path


def run(recipe: Path, name: str, *overrides: str, **more: Any) -> tuple[Any, Session]:
    plan = make_plan(load_recipe(str(recipe), overrides), recipe.parent / "store", **more)
    session = Session(plan, name)
    state = run_in_prefect(session, {"recipe": str(recipe), "overrides": list(overrides), "store": "store"})
    return state, session


def task_runs(flow_run_id: Any, expected: int) -> dict[str, Any]:
    """The task runs of a flow run by name; task states reach the server a moment after the run."""
    for _ in range(100):
        with get_client(sync_client=True) as client:
            found = client.read_task_runs(
                flow_run_filter=FlowRunFilter(id={"any_": [flow_run_id]}), task_run_filter=TaskRunFilter()
            )
        if len(found) == expected and all(item.state and item.state.is_final() for item in found):
            return {item.name: item for item in found}
        time.sleep(0.1)
    raise AssertionError(f"not {expected} ended task runs: {[(item.name, item.state_name) for item in found]}")


def page(key: str, flow_run_id: Any) -> str:
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(artifact_filter=ArtifactFilter(key={"any_": [key]}))
    return next(str(item.data) for item in found if item.flow_run_id == flow_run_id)


def test_a_first_run_computes_every_step_and_a_second_shows_all_as_cached(recipe: Path) -> None:
    state, session = run(recipe, "first-run")
    assert state.is_completed()
    first = task_runs(state.state_details.flow_run_id, 4)
    assert {name: item.state.name for name, item in first.items()} == dict.fromkeys(
        ["words", "model", "better", "report"], "Completed"
    )
    edges = {name: {str(x.id) for x in item.task_inputs.get("wait_for", [])} for name, item in first.items()}
    assert edges["words"] == set()
    assert edges["report"] == {str(first["model"].id), str(first["better"].id)}
    with get_client(sync_client=True) as client:
        assert client.read_flow_run(state.state_details.flow_run_id).name == "first-run"

    state, again = run(recipe, "second-run")
    assert state.is_completed()
    assert state.message == "4 steps: 4 cached"
    second = task_runs(state.state_details.flow_run_id, 4)
    assert {item.state.name for item in second.values()} == {"Cached"}
    assert again.result is not None
    assert session.result is not None
    assert {name: step.artifact for name, step in again.result.steps.items()} == {
        name: step.artifact for name, step in session.result.steps.items()
    }
    document = read_run(again.plan.store, "second-run")
    assert document is not None
    assert document["state"] == "done"


def test_the_pages_of_a_run_are_read_back_from_prefect(recipe: Path) -> None:
    state, session = run(recipe, "paged-run")
    flow_run_id = state.state_details.flow_run_id
    assert session.result is not None

    metrics = page("toy-metrics", flow_run_id)
    for step in session.result.steps.values():
        assert step.artifact is not None
        assert step.artifact in metrics
    assert "loss 0.333" in metrics

    picture = page("toy-loss", flow_run_id)
    assert picture.startswith("data:image/svg+xml;base64,")
    drawn = ElementTree.fromstring(base64.b64decode(picture.partition(",")[2]))
    said = [item.text for item in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert [text for text in said if "loss" in str(text)] == ["model · loss", "better · loss"]
    assert said.count("0.333") == 2  # the last loss of both

    evaluation = page("toy-evaluation", flow_run_id)
    assert "| better | 50.0% |" in evaluation
    assert "What is 0 + 1?" in evaluation

    lineage = page("toy-lineage", flow_run_id)
    assert "```mermaid\nflowchart TD" in lineage
    better = session.result.steps["better"].artifact
    assert better is not None
    assert better in lineage
    assert re.search(r'a\d+ -- "model" --> a0', lineage)


def test_a_failed_step_is_failed_and_what_needs_it_skipped(recipe: Path) -> None:
    state, session = run(recipe, "failed-run", "words.bad=true")
    assert state.is_failed()
    assert 'step words: words.txt line 3: "messages" is missing' in str(state.message)
    states = {name: item.state for name, item in task_runs(state.state_details.flow_run_id, 4).items()}
    assert states["words"].is_failed()
    assert "(83)" in states["words"].message
    assert {states[name].name for name in ("model", "better", "report")} == {"Skipped"}
    assert session.result is not None
    assert session.result.state == "failed"


def test_what_a_stage_logs_is_in_the_log_of_its_task(recipe: Path) -> None:
    state, _ = run(recipe, "logged-run", "model.max_steps=4")
    words = task_runs(state.state_details.flow_run_id, 4)["words"]
    for _ in range(100):
        with get_client(sync_client=True) as client:
            logs = client.read_logs(LogFilter(task_run_id={"any_": [words.id]}))
        if any("read 18 characters" in item.message for item in logs):
            return
        time.sleep(0.1)
    raise AssertionError([item.message for item in logs])


def test_a_run_that_is_cancelled_in_prefect_saves_stops_and_can_go_on(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.pipeline.POLL_SECONDS", 0.2)
    started = threading.Event()
    events: list[dict[str, Any]] = []

    def listen(event: dict[str, Any]) -> None:
        events.append(event)
        if event.get("type") == "progress" and event["step"] == "better":
            started.set()

    def cancel() -> None:
        assert started.wait(60)
        with get_client(sync_client=True) as client:
            found = client.read_flow_runs(flow_run_filter=FlowRunFilter(name={"any_": ["cancelled-run"]}))
            client.set_flow_run_state(found[0].id, Cancelled(), force=True)

    overrides = ("better.max_steps=100", "better.pause=0.2")
    plan = make_plan(load_recipe(str(recipe), overrides), recipe.parent / "store")
    session = Session(plan, "cancelled-run", listen)
    thread = threading.Thread(target=cancel)
    thread.start()
    state = run_in_prefect(session, {"recipe": str(recipe), "store": "store"})
    thread.join()
    assert state.is_cancelled()
    assert session.result is not None
    assert session.result.steps["better"].status == "stopped"
    saved = session.result.steps["better"].saved_step
    assert saved is not None

    events.clear()
    fast = ("better.max_steps=100", "better.pause=0")
    plan = make_plan(load_recipe(str(recipe), fast), recipe.parent / "store")
    assert plan["better"].saved_step == saved
    state = run_in_prefect(Session(plan, "resumed-run", events.append), {"recipe": str(recipe), "store": "store"})
    assert state.is_completed()
    assert [event["at"] for event in events if event["type"] == "resumed"] == [saved]


def test_the_flow_works_without_a_session_as_a_deployment_calls_it(recipe: Path) -> None:
    state = pipeline(recipe=str(recipe), store=str(recipe.parent / "store"), until=["words"], return_state=True)
    assert state.is_completed()
    assert state.message == "1 step: 1 done"


def test_a_wrong_recipe_fails_the_flow_with_the_sentence_for_the_user(recipe: Path) -> None:
    state = pipeline(recipe=str(recipe), overrides=["better.rat=1"], store="store", return_state=True)
    assert state.is_failed()
    assert "Did you mean rate" in str(state.message)


def test_a_run_goes_on_where_the_slot_of_its_deployment_is_lost() -> None:
    ours, theirs = slots._keep_deployment_slot, prefect.flow_engine.maintain_concurrency_lease
    assert [*inspect.signature(ours).parameters] == [*inspect.signature(theirs).parameters]
    lease = uuid.uuid4()  # the server has none of that name
    with ours(lease, 60, raise_on_lease_renewal_failure=True):
        for _ in range(600):
            if not any(thread.name == f"slot {lease}" for thread in threading.enumerate()):
                break
            time.sleep(0.1)
        else:
            raise AssertionError("the slot is still renewed")
