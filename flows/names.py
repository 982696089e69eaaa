"""Names people use on the command line: artifacts by digest, reference, step or run, and new names for runs.

Resolving tries, in this order: an explicit "sha256:..." or "artifact:..."; an explicit "ref:..."; a reference, or an
entry of its history ("production@3"); a run's step ("RUN/step", "RUN/step/output"); a step of the newest run that has
it ("step", "step/output"); and at last the first digits of a digest. A name is never guessed: what is not found is an
error with the nearest names.
"""

from __future__ import annotations

import difflib
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stages.artifacts import Store, list_runs, read_ref, read_run, ref_names, resolve_digest, run_names

if TYPE_CHECKING:
    from flows.lineage.index import Index

_RUNS_LOOKED_AT = 20  # of those with a step: not every one has the side output that is asked for
_FIRST = (
    "amber blue brave bright bronze calm clear cold coral deep early fair fresh gentle glad golden grand "
    "green grey happy icy jade keen late light lively lucky mellow misty noble northern opal pale quick quiet "
    "rapid red royal ruby silent silver slow soft spring steady still swift tidal warm western white wild"
)
_SECOND = (
    "badger bay beaver bittern brook canal carp cascade crane creek current delta dipper dolphin eddy eel "
    "egret estuary ford grebe gull heron kingfisher lagoon lake lock loon marsh mill newt otter pike pond "
    "pool rapids reed ripple river salmon seal shoal sluice spring stork stream swan swift tern tide trout "
    "weir willow"
)


class UnknownName(ValueError):
    """No artifact of that name; the message says what there is."""


@dataclass(frozen=True)
class Named:
    """An artifact found by a name.

    Attributes:
        digest: full digest.
        label: how to speak of it: "grpo (run golden-otter)", "production".
        ref: the reference that it was found by, "" for none.
    """

    digest: str
    label: str
    ref: str = ""


def resolve(store: Store, name: str, index: Index | None = None) -> Named:
    """The artifact that a name on the command line means.

    Args:
        index: of the store, up to date: without one all runs are read.

    Raises:
        UnknownName: there is none, or a digest is too short or ambiguous.
    """
    if name.startswith(("sha256:", "artifact:")):
        return _by_digest(store, name.removeprefix("artifact:"))
    refs = ref_names(store)
    wanted = name.removeprefix("ref:")
    if wanted in refs:
        return Named(read_ref(store, wanted).artifact, wanted, wanted)
    if (match := re.fullmatch(r"(.+)@(\d{1,6})", wanted)) and match[1] in refs:
        return _by_entry(store, match[1], int(match[2]))
    if name.startswith("ref:"):
        raise UnknownName(f"there is no reference {wanted!r}.{_near(wanted, refs)}")
    runs = list(list_runs(store)) if index is None else _runs_with(store, index, name)
    if found := _by_run(runs, name) or _by_step(runs, name):
        return found
    if re.fullmatch(r"[0-9a-f]{6,64}", name):
        return _by_digest(store, name)
    runs = runs if index is None else list(list_runs(store))
    known = {step for run in runs for step in run.get("steps", {})} | set(refs)
    if name in known:
        raise UnknownName(
            f"step {name} of store {store.url} has no result yet; `headrace status` shows how its runs ended."
        )
    hint = _near(name, known) or (f" Steps here: {', '.join(sorted(known))}." if known else " No run is recorded here.")
    raise UnknownName(f"no artifact, reference or step {name!r} in store {store.url}.{hint}")


def find_run(store: Store, name: str | None = None) -> dict[str, Any]:
    """The record of a run: the newest, or the one called `name` (its first letters do, if they are enough).

    Raises:
        UnknownName: there is none, or several start so.
    """
    runs = list(list_runs(store))
    if not runs and run_names(store):
        raise UnknownName(f"no run of store {store.url} can be read; `headrace verify` names what is damaged.")
    if not runs:
        raise UnknownName(f"store {store.url} has no runs yet; `headrace run quickstart` makes one.")
    if name is None:
        return runs[0]
    found = [run for run in runs if run["id"] == name] or [run for run in runs if run["id"].startswith(name)]
    if len(found) == 1:
        return found[0]
    names = [run["id"] for run in (found or runs)]
    if found:
        raise UnknownName(f"{name!r} is the start of {len(found)} runs: {', '.join(names[:5])}; give more of it.")
    raise UnknownName(f"no run {name!r}.{_near(name, names) or ' Newest runs: ' + ', '.join(names[:5]) + '.'}")


def new_run_name(store: Store, rng: random.Random | None = None) -> str:
    """A name for a new run, two words such as "golden-otter", that no run of the store has."""
    taken = run_names(store)
    rng = rng or random.SystemRandom()
    for _ in range(20):
        name = f"{rng.choice(_FIRST.split())}-{rng.choice(_SECOND.split())}"
        if name not in taken:
            return name
    return free_run_name(store, name)


def free_run_name(store: Store, name: str) -> str:
    """`name`, with a number behind it if a run of the store has it already."""
    taken = run_names(store)
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name}-{number}"
    return free


def _by_digest(store: Store, prefix: str) -> Named:
    try:
        digest = resolve_digest(store, prefix)
    except ValueError as error:
        raise UnknownName(str(error)) from None
    return Named(digest, digest[:19])


def _by_entry(store: Store, name: str, number: int) -> Named:
    """What a reference named at an entry of its history."""
    history = read_ref(store, name).history
    if not 1 <= number <= len(history):
        raise UnknownName(f"reference {name} has no entry {number}; it has 1 to {len(history)}.")
    return Named(history[number - 1].artifact, f"{name}@{number}")


def _runs_with(store: Store, index: Index, name: str) -> list[dict[str, Any]]:
    """The run that a name begins with, and the newest runs with an artifact of the step that it begins with."""
    first, _, rest = name.partition("/")
    sql = """SELECT r.name FROM steps s JOIN runs r ON r.id = s.run WHERE s.step = ? AND s.artifact IS NOT NULL
        ORDER BY r.started DESC LIMIT ?"""
    found = [row[0] for row in index.rows("SELECT name FROM runs WHERE name = ?", (first,))] if rest else []
    found += [row[0] for row in index.rows(sql, (first, _RUNS_LOOKED_AT))]
    return [run for run in (read_run(store, each) for each in found) if run is not None]


def _by_run(runs: list[dict[str, Any]], name: str) -> Named | None:
    """ "RUN/step" or "RUN/step/output"."""
    run_name, _, rest = name.partition("/")
    step, _, output = rest.partition("/")
    for run in runs:
        if run["id"] == run_name and step and (digest := _output(run, step, output)):
            return Named(digest, f"{rest} (run {run_name})")
    return None


def _by_step(runs: list[dict[str, Any]], name: str) -> Named | None:
    """ "step" or "step/output" of the newest run that has it."""
    step, _, output = name.partition("/")
    for run in runs:
        if digest := _output(run, step, output):
            return Named(digest, f"{name} (run {run['id']})")
    return None


def _output(run: dict[str, Any], step: str, output: str) -> str | None:
    record = run.get("steps", {}).get(step)
    if not isinstance(record, dict):
        return None
    return record.get("outputs", {}).get(output) if output else record.get("artifact")


def _near(name: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, list(known), n=2, cutoff=0.6)
    return f" Did you mean {' or '.join(found)}?" if found else ""
