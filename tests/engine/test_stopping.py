"""Runs in containers that are stopped from a terminal, or in Prefect, by the real command."""

from __future__ import annotations

import json
import os
import signal
import uuid
from pathlib import Path

import docker
import pytest
from container_runs import containers, events_of, start
from toy_stages import Toys

from stages.artifacts import open_store, read_run

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]  # the first one builds the image


def test_ctrl_c_saves_stops_and_leaves_no_container(
    stage_image: str, tmp_path: Path, s3_url: str, engine: docker.DockerClient, own_installation: str
) -> None:
    recipe = Toys(tmp_path).recipe("a: {stage: COUNT, total: 60, delay: 0.5}")
    command = ["run", recipe, "--json", "--no-prefect", "--runner", "docker", "--store", s3_url]
    flow = start(tmp_path, *command, start_new_session=True)
    assert flow.stdout is not None
    for line in flow.stdout:
        if line.startswith("{") and json.loads(line)["type"] == "saved":
            os.killpg(flow.pid, signal.SIGINT)  # what a terminal does
            break
    code, events = events_of(flow)
    assert code == 130, events[-3:]
    assert events[-1]["steps"]["a"]["code"] == 75
    saved = events[-1]["steps"]["a"]["saved_step"]
    assert containers(engine, own_installation) == []
    code, events = events_of(start(tmp_path, *command, "--set", "a.delay=0"))
    assert code == 0, events[-3:]
    assert next(event["at"] for event in events if event["type"] == "resumed") >= saved


def test_a_run_that_is_cancelled_in_prefect_saves_stops_and_leaves_no_container(
    stage_image: str,
    tmp_path: Path,
    s3_url: str,
    engine: docker.DockerClient,
    own_installation: str,
    prefect_api: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", prefect_api)
    recipe = Toys(tmp_path).recipe("a: {stage: COUNT, total: 2000, delay: 0.5}")
    flow = start(tmp_path, "run", recipe, "--json", "--runner", "docker", "--store", s3_url)
    assert flow.stdout is not None
    run_id = ""
    for line in flow.stdout:
        event = json.loads(line) if line.startswith("{") else {}
        if event.get("type") == "saved":
            run_id = cancel_the_run_of(prefect_api)
            break
    code, events = events_of(flow)
    assert code == 130, events[-5:]
    assert containers(engine, own_installation) == []
    assert events[-1]["steps"]["a"]["code"] == 75
    document = read_run(open_store(s3_url), events[-1]["run"])
    assert document is not None
    assert document["state"] == "stopped"
    assert state_of(prefect_api, run_id) == "CANCELLED"


def cancel_the_run_of(api: str) -> str:
    """Cancel the one flow run that runs, as its page does. Returns its id."""
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, temporary_settings
    from prefect.states import Cancelling

    with temporary_settings({PREFECT_API_URL: api}), get_client(sync_client=True) as client:
        runs = [run for run in client.read_flow_runs() if run.state is not None and run.state.is_running()]
        assert len(runs) == 1
        client.set_flow_run_state(runs[0].id, Cancelling())
        return str(runs[0].id)


def state_of(api: str, run_id: str) -> str:
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: api}), get_client(sync_client=True) as client:
        state = client.read_flow_run(uuid.UUID(run_id)).state
        assert state is not None
        return str(state.type.value)
