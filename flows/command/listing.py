"""The verbs that read: status, logs, pull, sample. (`flows.command.store` has those that look after a store.)

Each takes the store's URL and prints to standard output: text for people, or one JSON value with `as_json`.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from flows import figures
from flows.endings import ending
from flows.names import UnknownName, find_run, resolve
from flows.visible import for_terminal
from stages.artifacts import (
    LogTail,
    Store,
    fetch,
    list_runs,
    open_store,
    pull,
    read_log,
    read_manifest,
    read_run,
    run_names,
)

FOLLOW_SECONDS = 1.0  # between two looks at a log that grows


def print_json(value: Any) -> None:
    """Print one JSON value, indented."""
    print(json.dumps(value, indent=1, ensure_ascii=False, default=str))


def status(store_url: str, run: str | None, number: int, *, as_json: bool) -> None:
    """The last runs, or the steps of one.

    Raises:
        UnknownName: there is no such run.
    """
    store = open_store(store_url)
    if run is not None:
        record = find_run(store, run)
        print_json(record) if as_json else print("\n".join(map(for_terminal, _run_lines(record))))
        return
    records = [record for _, record in zip(range(number), list_runs(store), strict=False)]
    if as_json:
        print_json(records)
    elif not records and run_names(store):
        print(f"No run of store {store.url} can be read.")
    elif not records:
        print(f"No runs in store {store.url} yet. `headrace run quickstart` makes one.")
    else:
        print("\n".join(for_terminal(_run_line(record)) for record in records))


def _run_line(record: dict[str, Any]) -> str:
    states: dict[str, int] = {}
    for step in record.get("steps", {}).values():
        states[step.get("status", "?")] = states.get(step.get("status", "?"), 0) + 1
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    took = figures.duration(record["seconds"]) if record.get("seconds") is not None else ""
    started = _local(record.get("started"))
    recipe, state = record.get("recipe", ""), record.get("state", "")
    return f"  {record['id']:<22} {recipe:<16} {state:<8} {started:>12}  {took:>8}  {counts}".rstrip()


def _run_lines(record: dict[str, Any]) -> list[str]:
    steps = record.get("steps", {})
    width = max((len(name) for name in steps), default=0)
    lines = [_run_line(record)]
    for name, step in steps.items():
        took = figures.duration(step["seconds"]) if step.get("seconds") is not None else ""
        told = step.get("message") or figures.headline(step.get("metrics") or {})
        told += f" (checkpoint kept: {step['kept']})" if step.get("kept") else ""
        state, digest = step.get("status", ""), figures.short(step.get("artifact"))
        lines.append(f"    {name:<{width}}  {state:<8} {took:>8}  {digest:<12}  {told}".rstrip())
    return lines


def _local(stamp: str | None) -> str:
    """An ISO 8601 time as the local "2 Nov 14:03"."""
    if not stamp:
        return ""
    return f"{datetime.fromisoformat(stamp).astimezone():%d %b %H:%M}".lstrip("0")


def logs(store_url: str, run: str | None, step: str | None, *, as_json: bool, follow: bool = False) -> None:
    """What the steps of a run said; with one name that is no run, the newest run with a step of that name.

    Args:
        follow: go on until the run has ended.

    Raises:
        UnknownName: there is no such run or step.
    """
    store = open_store(store_url)
    record, step = _run_and_step(store, run, step)
    found = False
    for event in _following(store, record["id"], step) if follow else read_log(store, record["id"], step):
        found = True
        if as_json:
            print(json.dumps(event, ensure_ascii=False), flush=follow)
        elif text := event_text(event):
            print(for_terminal(f"{_clock(event)} {event.get('step', ''):<12} {text}"), flush=follow)
    if not found and not as_json:
        said = f"step {step} of run {record['id']}" if step else f"run {record['id']}"
        print(f"{said}: nothing was logged; its steps were cached or did not start.{_where_computed(store, step)}")


def _where_computed(store: Store, step: str | None) -> str:
    """A hint at the newest run in which a step was computed."""
    for record in list_runs(store) if step is not None else ():
        if (record.get("steps", {}).get(step) or {}).get("status") in ("done", "failed", "stopped"):
            return f" It was computed in another: headrace logs {record['id']} {step}"
    return ""


def _following(store: Store, run: str, step: str | None) -> Iterator[dict[str, Any]]:
    """The events of a run as they come, until it has ended (or its document is gone)."""
    tail = LogTail(store, run, step)
    while True:
        running = (read_run(store, run) or {}).get("state") == "running"  # looked at before the last reading
        yield from tail.new()
        if not running:
            return
        time.sleep(FOLLOW_SECONDS)


def _run_and_step(store: Store, run: str | None, step: str | None) -> tuple[dict[str, Any], str | None]:
    if run is not None and step is None:
        runs = list(list_runs(store))
        if not any(record["id"] == run for record in runs):
            for record in runs:  # a step goes before the first letters of a run
                if run in record.get("steps", {}):
                    return record, run
        return find_run(store, run), None
    record = find_run(store, run)
    if step is not None and step not in record.get("steps", {}):
        steps = ", ".join(record.get("steps", {}))
        raise UnknownName(f"run {record['id']} has no step {step!r}. Its steps: {steps}.")
    return record, step


def _clock(event: dict[str, Any]) -> str:
    return time.strftime("%H:%M:%S", time.localtime(float(event.get("time") or 0)))


def event_text(event: dict[str, Any]) -> str:
    """An event as a line of a log; "" for those that only move a progress bar."""
    match event.get("type"):
        case "log":
            level = str(event.get("level", "info"))
            return ("" if level == "info" else f"{level}: ") + str(event.get("text", ""))
        case "metric":
            values = " · ".join(f"{name} {figures.number(value)}" for name, value in event.get("values", {}).items())
            return f"step {event.get('at')}: {values}"
        case "resumed":
            return f"resumed at step {event.get('at')}"
        case "saved":
            return f"saved at step {event.get('at')}{figures.in_brackets(event.get('seconds') or 0.0)}"
        case "waiting":
            return f"waits for {event['for']}, which computes the same" if event.get("for") else "waits no longer"
        case "outcome":
            return f"ended: {event.get('state')} ({event.get('code')}) {event.get('message') or ''}".rstrip()
        case "step":
            return f"{event.get('state')} {event.get('message') or ''}".rstrip()
    return ""


def pull_to(store_url: str, name: str, folder: Path, *, as_json: bool) -> None:
    """Copy an artifact to a new or empty folder, verified.

    Raises:
        UnknownName: there is no such artifact.
        StoreError: the folder is not empty, or the artifact is damaged.
    """
    store = open_store(store_url)
    named = resolve(store, name)
    manifest = pull(store, named.digest, folder)
    if as_json:
        files = [{"path": entry.path, "size": entry.size, "sha256": entry.sha256} for entry in manifest.files]
        print_json({"artifact": named.digest, "kind": manifest.kind, "folder": str(folder), "files": files})
        return
    print(f"{named.label}: {manifest.kind}, {len(manifest.files)} files, {figures.size(manifest.size)} -> {folder}")
    print(f"Check it at any time: cd {shlex.quote(str(folder))} && sha256sum -c SHA256SUMS")


def sample(store_url: str, name: str, prompt: str, *, raw: bool = False) -> int:
    """Run `python -m stages sample` on a checkpoint; its answer goes straight to standard output.

    Args:
        raw: go on with the prompt as it stands, without the chat template.

    Returns:
        The exit code of that process; 128 and the number of the signal that killed it.

    Raises:
        UnknownName: there is no such artifact, or it is not a checkpoint.
    """
    store = open_store(store_url)
    named = resolve(store, name)
    kind = read_manifest(store, named.digest).kind
    if kind != "checkpoint":
        raise UnknownName(f"{name} is a {kind}; sample takes a checkpoint, such as the step sft, dpo or grpo.")
    with tempfile.TemporaryDirectory(prefix="headrace-sample-") as scratch:
        folder = Path(scratch) / "model"
        fetch(store, named.digest, folder)
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-m", "stages", "sample", str(folder), *(["--raw"] if raw else []), "--", prompt]
        code = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}).returncode
    if code >= 0:
        return code
    print(f"headrace: the process of the model was {ending(code)}", file=sys.stderr)
    return 128 - code
