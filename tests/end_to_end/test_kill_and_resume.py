"""Kill anything at any moment: the next attempt goes on from the last saved step and ends with the same bytes."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from mini_runs import RUN, copy_project, headrace, plan, start

TRAINED = ("base", "sft", "dpo", "grpo")


def stage_processes(command: psutil.Process) -> list[psutil.Process]:
    """The stages that run for a `headrace run`: the children of its fork server."""
    return [stage for server in command.children() for stage in server.children()]


def events_of(process: Any) -> Any:
    for line in process.stdout:
        if line.startswith("{"):
            yield json.loads(line)


def artifacts(folder: Path) -> dict[str, str]:
    return {step: entry["artifact"] for step, entry in plan(folder).items()}


def test_stages_killed_while_they_train_end_with_the_same_bytes(finished: Path, tmp_path: Path) -> None:
    folder = copy_project(tmp_path)
    process = start([*RUN, "--json"], folder)
    command = psutil.Process(process.pid)
    killed: set[str] = set()
    resumed: dict[str, int] = {}
    for event in events_of(process):
        step = event.get("step")
        if event.get("type") == "saved" and step in TRAINED and step not in killed and event["at"] >= 3:
            for stage in stage_processes(command):
                stage.send_signal(signal.SIGKILL)
            killed.add(step)
        elif event.get("type") == "resumed" and step in killed:
            resumed[step] = event["at"]
    assert process.wait() == 0
    assert killed == set(TRAINED)
    assert all(resumed.get(step, 0) >= 1 for step in TRAINED), resumed
    assert artifacts(folder) == artifacts(finished)


@pytest.mark.parametrize(
    ("number", "steps"),
    [
        (signal.SIGKILL, ("base", "grpo")),
        pytest.param(signal.SIGKILL, TRAINED, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, TRAINED, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_killed_or_interrupted_goes_on_where_it_was(
    finished: Path, tmp_path: Path, number: signal.Signals, steps: tuple[str, ...]
) -> None:
    folder = copy_project(tmp_path)
    for step in steps:
        process = start([*RUN, "--json"], folder)
        command = psutil.Process(process.pid)
        stages: list[psutil.Process] = []
        for event in events_of(process):
            if event.get("type") == "saved" and event.get("step") == step and not stages:
                stages = stage_processes(command)
                process.send_signal(number)
        assert process.wait() == (-number if number == signal.SIGKILL else 128 + number)
        _, alive = psutil.wait_procs(stages, timeout=60)
        assert not alive, "a stage outlived its run"
        entry = plan(folder)[step]
        assert (entry["status"], entry["resumable"]) == ("miss", True)
    printed = headrace(folder, *RUN)
    assert f"grpo       resumed at step {entry['saved_step']}" in printed
    assert artifacts(folder) == artifacts(finished)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_kills_of_each_stage_at_random_moments_change_no_byte(tmp_path: Path) -> None:
    run = [*RUN[:-1], "steps=80"]
    quiet, stormy = copy_project(tmp_path / "quiet"), copy_project(tmp_path / "stormy")
    headrace(quiet, *run)
    draw = random.Random(0)
    process = start([*run, "--json"], stormy)
    command = psutil.Process(process.pid)
    kills = dict.fromkeys(TRAINED, 0)
    saves_left = draw.randint(1, 4)
    for event in events_of(process):
        step = event.get("step")
        if event.get("type") != "saved" or kills.get(step, 20) >= 20:
            continue
        saves_left -= 1
        if saves_left == 0:  # every step is saved, so this falls into a step, a snapshot or an upload
            time.sleep(draw.uniform(0, 0.05))
            for stage in stage_processes(command):
                stage.send_signal(signal.SIGKILL if draw.random() < 0.8 else signal.SIGTERM)
            kills[step] += 1
            saves_left = draw.randint(1, 4)
    assert process.wait() == 0
    assert min(kills.values()) == 20, kills
    mine, theirs = (json.loads(headrace(folder, "plan", *run[1:2], *run[3:], "--json")) for folder in (quiet, stormy))
    assert [entry["artifact"] for entry in mine] == [entry["artifact"] for entry in theirs]
