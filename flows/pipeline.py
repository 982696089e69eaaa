"""The Prefect flow: one flow run a pipeline, one task run a step, around `flows.execute.Execution`.

Prefect shows, schedules and cancels; what is done and what is not is decided by the store. So a task never uses
Prefect's cache: a step whose result is in the store ends in state Cached, at once.

Invariants:
- However the flow ends, the stages it started are told to stop, are given time to save, and have ended when it returns:
  where a worker has started it, sooner than the worker kills a run that was cancelled.
- States tell the truth: Cached, Completed, Failed, Stopped (of type Cancelled: saved, to be gone on from), Skipped (of
  type Cancelled: a step that it needs did not end well). The flow run is Completed only if every step is.
- A page that cannot be made never fails a run; the flow's log says why.
- A server that is away stops nothing: stages go on, the end of the run waits for it (`flows.flow_run.server_watch`),
  and what it missed is told to it then.
- Stages with GPUs, and all stages where the installation limits them, hold slots while they run
  (`flows.flow_run.slots`).
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectFuture
from prefect.runtime import flow_run, task_run
from prefect.states import Cancelled, Completed, Failed, State
from prefect.task_runners import ThreadPoolTaskRunner
from prefect.utilities.annotations import allow_failure
from pydantic import Field

from flows import figures
from flows.command.summary import Made
from flows.endings import RunResult, StepResult
from flows.execute import GRACE, Execution, Listener
from flows.flow_run.pages import PageMaker, StepRow
from flows.flow_run.progress import ProgressPages
from flows.flow_run.server_watch import ServerWatch
from flows.flow_run.slots import Slots
from flows.names import free_run_name
from flows.plan import Plan, PlannedStep, make_plan
from flows.recipe import load_recipe
from flows.runners.base import Runner
from flows.runners.choice import make_runner
from flows.signals import stopping

POLL_SECONDS = 5.0  # between two looks at the run's state in Prefect
WORKER_GRACE = 20.0  # that a stage has to save where a worker started the flow: it kills a cancelled one after 30 s
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


# The fields of the form in which a person starts a run: shared by every flow that runs a recipe.
RecipeField = Annotated[
    str, Field(title="Recipe", description="A recipe of this installation, or the path of a YAML file.")
]
UntilField = Annotated[
    list[str],
    Field(title="Only up to", description="These steps and what they need; every step when none is chosen."),
]
ForceField = Annotated[
    list[str], Field(title="Run again", description="Steps to compute though their results are in the store.")
]
AcceptField = Annotated[
    list[str],
    Field(title="Keep in spite of changed code", description="Steps whose newest result is kept though code changed."),
]
OverridesField = Annotated[
    list[str],
    Field(
        title="Changed settings",
        description="One a line: step.field=value or parameter=value, such as dpo.beta=0.2. The value is YAML.",
    ),
]
WorkersField = Annotated[int, Field(title="Steps at once", description="How many steps may run at once.", ge=1, le=64)]
RunnerField = Annotated[
    Literal["process", "docker", "workpool"],
    Field(
        title="Runner",
        description="Where stages run: as processes or containers of the worker's machine, or on workers of a pool.",
    ),
]
StoreField = Annotated[
    str, Field(title="Store", description="The artifact store: a folder of the worker, or s3://bucket/prefix.")
]


@flow(
    name="headrace",
    task_runner=ThreadPoolTaskRunner(),  # type: ignore[arg-type]
    persist_result=False,
    retries=0,
    log_prints=False,
)
def pipeline(
    recipe: RecipeField = "quickstart",
    until: UntilField = [],  # noqa: B006
    force: ForceField = [],  # noqa: B006
    overrides: OverridesField = [],  # noqa: B006
    workers: WorkersField = WORKERS,
    runner: RunnerField = "process",
    store: StoreField = ".headrace",
    accept_code: AcceptField = [],  # noqa: B006
) -> State[Any]:
    """Train and align a model by a recipe, computing only what is not in the store yet."""
    session = _session.get() or new_session(
        recipe, overrides, store, until=until, force=force, accept_code=accept_code, workers=workers
    )
    return _final_state(carry_out(session, make_runner(runner)))


def new_session(
    recipe: str,
    overrides: list[str],
    store: str,
    *,
    until: list[str] | None = None,
    force: list[str] | None = None,
    accept_code: list[str] | None = None,
    workers: int = WORKERS,
) -> Session:
    """The session of a flow run that a worker has started: its plan, and the flow run's name for its run.

    Raises:
        RecipeError: anything that was asked for is wrong; the message is that of the command.
    """
    plan = make_plan(
        load_recipe(recipe, overrides), store, force=force or [], until=until or [], accept_code=accept_code or []
    )
    return Session(plan, free_run_name(plan.store, str(flow_run.get_name() or "run")), workers=workers)


def carry_out(session: Session, runner: Runner) -> RunResult:
    """Run a session's plan within the current flow run: every step as a task, then the pages.

    However it ends, `session.result` says how each step did.
    """
    events = _Events(session.listener)
    slots = Slots()
    execution = Execution(
        session.plan,
        runner=runner,
        run_id=session.run_id,
        listener=events.hear,
        grace=GRACE if session.on_signal else WORKER_GRACE,
        slots=slots.hold,
    )
    slots.execution = execution
    watch = ServerWatch(on_cancel=execution.stop, every=POLL_SECONDS)
    try:
        execution.begin()
        with ExitStack() as stack:
            if session.on_signal:
                stack.enter_context(stopping(execution, session.on_signal))
            stack.enter_context(watch)
            events.pages = stack.enter_context(ProgressPages(session.plan.recipe.name))
            futures = _run_steps(session, execution, events)
            result = session.result = execution.finish()
            watch.wait_until_back()
            if watch.was_away:
                watch.mend_tasks({name: (future.task_run_id, future.state) for name, future in futures.items()})
            if result.state != "stopped":
                _make_pages(session.plan, result, get_run_logger())
        return result
    finally:
        runner.close()
        if session.result is None:
            session.result = execution.finish()


def _run_steps(session: Session, execution: Execution, events: _Events) -> dict[str, PrefectFuture[Any]]:
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
                futures[name] = _submit(session.plan[name], execution, events, futures)
                running.add(name)
                futures[name].add_done_callback(lambda _, name=name: ended.put(name))  # type: ignore[misc]
            name = ended.get()
            running.remove(name)
            if name not in execution.results:  # `run_step` gives a result for every failure: this is a defect
                futures[name].result()
        except BaseException as error:
            execution.stop(kill=raised is not None)
            raised, waiting = raised or error, []
    if raised is not None:
        raise raised
    return futures


def _submit(
    planned: PlannedStep, execution: Execution, events: _Events, futures: dict[str, PrefectFuture[Any]]
) -> PrefectFuture[Any]:
    """Start the task of a step whose needs have all ended. What it took from others are its edges in Prefect."""

    @task(name=planned.stage, task_run_name=planned.step, cache_policy=NO_CACHE, persist_result=False, retries=0)
    def stage_step(step: str) -> State[Any]:
        events.add(step, get_run_logger(), execution.run_id)
        return _task_state(execution.run_step(step))

    # Prefect does not start a task after one that was cancelled, and this one must be told as skipped or stopped.
    after: list[Any] = [
        allow_failure(futures[name]) for name in planned.needs if execution.results[name].status in _NOT_CANCELLED
    ]
    submitted: Any = stage_step
    future: PrefectFuture[Any] = submitted.submit(planned.step, wait_for=after)
    return future


class _Events:
    """Hears every event: passes it on, and writes what is worth it to the log and the progress of its step's task."""

    def __init__(self, listener: Listener | None) -> None:
        self.pages: ProgressPages | None = None
        self._listener = listener
        self._loggers: dict[str, Any] = {}

    def add(self, step: str, logger: Any, run_id: str) -> None:
        self._loggers[step] = logger
        if self.pages is not None:
            self.pages.begin(step, task_run.get_id())
        logger.info("The whole log is in the store: headrace logs %s %s", run_id, step)

    def hear(self, event: dict[str, Any]) -> None:
        if self._listener is not None:
            self._listener(event)
        if self.pages is not None:
            self.pages.hear(event)
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
        return Completed(message=f"{figures.counted(len(result.steps), 'step')}: {told}")
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
        StepRow(
            planned.step,
            planned.stage,
            step.status,
            step.artifact,
            step.seconds,
            step.metrics,
            step.message,
            step.reason,
        )
        for planned in plan.steps
        for step in [result.steps[planned.step]]
    ]
    try:
        PageMaker(plan.store, plan.recipe.name, result.run).publish(rows, made_by(plan, result))
    except Exception:
        logger.warning("The pages of this run could not all be made", exc_info=True)
