"""Steps as flow runs on a real Prefect server's work pool, with real workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from pool_runs import ROOT, Pool, Runs
from prefect import get_client
from prefect.states import Running, Scheduled
from toy_stages import Toys

from flows.execute import execute
from flows.plan import make_plan
from flows.recipe import load_recipe
from flows.runners.process import ProcessRunner
from flows.service.reconcile import reconcile
from stages.artifacts import fetch, open_store, read_log

pytestmark = pytest.mark.timeout(1800)

WHO = "import os\n\n\ndef who(total):\n    return int(os.environ['WORKER'])\n"


def value(runs: Runs, artifact: str | None, folder: Path) -> str:
    assert artifact is not None
    fetch(open_store(runs.toys.store), artifact, folder)
    return (folder / "value.txt").read_text()


def told(runs: Runs, kind: str, step: str = "a") -> list[dict[str, Any]]:
    return [event for event in runs.events if event["type"] == kind and event.get("step") == step]


def left(runs: Runs) -> list[str]:
    """Objects of channels that are still in the store."""
    return [info.key for info in open_store(runs.toys.store).list("logs/") if ".relay/" in info.key]


def until(condition: Callable[[], Any], seconds: float = 120) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited too long"
        time.sleep(0.1)


def test_two_workers_share_the_steps_of_a_run_and_everything_comes_back(runs: Runs, pool: Pool, tmp_path: Path) -> None:
    assert "stage/dpo" in pool.said
    assert "stage/custom" in pool.said
    (runs.toys.folder / "whoami.py").write_text(WHO)
    steps = "".join(
        f"s{n}: {{stage: COUNT, total: 5, beta: {n}.5, delay: 0.4, reward: 'whoami:who'}}\n" for n in range(4)
    )
    path = runs.toys.recipe(steps + "last: {stage: COUNT, total: 3, inputs: {data: s0}, ignore_data: true}")
    result = runs(path)
    assert result.state == "done", [step.message for step in result.steps.values()]
    workers = {value(runs, result.steps[f"s{n}"].artifact, tmp_path / f"value-{n}").split()[0] for n in range(4)}
    assert workers == {"1", "2"}
    for name in (f"s{n}" for n in range(4)):
        assert [event["done"] for event in told(runs, "progress", name)] == [1, 2, 3, 4, 5]
        assert [event["code"] for event in told(runs, "outcome", name)] == [0]
        log = list(read_log(open_store(runs.toys.store), "run-1", name))
        assert [event["text"] for event in log if event.get("level") == "stderr"] == ["a stray print"]
    assert left(runs) == []

    alone = Toys(tmp_path / "alone")  # the same step by a process of this machine gives the same bytes
    runner = ProcessRunner(preload=False, gpus=[])
    try:
        plan = make_plan(load_recipe(alone.recipe("last: {stage: COUNT, total: 3}")), alone.store)
        made = execute(plan, runner=runner, run_id="alone").steps["last"]
    finally:
        runner.close()
    assert made.artifact == result.steps["last"].artifact


def test_without_a_server_or_deployments_the_step_says_what_to_do(
    prefect_api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    runs = Runs(Toys(tmp_path))
    path = runs.toys.recipe("a: {stage: COUNT}")
    assert "set PREFECT_API_URL" in runs(path).steps["a"].message
    gone = "http://127.0.0.1:9/api"
    monkeypatch.setenv("PREFECT_API_URL", gone)
    with temporary_settings({PREFECT_API_URL: gone}):
        assert "the Prefect server cannot be asked for stage/custom" in runs(path).steps["a"].message


def test_headrace_up_leaves_the_stages_of_its_pool_to_the_flows_that_asked_for_them(
    prefect_api: str, runs: Runs, pool: Pool
) -> None:
    """It schedules runs of flows again whose process is gone; a stage that came back so would meet no channel."""
    later = datetime.now(UTC) + timedelta(hours=1)  # so that no worker takes it
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name("stage/custom")
        run = client.create_flow_run_from_deployment(
            deployment.id,
            parameters=dict.fromkeys(("run", "step", "stage", "store", "channel"), "x"),
            state=Scheduled(scheduled_time=later),
        )
        client.set_flow_run_state(run.id, Running(), force=True)
        assert reconcile(deployment.work_pool_name, {str(run.id)}) == set()
        assert client.read_flow_run(run.id).state_type == "RUNNING"
        client.delete_flow_run(run.id)


@pytest.mark.slow
def test_a_failure_ends_as_with_any_runner(runs: Runs, pool: Pool) -> None:
    result = runs(
        runs.toys.recipe(
            "a: {stage: COUNT, beta: 1.5, trouble: refuse}\nb: {stage: COUNT, beta: 2.5, trouble: tripwire@2}\n"
            "c: {stage: COUNT, beta: 3.5, trouble: crash@1}"
        )
    )
    ends = {name: (step.code, step.attempts) for name, step in result.steps.items()}
    assert ends == {"a": (83, 1), "b": (80, 1), "c": (1, 1)}
    assert result.steps["a"].message == "data line 3: it is blank"
    assert result.steps["c"].message == "RuntimeError: the disk of toys is on fire"


@pytest.mark.slow
def test_a_stopped_run_saves_and_the_next_goes_on_from_there(runs: Runs, pool: Pool, tmp_path: Path) -> None:
    def stop(event: dict[str, Any]) -> None:
        if event["type"] == "progress" and event["done"] == 3:
            assert runs.execution is not None
            runs.execution.stop()

    runs.react = stop
    path = runs.toys.recipe("a: {stage: COUNT, total: 100, delay: 0.3}")
    first = runs(path).steps["a"]
    assert (first.status, first.code) == ("stopped", 75)
    assert first.saved_step is not None
    runs.react = lambda event: None
    again = runs(path, "a.delay=0").steps["a"]
    assert again.status == "done"
    assert told(runs, "resumed")[0]["at"] >= first.saved_step
    assert value(runs, again.artifact, tmp_path / "value") == "5050 0.1 "
    assert left(runs) == []


@pytest.mark.slow
def test_a_stage_that_was_not_taken_yet_is_cancelled(runs: Runs, pool: Pool) -> None:
    def stop(event: dict[str, Any]) -> None:
        if event["type"] == "progress" and event["done"] == 2:
            assert runs.execution is not None
            runs.execution.stop()

    runs.react = stop
    steps = "".join(f"s{n}: {{stage: COUNT, total: 50, beta: {n}.5, delay: 0.3}}\n" for n in range(3))
    result = runs(runs.toys.recipe(steps), workers=3)  # for two workers: one step is in the queue
    assert result.state == "stopped"
    assert sorted(step.code or 0 for step in result.steps.values())[0] in (-signal.SIGTERM, 75)
    assert [step.status for step in result.steps.values()] == ["stopped"] * 3


@pytest.mark.slow
def test_a_lost_worker_costs_an_attempt_and_a_dead_flow_leaves_no_stage(
    prefect_api: str, runs: Runs, pool: Pool, tmp_path: Path
) -> None:
    doomed: list[int] = []

    def kill(event: dict[str, Any]) -> None:
        if event["type"] == "saved" and event["at"] == 3 and not doomed:
            for worker in pool.workers:  # and their flow runs, and the stages of these
                below = psutil.Process(worker.pid).children(recursive=True)
                doomed.extend(process.pid for process in below)
            for pid in doomed:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue

    runs.react = kill
    result = runs(runs.toys.recipe("a: {stage: COUNT, total: 10, delay: 0.3}")).steps["a"]
    assert doomed
    assert (result.status, result.attempts) == ("done", 2), result
    assert told(runs, "resumed")[0]["at"] >= 3

    path = runs.toys.recipe("b: {stage: COUNT, total: 400, beta: 7.5, delay: 0.3}")
    command = [sys.executable, "-m", "flows.cli", "run", path, "--no-prefect", "--runner", "workpool", "--json"]
    environment = pool.environment | {"PYTHONPATH": str(ROOT)}
    flow = subprocess.Popen(
        [*command, "--store", str(runs.toys.store)], env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    assert flow.stdout is not None
    for line in flow.stdout:
        if '"saved"' in line:
            break
    flow.kill()
    flow.wait()
    flow.stdout.close()
    store = open_store(runs.toys.store)

    def ended() -> bool:
        from stages.artifacts import leases

        held = [lease for lease in leases(store) if lease.step == "b"]
        return bool(held) and held[0].holder is None  # let go in good order, after saving

    until(ended)
