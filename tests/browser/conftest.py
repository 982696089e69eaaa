"""A small store and its pages: in this process for their content, and served by the real command for Chromium."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import small_store
from fastapi.testclient import TestClient

from flows.lineage.browser.app import create_app
from flows.lineage.browser.site import Site, open_site
from stages.artifacts import open_store

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Pages:
    """A small store with a client of its pages."""

    small: small_store.SmallStore
    site: Site
    client: TestClient

    def text(self, path: str, status: int = 200) -> str:
        """The HTML of a page, after a look at what has changed in the store."""
        self.site.look_again()
        answer = self.client.get(path, follow_redirects=False)
        assert answer.status_code == status, answer.text[:2000]
        return answer.text

    def digest(self, step: str, run: str = small_store.FIRST) -> str:
        return self.small.made[run][step]


@pytest.fixture(scope="session")
def _small(tmp_path_factory: pytest.TempPathFactory) -> small_store.SmallStore:
    folder = tmp_path_factory.mktemp("browser")
    return small_store.build(open_store(folder / "store"), folder / "files")


def pages_of(small: small_store.SmallStore, root: str = "") -> Pages:
    """The pages of a store, in this process."""
    site = open_site(small.store.url, root)
    return Pages(small, site, TestClient(create_app(site), base_url="http://localhost", raise_server_exceptions=False))


@pytest.fixture(scope="session")
def pages(_small: small_store.SmallStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    """The pages of the small store; no test changes it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield pages_of(_small)


@pytest.fixture
def own_pages(_small: small_store.SmallStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pages:
    """The pages of a copy of the small store that the test may change."""
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "cache"))
    shutil.copytree(_small.store.url, tmp_path / "store")
    small = small_store.SmallStore(
        open_store(tmp_path / "store"),
        tmp_path / "files",
        _small.source,
        {run: dict(made) for run, made in _small.made.items()},
        dict(_small.keys),
    )
    return pages_of(small)


@dataclass(frozen=True)
class Served:
    """Pages served by `headrace browse`, with the store behind them."""

    url: str
    small: small_store.SmallStore


def start_browse(store: Path, cache: Path, *arguments: str) -> tuple[subprocess.Popen[str], str]:
    """Start `headrace browse` on any free port; returns the process and the URL that it printed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "flows.lineage.browser", "--port", "0", "--store", str(store), *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT), "HEADRACE_CACHE_DIR": str(cache)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r"http://\S+", line)
    if found is None:
        process.kill()
        raise AssertionError(f"browse did not start: {line}{process.stdout.read()}")
    return process, found[0].rstrip("/")


def stop(process: subprocess.Popen[str]) -> int:
    """End a process that `start_browse` started; returns its exit code."""
    process.send_signal(signal.SIGTERM)
    try:
        return process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        raise


@pytest.fixture(scope="session")
def served(_small: small_store.SmallStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A copy of the small store, served; tests may add to it."""
    folder = tmp_path_factory.mktemp("served")
    shutil.copytree(_small.store.url, folder / "store")
    small = small_store.SmallStore(open_store(folder / "store"), folder / "files", _small.source, _small.made)
    process, url = start_browse(folder / "store", folder / "cache")
    try:
        yield Served(url, small)
    finally:
        stop(process)
