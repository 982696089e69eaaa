"""How pages become HTML: the templates, the words and figures that they use, and the addresses of pages.

Invariants:
- All text is escaped (Jinja's autoescape, undefined names are errors), and characters that would hide or turn other
  text round (controls, bidirectional marks) are shown as what they are. So a name from a store is inert.
- Addresses are paths of this server below `root`, whatever proxy stands before it.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from flows import figures
from flows.visible import visible

HERE = Path(__file__).parent
# A state with the sign that tells it without colour, and how it is spoken of.
STATES: dict[str, tuple[str, str]] = {
    "done": ("✓", "done"),
    "cached": ("↺", "reused"),
    "running": ("▶", "running"),
    "waiting": ("·", "waiting"),
    "failed": ("✗", "failed"),
    "stopped": ("■", "stopped"),
    "killed": ("✗", "killed"),
    "lost": ("?", "lost"),
    "skipped": ("–", "skipped"),
}
# The character that tells a kind of artifact without colour.
KIND_SIGNS: dict[str, str] = {
    "source": "▤",
    "dataset": "▦",
    "checkpoint": "◆",
    "adapter": "◇",
    "logprobs": "∑",
    "rollouts": "❝",
    "report": "▲",
    "code": "§",
    "origins": "↦",
}


@dataclass(frozen=True)
class Links:
    """The addresses of the pages; they never change, for other programs point to them.

    Attributes:
        root: the path that a proxy serves these pages under, "" for none.
    """

    root: str = ""

    def __call__(self, *parts: str | int, **query: Any) -> str:
        """The address of a page: parts of its path, and what follows the "?" (None and "" are left out)."""
        path = "/".join(quote(str(part), safe="@:+") for part in parts)
        given = {name: value for name, value in query.items() if value not in (None, "")}
        return f"{self.root}/{path}{'?' + urlencode(given) if given else ''}"

    def artifact(self, digest: str, *more: str | int, **query: Any) -> str:
        return self("artifact", digest, *more, **query)

    def artifact_file(self, digest: str, path: str, what: str = "file", **query: Any) -> str:
        return self("artifact", digest, what, *path.split("/"), **query)

    def run(self, name: str, *more: str, **query: Any) -> str:
        return self("run", name, *more, **query)

    def ref(self, name: str) -> str:
        return self("ref", name)

    def file(self, sha256: str) -> str:
        return self("file", sha256)

    def compare(self, first: str, second: str = "") -> str:
        return self("compare", a=first, b=second)


def environment() -> Environment:
    """The templates, with the words and figures that they use."""
    made = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    made.filters |= {
        "short": figures.short,
        "size": figures.size,
        "count": figures.count,
        "number": number,
        "duration": lambda seconds: "" if seconds is None else figures.duration(seconds),
        "headline": lambda metrics: figures.headline(metrics or {}),
        "when": when,
        "stamp": stamp,
        "clock": clock,
        "json": lambda value: json.dumps(value, indent=1, ensure_ascii=False, default=str),
        "state_sign": lambda state: STATES.get(state, ("?", state))[0],
        "state_word": lambda state: STATES.get(state, ("?", state))[1],
        "kind_sign": lambda kind: KIND_SIGNS.get(kind, "?"),
        "look": look,
        "shell": shlex.quote,
    }
    return made


def _finalize(value: Any) -> Any:
    """What a template writes: nothing for None, and text that is not ours made visible."""
    if value is None:
        return ""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def number(value: Any) -> str:
    """A figure as people read it; whole numbers in full, text as it is."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or (value.is_integer() and abs(value) < 1e15):
        return figures.count(value) if abs(value) >= 1000 else f"{value:.0f}"
    return figures.number(value)


def seconds_of(value: Any) -> float | None:
    """Unix seconds of a time that a store holds, as seconds or as ISO 8601 text; None where it is none."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    try:
        return datetime.fromisoformat(value).timestamp()
    except (TypeError, ValueError):
        return None


def when(value: Any) -> str:
    """A time as the local "2 Nov 14:03", with the year where it is not this one."""
    seconds = seconds_of(value)
    if seconds is None:
        return ""
    moment = datetime.fromtimestamp(seconds, UTC).astimezone()
    year = "" if moment.year == datetime.now().year else f" {moment.year}"
    return f"{moment:%d %b}{year} {moment:%H:%M}".lstrip("0")


def clock(value: Any) -> str:
    """A time as the local "14:03:21"."""
    seconds = seconds_of(value)
    return "" if seconds is None else f"{datetime.fromtimestamp(seconds):%H:%M:%S}"


def stamp(value: Any) -> str:
    """A time as ISO 8601 for a `datetime` attribute."""
    seconds = seconds_of(value)
    return "" if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def look(name: str) -> str:
    """A CSS class for a state or kind, whatever text it is."""
    return name if re.fullmatch(r"[a-z]+", name or "") else "unknown"
