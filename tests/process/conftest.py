"""A toy stage package, written into a folder of its own and run by real stage processes."""

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

CONFIG = '''
from typing import Annotated, ClassVar

from pydantic import Field

from stages.contract import Input, NotIdentity, StageConfig


class Config(StageConfig):
    """Counts to `total`; the sum of squares is its result."""

    OUTPUT: ClassVar[str] = "report"
    SIDE_OUTPUTS: ClassVar[dict[str, str]] = {"trace": "rollouts", "unused": "rollouts"}
    INPUTS: ClassVar[dict[str, Input]] = {"data": Input(("source",), required=False)}
    NEEDS_TORCH: ClassVar[bool] = False

    total: int = Field(ge=0)
    behaviour: str = "count"
    pause: Annotated[float, NotIdentity()] = 0.0
'''

STAGE = '''
"""Counts, saving after every step."""

import json
import os
import sys
import time

from stages.contract import BudgetSpent, NonFinite, Refused, Stopped, Tripwire
from toy.counter.arithmetic import square


def run(context):
    config = context.config
    print("a stray print")
    os.write(1, b"a stray write\\n")
    if config.behaviour == "speak":
        print("caf\\u00e9 \\ud800")
    if config.behaviour == "refuse":
        raise Refused("data/train.jsonl line 3: field x is missing; add it")
    if config.behaviour == "crash":
        raise ZeroDivisionError("no way\\nsecond line")
    if config.behaviour == "full":
        with open("/dev/full", "w") as file:
            file.write("x" * 100_000)
    if config.behaviour == "tripwire":
        raise Tripwire("entropy fell")
    if config.behaviour == "halt":
        end = Tripwire("entropy fell")
        end.checkpoint = context.scratch / "halted"
        end.checkpoint.mkdir()
        (end.checkpoint / "weights.txt").write_text("as they were")
        raise end
    if config.behaviour == "nonfinite":
        raise NonFinite("loss is nan")
    if config.behaviour == "budget":
        raise BudgetSpent("10 s are spent")
    if config.behaviour == "exit":
        sys.exit(0)
    if config.behaviour == "abort":
        os.abort()
    if config.behaviour == "nothing":
        return
    if config.behaviour == "child":
        if os.fork() == 0:
            time.sleep(600)
            os._exit(0)
    if config.behaviour == "daemon":
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                (context.scratch.parent / "daemon.pid.tmp").write_text(str(os.getpid()))
                (context.scratch.parent / "daemon.pid.tmp").rename(context.scratch.parent / "daemon.pid")
                time.sleep(600)
            os._exit(0)
        os.wait()
        while not (context.scratch.parent / "daemon.pid").exists():
            time.sleep(0.01)
    count, total = 0, 0
    found = context.work.latest()
    if found is not None:
        count, folder = found
        total = json.loads((folder / "state.json").read_text())["total"]
        context.resumed(count)
    while count < config.total:
        count += 1
        total += square(count)
        time.sleep(config.pause)
        folder = context.scratch / f"save-{count}"
        folder.mkdir()
        (folder / "state.json").write_text(json.dumps({"total": total}))
        context.work.save(count, folder)
        context.progress(count, config.total, loss=float("nan") if count == 1 else 1.0)
        if context.stop_requested:
            context.work.wait()
            context.saved(count, 0.0)
            raise Stopped(f"saved at step {count}")
    (context.output / "sum.txt").write_text(str(total))
    (context.side_output("trace") / "trace.txt").write_text("".join(f"{i}\\n" for i in range(config.total)))
    for name, path in context.inputs.items():
        (context.output / f"{name}.txt").write_text(" ".join(sorted(p.name for p in path.iterdir())))
    context.summary(total=total, ratio=0.5)
'''

ARITHMETIC = '''
def square(x):
    """The square."""
    return x * x
'''


@dataclass
class Toy:
    """Where the toy stage, its store and its scratch folders are."""

    root: Path
    code: Path
    store: Path

    def spec(self, name: str = "one", *, key: str = "ab" * 32, **changes: Any) -> Path:
        """Write a spec. `config` is given by `total`, `behaviour` and `pause`."""
        config = {key: changes.pop(key) for key in ("total", "behaviour", "pause") if key in changes}
        spec = {
            "stage": "toy.counter",
            "step": name,
            "run": "run-1",
            "key": key,
            "config": {"total": 5} | config,
            "inputs": {},
            "store": str(self.store),
            "scratch": str(self.root / "scratch" / name),
            "python_path": [str(self.code)],
        } | changes
        path = self.root / f"{name}.spec.json"
        path.write_text(json.dumps(spec))
        return path

    def run(self, spec: Path, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "stages", "run", str(spec)], capture_output=True, text=True, timeout=timeout
        )

    @staticmethod
    def parse(text: str) -> list[dict[str, Any]]:
        """The events of a text, every line of which must be one."""
        events = [json.loads(line) for line in text.splitlines()]
        assert all(isinstance(event, dict) and {"time", "step", "type"} <= set(event) for event in events)
        return events

    @staticmethod
    def wait_for_progress(path: Path, count: int, seconds: float = 60) -> None:
        """Wait until a file of events tells of progress `count` times."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if path.exists() and path.read_text().count('"progress"') >= count:
                return
            time.sleep(0.02)
        raise AssertionError(f"{path} did not tell of progress {count} times")

    def start(self, spec: Path, events: Path) -> subprocess.Popen[bytes]:
        """Start a stage process whose standard output goes to the file `events`."""
        with open(events, "ab") as file:
            command = [sys.executable, "-m", "stages", "run", str(spec)]
            return subprocess.Popen(command, stdout=file, stderr=subprocess.DEVNULL)


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    package = tmp_path / "code" / "toy" / "counter"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "config.py").write_text(CONFIG)
    (package / "stage.py").write_text(STAGE)
    (package / "arithmetic.py").write_text(ARITHMETIC)
    return Toy(tmp_path, tmp_path / "code", tmp_path / "store")


class ServerProcess:
    """A real fork server, and what it answers."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-m", "stages", "serve", *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.children: dict[str, int] = {}
        self._lines: queue.Queue[str] = queue.Queue()
        self.reader = threading.Thread(target=self._read)
        self.reader.start()
        self.ready = self.answer()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)

    def answer(self) -> dict[str, Any]:
        message = json.loads(self._lines.get(timeout=120))
        if message["type"] == "started":
            self.children[message["id"]] = message["pid"]
        return message

    def ask(self, request: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def start(self, name: str, spec: Path) -> dict[str, Any]:
        events = self.folder / f"{name}.events"
        self.ask({"id": name, "spec": str(spec), "events": str(events), "stderr": str(self.folder / f"{name}.err")})
        return self.answer()

    def events(self, name: str) -> list[dict[str, Any]]:
        return Toy.parse((self.folder / f"{name}.events").read_text())

    def close(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(60)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path, "--lazy")
    yield server
    for pid in server.children.values():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    server.process.kill()
    server.process.wait()
    server.reader.join(60)
    for stream in (server.process.stdin, server.process.stdout):
        assert stream is not None
        with contextlib.suppress(BrokenPipeError):
            stream.close()
