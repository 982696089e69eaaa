"""A real S3 server, started once for a test run and only if a test asks for it, and stores on both backends."""

from __future__ import annotations

import os
import signal
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import s3_server as server_module
from s3_proxy import Proxy, proxy

from stages.artifacts import Store, open_store

BUCKET = "headrace-tests"
# Away from the user's own, before any test imports Prefect; gone when the tests have ended.
_HOME = tempfile.TemporaryDirectory(prefix="headrace-test-home-", ignore_cleanup_errors=True)
os.environ["HEADRACE_HOME"] = f"{_HOME.name}/headrace"
os.environ["PREFECT_HOME"] = f"{_HOME.name}/prefect"

# What is started with `nohup`, or by a shell in the background, ignores these, and so would all that tests start.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[server_module.Server]:
    """The server, with an empty bucket `headrace-tests`."""
    server = server_module.start(tmp_path_factory.mktemp("s3-server"))
    try:
        server_module.client(server).create_bucket(Bucket=BUCKET)
        yield server
    finally:
        server.stop()


@pytest.fixture
def s3_url(s3_server: server_module.Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """URL of an empty S3 store of this test's own; the environment leads to the server, also in processes it starts."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "cache"))
    return f"s3://{BUCKET}/{uuid.uuid4().hex[:12]}"


@pytest.fixture
def through(s3_url: str, s3_server: server_module.Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy before the S3 server, to which the environment leads."""
    with proxy(s3_server.endpoint) as running:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", running.endpoint)
        yield running


@pytest.fixture(params=["folder", "s3"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where an empty store of this test's own is: a test that takes it runs on a folder and on S3."""
    return str(tmp_path / "store") if request.param == "folder" else str(request.getfixturevalue("s3_url"))


@pytest.fixture
def store(store_url: str) -> Store:
    """An empty store, on a folder and on S3."""
    return open_store(store_url)
