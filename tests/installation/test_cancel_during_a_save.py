"""A run is cancelled while a training step saves: the save is held at a proxy before the S3 store, so that there is no
doubt that it is under way."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import s3_proxy
import s3_server as server_module
from clicks import click_cancel, open_run
from installed import SETTINGS, Installed, copy_mini, gone, prepared, processes_of, until
from prefect.states import Cancelling

from stages.artifacts import Store, WorkArea, open_store

pytestmark = pytest.mark.slow

BUCKET = "headrace-tests"


class Barrier:
    """Holds every upload of saved progress at the proxy while it is closed."""

    def __init__(self, proxy: s3_proxy.Proxy) -> None:
        self._open = threading.Event()
        self._open.set()
        self.reached = threading.Event()  # since it was closed last
        proxy.choose = self._choose

    def _choose(self, method: str, path: str, number: int) -> str:
        if method == "PUT" and "/work/" in path and not self._open.is_set():
            self.reached.set()
            self._open.wait(600)
        return "pass"

    def close(self) -> None:
        self.reached.clear()
        self._open.clear()

    def open(self) -> None:
        self._open.set()


@dataclass
class OnS3:
    """An installation whose store is in a bucket, with a barrier before its saves."""

    installed: Installed
    barrier: Barrier
    store: Store

    def key(self, flow_run: UUID) -> str:
        document = self.installed.document(self.installed.read(flow_run).name)
        assert document is not None
        return str(document["steps"]["base"]["key"])

    def saved(self, flow_run: UUID) -> list[int]:
        """The steps at which progress of `base` is saved, newest first."""
        return WorkArea(self.store, self.key(flow_run), Path("/nowhere")).steps()


@pytest.fixture(scope="module")
def on_s3(s3_server: server_module.Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnS3]:
    with s3_proxy.proxy(s3_server.endpoint) as proxy, pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("on-s3")
        found = prepared(folder)
        copy_mini(folder)
        found.store_url = f"s3://{BUCKET}/{uuid.uuid4().hex[:12]}"
        (folder / "headrace.yaml").write_text(SETTINGS.replace("store: store", f"store: {found.store_url}"))
        environment = s3_server.environment | {"HEADRACE_CACHE_DIR": str(folder / "cache")}
        for name, value in environment.items():
            patch.setenv(name, value)
        found.environment |= environment | {"AWS_ENDPOINT_URL_S3": proxy.endpoint}
        found.start()
        barrier = Barrier(proxy)
        yield OnS3(found, barrier, open_store(found.store_url))
        barrier.open()
        assert found.stop() == 0, found.said


def start_and_hold_a_save(on_s3: OnS3, seed: int) -> tuple[UUID, int]:
    """Start a pretraining and stop it within a save. Returns the run, and the step of the newest whole save."""
    overrides = ["base.max_steps=5000", f"base.seed={seed}"]
    flow_run = on_s3.installed.submit_recipe("mini.yaml", *overrides, until=["base"])
    name = on_s3.installed.reached(flow_run, lambda run: run.state_name not in ("Scheduled", "Pending")).name
    until(lambda: on_s3.installed.running_step(name, "base"), 300, "base runs")
    until(lambda: bool(on_s3.saved(flow_run)), 300, "a whole save")
    on_s3.barrier.close()
    assert on_s3.barrier.reached.wait(120)
    return flow_run, on_s3.saved(flow_run)[0]


def check(on_s3: OnS3, flow_run: UUID, folder: Path) -> int:
    """The run is Cancelled and no process is left; returns the step of the newest save, which is whole."""
    run = on_s3.installed.ended(flow_run)
    assert run.state is not None
    assert run.state.is_cancelled(), run.state
    gone(flow_run)
    document = on_s3.installed.document(run.name)
    assert document is not None
    assert document["steps"]["base"]["status"] == "stopped"
    latest = WorkArea(on_s3.store, on_s3.key(flow_run), folder).latest()  # every hash is checked
    assert latest is not None
    assert document["steps"]["base"]["saved_step"] == latest[0]
    assert latest[0] == on_s3.saved(flow_run)[0], "the newest save is damaged"
    return latest[0]


def by_api(installed: Installed, flow_run: UUID, page: Any) -> None:
    with installed.client() as client:
        client.set_flow_run_state(flow_run, Cancelling())


def by_clicks(installed: Installed, flow_run: UUID, page: Any) -> None:
    open_run(page, installed, flow_run)
    click_cancel(page)


@pytest.mark.parametrize(("cancel", "seed"), [(by_api, 1), (by_clicks, 2)])
def test_a_cancellation_during_a_save_lets_it_end(
    on_s3: OnS3, tmp_path: Path, request: pytest.FixtureRequest, cancel: Callable[..., None], seed: int
) -> None:
    page = request.getfixturevalue("page") if cancel is by_clicks else None
    flow_run, whole = start_and_hold_a_save(on_s3, seed)
    cancel(on_s3.installed, flow_run, page)
    begun = time.monotonic()
    on_s3.installed.reached(flow_run, lambda run: run.state_name != "Running")
    time.sleep(4)  # in which the worker has told the flow, and the flow the stage
    assert processes_of(flow_run)
    assert on_s3.installed.read(flow_run).state_name == "Cancelling"
    on_s3.barrier.open()
    assert check(on_s3, flow_run, tmp_path) > whole
    print(f"cancelled in {time.monotonic() - begun:.1f} s, of which the save was held 4")


def test_a_save_that_does_not_end_is_given_up_and_the_one_before_it_is_kept(on_s3: OnS3, tmp_path: Path) -> None:
    flow_run, whole = start_and_hold_a_save(on_s3, 3)
    by_api(on_s3.installed, flow_run, None)
    begun = time.monotonic()
    assert check(on_s3, flow_run, tmp_path) == whole
    print(f"cancelled in {time.monotonic() - begun:.1f} s")
    on_s3.barrier.open()

    again = on_s3.installed.submit_recipe("mini.yaml", "base.max_steps=5000", "base.seed=3", until=["base"])
    name = on_s3.installed.reached(again, lambda run: run.state_name not in ("Scheduled", "Pending")).name
    until(lambda: on_s3.installed.running_step(name, "base"), 300, "base runs again")
    document = on_s3.installed.document(name)
    assert document is not None
    # What was held may have come through by now, and have been the last that its save lacked.
    assert document["steps"]["base"]["reason"] in [f"saved progress at step {step}" for step in (whole, whole + 1)]
    by_api(on_s3.installed, again, None)
    assert check(on_s3, again, tmp_path / "again") >= whole
