"""Why a step of a run was computed or reused."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from flows import figures
from flows.lineage import compare, records
from flows.lineage.index import Index
from flows.names import UnknownName
from stages.artifacts import Result, read_run

_STATES = {"done": "ran", "cached": "was reused", "skipped": "was not run"}


@dataclass(frozen=True)
class Why:
    """Why a step went as it did.

    Attributes:
        status: as in the run's document.
        reason: what the plan said; for a step whose result was there, why it was one.
        computed_by: run that computed the result, "" where there is none.
        against: the run of the earlier result that the step is compared with, "" for none.
        differences: everything that differs from it, the first difference first.
        seconds: how long the computation took; None where there is no result.
    """

    run: str
    step: str
    stage: str
    status: str
    reason: str
    message: str = ""
    computed_by: str = ""
    against: str = ""
    differences: list[str] = field(default_factory=list)
    seconds: float | None = None

    def to_json(self) -> dict[str, Any]:
        """As JSON-able values."""
        return asdict(self)


def why(index: Index, step: str, run: str | None = None) -> Why:
    """Why a step of a run, or of the newest run that has it, ran or was reused.

    Raises:
        UnknownName: no run has that step.
    """
    where = "" if run is None else " AND r.name = ?"
    sql = f"SELECT r.name FROM steps s JOIN runs r ON r.id = s.run WHERE s.step = ?{where} ORDER BY r.started DESC"
    found = index.rows(f"{sql} LIMIT 1", (step,) if run is None else (step, run))
    if not found:
        known = [row[0] for row in index.rows("SELECT DISTINCT step FROM steps ORDER BY step LIMIT 50")]
        of = f"run {run} has" if run is not None else "no run has"
        raise UnknownName(f"{of} {'no step' if run is not None else 'a step'} {step!r}. Steps: {', '.join(known)}.")
    name = found[0][0]
    document = read_run(index.store, name) or {}
    entry = document.get("steps", {}).get(step, {})
    told = Why(
        name, step, entry.get("stage", ""), entry.get("status", ""), entry.get("reason", ""), entry.get("message", "")
    )
    artifact = entry.get("artifact")
    makers = [result for result, _ in records.makers(index, artifact)] if artifact else []
    own = next((result for result in makers if result.key == entry.get("key")), None)
    if own is None:
        return told
    earlier = _earlier(index, own)
    return Why(
        *(told.run, told.step, told.stage, told.status, told.reason, told.message, own.run),
        against=earlier.run if earlier is not None else "",
        differences=_differences(index, earlier, own) if earlier is not None else [],
        seconds=own.seconds,
    )


def _earlier(index: Index, own: Result) -> Result | None:
    """The newest result of the same step and stage with another key that ended before this one."""
    sql = """SELECT a.digest FROM makings m JOIN outputs o ON o.making = m.id AND o.name = '' JOIN artifacts a
        ON a.id = o.artifact WHERE m.step = ? AND m.stage = ? AND m.key != ? AND m.finished <= (SELECT max(finished)
        FROM makings WHERE key = ?) ORDER BY m.finished DESC LIMIT 1"""
    found = index.rows(sql, (own.step, own.stage, own.key, own.key))
    makers = [result for result, _ in records.makers(index, found[0][0])] if found else []
    return next((result for result in makers if result.key != own.key and result.step == own.step), None)


def _differences(index: Index, before: Result, after: Result) -> list[str]:
    found = compare.setting_changes(before.identity, after.identity)
    for name in dict.fromkeys([*after.inputs, *before.inputs]):
        one, other = before.inputs.get(name), after.inputs.get(name)
        if one != other:
            found.append(f"input {name} {figures.short(one) or 'none'} -> {figures.short(other) or 'none'}")
    return found + [f"code changed: {path}" for path in compare.changed_code(index, before, after)]


def lines(found: Why) -> list[str]:
    """A reason for people."""
    did = _STATES.get(found.status, f"is {found.status}")
    reason = found.reason or ("its result was there" if found.status == "cached" else "")
    told = [f"{found.step} ({found.stage}) {did} in run {found.run}: {reason}".rstrip(": ")]
    if found.message:
        told.append(f"  {found.message}")
    if found.status == "cached" and found.computed_by:
        took = f" in {figures.duration(found.seconds)}" if found.seconds is not None else ""
        told.append(f"  run {found.computed_by} had computed it{took}")
    if found.against and found.status != "cached":
        told.append(f"  compared with the step before it, of run {found.against}:")
        told += [f"    {item}" for item in found.differences] or ["    nothing that is part of its key differs"]
    return told
