"""A fork server that runs stages of several ranks, and what a test wants to know of them."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from small_runs import make_dataset

from stages.artifacts import WorkArea, fetch, open_store, publish

HERE = Path(__file__).parent
SCRATCH = "a scratch@folder#1"  # characters that a URL would escape


class Stages:
    """A fork server, a store with one dataset, and stages that run in it to their end."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count, self.name = folder, 0, ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "stages", "serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=HERE.parents[1],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        self.answers: queue.Queue[dict] = queue.Queue()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        self.store = open_store(folder / "store")
        self.data = publish(self.store, make_dataset(folder / "data", rows=24), "dataset")
        self.pids: list[int] = []

    def _read(self) -> None:
        for line in self.process.stdout:
            self.answers.put(json.loads(line))

    def answer(self, kind: str) -> dict:
        while (answer := self.answers.get(timeout=120))["type"] != kind:
            assert answer["type"] != "refused", answer
        return answer

    def start(
        self, key: str, processes: int = 2, stage: str = "training_stages.ranked", inputs: dict | None = None, **config
    ) -> str:
        self.count += 1
        name = self.name = f"run-{self.count}"
        folder = self.folder / name
        folder.mkdir()
        settings = {"train_batch_size": 8, "learning_rate": 1e-2, "save_seconds": 0, "device": "cpu"}
        spec = {
            "stage": stage,
            "step": name,
            "run": "run",
            "key": key,
            "config": settings | config,
            "inputs": inputs or {"data": self.data},
            "store": str(self.folder / "store"),
            "scratch": str(folder / SCRATCH),
            "resources": {"processes": processes, "threads": 1},
            "python_path": [str(self.folder / "code"), str(HERE.parent / "sampling")],
        }
        (folder / "spec.json").write_text(json.dumps(spec))
        request = {"id": name, "spec": str(folder / "spec.json"), "events": str(folder / "events")}
        self.process.stdin.write(json.dumps(request | {"stderr": str(folder / "stderr")}) + "\n")
        self.process.stdin.flush()
        self.pids.append(self.answer("started")["pid"])
        return name

    def wait(self, name: str) -> dict:
        """The outcome of a stage that has been started."""
        answer = self.answer("exited")
        assert answer["id"] == name
        outcome = json.loads((self.folder / name / SCRATCH / "outcome.json").read_text())
        assert answer["code"] == outcome["code"], (self.folder / name / "stderr").read_text()
        return outcome

    def run(self, key: str, processes: int = 2, **config) -> dict:
        return self.wait(self.start(key, processes, **config))

    def events(self, name: str, kind: str) -> list[dict]:
        text = (self.folder / name / "events").read_text()
        return [event for event in map(json.loads, text.splitlines()) if event["type"] == kind]

    def ranks(self, name: str, after_step: int) -> list[int]:
        """The processes of the ranks, once the run has done some steps."""
        deadline = time.monotonic() + 60
        while not any(event["at"] >= after_step for event in self.events(name, "metric")):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        leader = self.pids[-1]
        return [int(pid) for pid in Path(f"/proc/{leader}/task/{leader}/children").read_text().split()]

    def output(self, outcome: dict) -> Path:
        """A folder with the artifact of an outcome."""
        assert outcome["code"] == 0, outcome
        folder = self.folder / f"artifact-{self.count}"
        if not folder.exists():
            fetch(self.store, outcome["artifact"], folder)
        return folder

    def records(self, outcome: dict) -> list[dict]:
        return [json.loads(line) for line in (self.output(outcome) / "training.jsonl").read_text().splitlines()]

    def progress(self, key: str) -> tuple[int, Path]:
        """The saved progress under a key."""
        self.count += 1
        return WorkArea(self.store, key, self.folder / f"restored-{self.count}").latest()


@contextlib.contextmanager
def stage_server(folder: Path) -> Iterator[Stages]:
    """Stages that work in `folder`; whatever of them still runs at the end is killed."""
    package = folder / "code" / "training_stages"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "ranked").symlink_to(HERE / "ranked")
    stages = Stages(folder)
    try:
        yield stages
    finally:
        for pid in stages.pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        stages.process.kill()
        stages.process.wait()
        stages.reader.join(20)
        stages.process.stdin.close()
        stages.process.stdout.close()
