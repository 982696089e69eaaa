"""What a stage process says, as JSON Lines, and how it is told to stop."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import threading
import time
from typing import Any


class EventStream:
    """Writes events to a descriptor, one JSON line each, from any thread. Errors of the descriptor are swallowed: the
    reader may be gone while the stage saves. What a full disk did not take is lost; a later event may find room again,
    as the last one does, which says why the stage ended."""

    def __init__(self, descriptor: int, step: str = "") -> None:
        self.step = step
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._broken = descriptor < 0
        self._cut = False  # whether the last line has no end

    def __call__(self, event: dict[str, Any]) -> None:
        line = json_line({"time": round(time.time(), 3), "step": self.step, **event})
        with self._lock:
            view = memoryview(b"\n" + line if self._cut else line)
            try:
                while view and not self._broken:
                    view = view[os.write(self._descriptor, view) :]
                    self._cut = bool(view)
            except OSError as error:
                self._broken = error.errno not in (errno.ENOSPC, errno.EDQUOT)


def json_line(event: dict[str, Any]) -> bytes:
    try:
        text = json.dumps(event, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError):
        text = json.dumps(_plain(event), ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace") + b"\n"


def _plain(value: Any) -> Any:
    """JSON for anything: scalars of array libraries become numbers, NaN and infinities null, other objects text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if hasattr(value, "item") and not isinstance(value, float):
        try:
            value = value.item()
        except (TypeError, ValueError, RuntimeError):
            return str(value)
        if isinstance(value, bool | int):
            return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value)


class StopFlag:
    """Whether SIGTERM or SIGINT has come."""

    def __init__(self) -> None:
        self._set = False

    def __call__(self) -> bool:
        return self._set

    def listen(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))  # the fork server blocks them

    def _handle(self, number: int, frame: object) -> None:
        self._set = True
