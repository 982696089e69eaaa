"""Runs and their logs: what a run did, and what each of its steps said.

Invariants:
- Secrets in either are blanked before they are stored (see `stages.artifacts.secrets`).
- A run is "running" only as long as its process may live: what a killed process left behind is read as "killed", on the
  machine where it ran at once, elsewhere once a later run there has written it down. Until then it is read elsewhere as
  "lost", when its document was not renewed for ten times as long as it promises. By the store's clock: those of hosts
  are never compared. One that is heard of again (a laptop that slept) is running again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from stages.artifacts import processes
from stages.artifacts.secrets import redact
from stages.artifacts.store import Damaged, NotInStore, Store, is_segment, leave_out

_MISSED = 10  # heartbeats of a run until it counts as lost


def _check_name(name: str, what: str) -> str:
    if not isinstance(name, str) or not re.fullmatch(r"[\w][\w.@+-]{0,199}", name, re.ASCII):
        raise ValueError(f"{name!r} is not the name of a {what} (letters, digits, and _ . @ + - after the first)")
    return name


def _run_key(run: str) -> str:
    return f"runs/{_check_name(run, 'run')}.json"


def log_key(run: str, step: str) -> str:
    """Where the log of a step lies in a store."""
    return f"logs/{_check_name(run, 'run')}/{_check_name(step, 'step')}.jsonl"


def write_run(store: Store, run: dict[str, Any]) -> None:
    """Store what is known of a run, replacing what was. `run["id"]` names it, `run["started"]` (ISO 8601) orders runs.

    Raises:
        ValueError: there is no usable id, or the rest is not JSON.
    """
    try:
        data = json.dumps(run, ensure_ascii=False, indent=1, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"run {run.get('id')!r} cannot be written as JSON: {error}") from None
    store.put(_run_key(run.get("id", "")), redact(data).encode())


def read_run(store: Store, run: str) -> dict[str, Any] | None:
    """What is known of a run, None if nothing. One whose process has ended without a word is "killed" or "lost".

    Raises:
        Damaged: the object is not a run.
    """
    key = _run_key(run)
    try:
        value = json.loads(store.get(key))
    except NotInStore:
        return None
    except ValueError as error:
        raise Damaged(f"{key} in store {store.url} is not JSON: {error}") from None
    if not isinstance(value, dict) or value.get("id") != run:
        raise Damaged(f"{key} in store {store.url} is not the run of that name")
    if value.get("state") != "running":
        return value
    if _is_gone(value):
        return _ended(value, "killed")
    return _ended(value, "lost") if _is_silent(store, key, value) else value


def _ended(run: dict[str, Any], state: str) -> dict[str, Any]:
    """The document of a run that is not running, whatever its process left: what waited is "stopped"."""
    ends = {"running": state, "waiting": "stopped"}
    steps = run.get("steps")
    if isinstance(steps, dict):
        steps = {
            name: step | {"status": ends.get(str(step.get("status")), step.get("status"))}
            if isinstance(step, dict)
            else step
            for name, step in steps.items()
        }
    return run | {"state": state} | ({"steps": steps} if "steps" in run else {})


def _is_gone(run: dict[str, Any]) -> bool:
    place, pid, born = run.get("place"), run.get("pid"), run.get("born")
    if not (isinstance(place, str) and type(pid) is int and isinstance(born, str)):
        return False  # written before these were
    return processes.is_gone(place, pid, born)


def _is_silent(store: Store, key: str, run: dict[str, Any]) -> bool:
    """Whether a run of another machine was not heard of for long; its document is renewed every `heartbeat` seconds."""
    heartbeat = run.get("heartbeat")
    if not isinstance(heartbeat, int | float) or run.get("place") == processes.place():
        return False
    modified = next((info.modified for info in store.list(key) if info.key == key), None)
    return modified is not None and store.now() - modified > _MISSED * heartbeat


def list_runs(store: Store) -> Iterator[dict[str, Any]]:
    """Every readable run, newest first; the log says which could not be read."""
    found = []
    for info in store.list("runs/"):
        try:
            run = read_run(store, info.key.removeprefix("runs/").removesuffix(".json"))
        except Damaged as error:
            leave_out(error)
            continue
        except ValueError:  # not the name of a run; `verify` says so
            continue
        if run is not None:
            found.append(run)
    yield from sorted(found, key=lambda run: (str(run.get("started", "")), run["id"]), reverse=True)


def run_names(store: Store) -> set[str]:
    """The names of all runs, readable or not."""
    return {info.key.removeprefix("runs/").removesuffix(".json") for info in store.list("runs/")}


def append_log(store: Store, run: str, step: str, events: list[dict[str, Any]]) -> None:
    """Add events of a step, one JSON line each, to its log."""
    if events:
        lines = (json.dumps(event, ensure_ascii=False, separators=(",", ":"), default=str) for event in events)
        store.append(
            log_key(run, step), redact("".join(line + "\n" for line in lines)).encode("utf-8", "backslashreplace")
        )


def read_log(store: Store, run: str, step: str | None = None) -> Iterator[dict[str, Any]]:
    """The events of one step, or of all steps in the order of their `time`.

    A last line that was cut short by a kill is left out; so are other lines that are no events, and the log says so.
    """
    if step is not None:
        key = log_key(run, step)
        for info in store.list(key):
            if is_segment(info.key, key):
                yield from _read(store, info.key)
        return
    events: list[dict[str, Any]] = []
    for info in store.list(f"logs/{_check_name(run, 'run')}/"):
        events.extend(_read(store, info.key))
    yield from sorted(events, key=_time)


class LogTail:
    """What is added to the logs of a run, read piece by piece."""

    def __init__(self, store: Store, run: str, step: str | None = None) -> None:
        self._store = store
        self._key = None if step is None else log_key(run, step)
        self._prefix = self._key or f"logs/{_check_name(run, 'run')}/"
        self._read: dict[str, tuple[int, int]] = {}  # key -> size when it was read, bytes of whole lines read

    def new(self) -> list[dict[str, Any]]:
        """The events since the last call, in the order of their `time`; a line that is not whole yet comes later."""
        events: list[dict[str, Any]] = []
        for info in self._store.list(self._prefix):
            if self._key is not None and not is_segment(info.key, self._key):
                continue
            size, done = self._read.get(info.key, (0, 0))
            if info.size == size:
                continue
            try:
                data = self._store.get(info.key)
            except NotInStore:
                continue
            end = data.rfind(b"\n") + 1
            events.extend(_events(self._store, info.key, data[done:end]))
            self._read[info.key] = (len(data), end)
        return sorted(events, key=_time)


def _time(event: dict[str, Any]) -> float:
    time = event.get("time")
    return float(time) if isinstance(time, int | float) else 0.0


def _read(store: Store, key: str) -> Iterator[dict[str, Any]]:
    try:
        data = store.get(key)
    except NotInStore:
        return
    yield from _events(store, key, data)


def _events(store: Store, key: str, data: bytes) -> Iterator[dict[str, Any]]:
    bad = 0
    *lines, last = data.split(b"\n")
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if isinstance(event, dict):
            yield event
        else:
            bad += bool(line.strip())
    if bad:
        what = f"{bad} of {len(lines)} lines are not events"
        leave_out(Damaged(f"{key} in store {store.url} is damaged: {what}"))
    with suppress(ValueError):
        if isinstance(event := json.loads(last), dict):
            yield event
