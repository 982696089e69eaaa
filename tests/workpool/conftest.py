"""A real Prefect server, the stage deployments on a pool of type process, and two workers, for a whole test run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parents[1] / "execute"), str(Path(__file__).parent)]

from pool_runs import LOST, Pool, Runs  # noqa: E402
from toy_stages import Toys  # noqa: E402

from flows.service.local_server import LocalServer, quiet_prefect  # noqa: E402

quiet_prefect()


@pytest.fixture(scope="session")
def prefect_api() -> Iterator[str]:
    """The API of a real server."""
    server = LocalServer()
    try:
        server.wait(600)
        yield server.url
    finally:
        server.stop()


@pytest.fixture(scope="session")
def pool(prefect_api: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """The pool with two workers."""
    made = Pool(prefect_api, tmp_path_factory.mktemp("workers"))
    made.start_worker()
    made.start_worker()
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture
def runs(prefect_api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runs]:
    """Toy recipes, with this process as a client of the server."""
    from prefect.settings import PREFECT_API_URL, temporary_settings

    monkeypatch.setenv("PREFECT_API_URL", prefect_api)
    monkeypatch.setenv("HEADRACE_LOST_SECONDS", LOST)
    monkeypatch.setenv("HEADRACE_LEASE_SECONDS", "3")
    with temporary_settings({PREFECT_API_URL: prefect_api}):
        yield Runs(Toys(tmp_path))
