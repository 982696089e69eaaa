"""A run whose bucket goes away in its middle waits for it, and gives what a quiet one gives."""

from __future__ import annotations

import json
import os
import queue
import threading
from pathlib import Path

import pytest
import s3_server as server_module
from mini_runs import ROOT, RUN, copy_project, headrace, start


@pytest.mark.slow
def test_a_run_outlives_its_bucket_and_gives_the_same_bytes(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is killed in a training step, and is back once the run has said that it waits."""
    server = server_module.start(tmp_path / "server")
    try:
        server_module.client(server).create_bucket(Bucket="away")
        environment = os.environ | server.environment | {"AWS_MAX_ATTEMPTS": "2", "HEADRACE_CACHE_DIR": str(tmp_path)}
        monkeypatch.setattr("mini_runs.ENVIRONMENT", environment | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
        folder = copy_project(tmp_path / "project")
        store = ("--store", "s3://away/store")
        process = start([*RUN, "--json", *store], folder)
        lines: queue.Queue[str] = queue.Queue()
        assert process.stdout is not None
        reader = threading.Thread(target=lambda: [lines.put(line) for line in process.stdout or []])
        reader.start()
        said, stopped = [], False
        while process.poll() is None or not lines.empty():
            try:
                line = lines.get(timeout=1)
            except queue.Empty:
                continue
            said.append(line)
            if not stopped and '"saved"' in line:
                server.stop()
                stopped = True
            elif stopped and "is away since" in line and server.process.poll() is not None:
                server.start_again()
        assert process.wait() == 0, "".join(said[-20:])
        assert any("is back after" in line for line in said)
        steps = json.loads(headrace(folder, "plan", "mini.yaml", "--json", "--set", "steps=8", *store))
        monkeypatch.undo()
        quiet = json.loads(headrace(finished, "plan", "mini.yaml", "--json", "--set", "steps=8"))
        assert {step["step"]: step["artifact"] for step in steps} == {step["step"]: step["artifact"] for step in quiet}
    finally:
        server.stop()
