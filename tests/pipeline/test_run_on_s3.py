"""A recipe on a bucket: it runs, is cached afterwards, goes on after a kill, and gives what a folder gives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from toy_recipe import write_toy

from stages.artifacts import open_store, results, verify_all

ROOT = Path(__file__).resolve().parent.parent.parent


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "flows.cli", *arguments, "--no-prefect"]


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "HEADRACE_STORE"} | {"PYTHONPATH": str(ROOT)}


def headrace(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        command(*arguments), cwd=folder, env=environment(), capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def digests(url: str) -> dict[tuple[str, str], tuple[str, dict[str, str]]]:
    return {(each.step, each.key): (each.artifact, each.outputs) for each in results(open_store(url))}


def test_a_recipe_gives_the_same_artifacts_in_a_bucket_as_in_a_folder(tmp_path: Path, s3_url: str) -> None:
    write_toy(tmp_path)
    assert "4 steps, nothing cached" in headrace(tmp_path, "run", "toy.yaml", "--store", s3_url)
    assert "4 steps, all cached" in headrace(tmp_path, "run", "toy.yaml", "--store", s3_url)
    headrace(tmp_path, "run", "toy.yaml", "--store", str(tmp_path / "store"))
    assert digests(s3_url) == digests(str(tmp_path / "store"))
    assert len(digests(s3_url)) == 4
    assert list(verify_all(open_store(s3_url))) == []


def test_a_killed_step_goes_on_from_progress_in_the_bucket(tmp_path: Path, s3_url: str) -> None:
    write_toy(tmp_path)
    arguments = ["run", "toy.yaml", "--store", s3_url, "--until", "model", "--set", "model.max_steps=40"]
    process = subprocess.Popen(
        command(*arguments, "--set", "model.pause=0.2"),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    store = open_store(s3_url)
    limit = time.monotonic() + 120
    while not any(store.list("logs/")) and time.monotonic() < limit:
        time.sleep(0.2)
    while not [1 for info in store.list("logs/") if b'"loss"' in store.get(info.key)] and time.monotonic() < limit:
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)  # saves, and stops
    assert process.wait(60) == 128 + signal.SIGTERM
    assert len([info for info in store.list("work/") if "/data/" not in info.key]) == 1
    said = headrace(tmp_path, *arguments, "--json")
    resumed = [event for event in map(json.loads, said.splitlines()) if event["type"] == "resumed"]
    assert len(resumed) == 1
    assert resumed[0]["at"] >= 1
    assert list(store.list("work/")) == []  # dropped once the result was there


@pytest.mark.slow
def test_the_quickstart_gives_the_same_rows_in_a_bucket_as_in_a_folder(tmp_path: Path, s3_url: str) -> None:
    for url in (s3_url, str(tmp_path / "store")):
        headrace(tmp_path, "run", "quickstart", "--until", "chat", "--store", url)
    assert digests(s3_url) == digests(str(tmp_path / "store"))
    assert "all cached" in headrace(tmp_path, "run", "quickstart", "--until", "chat", "--store", s3_url)
