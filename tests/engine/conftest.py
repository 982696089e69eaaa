"""A real Docker Engine and the real stage image, for tests marked `engine`.

The engine is the one that DOCKER_HOST names, or the usual socket; where none answers and the script for it is at hand,
one is started. The image is built from this checkout: minutes the first time, seconds afterwards. Where that cannot be,
the tests are skipped and say why.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import docker
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "execute"), str(Path(__file__).parent)]

import shared_engine  # noqa: E402
from container_runs import Runs, containers  # noqa: E402
from toy_stages import Toys  # noqa: E402

from flows import images  # noqa: E402
from flows.runners import engine as engine_module  # noqa: E402
from flows.runners.base import RunnerError  # noqa: E402
from flows.service.local_server import LocalServer, quiet_prefect  # noqa: E402

quiet_prefect()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The whole pipeline goes first: it begins outside of containers, while another test process builds the image."""
    items.sort(key=lambda item: "test_whole_pipeline" not in item.nodeid)


@pytest.fixture(scope="session")
def engine() -> Iterator[docker.DockerClient]:
    """A client of a real engine; DOCKER_HOST leads to it, also in processes that a test starts."""
    try:
        yield engine_module.connect()
        return
    except RunnerError as error:
        if not shared_engine.script().exists() or os.getuid() != 0:
            pytest.skip(f"{error}; and there is no script here that starts one")
    with shared_engine.started_engine() as address:
        os.environ["DOCKER_HOST"] = address
        yield engine_module.connect()


@pytest.fixture(scope="session")
def base_image(engine: docker.DockerClient) -> str:
    """The image that the others are built on."""
    with shared_engine.alone("base-image"):
        for name in ("headrace-base:local", "python:3.11-slim"):
            if engine.images.list(name=name):
                return name
        script = shared_engine.script().parent / "base-image.sh"
        if not script.exists():
            pytest.skip("the engine has no image of Python, and there is no script here that makes one")
        subprocess.run(["bash", str(script), "headrace-base:local"], check=True, capture_output=True, timeout=300)
        return "headrace-base:local"


@pytest.fixture(scope="session")
def stage_image(engine: docker.DockerClient, base_image: str) -> str:
    """The stage image of this checkout, by its id. HEADRACE_TEST_IMAGE names one to use instead of building it."""
    name = os.environ.get("HEADRACE_TEST_IMAGE")
    if not name:
        name = "headrace-stage:test"
        with shared_engine.alone("stage-image"):
            _keep_wheel_of_torch()
            images.build(["stage"], base=base_image, index=None, tag="test", as_json=True)
    image = engine.images.get(name).id
    os.environ["HEADRACE_STAGE_IMAGE"] = image
    return str(image)


def _keep_wheel_of_torch() -> None:
    """Lay the wheel of torch that these tests run with into images/wheels: an index may offer that for CUDA only."""
    folder = ROOT / "images" / "wheels"
    installed = version("torch")
    if list(folder.glob("torch-*.whl")) or not installed.endswith("+cpu"):
        return
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    subprocess.run([*command, f"torch=={installed.removesuffix('+cpu')}"], check=True, timeout=600)


@pytest.fixture(autouse=True)
def own_installation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Give every test an installation of its own, and see that it leaves no container behind."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    monkeypatch.setenv("HEADRACE_INSTALLATION", name)
    yield name
    if "engine" in request.fixturenames:
        client: docker.DockerClient = request.getfixturevalue("engine")
        left = containers(client, name)
        for container in left:
            container.remove(force=True, v=True)
        assert not left, f"containers were left: {[container.name for container in left]}"


@pytest.fixture
def runs(stage_image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Toy recipes in a folder of the user who runs the tests."""
    if os.getuid() == 0:
        monkeypatch.setenv("HEADRACE_DOCKER_USER", "0:0")
    return Runs(Toys(tmp_path))


@pytest.fixture(scope="session")
def prefect_api() -> Iterator[str]:
    """The API of a real Prefect server, for the whole test run."""
    server = LocalServer()
    try:
        server.wait(600)
        yield server.url
    finally:
        server.stop()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's folder with the miniature recipe and its reward."""
    folder = tmp_path / "project"
    folder.mkdir()
    for name in ("mini.yaml", "mini_rewards.py"):
        shutil.copy(ROOT / "tests" / "end_to_end" / name, folder)
    return folder
