"""Stages as processes of this machine.

The model: one fork server (`python -m stages serve`) a runner, which imports torch and transformers once and forks each
stage in milliseconds. Stages with GPUs, and all stages where the server cannot be started, are plain processes
(`python -m stages run`). Either way the events of an attempt are a file in its scratch folder, followed by its handle.

Invariants:
- A stage is the leader of its own session: Ctrl-C in a terminal reaches the flow only, which then decides.
- When the flow dies, by kill -9 too, its stages get SIGTERM, save and end: the server sees the end of its standard
  input, plain processes have asked the kernel for it.
- A stage that holds more memory than `resources.memory` is killed and told so; it is not tried again.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import stages
from flows.runners.base import RunnerError
from flows.runners.gpus import GpuPool
from flows.runners.lines import STDERR_BYTES, EventLines, stderr_events
from flows.runners.memory import parse_size, session_memory, show_size
from stages.children import descendants, die_with_parent
from stages.contract import StageSpec

_POLL = 0.05  # seconds between looks at a file of events
_PIECE = 1 << 20  # bytes of events read at once: a stage may say more than memory holds
_MEMORY_POLL = 0.5
_READY = 120.0  # seconds that the fork server may take to say that it is there
_KILLED = 20.0  # seconds that a killed stage may take to be gone


class ProcessRunner:
    """Runs each stage as a process of this machine.

    Args:
        fork_server: start stages from a process that has imported torch; otherwise each imports it itself.
        preload: have the server import torch as soon as it is idle, rather than for the first stage that needs it.
        gpus: the GPUs to lend to stages, as CUDA_VISIBLE_DEVICES names them; those of the machine when None.
        python: the interpreter of the stages.
    """

    def __init__(
        self,
        *,
        fork_server: bool = True,
        preload: bool = True,
        gpus: list[str] | None = None,
        python: str = sys.executable,
    ) -> None:
        self._python = python
        self._gpus = GpuPool(gpus)
        self._use_server = fork_server
        self._server_options = [] if preload else ["--lazy"]
        self._server: _ForkServer | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._handles: list[ProcessHandle] = []

    def start(self, spec: StageSpec) -> ProcessHandle:
        """Start the stage of `spec`; see `flows.runners.base.Runner`."""
        try:
            limit = parse_size(spec.resources.memory) if spec.resources.memory else None
        except ValueError as error:
            raise RunnerError(f"step {spec.step}: resources.memory: {error}") from None
        scratch = Path(spec.scratch)
        gpus = self._gpus.take(spec.resources.gpus, spec.step)
        try:
            path = scratch / "spec.json"
            path.write_text(spec.model_dump_json(indent=1))
            handle = ProcessHandle(scratch, limit, lambda: self._gpus.give_back(gpus))
            with self._lock:
                if self._closed:
                    raise RunnerError("the run is being stopped")
                server = self._running_server() if self._use_server and not gpus else None
                if server is not None:
                    server.start(path, handle)
                else:
                    self._start_plain(path, handle, gpus)
                self._handles = [item for item in self._handles if not item.ended] + [handle]
        except BaseException:
            self._gpus.give_back(gpus)
            raise
        if limit is not None:
            threading.Thread(target=handle.watch_memory, name=f"memory of {spec.step}", daemon=True).start()
        return handle

    def close(self) -> None:
        """Stop what still runs, letting it save, and end the fork server."""
        with self._lock:
            self._closed = True
            server, self._server = self._server, None
        for handle in self._handles:
            handle.signal(signal.SIGTERM)
        for handle in self._handles:
            handle.wait()
        if server is not None:
            server.close()

    def _running_server(self) -> _ForkServer | None:
        """The fork server, started anew where it has died; None where it cannot be started."""
        if self._server is None or self._server.dead:
            try:
                self._server = _ForkServer([self._python, "-P", "-m", "stages", "serve", *self._server_options])
            except RunnerError as error:
                self._use_server = False  # every stage imports torch itself: slower, and otherwise the same
                print(f"headrace: {error}; stages are started one by one", file=sys.stderr)
                return None
        return self._server

    def _start_plain(self, spec: Path, handle: ProcessHandle, gpus: list[str]) -> None:
        environment = _environment() | {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        with open(handle.events_file, "ab") as events, open(handle.stderr_file, "ab") as errors:
            process = subprocess.Popen(
                [self._python, "-P", "-m", "stages", "run", str(spec)],
                stdin=subprocess.DEVNULL,
                stdout=events,
                stderr=errors,
                env=environment,
                start_new_session=True,
                preexec_fn=die_with(os.getpid()),
            )
        handle.started(process.pid)

        def follow() -> None:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            handle.signal(signal.SIGKILL)  # before the number is free again: what a crash has left behind
            handle.end(process.wait())

        threading.Thread(target=follow, name=f"wait for {process.pid}", daemon=True).start()


class ProcessHandle:
    """One stage process; see `flows.runners.base.Handle`."""

    def __init__(self, scratch: Path, memory_limit: int | None, when_ended: Callable[[], None]) -> None:
        self.scratch = scratch
        self.events_file = scratch / "events.jsonl"
        self.stderr_file = scratch / "stderr.log"
        self.events_file.touch()
        self.verdict = ""
        self.pid: int | None = None
        self._limit = memory_limit
        self._when_ended = when_ended
        self._begun = threading.Event()
        self._over = threading.Event()
        self._code = 0
        self._send: Callable[[int], None] = self._kill
        self._end_messenger: Callable[[], None] = lambda: None

    @property
    def ended(self) -> bool:
        return self._over.is_set()

    def started(self, pid: int) -> None:
        """Say that the process is there; called once by whoever starts it."""
        self.pid = pid
        self._begun.set()

    def end(self, code: int) -> None:
        """Say that the process has ended and all of its events are written."""
        if not self._over.is_set():
            self._code = code
            self._begun.set()
            self._over.set()
            self._when_ended()

    def events(self) -> Iterator[dict[str, Any]]:
        """The events as they come, then what the stage wrote to standard error."""
        lines = EventLines()
        code: int | None = None
        data = b""
        with open(self.events_file, "rb") as file:
            while True:
                # Asked before reading, so that nothing written before the end is missed.
                over = self._over.wait(0.0 if data else _POLL)
                data = file.read(_PIECE)
                for event in lines.feed(data):
                    if event.get("type") == "outcome":
                        code = int(event.get("code", 1))
                    yield event
                if over and not data:
                    break
                if code is not None and self.pid is not None and not _alive(self.pid):
                    self.end(code)  # a server that is busy importing torch would say so only later
        yield from lines.rest()
        yield from self._stderr()

    def _stderr(self) -> Iterator[dict[str, Any]]:
        try:
            with open(self.stderr_file, "rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - STDERR_BYTES))
                yield from stderr_events(file.read())
        except FileNotFoundError:
            return

    def wait(self) -> int:
        """Wait for the end; the exit code, or minus the number of the signal that ended it."""
        self._over.wait()
        return self._code

    def signal(self, number: int) -> None:
        """Send a signal; SIGKILL goes to everything the stage has started."""
        if not self._over.is_set():
            self._send(number)

    def stop(self, grace: float) -> None:
        """Ask the stage to save and stop; kill it where it has not ended after `grace` seconds."""
        self.signal(signal.SIGTERM)
        if not self._over.wait(grace):
            self.signal(signal.SIGKILL)
            if not self._over.wait(_KILLED):
                self._end_messenger()
                self._kill(signal.SIGKILL)
                self._over.wait(_KILLED)

    def send_with(self, send: Callable[[int], None], end: Callable[[], None] = lambda: None) -> None:
        """Let signals take another way than the kernel's own, for a process that is not this one's child.

        Args:
            end: ends whoever passes them on, and has not done so (a process that is frozen).
        """
        self._send, self._end_messenger = send, end

    def _kill(self, number: int) -> None:
        if self.pid is None:
            return
        try:
            if number == signal.SIGKILL:
                daemons = descendants(self.pid)
                os.killpg(self.pid, number)
                for daemon in daemons:
                    with suppress(ProcessLookupError):
                        os.kill(daemon, number)
            else:
                os.kill(self.pid, number)
        except ProcessLookupError:
            pass

    def watch_memory(self) -> None:
        """Kill the stage once it holds more than its limit. Returns when the stage has ended."""
        assert self._limit is not None
        self._begun.wait()
        while not self._over.wait(_MEMORY_POLL) and self.pid is not None:
            used = session_memory(self.pid)
            if used > self._limit:
                self.verdict = (
                    f"killed: it held {show_size(used)} of memory, over its resources.memory of "
                    f"{show_size(self._limit)}; raise that, or make its batches smaller"
                )
                self.signal(signal.SIGKILL)
                return


class _ForkServer:
    """The client's side of `python -m stages serve`; its module docstring states the protocol."""

    def __init__(self, command: list[str]) -> None:
        self._handles: dict[str, ProcessHandle] = {}
        self._refusals: dict[str, str] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._ready = threading.Event()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the server)
        self.dead = False
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=_environment() | {"CUDA_VISIBLE_DEVICES": ""},
            start_new_session=True,
        )
        threading.Thread(target=self._listen, name="fork server", daemon=True).start()
        if not self._ready.wait(_READY) or self.dead:
            self._process.kill()
            self._process.wait()
            self._stderr.seek(0)
            said = self._stderr.read().decode("utf-8", "replace").strip().splitlines()
            raise RunnerError(f"the fork server of the stages does not start{': ' + said[-1] if said else ''}")

    def start(self, spec: Path, handle: ProcessHandle) -> None:
        """Have a stage forked.

        Raises:
            RunnerError: the server is gone.
        """
        name = str(next(self._numbers))
        with self._lock:
            self._handles[name] = handle
        handle.send_with(lambda number: self._signal(name, number), self._process.kill)
        request = {"id": name, "spec": str(spec), "events": str(handle.events_file), "stderr": str(handle.stderr_file)}
        if not self._write(request):
            with self._lock:
                self._handles.pop(name, None)
            raise RunnerError("the fork server of the stages has ended")

    def close(self) -> None:
        """End the server, whose stages have all ended. It may be busy with an import, so it is not asked."""
        self._process.kill()
        self._process.wait()

    def _signal(self, name: str, number: int) -> None:
        self._write({"id": name, "signal": signal.Signals(number).name.removeprefix("SIG")})

    def _write(self, request: dict[str, str]) -> bool:
        stdin = self._process.stdin
        assert stdin is not None
        try:
            with self._lock:
                stdin.write(json.dumps(request).encode() + b"\n")
                stdin.flush()
        except (OSError, ValueError):  # a broken pipe; closed by us
            return False
        return True

    def _listen(self) -> None:
        stdout: IO[bytes] | None = self._process.stdout
        assert stdout is not None
        for line in stdout:
            try:
                answer = json.loads(line)
            except ValueError:
                continue
            self._take(answer)
        self.dead = True
        self._ready.set()
        with self._lock:
            left, self._handles = list(self._handles.values()), {}
        for handle in left:
            handle.send_with(handle._kill)
            threading.Thread(target=_outlive, args=(handle,), name="orphaned stage", daemon=True).start()

    def _take(self, answer: dict[str, Any]) -> None:
        kind, name = answer.get("type"), str(answer.get("id", ""))
        with self._lock:
            handle = self._handles.get(name)
            if kind in ("exited", "refused"):
                self._handles.pop(name, None)
        if kind == "ready":
            self._ready.set()
        elif handle is not None and kind == "started":
            handle.started(int(answer["pid"]))
        elif handle is not None and kind == "exited":
            killed = answer.get("signal")
            handle.end(-int(signal.Signals[killed]) if killed else int(answer["code"]))
        elif handle is not None and kind == "refused":
            handle.verdict = f"cannot be started: {answer.get('message')}"
            handle.end(1)


def _outlive(handle: ProcessHandle) -> None:
    """Follow a stage whose server has died: it has been told to stop; how it ended is in its `outcome.json`."""
    while handle.pid is not None and _alive(handle.pid):
        time.sleep(_POLL)
    try:
        code = int(json.loads((handle.scratch / "outcome.json").read_bytes())["code"])
    except (OSError, ValueError, KeyError):
        code = -int(signal.SIGKILL)
    handle.end(code)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return False
    except (OSError, IndexError):  # no /proc here, or it ended meanwhile
        return not Path("/proc/self").exists()
    return state != "Z"


def _environment() -> dict[str, str]:
    """The environment of a stage: ours, with this `stages` package found first, whatever the current folder."""
    root = str(Path(stages.__file__ or "").parent.parent)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": "0"}


def die_with(parent: int, number: signal.Signals = signal.SIGTERM) -> Callable[[], None]:
    """What a new process does first so that the kernel sends it a signal when the thread that started it ends.

    That thread waits for the stage (`flows.execute`), so its end before the stage's means the end of the flow.
    """

    def ask() -> None:
        if not die_with_parent(parent, number):
            os._exit(1)

    return ask
