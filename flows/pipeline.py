"""The Prefect flow: one flow run a pipeline, one task run a step, around `flows.execute.Execution`.

Prefect shows, schedules and cancels; what is done and what is not is decided by the store. So a task never uses
Prefect's cache: a step whose result is in the store ends in state Cached, at once.

Invariants:
- However the flow ends, the stages it started are told to stop, are given time to save, and have ended when it returns.
- States tell the truth: Cached, Completed, Failed, Stopped (of type Cancelled: saved, to be gone on from), Skipped (of
  type Cancelled: a step that it needs did not end well). The flow run is Completed only if every step is.
- A page that cannot be made never fails a run; the flow's log says why.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from uuid import UUID

import httpx
from prefect import flow, get_client, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectFuture
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed, Failed, State
from prefect.task_runners import ThreadPoolTaskRunner
from prefect.utilities.annotations import allow_failure
from pydantic import Field

from flows import figures
from flows.execute import Execution, Listener, RunResult, StepResult
from flows.names import free_run_name
from flows.pages import StepRow, publish_pages
from flows.plan import Plan, PlannedStep, make_plan
from flows.recipe import load_recipe
from flows.runners.base import Runner
from flows.runners.choice import make_runner
from flows.signals import stopping
from flows.summary import Made

POLL_SECONDS = 5.0  # between two looks at whether the run was cancelled in Prefect
WORKERS = 2
_NOT_CANCELLED = ("cached", "done", "failed")
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


@dataclass
class Session:
    """What a caller in this process hands to the flow beside its parameters, and gets back.

    Attributes:
        plan: made already, so that a wrong recipe is refused before Prefect starts.
        run_id: the name of the run, which is also the name of its flow run.
        listener: hears every event.
        workers: steps that run at once.
        on_signal: signals to this process are for the run, and it is called with how many have come so far; None leaves
            signals to Prefect.
        result: how the run ended; set by the flow.
    """

    plan: Plan
    run_id: str
    listener: Listener | None = None
    workers: int = WORKERS
    on_signal: Callable[[int], None] | None = None
    result: RunResult | None = None


_session: ContextVar[Session | None] = ContextVar("headrace_session", default=None)


@contextmanager
def hand_over(session: Session) -> Iterator[None]:
    """Make `pipeline` use the session for the time of the block."""
    token = _session.set(session)
    try:
        yield
    finally:
        _session.reset(token)


def run_in_prefect(session: Session, parameters: dict[str, Any]) -> State[Any]:
    """Run the flow for a session. Returns the final state of the flow run; `session.result` says how each step ended.

    Args:
        parameters: those of `pipeline`, for Prefect's record of the run.
    """
    with hand_over(session):
        named = pipeline.with_options(flow_run_name=session.run_id)
        return named(**parameters, return_state=True)


@flow(
    name="headrace",
    task_runner=ThreadPoolTaskRunner(),  # type: ignore[arg-type]
    persist_result=False,
    retries=0,
    log_prints=False,
)
def pipeline(
    recipe: str = "quickstart",
    overrides: Annotated[list[str], Field(description="Changed settings, such as dpo.beta=0.2")] = [],  # noqa: B006
    store: str = ".headrace",
    runner: Literal["process", "docker", "workpool"] = "process",
    until: str | None = None,
    force: Annotated[list[str], Field(description="Steps to run though their results are there")] = [],  # noqa: B006
    accept_code: Annotated[list[str], Field(description="Steps to keep though their code has changed")] = [],  # noqa: B006
) -> State[Any]:
    """Train and align a model by a recipe, computing only what is not in the store yet.

    Args:
        recipe: a built-in recipe, such as quickstart, or the path of a YAML file.
        overrides: changed settings, each step.field=value or parameter=value.
        store: folder or URL of the artifact store.
        runner: where stages run.
        until: the last step wanted; empty for all.
        force: steps to run though their results are there.
        accept_code: steps to keep though their code has changed.
    """
    session = _session.get()
    if session is None:
        plan = make_plan(load_recipe(recipe, overrides), store, force=force, until=until, accept_code=accept_code)
        session = Session(plan, free_run_name(plan.store, str(flow_run.get_name() or "run")))
    return _run(session, make_runner(runner))


def _run(session: Session, runner: Runner) -> State[Any]:
    """The body of the flow: every step as a task, then the pages."""
    tasks = _TaskLogs(session.listener)
    execution = Execution(session.plan, runner=runner, run_id=session.run_id, listener=tasks.hear)
    try:
        execution.begin()
        with stopping(execution, session.on_signal) if session.on_signal else nullcontext():
            _run_steps(session, execution, tasks)
            result = session.result = execution.finish()
            if result.state != "stopped":
                _make_pages(session.plan, result, get_run_logger())
        return _final_state(result)
    finally:
        runner.close()
        if session.result is None:
            session.result = execution.finish()


def _run_steps(session: Session, execution: Execution, tasks: _TaskLogs) -> None:
    """Run every step in a task of its own, `session.workers` at once, each after those it needs.

    Whatever is raised here (by Prefect's runner, which cancels with SIGTERM; by a defect) stops the run, and is raised
    again when all stages have ended.
    """
    waiting = [planned.step for planned in session.plan.steps]
    futures: dict[str, PrefectFuture[Any]] = {}
    running: set[str] = set()
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()
    raised: BaseException | None = None
    while waiting or running:
        try:
            for name in [name for name in waiting if execution.ready(name)][: session.workers - len(running)]:
                waiting.remove(name)
                futures[name] = _submit(session.plan[name], execution, tasks, futures)
                running.add(name)
                futures[name].add_done_callback(lambda _, name=name: ended.put(name))  # type: ignore[misc]
            try:
                name = ended.get(timeout=POLL_SECONDS)
            except queue.Empty:
                if not execution.stopping and _is_cancelled():
                    get_run_logger().warning("The run was cancelled: its stages save and stop.")
                    execution.stop()
                continue
            running.remove(name)
            if name not in execution.results:  # `run_step` gives a result for every failure: this is a defect
                futures[name].result()
        except BaseException as error:
            execution.stop(kill=raised is not None)
            raised, waiting = raised or error, []
    if raised is not None:
        raise raised


def _submit(
    planned: PlannedStep, execution: Execution, tasks: _TaskLogs, futures: dict[str, PrefectFuture[Any]]
) -> PrefectFuture[Any]:
    """Start the task of a step whose needs have all ended. What it took from others are its edges in Prefect."""

    @task(name=planned.stage, task_run_name=planned.step, cache_policy=NO_CACHE, persist_result=False, retries=0)
    def stage_step(step: str) -> State[Any]:
        tasks.add(step, get_run_logger())
        return _task_state(execution.run_step(step))

    # Prefect does not start a task after one that was cancelled, and this one must be told as skipped or stopped.
    after: list[Any] = [
        allow_failure(futures[name]) for name in planned.needs if execution.results[name].status in _NOT_CANCELLED
    ]
    submitted: Any = stage_step
    future: PrefectFuture[Any] = submitted.submit(planned.step, wait_for=after)
    return future


def _is_cancelled() -> bool:
    """Whether somebody has cancelled this flow run in Prefect."""
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(UUID(str(flow_run.get_id()))).state
    except httpx.HTTPError:  # the server is away; the stages are not
        return False
    return state is not None and (state.is_cancelling() or state.is_cancelled())


class _TaskLogs:
    """Hears every event: passes it on, and writes what is worth it to the log of the step's task run."""

    def __init__(self, listener: Listener | None) -> None:
        self._listener = listener
        self._loggers: dict[str, Any] = {}

    def add(self, step: str, logger: Any) -> None:
        self._loggers[step] = logger

    def hear(self, event: dict[str, Any]) -> None:
        if self._listener is not None:
            self._listener(event)
        logger = self._loggers.get(str(event.get("step")))
        if logger is None:
            return
        match event.get("type"):
            case "log":
                logger.log(_LEVELS.get(str(event.get("level")), logging.INFO), "%s", event.get("text"))
            case "resumed":
                logger.info("resumed at step %s", event.get("at"))
            case "saved":
                logger.info("saved at step %s", event.get("at"))
            case "outcome" if event.get("code"):
                logger.error("ended with code %s: %s", event.get("code"), event.get("message"))


def _task_state(result: StepResult) -> State[Any]:
    match result.status:
        case "cached":
            return Completed(name="Cached", message=result.artifact)
        case "done":
            return Completed(message=f"{result.artifact} in {figures.duration(result.seconds)}")
        case "stopped":
            saved = f"saved at step {result.saved_step}" if result.saved_step is not None else result.message
            return Cancelled(name="Stopped", message=saved)
        case "skipped":
            return Cancelled(name="Skipped", message=result.message)
    return Failed(message=result.message if result.code is None else f"({result.code}) {result.message}")


def _final_state(result: RunResult) -> State[Any]:
    counts: dict[str, int] = {}
    for step in result.steps.values():
        counts[step.status] = counts.get(step.status, 0) + 1
    told = figures.listed(f"{count} {status}" for status, count in counts.items())
    if result.state == "done":
        return Completed(message=f"{len(result.steps)} steps: {told}")
    if result.state == "stopped":
        return Cancelled(name="Stopped", message=f"{told}; run it again to go on from there")
    failed = [f"step {step.step}: {step.message}" for step in result.steps.values() if step.status == "failed"]
    return Failed(message="; ".join(failed) or told)


def made_by(plan: Plan, result: RunResult) -> list[Made]:
    """What each step that ended well gave, in the order of the plan."""
    made = []
    for planned in plan.steps:
        step = result.steps.get(planned.step)
        if step is not None and step.ok and step.artifact is not None:
            made.append(Made(planned.step, planned.stage, step.artifact, planned.needs))
    return made


def _make_pages(plan: Plan, result: RunResult, logger: Any) -> None:
    rows = [
        StepRow(planned.step, planned.stage, step.status, step.artifact, step.seconds, step.metrics, step.message)
        for planned in plan.steps
        for step in [result.steps[planned.step]]
    ]
    try:
        publish_pages(plan.store, plan.recipe.name, rows, made_by(plan, result))
    except Exception:
        logger.warning("The pages of this run could not all be made", exc_info=True)
