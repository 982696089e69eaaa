"""What runs and models cost, in seconds of devices, and what was saved by reuse.

The cost of a computation is the time of its stage, that of interrupted attempts included, times the devices it had:
GPUs where it used them, else the processors of the machine as one device. Of a run it is what was spent in it: the time
of each step that ran, whether or not it came to an end. A step whose result was there saved what that result cost. Of a
model it is the cost of everything that it was made from, each computation once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from flows import figures
from flows.lineage import queries
from flows.lineage.index import Index

DeviceSeconds = dict[str, float]  # "gpu" or "cpu" -> seconds of one such device


@dataclass(frozen=True)
class StepCost:
    """The cost of a step.

    Attributes:
        step, stage, run: of the computation, or of the run that was asked about.
        status: as in the run's document; "" where no run was asked about.
        spent, saved: seconds of devices; one of the two is empty.
    """

    step: str
    stage: str
    run: str
    status: str
    spent: DeviceSeconds
    saved: DeviceSeconds


@dataclass(frozen=True)
class Cost:
    """The cost of a run or a model.

    Attributes:
        what: the run, or the artifact's digest.
        spent: for a model, what all it was made from cost.
        saved: of a run, what reuse saved; of a model, the part of `spent` that earlier runs had paid.
    """

    what: str
    steps: list[StepCost] = field(default_factory=list)
    spent: DeviceSeconds = field(default_factory=dict)
    saved: DeviceSeconds = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As JSON-able values, in seconds of devices."""
        return asdict(self)


def run_cost(index: Index, run: str) -> Cost:
    """What was spent in a run, and what reuse saved it."""
    steps = queries.steps(index, run)
    known = _computations(index, [step.key for step in steps if step.key])
    costs = []
    for step in steps:
        spent, saved = DeviceSeconds(), DeviceSeconds()
        device, devices, seconds = known.get(step.key or "", ("cpu", 1, 0.0))
        if step.status == "cached":
            saved = {device: seconds * devices}
        elif step.seconds and step.started is not None:
            spent = {device: step.seconds * devices}
        costs.append(StepCost(step.step, step.stage, run, step.status, spent, saved))
    return Cost(run, costs, _sum(cost.spent for cost in costs), _sum(cost.saved for cost in costs))


def _computations(index: Index, keys: list[str]) -> dict[str, tuple[str, int, float]]:
    """Stage key -> device, devices and seconds of its (latest) result."""
    marks = ", ".join("?" * len(keys))
    sql = f"SELECT key, device, devices, seconds FROM makings WHERE current = 1 AND key IN ({marks})"
    return {row["key"]: (row["device"], row["devices"], row["seconds"]) for row in index.rows(sql, keys)}


def model_cost(index: Index, digest: str) -> Cost:
    """What everything that an artifact was made from cost, each computation once, the newest first."""
    sql = """WITH RECURSIVE above(id) AS (SELECT id FROM artifacts WHERE digest = ?
        UNION SELECT i.artifact FROM above JOIN artifacts a ON a.id = above.id JOIN inputs i ON i.making = a.maker)
        SELECT DISTINCT m.id, m.step, m.stage, m.run, m.seconds, m.devices, m.device, m.finished FROM above
        JOIN artifacts a ON a.id = above.id JOIN makings m ON m.id = a.maker ORDER BY m.finished DESC"""
    found = index.rows(sql, (digest,))
    own = queries.artifact(index, digest)
    costs = []
    for row in found:
        spent = {row["device"]: row["seconds"] * row["devices"]}
        costs.append(StepCost(row["step"], row["stage"], row["run"], "", spent, {}))
    earlier = _sum(cost.spent for cost in costs if own is None or cost.run != own.run)
    return Cost(digest, costs, _sum(cost.spent for cost in costs), earlier)


def saved_by(index: Index, digest: str) -> tuple[int, DeviceSeconds]:
    """How often runs took the artifact from the store instead of computing it, and what that saved."""
    sql = """SELECT count(*) AS times, m.device, m.seconds * m.devices AS cost FROM steps s JOIN artifacts a
        ON a.id = s.artifact JOIN makings m ON m.id = a.maker WHERE a.digest = ? AND s.status = 'cached'
        GROUP BY m.id"""
    found = index.rows(sql, (digest,))
    saved = _sum({row["device"]: row["times"] * row["cost"]} for row in found)
    return sum(row["times"] for row in found), saved


def _sum(parts: Iterable[DeviceSeconds]) -> DeviceSeconds:
    total: DeviceSeconds = {}
    for part in parts:
        for device, seconds in part.items():
            total[device] = total.get(device, 0.0) + seconds
    return total


def told(cost: DeviceSeconds) -> str:
    """A cost for people: "2.41 GPU hours", "4m 02s of CPU", "nothing"."""
    parts = []
    for device in sorted(device for device, seconds in cost.items() if seconds):
        seconds, name = cost[device], device.upper()
        parts.append(
            f"{seconds / 3600:,.2f} {name} hours" if seconds >= 3600 else f"{figures.duration(seconds)} of {name}"
        )
    return " and ".join(parts) or "nothing"


def run_lines(cost: Cost) -> list[str]:
    """The cost of a run for people: a line a step, and the sum."""
    width = max((len(step.step) for step in cost.steps), default=0)
    lines = []
    for step in cost.steps:
        what = told(step.spent) if step.spent else f"saved {told(step.saved)}" if step.saved else "nothing"
        lines.append(f"  {step.step:<{width}}  {step.status:<8}  {what}")
    return [*lines, f"Run {cost.what} spent {told(cost.spent)}; reuse saved {told(cost.saved)}."]


def model_lines(cost: Cost, name: str) -> list[str]:
    """The cost of a model for people: a line a computation, and the sum."""
    width = max((len(step.step) for step in cost.steps), default=0)
    lines = [f"  {step.step:<{width}}  run {step.run:<20}  {told(step.spent)}" for step in cost.steps]
    reused = f", of which {told(cost.saved)} by earlier runs" if cost.saved else ""
    return [*lines, f"{name} and all it was made from cost {told(cost.spent)}{reused}."]
