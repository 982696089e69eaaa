"""The flow `nightly`: retrain a reference when there is new data, and promote what passes its gate.

The model: a night finds what of the recipe's data is new, by content; runs the recipe, from the model that the
reference names or from scratch, with that model measured in the same report; judges the candidate by the gate; asks a
person if asked to; moves the reference; and writes down what it came to (`stages.artifacts.nights`), with the trend as
a page.

Invariants:
- A night whose data and recipe an earlier one has brought to an end trains nothing and says so.
- A night that was interrupted, retried by anybody, goes on with the base model that it began with: what it has trained
  is cached, though the reference may have moved.
- The reference moves only if it still names the base, and only to what the gate let through.
- A night has the date for which it was scheduled, however late it begins or is retried.
- Each date of a backfill is a night of its own, in turn; what it cannot bring to an end ends the backfill.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Any
from zoneinfo import ZoneInfo

from prefect import flow, get_run_logger
from prefect.artifacts import create_image_artifact, create_table_artifact
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed, Failed, State
from prefect.task_runners import ThreadPoolTaskRunner
from pydantic import Field

from flows import figures
from flows.chores import ApproveField, HoursField, current, question
from flows.command import store as store_verbs
from flows.command import summary
from flows.flow_run.approval import ask
from flows.flow_run.pages import page_key
from flows.flow_run.trend import plot_trend, table_rows, trend_metric
from flows.gate import Rule, judge, parse_rule
from flows.names import free_run_name
from flows.pipeline import (
    WORKERS,
    OverridesField,
    RecipeField,
    RunnerField,
    Session,
    StoreField,
    WorkersField,
    carry_out,
    made_by,
)
from flows.plan import make_plan
from flows.recipe import declared_parameters, load_recipe
from flows.recipe_model import Recipe, RecipeError
from flows.runners.choice import make_runner
from stages.artifacts import (
    SEEN,
    Night,
    NotInStore,
    Store,
    check_ref_name,
    open_store,
    promote,
    read_manifest,
    read_nights,
    size_of,
    write_night,
)

MOST_DATES = 1000
_NAMES = {
    "promoted": "Promoted",
    "refused": "Refused",
    "not approved": "Not approved",
    "unchanged": "Unchanged",
    "nothing new": "Nothing new",
}


@dataclass(frozen=True)
class Request:
    """What is asked of a night; the fields are the parameters of `nightly`."""

    recipe: str
    ref: str
    overrides: tuple[str, ...]
    warm_start: str
    scratch: bool
    model: str
    rules: tuple[Rule, ...]
    approve: bool
    approve_hours: float
    keep: int
    again: bool
    workers: int
    runner: str


@flow(
    name="nightly",
    task_runner=ThreadPoolTaskRunner(),  # type: ignore[arg-type]
    persist_result=False,
    retries=0,
)
def nightly(
    recipe: RecipeField,
    ref: Annotated[
        str, Field(title="Reference", description="The name of the model that is retrained.")
    ] = "production",
    gate: Annotated[
        list[str],
        Field(title="Gate", description="Rules, one a line: exact_match >= 0.5, exact_match > production + 0.01"),
    ] = [],  # noqa: B006
    warm_start: Annotated[
        str, Field(title="Warm start", description="step.input that takes the reference's model, such as sft.model.")
    ] = "",
    scratch: Annotated[
        bool,
        Field(title="From scratch", description="Start as the recipe says, though there is a model to start from."),
    ] = False,
    overrides: OverridesField = [],  # noqa: B006
    dates: Annotated[
        list[str],
        Field(
            title="Dates",
            description="Past nights to run in turn, one date or range a line: 2026-11-01..2026-11-07. Today if empty.",
        ),
    ] = [],  # noqa: B006
    again: Annotated[bool, Field(title="Again", description="Run though nothing is new.")] = False,
    approve: ApproveField = False,
    approve_hours: HoursField = 24.0,
    model: Annotated[
        str, Field(title="Model", description="The step whose model is promoted; the last of the chain when empty.")
    ] = "",
    keep: Annotated[
        int, Field(title="Keep", description="Of how many nights gc leaves the models in the store.", ge=1, le=1000)
    ] = 7,
    timezone: Annotated[str, Field(title="Time zone", description="In which a night has its date.")] = "UTC",
    workers: WorkersField = WORKERS,
    runner: RunnerField = "process",
    store: StoreField = ".headrace",
) -> State[Any]:
    """Retrain a reference if its recipe's data is new, and promote what passes the gate."""
    try:
        request = Request(
            recipe,
            check_ref_name(ref),
            tuple(overrides),
            warm_start,
            scratch,
            model,
            tuple(parse_rule(rule) for rule in gate),
            approve,
            approve_hours,
            keep,
            again,
            workers,
            runner,
        )
        days = read_dates(dates)
    except ValueError as error:
        raise RecipeError(f"{str(error).rstrip('.')}.") from None
    opened = open_store(store)
    nights: list[Night] = []
    for day in days or [_scheduled_date(timezone)]:
        night = _Night(request, opened, day, backfill=bool(days)).run()
        nights.append(night)
        _publish(opened, request)
        if night.state in ("failed", "stopped"):
            break
    return _final(nights, request.ref)


def _scheduled_date(timezone: str) -> date:
    """The date for which the current flow run was scheduled, in a time zone."""
    scheduled = flow_run.get_scheduled_start_time() or datetime.now(UTC)
    return datetime.fromtimestamp(scheduled.timestamp(), ZoneInfo(timezone)).date()


def read_dates(lines: Iterable[str]) -> list[date]:
    """The dates of lines such as "2026-11-01" and "2026-11-01..2026-11-07", in order.

    Raises:
        ValueError: a line is neither, or there are too many dates.
    """
    found: list[date] = []
    for line in lines:
        first, dots, last = (part.strip() for part in line.partition(".."))
        try:
            begin = date.fromisoformat(first)
            end = date.fromisoformat(last) if dots else begin
        except ValueError:
            raise ValueError(
                f"dates: {line!r} is not a date such as 2026-11-01, or a range 2026-11-01..2026-11-07"
            ) from None
        if end < begin:
            raise ValueError(f"dates: {line!r} ends before it begins")
        if (end - begin).days + len(found) >= MOST_DATES:
            raise ValueError(f"dates: more than {MOST_DATES} nights at once")
        found += [begin + timedelta(days=number) for number in range((end - begin).days + 1)]
    return sorted(dict.fromkeys(found))


class _Night:
    """One night: see the module."""

    def __init__(self, request: Request, store: Store, day: date, *, backfill: bool) -> None:
        self.request, self.store, self.day = request, store, day
        self.logger = get_run_logger()
        dated = "date" in declared_parameters(request.recipe)
        if backfill and not dated:
            raise RecipeError(
                f"dates: recipe {request.recipe} has no parameter `date`, so all dates would be the same; add one, and "
                'use it for the data of a night, such as data: "logs/${date}/*.jsonl".'
            )
        self.overrides = [*request.overrides, *([f"date={day.isoformat()}"] if dated else [])]
        self.recipe = load_recipe(request.recipe, self.overrides)
        self.earlier = read_nights(store, request.ref).nights
        self.night = self._begin()

    def _begin(self) -> Night:
        """The entry of this night: the one that an interrupted attempt has left, or a new one."""
        name = f"{flow_run.get_id()}/{self.day.isoformat()}"
        known = next((night for night in self.earlier if night.id == name and night.finished is None), None)
        self.earlier = [night for night in self.earlier if night.id != name]
        base = known.base if known is not None else current(self.store, self.request.ref)
        warm = bool(base and self.request.warm_start and not self.request.scratch)
        return Night(
            id=name,
            date=self.day.isoformat(),
            started=known.started if known is not None else _now(),
            base=base,
            start="warm" if warm else "scratch",
            recipe=hashlib.sha256(json.dumps([self.recipe.text, sorted(self.request.overrides)]).encode()).hexdigest(),
        )

    def run(self) -> Night:
        """Bring the night to its end, and return its entry."""
        night = self.night
        plan = make_plan(self.recipe, self.store)
        night.data = {
            f"{step}.{name}": source.digest
            for (step, name), source in plan.sources.items()
            if source.ref.source == "files" and source.digest is not None
        }
        seen = [item for item in self.earlier if item.state in SEEN and item.data == night.data]
        same = next((item for item in reversed(seen) if item.recipe == night.recipe), None)
        if same is not None and not self.request.again:
            return self._end("nothing new", f"nothing new: the data is that of {same.date} ({same.state})")
        night.new = self._what_is_new()
        write_night(self.store, self.request.ref, night, keep=self.request.keep)
        self.logger.info("Night %s of %s: %s", night.date, self.request.ref, night.new)

        overrides = [*self.overrides, *self._starting_from(night.base)]
        plan = make_plan(load_recipe(self.request.recipe, overrides), self.store)
        night.run = free_run_name(self.store, f"{self.request.ref}-{night.date}")
        session = Session(plan, night.run, workers=self.request.workers)
        try:
            result = carry_out(session, make_runner(self.request.runner))
        except BaseException:
            self._end("stopped", "it was stopped; what is done is kept")
            raise
        if result.state == "stopped":
            return self._end("stopped", "it was stopped; what is done is kept")
        if not result.ok:
            failed = [f"step {step.step}: {step.message}" for step in result.steps.values() if step.status == "failed"]
            return self._end("failed", "; ".join(failed))
        return self._decide(made_by(plan, result))

    def _what_is_new(self) -> str:
        """What of the data no earlier night had, in words."""
        last = next((item for item in reversed(self.earlier) if item.data and item.state in SEEN), None)
        if last is None:
            return "the first night"
        told = [
            f"{name.removesuffix('.files')}: " + _files_changed(self.store, last.data.get(name), self._paths(name))
            for name, digest in self.night.data.items()
            if last.data.get(name) != digest
        ]
        if not told and last.recipe != self.night.recipe:
            told = ["the recipe or its settings changed"]
        return "; ".join(told) or "nothing, but asked for again"

    def _paths(self, name: str) -> dict[str, int]:
        """Path -> size of the files of an input now."""
        step, _, input_name = name.partition(".")
        source = make_plan(self.recipe, self.store).sources[step, input_name]
        return {path: size_of(file) for path, file in source.files}

    def _starting_from(self, base: str) -> Iterator[str]:
        """The changed settings that start from a model, and measure it beside the candidate."""
        if not base:
            return
        if self.night.start == "warm":
            step, _, name = self.request.warm_start.partition(".")
            yield f"{step}.inputs.{name}=artifact:{base}"
        for reporter in self.recipe.steps.values():
            takes = type(reporter.config).INPUTS.get("models")
            if type(reporter.config).OUTPUT != "report" or takes is None or not takes.many:
                continue
            inputs = [ref for ref in reporter.inputs.values() if ref.name.startswith("models.")]
            models = {ref.name.partition(".")[2]: ref.text for ref in inputs}
            if "production" not in models:
                models["production"] = f"artifact:{base}"
                yield f"{reporter.name}.inputs.models={json.dumps(models)}"

    def _decide(self, made: list[summary.Made]) -> Night:
        night, request = self.night, self.request
        wanted = request.model or final_step(self.recipe)
        found = next((item for item in made if item.step == wanted), None)
        if found is None:
            return self._end("failed", f"recipe {self.recipe.name} gives no checkpoint that could be promoted")
        night.artifact = found.artifact
        models: dict[str, Any] = (summary.read_report(self.store, made) or {}).get("models") or {}
        night.metrics = _numbers(models.get(found.step, {}))
        night.production = _numbers(models.get("production", {})) if night.base else {}
        ref = request.ref
        if found.artifact == night.base:
            return self._end("unchanged", f"the night gave the very bytes that {ref} names")
        verdict = judge(request.rules, night.metrics, night.production if night.base else None)
        night.gate = list(verdict.lines)
        if not verdict.passes:
            return self._end("refused", f"refused by the gate: {verdict}")
        why = str(verdict)
        if request.approve and current(self.store, ref) == night.base:
            answer = ask(question(self.store, ref, found.artifact, night.base, verdict.lines), request.approve_hours)
            if not answer.approved:
                return self._end("not approved", f"not promoted: {answer.why or 'a person said no'}; {verdict}")
            why = " · ".join(filter(None, [why, answer.why]))
        if moved := self._moved_elsewhere(found.artifact):
            return self._end("refused", moved)
        if current(self.store, ref) != found.artifact:  # an attempt that was killed may have moved it already
            reason = f"nightly {night.date}: {why}"[:1000]
            promote(self.store, ref, found.artifact, who=store_verbs.who(), why=reason, expect=night.base)
        return self._end("promoted", f"promoted {figures.short(found.artifact)}: {why}")

    def _moved_elsewhere(self, candidate: str) -> str:
        """Why the candidate cannot be judged any more, where somebody has moved the reference since the night began."""
        now, base = current(self.store, self.request.ref), self.night.base
        if now in (base, candidate):
            return ""
        return (
            f"{self.request.ref} names {figures.short(now) or 'nothing'} by now, and the candidate was measured beside "
            f"{figures.short(base) or 'nothing'}: somebody moved it; run the night again"
        )

    def _end(self, state: Any, message: str) -> Night:
        self.night = self.night.model_copy(update={"state": state, "message": message, "finished": _now()})
        write_night(self.store, self.request.ref, self.night, keep=self.request.keep)
        self.logger.info("Night %s of %s: %s", self.night.date, self.request.ref, message)
        return self.night


def final_step(recipe: Recipe) -> str:
    """The step whose checkpoint has the most checkpoints behind it, as the recipe stands; "" where none makes one.

    A warm start cuts the chain, so it cannot be read from what a night has made.
    """
    depth: dict[str, int] = {}
    for name in recipe.order():
        above = max((depth[needed] for needed in recipe.steps[name].upstream()), default=0)
        depth[name] = above + (type(recipe.steps[name].config).OUTPUT == "checkpoint")
    makers = [name for name in depth if type(recipe.steps[name].config).OUTPUT == "checkpoint"]
    return max(makers, key=lambda name: depth[name], default="")


def _files_changed(store: Store, before: str | None, paths: dict[str, int]) -> str:
    """How the files of an input differ from those of an earlier artifact, in words."""
    try:
        old = {entry.path: entry.size for entry in read_manifest(store, before).files} if before else {}
    except NotInStore:
        old = {}
    if not old:
        return f"{figures.count(len(paths))} files"
    counts = {
        "new": len(paths.keys() - old.keys()),
        "gone": len(old.keys() - paths.keys()),
    }
    grown = sum(1 for path in paths.keys() & old.keys() if paths[path] != old[path])
    counts["changed"] = grown or (0 if counts["new"] or counts["gone"] else 1)
    told = [f"{figures.count(count)} {what}" for what, count in counts.items() if count]
    return f"{', '.join(told)} of {figures.count(len(paths))} files"


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}


def _publish(store: Store, request: Request) -> None:
    """The pages of a reference's nights: the trend as a picture, and a line a night. They never fail a night."""
    try:
        nights = read_nights(store, request.ref).nights
        metric = trend_metric(nights, [rule.metric for rule in request.rules])
        name = f"nightly-{request.ref}"
        create_table_artifact(
            table_rows(nights, metric), key=page_key(name, "nights"), description=f"The nights of {request.ref}"
        )
        if metric is not None:
            picture = base64.b64encode(plot_trend(nights, metric, request.ref)).decode()
            create_image_artifact(
                f"data:image/png;base64,{picture}",
                key=page_key(name, "trend"),
                description=f"{metric} of {request.ref} over its nights",
            )
    except Exception:
        get_run_logger().warning("The pages of the nights could not all be made", exc_info=True)


def _final(nights: list[Night], ref: str) -> State[Any]:
    last = nights[-1]
    told = "; ".join(f"{night.date} {night.message}" for night in nights) if len(nights) > 1 else last.message
    new = f" (new: {last.new})" if last.new and len(nights) == 1 else ""
    message = f"{ref}: {told}{new}"
    if last.state == "failed":
        return Failed(message=message)
    if last.state == "stopped":
        return Cancelled(name="Stopped", message=message)
    best = next((night.state for night in nights if night.state == "promoted"), last.state)
    return Completed(name=_NAMES[best], message=message)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
