"""The miniature of the quickstart, whole in containers, by the real command, on a real S3 server and on a folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import docker
import pytest
import s3_server as server_module
from container_runs import ROOT, containers

from stages.artifacts import open_store, read_run, verify_all

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]  # the first one builds the image

RUN = ["run", "mini.yaml", "--set", "steps=6", "--json"]


def start(folder: Path, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Start `headrace` in a folder; its events are on standard output."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "flows.cli", *arguments],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        **options,
    )


def events_of(process: subprocess.Popen[str]) -> tuple[int, list[dict[str, Any]]]:
    """Read a command to its end: its exit code and its events."""
    assert process.stdout is not None
    lines = process.stdout.read().splitlines()
    process.stdout.close()
    events = []
    for line in lines:
        try:
            events.append(json.loads(line))
        except ValueError:
            events.append({"type": "text", "text": line})
    return process.wait(), events


def run(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run the miniature to a good end and return what `run --json` says last."""
    code, events = events_of(start(folder, *RUN, *arguments))
    assert code == 0, [event for event in events if event["type"] in ("text", "run", "outcome")]
    return events[-1]


def artifacts(result: dict[str, Any]) -> dict[str, Any]:
    return {name: (step["artifact"], step["outputs"]) for name, step in result["steps"].items()}


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The miniature run by processes of this machine."""
    folder = tmp_path_factory.mktemp("processes")
    for name in ("mini.yaml", "mini_rewards.py"):
        (folder / name).write_bytes((ROOT / "tests" / "end_to_end" / name).read_bytes())
    return run(folder, "--no-prefect", "--runner", "process")


def test_the_whole_pipeline_gives_the_same_bytes_in_containers_on_s3(
    stage_image: str, processes: dict[str, Any], project: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEADRACE_DOCKER_USER", raising=False)
    result = run(project, "--no-prefect", "--runner", "docker", "--store", s3_url)
    assert artifacts(result) == artifacts(processes)
    assert {step["status"] for step in result["steps"].values()} == {"done"}
    assert not list(verify_all(open_store(s3_url)))
    assert not (project / ".headrace").exists()
    again = run(project, "--no-prefect", "--runner", "docker", "--store", s3_url)
    assert {step["status"] for step in again["steps"].values()} == {"cached"}


def test_training_that_is_killed_in_its_container_ends_with_the_same_bytes(
    stage_image: str,
    processes: dict[str, Any],
    project: Path,
    s3_url: str,
    engine: docker.DockerClient,
    own_installation: str,
) -> None:
    flow = start(project, *RUN, "--no-prefect", "--runner", "docker", "--store", s3_url, "--until", "sft")
    assert flow.stdout is not None
    killed = []
    events = []
    for line in flow.stdout:
        event = json.loads(line) if line.startswith("{") else {"type": "text", "text": line}
        events.append(event)
        # A save is told when it begins: at the third, the second is durable.
        if event["type"] == "saved" and event["step"] in ("base", "sft") and event["at"] >= 3:
            if event["step"] in killed:
                continue
            killed.append(event["step"])
            for container in containers(engine, own_installation):
                if container.labels["headrace.step"] == event["step"]:
                    container.kill("SIGKILL")
    assert flow.wait() == 0, events[-5:]
    result = events[-1]
    assert killed == ["base", "sft"]
    assert [result["steps"][name]["attempts"] for name in killed] == [2, 2]
    assert {event["step"] for event in events if event["type"] == "resumed"} == {"base", "sft"}
    expected = artifacts(processes)
    assert all(made == expected[name] for name, made in artifacts(result).items())


def test_ctrl_c_saves_stops_and_leaves_no_container(
    stage_image: str,
    processes: dict[str, Any],
    project: Path,
    s3_url: str,
    engine: docker.DockerClient,
    own_installation: str,
) -> None:
    arguments = ["--no-prefect", "--runner", "docker", "--store", s3_url, "--until", "base"]
    flow = start(project, *RUN, *arguments, start_new_session=True)
    assert flow.stdout is not None
    for line in flow.stdout:
        if '"type": "saved"' in line or '"type":"saved"' in line:
            os.killpg(flow.pid, signal.SIGINT)  # what a terminal does
            break
    code, events = events_of(flow)
    assert code == 130, events[-3:]
    assert events[-1]["steps"]["base"]["code"] in (75, 0)
    assert containers(engine, own_installation) == []
    result = run(project, *arguments)
    assert artifacts(result)["base"] == artifacts(processes)["base"]


@pytest.mark.slow
def test_the_whole_pipeline_gives_the_same_bytes_in_containers_on_a_folder(
    stage_image: str, processes: dict[str, Any], project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.getuid() == 0:
        monkeypatch.setenv("HEADRACE_DOCKER_USER", "0:0")
    result = run(project, "--no-prefect", "--runner", "docker")
    assert artifacts(result) == artifacts(processes)
    assert not list(verify_all(open_store(project / ".headrace")))


def test_a_run_that_is_cancelled_in_prefect_saves_stops_and_leaves_no_container(
    stage_image: str,
    project: Path,
    s3_url: str,
    s3_server: server_module.Server,
    engine: docker.DockerClient,
    own_installation: str,
    prefect_api: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", prefect_api)
    arguments = ["--runner", "docker", "--store", s3_url, "--until", "base", "--set", "base.max_steps=2000"]
    flow = start(project, *RUN, *arguments)
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
    assert events[-1]["steps"]["base"]["code"] == 75
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
