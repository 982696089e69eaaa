"""Run a plan: start what is missing, keep what is there, lose nothing.

The model: an `Execution` is the state of one run. `run_step` brings one step to its end, in the calling thread: it
computes the step's key from the digests that its inputs really have, takes a result that is there, or starts the stage
and follows it. `execute` calls it from plain threads; the Prefect flow calls it from tasks. Neither this module nor a
runner knows of Prefect.

Invariants:
- Of several runs that need one result, one computes it (the stage process takes a lease); the others wait and take it.
- The store's result decides whether a step is done, not the exit code of its process.
- Verdicts (exit codes 80 to 83) are never tried again. A kill, an unasked stop and a lost host are; so is a crash that
  saved further progress than any attempt before. Three attempts in a row without further progress end the step.
- A failed step skips what needs it; everything else runs to its end, and what is finished stays.
- The run's document (runs/<run>.json) and logs in the store are current at every change of a step.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from flows.endings import RunResult, StepResult, ending, was_killed
from flows.plan import Plan, PlannedStep, Planner
from flows.recipe_model import RecipeError, Step
from flows.record import Heartbeat, git_state, record_killed, run_document, step_document
from flows.runners.base import Handle, Runner, RunnerError
from flows.scratch import ScratchFolders
from flows.sources import bring
from flows.step_log import StepLog
from stages.artifacts import (
    Result,
    StoreError,
    append_log,
    keep_code,
    log_key,
    read_result,
    redact,
    redact_event,
    stop_waiting,
    wait_for_stores,
    write_result,
    write_run,
)
from stages.contract import VERDICTS, ExitCode, StageSpec

Listener = Callable[[dict[str, Any]], None]

ATTEMPTS = 3  # in a row without further saved progress
GRACE = 60.0  # seconds that a stopped stage may take to save
_PAUSES = (1.0, 3.0)  # seconds before the second and later attempts


def execute(
    plan: Plan,
    *,
    runner: Runner,
    run_id: str,
    listener: Listener | None = None,
    workers: int = 2,
    grace: float = GRACE,
) -> RunResult:
    """Run a plan in threads of this process, `workers` steps at a time.

    Ctrl-C stops it: running stages save (for at most `grace` seconds) and the result is "stopped"; a second one kills
    them.

    Args:
        run_id: name of the run, of letters, digits and "_.@+-", that no other run of the store has.
        listener: called with every event, from any thread, one call at a time.

    Raises:
        StoreError: the run's document cannot be written.
    """
    return run_all(Execution(plan, runner=runner, run_id=run_id, listener=listener, grace=grace), workers=workers)


def run_all(execution: Execution, *, workers: int = 2) -> RunResult:
    """`execute` for an execution that the caller has made, to stop it from elsewhere.

    Raises:
        StoreError: the run's document cannot be written.
    """
    execution.begin()
    waiting = [planned.step for planned in execution.plan.steps]
    running: dict[Future[StepResult], str] = {}
    try:
        with ThreadPoolExecutor(max(1, workers), thread_name_prefix="step") as pool:
            try:
                while waiting or running:
                    for name in [name for name in waiting if execution.ready(name)]:
                        if len(running) >= max(1, workers):
                            break
                        waiting.remove(name)
                        running[pool.submit(execution.run_step, name)] = name
                    ended, _ = wait(running, return_when=FIRST_COMPLETED)
                    for future in ended:
                        running.pop(future)
                        future.result()
            except BaseException as error:
                execution.stop(kill=False)
                _await_interruptible(execution, running)
                if not isinstance(error, KeyboardInterrupt):
                    raise
        for name in waiting:
            execution.run_step(name)
    finally:
        result = execution.finish()
    return result


def _await_interruptible(execution: Execution, running: dict[Future[StepResult], str]) -> None:
    """Wait until the stopped steps have ended; Ctrl-C now kills them."""
    while True:
        try:
            wait(running)
            return
        except KeyboardInterrupt:
            execution.stop(kill=True)


class Execution:
    """The state of one run, for several threads: `begin`, `run_step` for each step after those it needs, `finish`.

    Args: as `execute`, and
        slots: the block in which a stage of a step may run, entered once a step is known to be no hit; it may wait.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        runner: Runner,
        run_id: str,
        listener: Listener | None = None,
        grace: float = GRACE,
        slots: Callable[[Step], AbstractContextManager[object]] | None = None,
    ) -> None:
        self.plan, self.runner, self.run_id = plan, runner, run_id
        self._slots = slots or nullcontext
        self.results: dict[str, StepResult] = {}
        self._listener = listener
        self._grace = grace
        self._lock = threading.RLock()
        self._listening = threading.RLock()
        self._key_locks: dict[str, threading.Lock] = {}
        self._importing = threading.Lock()
        self._handles: dict[str, Handle] = {}
        self._stopping = threading.Event()
        self._killing = False
        self._begun = time.monotonic()
        self._git = git_state()
        self._document = run_document(plan, run_id)
        self._heartbeat = Heartbeat(self._write_document)
        self._scratch = ScratchFolders(plan.store, run_id)

    # The run

    def begin(self) -> None:
        """Write the run's document and say which steps wait."""
        wait_for_stores()
        record_killed(self.plan.store, self._scratch.sweep())
        self._write_document()
        self._heartbeat.start()
        for planned in self.plan.steps:
            self._tell(planned.step, "waiting", reason=planned.reason)

    def ready(self, name: str) -> bool:
        """Whether every step that `name` needs has ended, well or not."""
        with self._lock:
            return all(needed in self.results for needed in self.plan.recipe.steps[name].upstream())

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def stop(self, *, kill: bool = False) -> None:
        """Stop the run: nothing is started any more; running stages save and end, or are killed. Returns at once."""
        self._stopping.set()
        stop_waiting()
        with self._lock:
            self._killing = self._killing or kill
            handles = list(self._handles.values())
        for handle in handles:
            threading.Thread(target=handle.stop, args=(0.0 if kill else self._grace,), daemon=True).start()

    def finish(self) -> RunResult:
        """Write how the run ended, and return it. Steps that were never brought to an end count as stopped."""
        self._heartbeat.stop()
        with self._lock:
            for planned in self.plan.steps:
                if planned.step not in self.results:
                    self.results[planned.step] = StepResult(planned.step, "stopped", message="not started")
                    self._document["steps"][planned.step]["status"] = "stopped"
            statuses = {result.status for result in self.results.values()}
            state: Literal["done", "failed", "stopped"] = "done"
            if statuses & {"failed", "skipped"}:
                state = "failed"
            if "stopped" in statuses and "failed" not in statuses:
                state = "stopped"
            seconds = round(time.monotonic() - self._begun, 3)
            self._document |= {"state": state, "finished": _now(), "seconds": seconds}
            self._write_document()
        self._scratch.close()
        return RunResult(self.run_id, state, dict(self.results), seconds)

    # One step

    def run_step(self, name: str) -> StepResult:
        """Bring one step to its end and return how it ended. The steps that it needs must have been run before.

        Raises:
            ValueError: a step that it needs has not ended yet.
            StoreError: the run's document or log cannot be written.
        """
        begun = time.monotonic()
        step = self.plan.recipe.steps[name]
        with self._lock:
            upstream = {needed: self.results.get(needed) for needed in step.upstream()}
        if missing := [needed for needed, result in upstream.items() if result is None]:
            raise ValueError(f"step {name} needs {', '.join(missing)}, which has not been run")
        bad = [result for result in upstream.values() if result is not None and not result.ok]
        try:
            if self.stopping or any(result.status == "stopped" for result in bad):
                result = StepResult(name, "stopped", message="not started")
            elif bad:
                causes = ", ".join(f"{item.step} {item.status}" for item in bad)
                result = StepResult(name, "skipped", message=f"not run, for {causes}")
            else:
                result = self._bring_to_end(step)
        except (RecipeError, RunnerError, StoreError) as error:
            result = StepResult(name, "failed", message=redact(str(error)))
        result = replace(result, seconds=round(time.monotonic() - begun, 3))
        self._end(result)
        return result

    def _bring_to_end(self, step: Step) -> StepResult:
        inputs = self._inputs(step)
        planner = Planner(self.plan.recipe, self.plan.store, force=self.plan.force, accept_code=self.plan.accept_code)
        key = planner.key(step, inputs)
        with self._lock:
            lock = self._key_locks.setdefault(key, threading.Lock())
        with lock:  # two steps with one key: the second finds the result of the first
            planned = planner.decide(step, dict(inputs), {}, strict=False)
            if planned.status == "hit":
                return self._take_hit(step, planned, planner)
            with self._slots(step):
                return self._attempts(step, planned, inputs, planner)

    def _inputs(self, step: Step) -> dict[str, str]:
        """Input name -> digest, all of them in the store."""
        inputs: dict[str, str] = {}
        for ref in step.inputs.values():
            if ref.source == "step":
                made = self.results[ref.target]
                digest = made.outputs.get(ref.output) if ref.output else made.artifact
                if digest is None:
                    raise RecipeError(
                        f"{ref.where}: step {ref.target} gave no {ref.output or 'artifact'} for {step.name}."
                    )
                inputs[ref.name] = digest
            else:
                with self._importing:  # the same files may be the input of several steps
                    source = self.plan.sources[step.name, ref.name]
                    inputs[ref.name] = bring(source, self.plan.store, self.run_id, self.plan.hashes)
        return inputs

    def _take_hit(self, step: Step, planned: PlannedStep, planner: Planner) -> StepResult:
        assert planned.key is not None
        assert planned.artifact is not None
        result = read_result(self.plan.store, step.stage, planned.accepted_from or planned.key)
        if planned.accepted_from is not None and result is not None:
            code = planner.code(step)
            kept = keep_code(self.plan.store, code.whole.sources())
            changed: dict[str, Any] = {
                "key": planned.key,
                "step": step.name,
                "run": self.run_id,
                "code": code.record | {"artifact": kept},
                "accepted_from": planned.accepted_from,
                "history": [],
            }
            result = write_result(self.plan.store, Result.model_validate(result.model_dump() | changed))
        return StepResult(
            step.name,
            "cached",
            key=planned.key,
            artifact=planned.artifact,
            outputs=planned.outputs,
            metrics=result.metrics if result is not None else {},
            reason=planned.reason,
        )

    def _attempts(self, step: Step, planned: PlannedStep, inputs: dict[str, str], planner: Planner) -> StepResult:
        assert planned.key is not None
        result = StepResult(step.name, "failed", key=planned.key, reason=planned.reason, saved_step=planned.saved_step)
        fruitless = 0
        while True:
            number = result.attempts + 1
            self._tell(step.name, "running", reason=planned.reason, key=planned.key, attempt=number)
            before = result.saved_step if result.saved_step is not None else -1
            result, again = self._attempt(step, planned.key, inputs, planner, result)
            progressed = (result.saved_step if result.saved_step is not None else -1) > before
            fruitless = 0 if progressed else fruitless + 1
            if again == "never" or (again == "with progress" and not progressed) or fruitless >= ATTEMPTS:
                return result
            pause = _PAUSES[min(fruitless, len(_PAUSES)) - 1] if fruitless else _PAUSES[0]
            self._log(step.name, f"attempt {number} ended ({result.message}); trying again in {pause:.0f} s")
            if self._stopping.wait(pause):
                return replace(result, status="stopped")

    def _attempt(
        self, step: Step, key: str, inputs: dict[str, str], planner: Planner, before: StepResult
    ) -> tuple[StepResult, Literal["never", "with progress", "always"]]:
        """Start the stage once and follow it. Returns how it ended, and whether to try again."""
        number = before.attempts + 1
        scratch = self._scratch.make(step.name, number)
        try:
            spec = self._spec(step, key, inputs, planner, scratch, number)
            handle = self._start(spec)
            if handle is None:
                return replace(before, status="stopped", message="stopped before it started"), "never"
            try:
                outcome, saved = self._follow(step.name, handle, before.saved_step)
                code = handle.wait()
            except BaseException:
                handle.stop(0.0 if self._killing else self._grace)
                raise
            finally:
                with self._lock:
                    self._handles.pop(step.name, None)
            made = read_result(self.plan.store, step.stage, key) if code == ExitCode.DONE else None
        finally:
            self._scratch.remove(scratch)
        result = replace(before, code=code, attempts=number, saved_step=saved, kept=outcome.get("kept"))
        if made is not None:
            others = outcome.get("computed") is False  # another process computed it while this one waited
            return replace(
                result,
                status="cached" if others else "done",
                message=f"computed by run {made.run}" if others else "",
                artifact=made.artifact,
                outputs=made.outputs,
                metrics=made.metrics,
                saved_step=None,
            ), "never"
        if self.stopping and code == -signal.SIGTERM:
            return replace(result, status="stopped", message="stopped before it started"), "never"
        message = handle.verdict or str(outcome.get("message") or "") or ending(code)
        if code == ExitCode.DONE:
            return replace(result, message="it says that it is done, but its result is not in the store"), "never"
        if self.stopping:
            return replace(result, status="stopped", message=message), "never"
        if handle.verdict or code in VERDICTS:
            return replace(result, message=message), "never"
        return replace(result, message=message), "always" if code == ExitCode.STOPPED or was_killed(
            code
        ) else "with progress"

    def _spec(
        self, step: Step, key: str, inputs: dict[str, str], planner: Planner, scratch: Path, attempt: int
    ) -> StageSpec:
        recipe = self.plan.recipe
        record = {
            "attempt": attempt,
            "code": planner.code(step).record,
            "recipe": {"name": recipe.name, "text": recipe.text, "overrides": list(recipe.overrides)},
            "git": self._git,
            "python_path": [str(folder) for folder in recipe.python_path],
        }
        return StageSpec(
            stage=step.stage,
            step=step.name,
            run=self.run_id,
            key=key,
            config=step.config.model_dump(mode="json"),
            inputs=inputs,
            store=self.plan.store.url,
            scratch=str(scratch),
            resources=step.resources,
            python_path=[str(folder) for folder in recipe.python_path],
            record=record,
            forced=step.name in self.plan.force,
        )

    def _start(self, spec: StageSpec) -> Handle | None:
        """Start the stage; None where the run is being stopped."""
        if self.stopping:
            return None
        handle = self.runner.start(spec)
        with self._lock:
            self._handles[spec.step] = handle
            stopping = self.stopping
        if stopping:  # `stop` may have come before the handle was there to be told
            threading.Thread(target=handle.stop, args=(self._grace,), daemon=True).start()
        return handle

    def _follow(self, name: str, handle: Handle, saved: int | None) -> tuple[dict[str, Any], int | None]:
        """Pass on and log the events of a stage to its end. Returns its outcome, and the last step that it saved at."""
        outcome: dict[str, Any] = {}
        with StepLog(self.plan.store, self.run_id, name) as log:
            for event in handle.events():
                event = redact_event(event)  # before anybody hears of it, a person at a terminal included
                event.setdefault("step", name)
                log.add(event)
                if event.get("type") == "outcome":
                    outcome = event
                elif event.get("type") == "saved":
                    saved = max(saved if saved is not None else -1, int(event.get("at", -1)))
                self._hear(event)
        return outcome, saved

    # Telling

    def _hear(self, event: dict[str, Any]) -> None:
        if self._listener is not None:
            with self._listening:
                self._listener(event)

    def _tell(self, name: str, state: str, **more: Any) -> None:
        """Tell a step's new state, and keep it in the run's document."""
        event = {"type": "step", "step": name, "state": state, "time": round(time.time(), 3), **more}
        with self._lock:
            entry = self._document["steps"][name]
            entry |= {"status": state} | {key: value for key, value in more.items() if key in entry}
            if state == "running":
                entry["logs"] = log_key(self.run_id, name)
                entry.setdefault("started", _now())
            if state != "waiting":
                self._write_document()
        self._hear(event)

    def _write_document(self) -> None:
        with self._lock:
            write_run(self.plan.store, self._document)

    def _log(self, name: str, text: str) -> None:
        event = {"type": "log", "level": "warning", "step": name, "time": round(time.time(), 3), "text": text}
        append_log(self.plan.store, self.run_id, name, [event])
        self._hear(event)

    def _end(self, result: StepResult) -> None:
        with self._lock:
            self.results[result.step] = result
            entry = self._document["steps"][result.step]
            entry |= step_document(result) | {"finished": _now()}
        self._tell(result.step, result.status, **step_document(result))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
