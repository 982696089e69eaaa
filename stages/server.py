"""The fork server: stages start in milliseconds because torch and transformers are imported once, before the fork.

`python -m stages serve [--grace SECONDS] [--lazy]` reads one JSON object a line from standard input and answers on
standard output, one JSON object a line. One server serves one `flows` process and dies with it.

Requests:
    {"id": "base", "spec": "/s/spec.json", "events": "/s/events.jsonl", "stderr": "/s/stderr.log"}
        Start the stage of that spec. `id` is any string not in use. `events` is a file (made if absent, appended to) or
        a FIFO whose read end is already open; it receives exactly what `python -m stages run` writes on standard
        output. `stderr` (optional; the server's own when absent) is a file that receives stray prints, warnings and
        native crash messages of the stage. Both folders must exist.
    {"id": "base", "signal": "TERM"}
        TERM or INT: ask the stage to save and stop (exit 75). KILL: kill the stage and everything in its process group.
        A signal to a stage that has ended is ignored.

Answers:
    {"type": "ready", "pid": 4711}                                        once, at the start
    {"type": "started", "id": "base", "pid": 4712}                        the stage is forked
    {"type": "exited", "id": "base", "code": 0, "signal": null}           its end; all its events are written by then
    {"type": "exited", "id": "base", "code": null, "signal": "SIGKILL"}   killed by a signal (137 in a shell)
    {"type": "refused", "id": "base", "message": "..."}                   bad request; nothing was started

End of file on standard input, or SIGTERM, says that the parent is gone or done: every stage gets SIGTERM, is waited for
while it saves (at most `--grace` seconds, 300 by default, then killed), and the server exits 0. SIGINT is ignored:
whoever started the server decides what Ctrl-C means, and should start it in a session of its own.

Invariants:
- The server never runs nor imports stage or user code, so a stage always runs the code that is on disk when it starts.
- The server has no Python thread but its main one, has run no tensor operation and made no CUDA context when it forks:
  children may use OpenMP and CUDA.
- A stage whose `Config` says `NEEDS_TORCH = False` is forked at once. torch is imported before the first stage that
  needs it, or (unless `--lazy`) once no request has come for a moment. Requests are served between one import and the
  next, a second or two apart.
- A child is the leader of its own session, gets SIGTERM when the server dies (PR_SET_PDEATHSIG), and sees
  PYTHONHASHSEED=0. What it leaves running is killed when it ends: by itself, or, where it is killed, by the server, to
  which the orphans of a stage come.
- The log of the store is written by whoever follows the events (`stages.artifacts.append_log`), not by the stage.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import stat
import sys
import time
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from stages.children import adopt_orphans, die_with_parent, end_children, end_with
from stages.fingerprint import needs_torch
from stages.process import run_spec

_IDLE_SECONDS = 0.3
_SIGNALS = {"TERM": signal.SIGTERM, "INT": signal.SIGINT, "KILL": signal.SIGKILL}
_MASKED = (signal.SIGTERM, signal.SIGINT)
# What stages need: modules, and names that transformers imports when they are first asked for.
_PRELOADED = (
    ("torch", ""),
    ("safetensors.torch", ""),
    ("transformers", ""),
    ("transformers", "AutoModelForCausalLM"),
    ("transformers", "AutoTokenizer"),
    ("transformers", "PreTrainedTokenizerFast"),
    ("transformers", "GenerationConfig"),
    ("transformers", "Qwen3ForCausalLM"),
    ("transformers", "LlamaForCausalLM"),
    ("accelerate", ""),
)


@dataclass
class _Server:
    """The state of the one server of this process. Descriptors: `requests` and `answers` are the private copies of
    standard input and output, `wake` becomes readable when a signal came."""

    requests: int
    answers: int
    wake: int
    wake_write: int
    grace: float
    lazy: bool
    closing: bool = False
    loading: bool = False  # whether the imports have begun
    unloaded: list[tuple[str, str]] = field(default_factory=lambda: list(_PRELOADED))
    asked: bool = False  # whether a stage was ever asked for
    unread: bytes = b""
    waiting: list[dict[str, Any]] = field(default_factory=list)  # requests to start a stage
    children: dict[str, int] = field(default_factory=dict)  # id -> pid


def main(arguments: list[str]) -> int:
    """Serve until standard input ends. Returns the exit code."""
    grace, lazy = 300.0, False
    rest = list(arguments)
    try:
        while rest:
            option = rest.pop(0)
            if option == "--lazy":
                lazy = True
            elif option == "--grace":
                grace = float(rest.pop(0))
            else:
                raise ValueError(option)
    except (ValueError, IndexError):
        print("usage: python -m stages serve [--grace SECONDS] [--lazy]", file=sys.stderr)
        return 2
    server = _open(grace, lazy)
    _answer(server, {"type": "ready", "pid": os.getpid()})
    while not server.closing:
        _listen(server)
        _reap(server)
        _start_waiting(server)
        if server.loading and server.unloaded:
            _load_next(server)
    _close(server)
    return 0


def _open(grace: float, lazy: bool) -> _Server:
    requests, answers = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)  # nothing but answers may reach the parent
    wake, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    server = _Server(requests, answers, wake, wake_write, grace, lazy)
    adopt_orphans()

    def close(number: int, frame: object) -> None:
        server.closing = True

    signal.signal(signal.SIGTERM, close)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)  # wakes `select` through the wake-up descriptor
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    return server


def _answer(server: _Server, message: dict[str, Any]) -> None:
    view = memoryview(json.dumps(message).encode() + b"\n")
    with contextlib.suppress(OSError):  # the parent is gone; the end of its requests will say so
        while view:
            view = view[os.write(server.answers, view) :]


def _listen(server: _Server) -> None:
    """Wait for requests, ended children or, once, for idleness; take in what there is."""
    # The first moment of idleness counts from the first request: a flow may be slow to send it.
    patience = None
    if server.loading and (server.unloaded or server.waiting):
        patience = 0.0  # only look: there is more to import, or the last import has made a stage ready to start
    elif server.unloaded and server.asked and not server.lazy:
        patience = _IDLE_SECONDS
    ready, _, _ = select.select([server.requests, server.wake], [], [], patience)
    if not ready:
        server.loading = True  # idle for long enough, if it was not so already
        return
    if server.wake in ready:
        with contextlib.suppress(BlockingIOError):
            while os.read(server.wake, 512):
                pass
    if server.requests in ready:
        data = os.read(server.requests, 1 << 16)
        if not data:
            server.closing = True
            return
        *lines, server.unread = (server.unread + data).split(b"\n")
        for line in lines:
            if line.strip():
                _take(server, line)


def _take(server: _Server, line: bytes) -> None:
    try:
        request = json.loads(line)
    except ValueError:
        request = None
    if not isinstance(request, dict) or not isinstance(request.get("id"), str):
        shown = line[:200].decode(errors="replace")
        _answer(server, {"type": "refused", "id": None, "message": f"not a JSON object with an id: {shown}"})
        return
    name = request["id"]
    if "signal" in request:
        _signal(server, name, request["signal"])
    elif name in server.children or any(name == other["id"] for other in server.waiting):
        _answer(server, {"type": "refused", "id": name, "message": f"{name} is running already"})
    else:
        server.asked = True
        server.waiting.append(request)


def _signal(server: _Server, name: str, what: Any) -> None:
    number = _SIGNALS.get(str(what).removeprefix("SIG"))
    if number is None:
        _answer(server, {"type": "refused", "id": name, "message": f"unknown signal {what!r}; TERM, INT or KILL"})
        return
    for request in [request for request in server.waiting if request["id"] == name]:
        server.waiting.remove(request)
        _answer(server, {"type": "exited", "id": name, "code": None, "signal": number.name})
    pid = server.children.get(name)  # not yet reaped, so the number is still this child's
    if pid is None:
        return
    with contextlib.suppress(ProcessLookupError):
        if number == signal.SIGKILL:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)


def _start_waiting(server: _Server) -> None:
    """Fork what can be forked; begin to import torch for the rest, if there is any."""
    for request in list(server.waiting):
        try:
            spec = json.loads(Path(request["spec"]).read_bytes())
            torch = needs_torch(str(spec["stage"]), [Path(folder) for folder in spec.get("python_path", [])])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            server.waiting.remove(request)
            message = f"cannot read the spec {request.get('spec')}: {type(error).__name__}: {error}"
            _answer(server, {"type": "refused", "id": request["id"], "message": message})
            continue
        if torch and server.unloaded:
            server.loading = True
        else:
            server.waiting.remove(request)
            _fork(server, request)


def _load_next(server: _Server) -> None:
    """Import one more thing that stages need, without starting a thread pool or touching a GPU."""
    # Asking CUDA itself whether it is there would make a fork unusable; NVML can be asked.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    module, name = server.unloaded[0]
    try:
        loaded = importlib.import_module(module)
        if name:
            getattr(loaded, name)
    except Exception:  # the stage will fail on the same import, and say so where it is seen
        traceback.print_exc()
    if len(server.unloaded) == 1:
        gc.collect()
        gc.freeze()  # a collection in a child would copy every page
    del server.unloaded[0]


def _fork(server: _Server, request: dict[str, Any]) -> None:
    name, opened = request["id"], []
    try:
        # Without O_NONBLOCK, opening a FIFO that nobody reads would hang the server.
        events = os.open(request["events"], os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o666)
        opened.append(events)
        if not stat.S_ISREG(os.fstat(events).st_mode):
            os.set_blocking(events, True)
        stderr = None
        if request.get("stderr") is not None:
            stderr = os.open(request["stderr"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            opened.append(stderr)
    except (OSError, KeyError, TypeError) as error:
        for descriptor in opened:
            os.close(descriptor)
        message = f"cannot open the events or stderr of {name}: {error}"
        _answer(server, {"type": "refused", "id": name, "message": message})
        return
    parent = os.getpid()
    sys.stderr.flush()
    # A signal to the child waits until the stage's own handler is there; the server's would lose it.
    signal.pthread_sigmask(signal.SIG_BLOCK, _MASKED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads: BLAS's own survive a fork
        pid = os.fork()
    if pid == 0:
        _child(server, parent, Path(request["spec"]), events, stderr)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _MASKED)
    for descriptor in opened:
        os.close(descriptor)
    server.children[name] = pid
    _answer(server, {"type": "started", "id": name, "pid": pid})


def _child(server: _Server, parent: int, spec: Path, events: int, stderr: int | None) -> NoReturn:
    def body() -> int:
        os.setsid()
        if not die_with_parent(parent):
            os.kill(os.getpid(), signal.SIGTERM)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in (server.requests, server.answers, server.wake, server.wake_write):
            os.close(descriptor)
        if stderr is not None:
            os.dup2(stderr, 2)
            os.close(stderr)
        os.dup2(2, 1)
        adopt_orphans()
        try:
            return run_spec(spec, events)
        finally:
            end_children()

    end_with(body)


def _reap(server: _Server) -> None:
    for name, pid in list(server.children.items()):
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            continue
        # Before the pid is free again: end what the stage left behind.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        del server.children[name]
        end_children(but=server.children.values())
        killed = os.WIFSIGNALED(status)
        _answer(
            server,
            {
                "type": "exited",
                "id": name,
                "code": None if killed else os.WEXITSTATUS(status),
                "signal": signal.Signals(os.WTERMSIG(status)).name if killed else None,
            },
        )


def _close(server: _Server) -> None:
    """Ask every stage to stop, wait while they save, kill what is left after the grace period."""
    for request in server.waiting:
        _answer(server, {"type": "exited", "id": request["id"], "code": None, "signal": "SIGTERM"})
    for pid in server.children.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + server.grace
    while server.children:
        left = deadline - time.monotonic()
        if left <= 0:
            for pid in server.children.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            left = 1.0
        ready, _, _ = select.select([server.wake], [], [], left)
        if ready:
            with contextlib.suppress(BlockingIOError):
                while os.read(server.wake, 512):
                    pass
        _reap(server)
