"""Events from the bytes that a stage writes, wherever it runs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

STDERR_BYTES = 200_000  # of a stage's standard error, the last of which go to its log


class EventLines:
    """Puts events together from pieces of standard output."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []  # pieces of a line without its end: joining them each time would take for ever

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """The events that `data` completes."""
        first, *more = data.split(b"\n")
        self._rest.append(first)
        for begun in more:
            line, self._rest = b"".join(self._rest), [begun]
            if line:
                yield parse_event(line)

    def rest(self) -> Iterator[dict[str, Any]]:
        """The event of a last line without an end, if there is one."""
        line, self._rest = b"".join(self._rest), []
        if line:
            yield parse_event(line)


def parse_event(line: bytes) -> dict[str, Any]:
    """The event of a line; a line that is none becomes a log event."""
    try:
        event = json.loads(line)
    except ValueError:
        event = None
    if isinstance(event, dict):
        return event
    text = line.decode("utf-8", "replace")
    return {"type": "log", "level": "warning", "time": round(time.time(), 3), "text": text}


def stderr_events(data: bytes) -> Iterator[dict[str, Any]]:
    """What a stage wrote to standard error, as log events."""
    for line in data[-STDERR_BYTES:].decode("utf-8", "replace").splitlines():
        if line.strip():
            yield {"type": "log", "level": "stderr", "time": round(time.time(), 3), "text": line}


def lost_outcome(code: int, message: str) -> dict[str, Any]:
    """The outcome of a stage that could not tell its own: what the runner knows of its end."""
    return {
        "type": "outcome",
        "code": code,
        "state": "crashed",
        "message": message,
        "artifact": None,
        "outputs": {},
        "metrics": {},
        "time": round(time.time(), 3),
    }
