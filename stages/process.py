"""The stage process: fetch and verify the inputs, run the stage, publish what it wrote, say how it ended.

Invariants:
- Artifacts are published first, then the result, then the saved progress is dropped: killed between any two, the next
  attempt finds either the result or the progress.
- Events are whole JSON lines on a descriptor of their own; whatever prints to standard output goes to standard error. A
  reader that has gone, or a full disk under the events, never stops a stage or a save.
- A signal only sets a flag: the stage stops where it can save, and no second signal disturbs it.
- One process computes a key: it holds the lease on it (`stages.artifacts.leases`). Another one waits, says for whom,
  and takes the result. A process that has lost its lease stops; it publishes no result.
- The code that runs is the code that was planned: `spec.record["code"]`, as {"digest": ..., "files": ...} of
  `stage_fingerprint`, is compared with the code on disk before the stage is imported and once it is.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from stages.artifacts import (
    Damaged,
    Lease,
    LeaseLost,
    LeaseRecord,
    NotInStore,
    Result,
    Store,
    StoreError,
    WorkArea,
    acquire,
    fetch,
    keep_code,
    log_key,
    open_store,
    parse_result,
    publish,
    read_manifest,
    read_result,
    result_key,
    wait_for_stores,
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
from stages.environment import environment
from stages.events import EventStream, StopFlag, json_line
from stages.fingerprint import CodeError
from stages.halted import keep_halted
from stages.os_errors import explained
from stages.planned_code import check_code, check_late_code, code_of
from stages.ranks import explain, follower_context, run_ranks

CRASHED = 1
Emit = Callable[[dict[str, Any]], None]


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
    outcome = _outcome_of(lambda: _attempt(spec, scratch, emit, stop, begun), emit, begun, scratch)
    outcome["seconds"] = round(time.monotonic() - begun, 3)
    _clear(scratch)
    _write_outcome(scratch, {"step": spec.step, **outcome}, emit)
    emit(outcome)
    return int(outcome["code"])


def _read_spec(path: Path) -> StageSpec:
    try:
        return StageSpec.model_validate_json(path.read_bytes())
    except OSError as error:
        raise Refused(f"cannot read the spec {path}: {explained(error)}") from None
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


def _outcome_of(work: Callable[[], dict[str, Any]], emit: Emit, begun: float, scratch: Path) -> dict[str, Any]:
    """The outcome that `work` returns, or that of what it raises."""
    try:
        return work()
    except StageEnd as error:
        said = {"kept": error.kept, "together": error.together}
        return _outcome(error.code, str(error), begun) | {name: value for name, value in said.items() if value}
    except (StoreError, CodeError) as error:
        return _outcome(CRASHED, str(error), begun)
    except BaseException as error:
        emit({"type": "log", "level": "error", "text": traceback.format_exc().rstrip()})
        if isinstance(error, OSError) and explained(error) not in (error.strerror, str(error)):  # the machine's fault
            return _outcome(CRASHED, f"{error.filename or scratch}: {explained(error)}", begun)
        return _outcome(CRASHED, _one_line(error), begun)


def _clear(scratch: Path) -> None:
    for name in ("inputs", "output", "side", "work", "tmp", "ranks"):
        remove_folder(scratch / name)


def _write_outcome(scratch: Path, outcome: dict[str, Any], emit: EventStream) -> None:
    temporary = scratch / "outcome.json.tmp"
    try:
        scratch.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(json_line(outcome))
        os.replace(temporary, scratch / "outcome.json")
    except OSError as error:
        emit(
            {"type": "log", "level": "warning", "text": f"cannot write {scratch / 'outcome.json'}: {explained(error)}"}
        )


def _attempt(spec: StageSpec, scratch: Path, emit: EventStream, stop: StopFlag, begun: float) -> dict[str, Any]:
    started = _now()
    _extend_path(spec.python_path)
    config = _config(spec)
    code = check_code(spec, config)
    wait_for_stores(lambda text: emit({"type": "log", "level": "warning", "text": text}))
    store = open_store(spec.store)
    turn = _take_turn(spec, store, emit, stop)
    if isinstance(turn, Result):
        message = f"computed by run {turn.run} meanwhile"
        made = {"artifact": turn.artifact, "outputs": turn.outputs, "metrics": turn.metrics, "computed": False}
        return _outcome(ExitCode.DONE, message, begun) | made
    with turn as lease:
        try:
            return _compute(spec, scratch, emit, stop, begun, started, config, code, store, lease)
        except BaseException as error:
            if lease.lost:
                raise Stopped(lease.reason) from error
            raise


def _take_turn(spec: StageSpec, store: Store, emit: EventStream, stop: StopFlag) -> Lease | Result:
    """Wait while another process computes the key. Returns the lease on it, or the result that is there by then."""
    found: list[Result] = []
    waited: list[LeaseRecord] = []

    def result_is_there() -> bool:
        if not spec.forced and (result := read_result(store, spec.stage, spec.key)):
            found.append(result)
        return bool(found)

    def wait(record: LeaseRecord) -> None:
        waited.append(record)
        where = {"run": record.run, "host": record.host, "pid": record.pid, "since": record.since}
        emit({"type": "waiting", "for": record.who(), **where})

    def token_of_result() -> int:
        try:
            return parse_result(store, result_key(spec.stage, spec.key)).token
        except (NotInStore, Damaged):
            return 0

    lease = acquire(
        store,
        spec.key,
        stage=spec.stage,
        step=spec.step,
        run=spec.run,
        inputs=list(spec.inputs.values()),
        after=token_of_result,
        on_wait=wait,
        give_up=lambda: stop() or result_is_there(),
    )
    if waited:
        emit({"type": "waiting", "for": None})
    if lease is None and not found:
        raise Stopped(f"stopped while it waited for {waited[-1].who()}")
    if lease is not None and not result_is_there():
        return lease
    if lease is not None:
        lease.release()
    return found[-1]


def _compute(
    spec: StageSpec,
    scratch: Path,
    emit: EventStream,
    stop: StopFlag,
    begun: float,
    started: str,
    config: StageConfig,
    code: dict[str, Any],
    store: Store,
    lease: Lease,
) -> dict[str, Any]:
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
        raise Refused(f"cannot make the scratch folder {scratch}: {explained(error)}") from error
    inputs = _fetch_inputs(spec, config, store, scratch / "inputs", stop)
    run, loaded = _import_stage(spec)
    sources = code_of(spec, config).sources()
    check_code(spec, config)  # after they were read, so they are what was planned
    work = WorkArea(store, spec.key, scratch / "work", warn=lambda text: _warn(emit, text), lease=lease)
    context = StageContext(
        config=config,
        inputs=inputs,
        output=scratch / "output",
        work=work,
        scratch=scratch / "tmp",
        resources=spec.resources,
        emit=emit,
        stop=lambda: stop() or lease.lost,
        step=spec.step,
        side_outputs=side_outputs,
        digests=dict(spec.inputs),
    )

    def alone() -> dict[str, Any]:
        try:
            _run_and_settle(run, context, work, emit)
        except StageEnd as end:
            keep_halted(store, spec, end, code, started=started, finished=_now(), warn=lambda text: _warn(emit, text))
            raise
        check_late_code(spec, config, loaded)
        try:
            lease.check()  # before anything is uploaded in vain
            return _finish(spec, config, context, store, work, lease, code, sources, emit, started, begun)
        except LeaseLost as error:
            raise Stopped(str(error)) from error

    if spec.resources.processes == 1:
        return alone()

    def rank(number: int) -> dict[str, Any]:
        lease.forked()
        if number == 0:
            return _outcome_of(alone, emit, begun, scratch)
        follower, log = follower_context(context, scratch / "ranks" / str(number), number)
        return _outcome_of(lambda: (run(follower), _outcome(ExitCode.DONE, "", begun))[1], log, begun, scratch)

    (scratch / "ranks").mkdir()
    count, folder = spec.resources.processes, scratch / "ranks"
    end = run_ranks(count, rank, folder, lambda: stop() or lease.lost, while_forking=lease.held_still())
    if end.outcome is not None and not end.crashed:
        return end.outcome
    return _outcome(CRASHED, explain(end), begun)


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
    if spec.resources.processes > 1 and not Config.RANKS:
        raise Refused(
            f"step {spec.step}: resources.processes is {spec.resources.processes}, and stage {spec.stage} runs in one "
            "process; set it to 1"
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


_MENDED_BY = "`headrace verify --repair --from FOLDER` mends read data, --force on the step that gave it anything else"


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
            raise Refused(f"input {key}: {error}; {_MENDED_BY}") from error
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
    lease: Lease,
    code: dict[str, Any],
    sources: dict[str, bytes],
    emit: EventStream,
    started: str,
    begun: float,
) -> dict[str, Any]:
    """Publish, write the result, drop the progress."""
    if not any(context.output.iterdir()):
        raise RuntimeError(f"stage {spec.stage} ended without writing anything to its output")
    record = {key: value for key, value in spec.record.items() if key != "code"}
    metrics = {name: float(value) for name, value in context.final_metrics.items()}

    def put() -> Result:
        artifact, outputs = _publish(store, config, context)
        kept = keep_code(store, sources, context.scratch)
        result = Result(
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
            code=code | {"artifact": kept},
            environment=environment() | {"processes": spec.resources.processes},
            started=started,
            finished=_now(),
            seconds=round(time.monotonic() - begun + work.earlier_seconds, 3),
            attempts=int(spec.record.get("attempt", 1)),
            metrics=metrics,
            logs=log_key(spec.run, spec.step),
            record=record,
        )
        return write_result(store, result, lease)

    try:
        stored = put()
    except NotInStore:  # a gc removed an old blob in the moment in which publishing found it there
        stored = put()
    if stored.history and not stored.history[-1]["same_bytes"]:
        _warn(emit, f"the same key gave other bytes before ({stored.history[-1]['artifact']}); the record keeps both")
    try:
        work.drop()
    except StoreError as error:
        _warn(emit, f"saved progress could not be removed: {error}")
    made = {"artifact": stored.artifact, "outputs": stored.outputs, "metrics": metrics}
    return _outcome(ExitCode.DONE, "", begun) | made


def _publish(store: Store, config: StageConfig, context: StageContext[Any]) -> tuple[str, dict[str, str]]:
    """Publish what the stage wrote: the digest of its output, and side output name -> digest."""
    artifact = publish(store, context.output, config.OUTPUT)
    outputs = {
        name: publish(store, folder, config.SIDE_OUTPUTS[name])
        for name, folder in context.side_outputs.items()
        if any(folder.iterdir())
    }
    return artifact, outputs
