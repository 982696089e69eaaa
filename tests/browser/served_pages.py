"""The pages of a store: in this process for their content, and served by the real command for Chromium."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import small_store
from fastapi.testclient import TestClient

from flows.lineage.browser.app import create_app
from flows.lineage.browser.site import Site, open_site

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


def pages_of(small: small_store.SmallStore, root: str = "") -> Pages:
    """The pages of a store, in this process."""
    site = open_site(small.store.url, root)
    return Pages(small, site, TestClient(create_app(site), base_url="http://localhost", raise_server_exceptions=False))


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
