"""The miniature of the quickstart, whole in containers, by the real command, on a real S3 server and on a folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import docker
import pytest
from container_runs import ROOT, containers, events_of, start

from stages.artifacts import open_store, verify_all

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]  # the first one builds the image

RUN = ["run", "mini.yaml", "--set", "steps=6", "--json"]


def run(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run the miniature to a good end and return what `run --json` says last."""
    code, events = events_of(start(folder, *RUN, *arguments))
    assert code == 0, [event for event in events if event["type"] in ("text", "run", "outcome")]
    return events[-1]


def artifacts(result: dict[str, Any]) -> dict[str, Any]:
    return {name: (step["artifact"], step["outputs"]) for name, step in result["steps"].items()}


@pytest.fixture(scope="session")  # so that it is made before the image, which another test process may be building
def processes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The miniature run by processes of this machine."""
    folder = tmp_path_factory.mktemp("processes")
    for name in ("mini.yaml", "mini_rewards.py"):
        (folder / name).write_bytes((ROOT / "tests" / "end_to_end" / name).read_bytes())
    return run(folder, "--no-prefect", "--runner", "process")


def test_the_whole_pipeline_gives_the_same_bytes_in_containers_on_s3_though_training_is_killed(
    processes: dict[str, Any],
    stage_image: str,
    project: Path,
    s3_url: str,
    engine: docker.DockerClient,
    own_installation: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("HEADRACE_DOCKER_USER", raising=False)
    flow = start(project, *RUN, "--no-prefect", "--runner", "docker", "--store", s3_url)
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
    assert {event["step"] for event in events if event["type"] == "resumed"} == {"base", "sft"}
    attempts = {name: step["attempts"] for name, step in result["steps"].items()}
    assert attempts == {name: 2 if name in killed else 1 for name in attempts}
    assert artifacts(result) == artifacts(processes)
    assert {step["status"] for step in result["steps"].values()} == {"done"}
    assert not list(verify_all(open_store(s3_url)))
    assert not (project / ".headrace").exists()
    again = run(project, "--no-prefect", "--runner", "docker", "--store", s3_url)
    assert {step["status"] for step in again["steps"].values()} == {"cached"}


@pytest.mark.slow
def test_the_whole_pipeline_gives_the_same_bytes_in_containers_on_a_folder(
    processes: dict[str, Any], stage_image: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.getuid() == 0:
        monkeypatch.setenv("HEADRACE_DOCKER_USER", "0:0")
    result = run(project, "--no-prefect", "--runner", "docker")
    assert artifacts(result) == artifacts(processes)
    assert not list(verify_all(open_store(project / ".headrace")))
