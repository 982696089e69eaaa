"""What leads to what in a store: from an artifact to everything that it was made from.

Read from results alone, those that a forced run has replaced included. `flows.lineage` tells the same story for people.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from stages.artifacts.results import Result, results
from stages.artifacts.store import Store


@dataclass(frozen=True)
class Making:
    """One computation: what it read and gave, for whom, and the key of its (latest) result.

    Attributes:
        made: digests of the artifact and the side outputs.
        inputs: digests of what it read, the sources of its code included.
        finished: UTC, ISO 8601.
        current: whether it is the result of its key, and not one of its history.
    """

    stage: str
    key: str
    step: str
    run: str
    made: tuple[str, ...]
    inputs: tuple[str, ...]
    finished: str
    current: bool


def makings(result: Result) -> Iterator[Making]:
    """The computation of a result and those of its history, the newest first."""
    fields = result.model_dump(include=_FIELDS) | {"code": {"artifact": result.code.get("artifact")}}
    yield _making(fields, current=True)
    for entry in reversed(result.history):
        yield _making(entry, current=False)


_FIELDS = {"stage", "key", "step", "run", "artifact", "outputs", "inputs", "finished"}


def _making(value: dict[str, Any], *, current: bool) -> Making:
    outputs, inputs = value.get("outputs") or {}, value.get("inputs") or {}
    code = (value.get("code") or {}).get("artifact")
    return Making(
        stage=str(value.get("stage", "")),
        key=str(value.get("key", "")),
        step=str(value.get("step", "")),
        run=str(value.get("run", "")),
        made=(str(value.get("artifact", "")), *outputs.values()),
        inputs=(*inputs.values(), *([str(code)] if code else [])),
        finished=str(value.get("finished", "")),
        current=current,
    )


def by_artifact(found: Iterable[Making]) -> dict[str, list[Making]]:
    """Artifact digest -> the computations that gave it, in the order given."""
    makers: dict[str, list[Making]] = {}
    for making in found:
        for digest in making.made:
            makers.setdefault(digest, []).append(making)
    return makers


def ancestors(store: Store, digest: str) -> list[str]:
    """The artifact itself and everything that it was made from, each once, by whatever computations are on record."""
    makers = by_artifact(making for result in results(store) for making in makings(result))
    found: dict[str, None] = {}
    waiting = [digest]
    while waiting:
        current = waiting.pop(0)
        if current not in found:
            found[current] = None
            waiting.extend(read for making in makers.get(current, []) for read in making.inputs)
    return list(found)
