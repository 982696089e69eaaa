"""The pipeline on a real work pool of type docker: two workers start a container for each step."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import docker
import pytest
from container_runs import ROOT
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags
from prefect.settings import PREFECT_API_URL, temporary_settings
from test_whole_pipeline import artifacts, run

from flows import images
from flows.service.stage_deployments import deploy_stages

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture
def worker_image(engine: docker.DockerClient, stage_image: str) -> str:
    """The worker image of this checkout."""
    images.build(["worker"], base=None, index=None, tag="test", as_json=True)
    return str(engine.images.get("headrace-worker:test").id)


def test_two_workers_of_a_docker_pool_share_the_steps_of_a_run(
    worker_image: str,
    engine: docker.DockerClient,
    prefect_api: str,
    project: Path,
    s3_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = artifacts(run(project, "--no-prefect", "--until", "sft"))
    monkeypatch.setenv("PREFECT_API_URL", prefect_api)
    template: dict[str, Any] = json.loads((ROOT / "infra" / "work-pools" / "docker.json").read_text())
    properties = template["variables"]["properties"]
    properties["image"]["default"] = "headrace-worker:test"
    given = ("AWS_ENDPOINT_URL_S3", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION")
    properties["env"]["default"] = {name: os.environ[name] for name in given}
    with temporary_settings({PREFECT_API_URL: prefect_api}), get_client(sync_client=True) as client:
        client.create_work_pool(WorkPoolCreate(name="containers", type="docker", base_job_template=template))
        deploy_stages(client, "containers")
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "containers", "--type", "docker"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PREFECT_WORKER_QUERY_SECONDS": "1"}
    workers = []
    for number in (1, 2):
        with open(project / f"worker-{number}.log", "wb") as log:
            more = ["--limit", "1", "--name", f"worker-{number}"]
            workers.append(
                subprocess.Popen(
                    [*command, *more], env=environment, cwd=project, stdout=log, stderr=log, start_new_session=True
                )
            )
    try:
        told = run(project, "--runner", "workpool", "--store", s3_url, "--until", "sft", "--workers", "2")
    finally:
        for worker in workers:
            os.killpg(worker.pid, signal.SIGTERM)
        for worker in workers:
            worker.wait(120)
    made = artifacts(told)
    assert made == expected
    assert set(made) == {"corpus", "base", "chat", "sft"}
    for number in (1, 2):  # base and chat wait for corpus alone, so there is one for each
        assert f"Flow run '{told['run']}/" in (project / f"worker-{number}.log").read_text()
    with temporary_settings({PREFECT_API_URL: prefect_api}), get_client(sync_client=True) as client:
        tags = FlowRunFilterTags(all_=[f"run:{told['run']}"])
        runs = client.read_flow_runs(flow_run_filter=FlowRunFilter(tags=tags))
    assert sorted(str(item.name).rpartition("/")[2] for item in runs) == ["base", "chat", "corpus", "sft"]
    assert all(item.infrastructure_pid for item in runs)  # a container was made for each
    assert not engine.containers.list(all=True, filters={"ancestor": worker_image})
