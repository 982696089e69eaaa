"""The verbs `run` and `plan`: a plan is made, shown, carried out under a display, and the outcome is told.

Invariants:
- A wrong request is refused before anything is started: no Prefect server, no stage.
- SIGTERM and SIGHUP are Ctrl-C: running stages save, and the command says what was saved.
- What a run says at its end comes from the store, so a cached run says the same as the one that computed it.
"""

from __future__ import annotations

import json
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from flows import figures
from flows.command import summary
from flows.command.display import Board, Display, Line, open_display, saved_message
from flows.command.summary import Made
from flows.endings import RunResult, StepResult
from flows.execute import Execution, run_all
from flows.lineage import openlineage
from flows.names import new_run_name
from flows.plan import Plan, PlannedStep, make_plan
from flows.recipe import load_recipe
from flows.recipe_model import RecipeError
from flows.runners.choice import RUNNERS, check_runner, make_runner
from flows.signals import exit_code, interrupting, leave_after, stopping
from flows.visible import for_terminal
from stages.artifacts import StoreError, redact

DONE, FAILED = 0, 1
_ENDINGS = {  # exit codes of stages that are verdicts on the run
    80: "halted itself (80)",
    81: "met values that are not finite (81)",
    82: "spent its time (82)",
    83: "failed before it started (83)",
}


@dataclass(frozen=True)
class Request:
    """What is asked of `run` or `plan`, as it was typed."""

    recipe: str
    overrides: tuple[str, ...] = ()
    store: str = ".headrace"
    runner: str = "process"
    until: tuple[str, ...] = ()
    force: tuple[str, ...] = ()
    accept_code: tuple[str, ...] = ()
    workers: int = 2

    def plan(self) -> Plan:
        """Read the recipe and plan it.

        Raises:
            RecipeError: anything that was asked for is wrong.
        """
        if self.runner not in RUNNERS:
            raise RecipeError(f"--runner {self.runner}: no such runner. Runners: {', '.join(RUNNERS)}.")
        recipe = load_recipe(self.recipe, self.overrides)
        return make_plan(recipe, self.store, force=self.force, until=self.until, accept_code=self.accept_code)

    def parameters(self) -> dict[str, Any]:
        """As the parameters of the Prefect flow."""
        return {
            "recipe": self.recipe,
            "overrides": list(self.overrides),
            "store": self.store,
            "runner": self.runner,
            "workers": self.workers,
            "until": list(self.until),
            "force": list(self.force),
            "accept_code": list(self.accept_code),
        }


# The plan


def show_plan(request: Request, *, as_json: bool) -> int:
    """Print what a run would do. Returns the exit code.

    Raises:
        RecipeError: anything that was asked for is wrong.
    """
    plan = request.plan()
    if as_json:
        print(json.dumps(plan.to_json(), indent=1, ensure_ascii=False))
    else:
        print("\n".join(map(for_terminal, plan_lines(plan))))
    return DONE


def plan_lines(plan: Plan) -> list[str]:
    """A plan as lines of text: each step with hit or run and the reason, and what it comes to."""
    width = max((len(step.step) for step in plan.steps), default=0)
    lines = [f"  {step.step:<{width}}  {_plan_line(step)}" for step in plan.steps]
    runs = len(plan.misses)
    if not runs:
        return [*lines, f"{_all_steps(len(plan.steps))} there; a run computes nothing."]
    cost = f", about {figures.about(plan.seconds)}" if plan.seconds else ""
    steer = "`headrace run` does it; `--accept-code`, `--force`, `--until` steer it."
    return [*lines, f"{runs} of {figures.counted(len(plan.steps), 'step')} run{cost}. {steer}"]


def _plan_line(step: PlannedStep) -> str:
    if step.status == "hit":
        return f"hit  {figures.short(step.artifact)}  {step.reason or step.note}".rstrip()
    took = f"last took {figures.about(step.last_seconds)}" if step.last_seconds is not None else ""
    return f"run  {step.reason:<48}  {took}".rstrip()


# The run


def run(request: Request, *, with_prefect: bool, as_json: bool) -> int:
    """Carry a request out. Returns the exit code: 0 done, 1 a step failed, that of
    `flows.signals` when it was stopped, after saving.

    Raises:
        RecipeError: anything that was asked for is wrong; nothing was started.
        RunnerError: the runner cannot start stages; nothing was started.
        StoreError: the store cannot be written; nothing was started.
        NoServer: the Prefect server did not come up.
    """
    begun = time.monotonic()
    plan = request.plan()
    if plan.misses:
        check_runner(request.runner)
    run_id = new_run_name(plan.store)
    board = Board(_line(planned) for planned in plan.steps)
    display = open_display(board, as_json=as_json)
    for text in _header(plan, run_id, request.runner):
        display.say(for_terminal(text))
    try:
        with interrupting():
            if with_prefect:
                result = _run_in_prefect(request, plan, run_id, display)
            else:
                result = _run_alone(plan, run_id, display, request)
    except KeyboardInterrupt:
        display.say("Stopped before a step was running.")
        return exit_code()
    except StoreError as error:
        if all(line.started is None for line in board.lines.values()):
            raise  # nothing was started
        print(f"headrace: {redact(str(error))}", file=sys.stderr)
        print("What was saved is kept: run the same command once the store is back.", file=sys.stderr)
        return FAILED
    openlineage.report(plan.store, run_id)
    if as_json:
        print(json.dumps({"type": "run"} | asdict(result), default=str))
    else:
        lines = outcome_lines(plan, result, board, request, time.monotonic() - begun)
        print("\n".join(map(for_terminal, lines)))
    return {"done": DONE, "stopped": exit_code()}.get(result.state, FAILED)


def _all_steps(total: int) -> str:
    return "The one step is" if total == 1 else f"All {total} steps are"


def _line(planned: PlannedStep) -> Line:
    return Line(planned.step, planned.stage, planned.needs)


def _header(plan: Plan, run_id: str, runner: str) -> list[str]:
    misses, total = len(plan.misses), len(plan.steps)
    cached = "nothing cached" if misses == total else f"{total - misses} cached" if misses else "all cached"
    cost = f", about {figures.about(plan.seconds)} by the last times" if misses and plan.seconds else ""
    return [
        f"Headrace {plan.recipe.name}: {figures.counted(total, 'step')}, {cached}{cost}",
        f"Run {run_id} · store {plan.store.url} · runner {runner}",
    ]


def _run_alone(plan: Plan, run_id: str, display: Display, request: Request) -> RunResult:
    runner = make_runner(request.runner)
    try:
        execution = Execution(plan, runner=runner, run_id=run_id, listener=display.event)
        with display, stopping(execution, lambda count: _say_stopping(display, count)):
            return run_all(execution, workers=request.workers)
    finally:
        runner.close()


def _run_in_prefect(request: Request, plan: Plan, run_id: str, display: Display) -> RunResult:
    from flows.service.local_server import LocalServer, run_link, serving, start_server

    server = start_server()
    if isinstance(server, LocalServer):
        display.say("Starting a Prefect server for this run (10 to 30 s) …")

    def leave() -> None:
        """Say how far it came, when the server keeps the end of the run waiting."""
        if server is not None:
            server.ask_to_end()
        display.__exit__(None, None, None)
        display.say("The Prefect server does not answer, and is waited for no longer.")
        for text in _stopped_lines(display.board):
            display.say(for_terminal(text))

    def on_signal(count: int) -> None:
        _say_stopping(display, count)
        if count == 2:
            threading.Thread(target=_leave_when_still, args=(display.board, over, leave), daemon=True).start()

    over = threading.Event()
    with interrupting(leave), serving(server), _setting(over):
        from flows.pipeline import Session, run_in_prefect

        _quiet_console()
        session = Session(plan, run_id, display.event, request.workers, on_signal)
        with display:
            state = run_in_prefect(session, request.parameters())
    details = state.state_details
    link = None
    if details.flow_run_id and not isinstance(server, LocalServer):
        link = run_link(str(details.flow_run_id), server)
    if link:
        display.say(f"Prefect: {link}")
    if session.result is None:
        state.result()  # raises what ended the flow before a step could
        raise RuntimeError(f"the flow ended as {state.name} without a result: {state.message}")
    return session.result


@contextmanager
def _setting(event: threading.Event) -> Iterator[None]:
    """Set an event at the end of the block."""
    try:
        yield
    finally:
        event.set()


def _leave_when_still(board: Board, over: threading.Event, leave: Callable[[], None]) -> None:
    """Leave a run whose stages have been killed, once they have ended."""
    while any(line.state == "running" for line in board.lines.values()):
        if over.wait(0.1):
            return
    leave_after(over, leave)


def _quiet_console() -> None:
    """Keep what Prefect says of runs and tasks off the terminal: the display says it. Its API has the whole log."""
    import logging

    for handler in logging.getLogger().handlers:
        handler.addFilter(lambda record: not record.name.startswith(("prefect.flow_runs", "prefect.task_runs")))


def _say_stopping(display: Display, count: int) -> None:
    if count == 1:
        display.say("Stopping: what runs is saved first. Ctrl-C again kills it.")
    elif count == 2:
        display.say("Killing what still runs; what it had saved before is kept.")


# The outcome


def outcome_lines(plan: Plan, result: RunResult, board: Board, request: Request, seconds: float) -> list[str]:
    """What is said when a run is over: results, samples, the final model and what to do next; or what went wrong."""
    if result.state == "stopped":
        return _stopped_lines(board)
    if result.state == "failed":
        return _failed_lines(result)
    made = [
        Made(planned.step, planned.stage, step.artifact, planned.needs)
        for planned in plan.steps
        for step in [result.steps[planned.step]]
        if step.artifact is not None
    ]
    lines = [""]
    if report := summary.read_report(plan.store, made):
        lines += [*summary.report_lines(report), ""]
    last = summary.final_model(plan.store, made)
    if last is None:
        what = f"{made[-1].step}  {made[-1].artifact}" if made else ""
        return [*lines, f"Done  {what}  ({figures.duration(seconds)})"]
    lines.append(f"Final model  {last.step}  {last.artifact}  ({figures.duration(seconds)})")
    store = "" if request.store == ".headrace" else f" --store {shlex.quote(request.store)}"
    prompt = next((sample["prompt"] for sample in (report or {}).get("samples", [])), "Hello!")
    lines.append(f"Next   headrace sample {last.step} {shlex.quote(prompt)}{store}")
    lines.append(f"       headrace lineage {last.step}{store}")
    lines.append(f"       headrace pull {last.step} my-model{store}")
    return lines


def _stopped_lines(board: Board) -> list[str]:
    begun = [line for line in board.lines.values() if line.started is not None]
    told = [f"{line.step}: {saved_message(line)}." for line in begun if line.state == "stopped"]
    nothing = "Stopped between two steps; what ended is kept." if begun else "Stopped before a step was running."
    return [*(told or [nothing]), "Run the same command to go on from there."]


def _failed_lines(result: RunResult) -> list[str]:
    lines = []
    for step in result.steps.values():
        if step.status == "failed":
            lines += _failure(step, result.run)
    skipped = [step.step for step in result.steps.values() if step.status == "skipped"]
    kept = [step.step for step in result.steps.values() if step.ok]
    if skipped:
        lines.append(f"Not run for that: {', '.join(skipped)}.")
    if kept:
        lines.append(f"Kept: {', '.join(kept)}. Run the same command again once it is mended.")
    return lines


def _failure(step: StepResult, run_id: str) -> list[str]:
    message = step.message.rstrip(".")
    ending = _ENDINGS.get(step.code or 0, "could not be run" if step.code is None else f"failed ({step.code})")
    lines = [f"step {step.step} {ending}: {message}."]
    if step.code in (80, 81, 82):
        saved = f" Progress is kept at step {step.saved_step}." if step.saved_step is not None else ""
        lines.append(f"  It is a verdict on the run, so it is not retried.{saved}")
    if step.kept is not None:
        lines.append(f"  Its checkpoint is kept, apart from results: headrace lineage {step.kept}")
    if step.code is not None and step.code != 83:
        lines.append(f"  Its log: headrace logs {run_id} {step.step}")
    return lines
