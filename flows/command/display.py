"""What a run shows while it runs: a live table on a terminal, plain lines elsewhere, JSON Lines for programs.

A display is given every event of a run, in order, from any thread. `Board` turns events into the state of each step and
knows nothing of terminals; the three displays show a board.

Events are those of `flows.execute` ({"type": "step", "step", "state", ...}) and of the stages (log, progress, metric,
resumed, saved, waiting, outcome; see `stages.contract.StageContext`), each with "step", the recipe's name of the step.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TextIO

from flows import figures
from flows.visible import for_terminal

BAR = 16
NARROW = 64  # columns of a terminal below which a line has no room for the stage
PLAIN_SECONDS = 10.0  # between two lines of progress of one step where there is no terminal
ENDED = frozenset({"cached", "done", "failed", "stopped", "skipped"})
NOT_SHOWN = frozenset({"learning_rate", "grad_norm", "seconds_left"})  # figures that tell little from one look
STYLES = {
    "cached": "cyan",
    "done": "green",
    "failed": "bold red",
    "stopped": "yellow",
    "skipped": "dim",
    "waiting": "dim",
    "running": "bold",
}


@dataclass
class Line:
    """One step as a display knows it."""

    step: str
    stage: str
    needs: tuple[str, ...] = ()
    state: str = "waiting"
    seconds: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    message: str = ""
    artifact: str | None = None
    done: int = 0
    total: int | None = None
    unit: str = "step"
    shown: dict[str, float] = field(default_factory=dict)
    resumed: int | None = None
    saved: int | None = None
    save_seconds: float = 0.0
    started: float | None = None
    note: str = ""
    _first: tuple[float, int] | None = None  # time and count of the first progress of this attempt

    def progress(self, event: dict[str, Any], now: float) -> None:
        unit = str(event.get("unit") or "step")
        self.done, self.total = int(event.get("done") or 0), event.get("total")
        self.shown = {k: v for k, v in (event.get("figures") or {}).items() if isinstance(v, int | float)}
        if self._first is None or self.done < self._first[1] or unit != self.unit:
            self._first = (now, self.done)
        self.unit = unit

    def seconds_left(self, now: float) -> float | None:
        """Seconds to the end as the stage says, or at the pace of this attempt; None before there is a pace."""
        if "seconds_left" in self.shown:
            return self.shown["seconds_left"]
        if self._first is None or not self.total or self.done <= self._first[1]:
            return None
        return (self.total - self.done) * max(0.0, now - self._first[0]) / (self.done - self._first[1])

    def start(self, now: float) -> None:
        """A new attempt: what the one before said no longer counts."""
        self.state, self.started, self._first = "running", now, None
        self.done, self.total, self.shown, self.message, self.note = 0, None, {}, "", ""


class Board:
    """The state of every step of a run, kept from its events. Safe to use from several threads."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self.lines = {line.step: line for line in lines}
        self.lock = threading.RLock()

    def apply(self, event: dict[str, Any]) -> Line | None:
        """Take one event; returns the line that it changed in a way worth a line of text, else None."""
        line = self.lines.get(str(event.get("step", "")))
        if line is None:
            return None
        now = float(event.get("time") or time.time())
        with self.lock:
            match event.get("type"):
                case "step":
                    return self._state(line, event, now)
                case "progress":
                    line.progress(event, now)
                case "resumed":
                    line.resumed = _at(event)
                    return line
                case "saved":
                    line.saved, line.save_seconds = _at(event), float(event.get("seconds") or 0.0)
                case "waiting":
                    line.note = f"waits for {event['for']}, which computes the same" if event.get("for") else ""
                    return line if line.note else None
                case "log" if event.get("level") in ("warning", "error"):
                    line.note = for_terminal(str(event.get("text", "")))
        return None

    def _state(self, line: Line, event: dict[str, Any], now: float) -> Line | None:
        state = str(event.get("state"))
        changed = state != line.state
        if state == "running":
            line.start(now)
        line.state = state
        line.message = for_terminal(str(event.get("message") or line.message))
        line.artifact = event.get("artifact") or line.artifact
        line.metrics = dict(event.get("metrics") or line.metrics)
        if event.get("seconds") is not None:
            line.seconds = float(event["seconds"])
        elif state in ENDED and line.started is not None:
            line.seconds = max(0.0, now - line.started)
        return line if changed else None

    def waits_for(self, line: Line) -> list[str]:
        return [name for name in line.needs if name in self.lines and self.lines[name].state not in ("cached", "done")]


def _at(event: dict[str, Any]) -> int:
    """The training step of a "resumed" or "saved" event ("step" names the recipe's step)."""
    return int(event.get("at") or 0)


def says(board: Board, line: Line, now: float) -> str:
    """The part of a step's line after its name, stage and state: progress, figures, reason or summary."""
    match line.state:
        case "waiting":
            waits = board.waits_for(line)
            return f"waits for {', '.join(waits)}" if waits else "waits for a free place"
        case "running":
            return _running(line, now)
        case "cached" | "done":
            return " · ".join(filter(None, [_resumed(line), figures.headline(line.metrics), line.message]))
        case "stopped" if line.started is not None:
            return saved_message(line)
    return line.message


def _running(line: Line, now: float) -> str:
    if not line.total and not line.done:
        so_far = figures.duration(max(0.0, now - (line.started or now)))
        return " · ".join(filter(None, [_resumed(line), line.note, so_far]))
    of = f"/{figures.count(line.total)}" if line.total else ""
    parts = [f"{line.unit} {figures.count(line.done)}{of}"]
    parts += [figures.figure(name, value) for name, value in line.shown.items() if name not in NOT_SHOWN]
    left = line.seconds_left(now)
    if left is not None:
        parts.append(f"{figures.about(left)} left")
    if line.resumed is not None and line.done <= line.resumed:
        parts.append(_resumed(line))
    return " · ".join(filter(None, parts))


def _resumed(line: Line) -> str:
    if line.resumed is None:
        return ""
    of = f" of {figures.count(line.total)}" if line.total else ""
    return f"resumed at {line.unit} {figures.count(line.resumed)}{of}"


def saved_message(line: Line) -> str:
    """What a stopped step kept."""
    if line.saved is None and line.resumed is None:
        return "stopped before its first save; it starts again next time"
    if line.saved is None:
        return f"stopped; its progress of step {figures.count(line.resumed or 0)} is kept"
    return f"saved at step {figures.count(line.saved)}{figures.in_brackets(line.save_seconds)}"


def bar(done: int, total: int | None) -> str:
    """A bar of `BAR` characters; empty where the total is not known."""
    if not total:
        return " " * BAR
    full = max(0, min(BAR, BAR * done // total))
    return "█" * full + "░" * (BAR - full)


class Display(Protocol):
    """Shows a run; used as a context manager around it."""

    board: Board

    def event(self, event: dict[str, Any]) -> None:
        """Take one event of the run; called from any thread."""

    def say(self, text: str) -> None:
        """One line of text of the command itself, above the table or among the lines."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...


class LiveDisplay:
    """A table that is redrawn in place, for terminals."""

    def __init__(self, board: Board, console: Any) -> None:
        from rich.live import Live

        self.board, self.console = board, console
        self._live = Live(get_renderable=self._table, console=console, refresh_per_second=4, redirect_stdout=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def event(self, event: dict[str, Any]) -> None:
        self.board.apply(event)

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False)

    def _table(self) -> Any:
        return table(self.board, time.time(), narrow=self.console.width < NARROW)


def table(board: Board, now: float, *, narrow: bool = False) -> Any:
    """The steps of a board as a rich renderable, one line each; where it is narrow, without the stages."""
    from rich.console import Group
    from rich.text import Text

    lines = list(board.lines.values())
    name_width = max((len(line.step) for line in lines), default=0)
    stage_width = max((len(line.stage) for line in lines), default=0)
    rows = []
    with board.lock:
        for line in lines:
            style = STYLES.get(line.state, "")
            row = Text(no_wrap=True, overflow="ellipsis")
            row.append(f"  {line.step:<{name_width}}  ", style=style)
            if not narrow:
                row.append(f"{line.stage:<{stage_width}}  ", style="dim")
            row.append(f"{_state_column(line):<{BAR}}  ", style=style)
            row.append(says(board, line, now), style="red" if line.state == "failed" else "")
            rows.append(row)
    return Group(*rows)


def _state_column(line: Line) -> str:
    if line.state == "running":
        return bar(line.done, line.total) if line.total else "running".ljust(BAR)
    if line.seconds is not None and line.started is not None and line.state in ("done", "failed", "stopped"):
        return f"{line.state:<8}{figures.duration(line.seconds):>8}"
    return line.state if line.state != "waiting" else ""


class _Lines:
    """What the displays that only add lines have in common."""

    def __init__(self, board: Board, out: TextIO | None = None) -> None:
        self.board, self._out = board, out or sys.stdout
        self._lock = threading.RLock()  # a signal may come, and be told of, in the middle of a line

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._out.flush()


class PlainDisplay(_Lines):
    """One line of text for each change of state, and now and then for progress: for logs, pipes and CI."""

    def __init__(self, board: Board, out: TextIO | None = None, clock: Callable[[], float] = time.time) -> None:
        super().__init__(board, out)
        self._clock = clock
        self._told: dict[str, float] = {}
        self._width = max((len(name) for name in board.lines), default=0)

    def event(self, event: dict[str, Any]) -> None:
        with self._lock:
            line, now = self.board.apply(event), self._clock()
            if line is not None and line.state != "waiting":
                self._told[line.step] = now
                self._print(line, self._sentence(line, event, now))
            elif event.get("type") == "progress":
                self._progress(str(event.get("step")), now)

    def say(self, text: str) -> None:
        with self._lock:
            print(text, file=self._out, flush=True)

    def _progress(self, step: str, now: float) -> None:
        line = self.board.lines.get(step)
        if line is not None and abs(now - self._told.get(step, 0.0)) >= PLAIN_SECONDS:  # the clock may be set back
            self._told[step] = now
            self._print(line, says(self.board, line, now))

    def _sentence(self, line: Line, event: dict[str, Any], now: float) -> str:
        if event.get("type") == "resumed":
            return _resumed(line)
        if event.get("type") == "waiting":
            return line.note
        if line.state == "running":
            return f"running ({line.stage})"
        ran = line.state in ("done", "failed", "stopped") and line.started is not None and line.seconds is not None
        took = f" in {figures.duration(line.seconds or 0.0)}" if ran else ""
        text = says(self.board, line, now)
        return f"{line.state}{took}" + (f": {text}" if text else "")

    def _print(self, line: Line, text: str) -> None:
        clock = time.strftime("%H:%M:%S", time.localtime(self._clock()))
        print(f"{clock} {line.step:<{self._width}}  {text}", file=self._out, flush=True)


class JsonDisplay(_Lines):
    """Every event as one line of JSON, for programs; what is said in words goes to standard error."""

    def event(self, event: dict[str, Any]) -> None:
        with self._lock:
            self.board.apply(event)
            print(json.dumps(event, default=str), file=self._out, flush=True)

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def open_display(board: Board, *, as_json: bool) -> Display:
    """The display that fits standard output: JSON Lines if asked for, a live table on a terminal, else plain lines."""
    if as_json:
        return JsonDisplay(board)
    if sys.stdout.isatty():
        from rich.console import Console

        return LiveDisplay(board, Console())
    return PlainDisplay(board)
