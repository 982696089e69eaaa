"""The stage process: fetch and verify the inputs, run the stage, publish what it wrote, say how it ended.

Invariants:
- Artifacts are published first, then the result, then the saved progress is dropped: killed between any two, the next
  attempt finds either the result or the progress.
- Events are whole JSON lines on a descriptor of their own; whatever prints to standard output goes to standard error. A
  reader that has gone, or a full disk under the events, never stops a stage or a save.
- A signal only sets a flag: the stage stops where it can save, and no second signal disturbs it.
- The code that runs is the code that was planned: `spec.record["code"]`, as {"digest": ..., "files": ...} of
  `stage_fingerprint`, is compared with the code on disk before the stage is imported and once it is.
"""

from __future__ import annotations

import errno
import importlib
import importlib.metadata
import json
import math
import os
import platform
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from stages.artifacts import (
    Damaged,
    NotInStore,
    Result,
    Store,
    StoreError,
    WorkArea,
    fetch,
    log_key,
    open_store,
    publish,
    read_manifest,
    write_result,
)
from stages.artifacts.store import remove_folder
from stages.contract import (
    BudgetSpent,
    ExitCode,
    Refused,
    StageConfig,
    StageContext,
    StageEnd,
    StageSpec,
    Stopped,
    config_class,
)
from stages.fingerprint import CodeError, difference, stage_fingerprint

CRASHED = 1
_LIBRARIES = ("accelerate", "headrace", "numpy", "pyarrow", "safetensors", "tokenizers", "torch", "transformers")


class EventStream:
    """Writes events to a descriptor, one JSON line each, from any thread. Errors of the descriptor are swallowed: the
    reader may be gone while the stage saves."""

    def __init__(self, descriptor: int, step: str = "") -> None:
        self.step = step
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._broken = descriptor < 0

    def __call__(self, event: dict[str, Any]) -> None:
        line = _json_line({"time": round(time.time(), 3), "step": self.step, **event})
        with self._lock:
            view = memoryview(line)
            try:
                while view and not self._broken:
                    view = view[os.write(self._descriptor, view) :]
            except OSError:
                self._broken = True


def _json_line(event: dict[str, Any]) -> bytes:
    try:
        text = json.dumps(event, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError):
        text = json.dumps(_plain(event), ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace") + b"\n"


def _plain(value: Any) -> Any:
    """JSON for anything: scalars of array libraries become numbers, NaN and infinities null, other objects text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if hasattr(value, "item") and not isinstance(value, float):
        try:
            value = value.item()
        except (TypeError, ValueError, RuntimeError):
            return str(value)
        if isinstance(value, bool | int):
            return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value)


class StopFlag:
    """Whether SIGTERM or SIGINT has come."""

    def __init__(self) -> None:
        self._set = False

    def __call__(self) -> bool:
        return self._set

    def listen(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))  # the fork server blocks them

    def _handle(self, number: int, frame: object) -> None:
        self._set = True


def run_spec(path: Path, events: int) -> int:
    """Run the stage of a spec file to its end. Returns the exit code; `outcome.json` in the scratch folder agrees.

    Args:
        path: a `StageSpec` in JSON.
        events: descriptor for the events; the process's standard output is not touched.
    """
    stop = StopFlag()
    stop.listen()
    begun = time.monotonic()
    emit = EventStream(events)
    try:
        spec = _read_spec(path)
    except Refused as error:
        emit(_outcome(ExitCode.REFUSED, str(error), begun))
        return int(ExitCode.REFUSED)
    emit.step = spec.step
    scratch = Path(spec.scratch)
    try:
        outcome = _attempt(spec, scratch, emit, stop, begun)
    except StageEnd as error:
        outcome = _outcome(error.code, str(error), begun)
    except (StoreError, CodeError) as error:
        outcome = _outcome(CRASHED, str(error), begun)
    except BaseException as error:
        emit({"type": "log", "level": "error", "text": traceback.format_exc().rstrip()})
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        message = f"no space is left on the disk of {scratch}; free some, or give a store on another disk"
        outcome = _outcome(CRASHED, message if full else _one_line(error), begun)
    outcome["seconds"] = round(time.monotonic() - begun, 3)
    _clear(scratch)
    _write_outcome(scratch, {"step": spec.step, **outcome}, emit)
    emit(outcome)
    return int(outcome["code"])


def _read_spec(path: Path) -> StageSpec:
    try:
        return StageSpec.model_validate_json(path.read_bytes())
    except OSError as error:
        raise Refused(f"cannot read the spec {path}: {error.strerror or error}") from None
    except ValidationError as error:
        raise Refused(f"spec {path}: {_first_problems(error)}") from None


def _first_problems(error: ValidationError) -> str:
    problems = []
    for problem in error.errors(include_url=False, include_context=False)[:3]:
        where = ".".join(str(part) for part in problem["loc"])
        problems.append(f"{where}: {problem['msg']}" if where else str(problem["msg"]))
    return "; ".join(problems)


def _one_line(error: BaseException) -> str:
    first = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _outcome(code: int, message: str, begun: float) -> dict[str, Any]:
    states = {ExitCode.DONE: "done", ExitCode.STOPPED: "stopped", ExitCode.REFUSED: "refused", CRASHED: "crashed"}
    return {
        "type": "outcome",
        "code": int(code),
        "state": states.get(code, "halted"),
        "message": message,
        "artifact": None,
        "outputs": {},
        "seconds": round(time.monotonic() - begun, 3),
        "metrics": {},
    }


def _clear(scratch: Path) -> None:
    for name in ("inputs", "output", "side", "work", "tmp"):
        remove_folder(scratch / name)


def _write_outcome(scratch: Path, outcome: dict[str, Any], emit: EventStream) -> None:
    temporary = scratch / "outcome.json.tmp"
    try:
        scratch.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(_json_line(outcome))
        os.replace(temporary, scratch / "outcome.json")
    except OSError as error:
        emit({"type": "log", "level": "warning", "text": f"cannot write {scratch / 'outcome.json'}: {error.strerror}"})


def _attempt(spec: StageSpec, scratch: Path, emit: EventStream, stop: StopFlag, begun: float) -> dict[str, Any]:
    started = _now()
    _extend_path(spec.python_path)
    config = _config(spec)
    code = _check_code(spec, config)
    store = open_store(spec.store)
    try:
        _clear(scratch)
        (scratch / "outcome.json").unlink(missing_ok=True)
        (scratch / "tmp").mkdir(parents=True)
        (scratch / "output").mkdir()
        (scratch / "inputs").mkdir()
        side_outputs = {name: scratch / "side" / name for name in config.SIDE_OUTPUTS}
        for folder in side_outputs.values():
            folder.mkdir(parents=True)
    except OSError as error:
        raise Refused(f"cannot make the scratch folder {scratch}: {error.strerror or error}") from error
    inputs = _fetch_inputs(spec, config, store, scratch / "inputs", stop)
    run, loaded = _import_stage(spec)
    _check_code(spec, config)
    work = WorkArea(store, spec.key, scratch / "work", warn=lambda text: _warn(emit, text))
    context = StageContext(
        config=config,
        inputs=inputs,
        output=scratch / "output",
        work=work,
        scratch=scratch / "tmp",
        resources=spec.resources,
        emit=emit,
        stop=stop,
        step=spec.step,
        side_outputs=side_outputs,
    )
    _run_and_settle(run, context, work, emit)
    _check_late_code(spec, config, loaded)
    return _finish(spec, config, context, store, work, code, emit, started, begun)


def _run_and_settle(
    run: Callable[[StageContext[Any]], None], context: StageContext[Any], work: WorkArea, emit: EventStream
) -> None:
    """Run the stage and let the save in flight end. Its failure matters only where the stage says that it is saved."""
    try:
        run(context)
    except (Stopped, BudgetSpent):
        work.wait()
        raise
    finally:
        try:
            work.wait()
        except StoreError as error:
            _warn(emit, str(error))


def _warn(emit: Callable[[dict[str, Any]], None], text: str) -> None:
    emit({"type": "log", "level": "warning", "text": text})


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _extend_path(python_path: list[str]) -> None:
    """Put the folders with user code first: there the fingerprint looks first too."""
    folders = [os.path.abspath(folder) for folder in python_path]
    sys.path[:] = folders + [entry for entry in sys.path if entry not in folders]
    importlib.invalidate_caches()


def _config(spec: StageSpec) -> StageConfig:
    try:
        Config = config_class(spec.stage)
    except ValueError as error:
        raise Refused(str(error)) from None
    try:
        config = Config.model_validate(spec.config)
    except ValidationError as error:
        raise Refused(f"config of step {spec.step}: {_first_problems(error)}") from None
    if spec.resources.processes > 1:
        raise Refused(
            f"step {spec.step}: resources.processes is {spec.resources.processes}, and stages train in one process "
            "for now; leave it at 1"
        )
    for name, wanted in Config.INPUTS.items():
        given = [key for key in spec.inputs if key == name or (wanted.many and key.startswith(name + "."))]
        if wanted.required and not given:
            raise Refused(f"step {spec.step}: input {name} is missing; it takes a {' or '.join(wanted.kinds)}")
    for key in spec.inputs:
        name = key.partition(".")[0]
        if name not in Config.INPUTS or ("." in key and not Config.INPUTS[name].many):
            raise Refused(
                f"step {spec.step}: stage {spec.stage} has no input {key} ({', '.join(Config.INPUTS) or 'none'})"
            )
    return config


def _check_code(spec: StageSpec, config: StageConfig) -> dict[str, Any]:
    """The code's fingerprint for the record; refuses code that is not what was planned.

    Raises:
        Refused: it changed since, or the user's code is missing or not Python.
    """
    planned = spec.record.get("code") or {}
    try:
        now = stage_fingerprint(spec.stage, config.user_code(), [Path(folder) for folder in spec.python_path])
    except CodeError as error:
        raise Refused(str(error)) from None
    if planned.get("digest") not in (None, now.digest):
        where = difference(planned.get("files", {}), now.files)
        raise Refused(f"the code changed after the run was planned{': ' + where if where else ''}; run it again")
    return {"digest": now.digest, "files": now.files} | planned


def _check_late_code(spec: StageSpec, config: StageConfig, loaded: set[str]) -> None:
    """Refuse a result when a module was imported during the run after it had been edited.

    Modules that were loaded before the stage began run as they were, so an edit of those does no harm.
    """
    late = {_source(name) for name in set(sys.modules) - loaded}
    planned = (spec.record.get("code") or {}).get("files")
    if not planned:
        return
    try:
        now = stage_fingerprint(spec.stage, config.user_code(), [Path(folder) for folder in spec.python_path]).files
    except CodeError:
        return  # broken by an edit after everything was loaded
    for path in planned.keys() & now.keys():
        if planned[path]["sha256"] != now[path]["sha256"] and any(file.endswith("/" + path) for file in late):
            raise Refused(f"the code changed while the step ran: {path} was edited and then imported; run it again")


def _source(module: str) -> str:
    return str(getattr(sys.modules.get(module), "__file__", None) or "").replace(os.sep, "/")


def _fetch_inputs(spec: StageSpec, config: StageConfig, store: Store, folder: Path, stop: StopFlag) -> dict[str, Path]:
    fetched = {}
    for key, digest in spec.inputs.items():
        if stop():
            raise Stopped("stopped before it started")
        wanted = config.INPUTS[key.partition(".")[0]]
        try:
            kind = read_manifest(store, digest).kind
            if kind not in wanted.kinds:
                raise Refused(f"step {spec.step}: input {key} is a {kind}; it takes a {' or '.join(wanted.kinds)}")
            fetch(store, digest, folder / key)
        except (NotInStore, Damaged) as error:
            raise Refused(f"input {key}: {error}; make it again with --force on the step that gave it") from error
        except ValueError as error:
            raise Refused(f"input {key}: {error}") from error
        fetched[key] = folder / key
    if stop():
        raise Stopped("stopped before it started")
    return fetched


def _import_stage(spec: StageSpec) -> tuple[Callable[[StageContext[Any]], None], set[str]]:
    """The stage's `run`, and the names of all modules that are loaded by now."""
    name = f"{spec.stage if '.' in spec.stage else 'stages.' + spec.stage}.stage"
    run = getattr(importlib.import_module(name), "run", None)
    if not callable(run):
        raise Refused(f"module {name} has no function run(context)")
    return run, set(sys.modules)


def _finish(
    spec: StageSpec,
    config: StageConfig,
    context: StageContext[Any],
    store: Store,
    work: WorkArea,
    code: dict[str, Any],
    emit: EventStream,
    started: str,
    begun: float,
) -> dict[str, Any]:
    """Publish, write the result, drop the progress."""
    if not any(context.output.iterdir()):
        raise RuntimeError(f"stage {spec.stage} ended without writing anything to its output")
    artifact = publish(store, context.output, config.OUTPUT)
    outputs = {
        name: publish(store, folder, config.SIDE_OUTPUTS[name])
        for name, folder in context.side_outputs.items()
        if any(folder.iterdir())
    }
    record = {key: value for key, value in spec.record.items() if key != "code"}
    metrics = {name: float(value) for name, value in context.final_metrics.items()}
    stored = write_result(
        store,
        Result(
            artifact=artifact,
            outputs=outputs,
            kind=config.OUTPUT,
            stage=spec.stage,
            step=spec.step,
            key=spec.key,
            run=spec.run,
            config=config.model_dump(mode="json"),
            identity=config.identity(),
            inputs=spec.inputs,
            code=code,
            environment=environment(),
            started=started,
            finished=_now(),
            seconds=round(time.monotonic() - begun + work.earlier_seconds, 3),
            attempts=int(spec.record.get("attempt", 1)),
            metrics=metrics,
            logs=log_key(spec.run, spec.step),
            record=record,
        ),
    )
    if stored.history and not stored.history[-1]["same_bytes"]:
        _warn(emit, f"the same key gave other bytes before ({stored.history[-1]['artifact']}); the record keeps both")
    try:
        work.drop()
    except StoreError as error:
        _warn(emit, f"saved progress could not be removed: {error}")
    return _outcome(ExitCode.DONE, "", begun) | {"artifact": artifact, "outputs": outputs, "metrics": metrics}


def environment() -> dict[str, Any]:
    """What a result's record says of the machine and the libraries that computed it. Imports nothing new."""
    versions = {}
    for name in _LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "cpu": _cpu_name(),
        "cpu_count": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "libraries": versions,
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        found["threads"] = torch.get_num_threads()
        if torch.cuda.is_available():
            found["cuda"] = torch.version.cuda
            found["cuda_devices"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return found


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
