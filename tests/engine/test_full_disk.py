"""An engine whose own disk is full: a real one, with a small disk."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
import shared_engine
from container_runs import Runs, containers
from small_engine import IMAGE, SmallEngine, small_engine
from toy_stages import Toys

from flows.runners.docker import DockerSettings

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SETTINGS = DockerSettings(IMAGE, user="0:0")


@pytest.fixture(scope="module")
def small() -> Iterator[SmallEngine]:
    if os.getuid() != 0 or not shared_engine.script().exists():
        pytest.skip("a second engine is started by root and by a script that is not here")
    try:
        with small_engine() as running:
            yield running
    except OSError as error:
        pytest.skip(f"no second engine with a small disk can be had here: {error}")


@pytest.fixture
def runs(small: SmallEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runs]:
    """Toy recipes on the small engine; their store is on another disk."""
    monkeypatch.setenv("DOCKER_HOST", small.address)
    yield Runs(Toys(tmp_path))
    small.free()


def test_a_step_is_not_started_on_a_full_disk_and_says_so(
    runs: Runs, small: SmallEngine, own_installation: str
) -> None:
    small.fill()
    step = runs(runs.toys.recipe("a: {stage: COUNT}"), settings=SETTINGS).steps["a"]
    assert (step.status, step.code) == ("failed", None)
    assert "step a: the disk of the Docker Engine is full" in step.message
    assert "docker system prune" in step.message
    small.free()
    assert runs(runs.toys.recipe("a: {stage: COUNT}"), settings=SETTINGS).state == "done"
    assert containers(docker.DockerClient(small.address), own_installation) == []


def test_a_stage_that_fills_the_disk_says_so(runs: Runs) -> None:
    (runs.toys.folder / "filling.py").write_text(
        "def fill(total):\n    with open('/scratch/large', 'wb') as file:\n        file.write(bytes(2 << 30))\n"
    )
    step = runs(runs.toys.recipe("a: {stage: COUNT, reward: 'filling:fill'}"), settings=SETTINGS).steps["a"]
    assert step.status == "failed"
    assert "full" in step.message or "no space is left on the disk" in step.message


def test_a_disk_that_fills_up_under_a_stage_is_named_though_the_engine_drops_its_log(
    runs: Runs, small: SmallEngine
) -> None:
    def fill(event: dict[str, Any]) -> None:
        if event["type"] == "progress" and event["done"] == 3:
            small.fill()

    runs.react = fill
    recipe = runs.toys.recipe("a: {stage: COUNT, total: 100, delay: 0.03, save_steps: 1000}")
    step = runs(recipe, settings=SETTINGS).steps["a"]
    assert step.status == "failed"
    assert "the disk of the Docker Engine is full" in step.message
    small.free()
    runs.react = lambda event: None
    assert runs(recipe, "a.delay=0", settings=SETTINGS).state == "done"


def test_lines_that_a_full_disk_swallows_do_not_hide_how_a_step_ended(runs: Runs, small: SmallEngine) -> None:
    """The disk is free again when the stage writes its end, so that only the engine's log has suffered."""
    runs.toys.store.mkdir()
    go = runs.toys.store / "go"

    def free() -> None:
        small.free()
        go.touch()

    def fill(event: dict[str, Any]) -> None:
        if event["type"] == "progress" and event["done"] == 3:
            small.fill()
            threading.Timer(3.0, free).start()

    (runs.toys.folder / "waiting.py").write_text(
        "import pathlib, time\nfrom stages.contract import Refused\n\n\ndef wait(total):\n"
        f"    while not pathlib.Path({str(go)!r}).exists():\n        time.sleep(0.05)\n"
        "    raise Refused('data line 3: it is blank')\n"
    )
    runs.react = fill
    recipe = runs.toys.recipe("a: {stage: COUNT, total: 100, delay: 0.03, save_steps: 1000, reward: 'waiting:wait'}")
    step = runs(recipe, settings=SETTINGS).steps["a"]
    assert (step.status, step.code) == ("failed", 83)
    assert step.message == "data line 3: it is blank"
