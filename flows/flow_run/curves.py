"""The training curves of a run as one picture: a panel for the loss of each training step, and one for its reward.

An SVG, which is drawn in milliseconds where a plotting library takes seconds for a dozen panels, and is sharp at any
size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from flows.lineage.browser.charts import HEIGHT, WIDTH, Chart, chart

COLUMNS = 3
_TITLE = 26.0  # height of a panel's title
_LOOKS = ("#2563eb", "#d97706")
_PANELS = (("loss", {"training": "loss", "validation": "eval_loss"}), ("reward", {"reward": "reward"}))
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"

Rows = Sequence[Mapping[str, Any]]


def draw_curves(rows_of: Mapping[str, Rows]) -> str:
    """An SVG of the curves.

    Args:
        rows_of: step name -> rows of its training.jsonl (step, loss, eval_loss, reward, ...).
    """
    panels = [panel for step, rows in rows_of.items() for panel in _panels(step, rows)]
    columns = max(1, min(len(panels), COLUMNS))
    width, height = columns * WIDTH, -(-len(panels) // columns) * (HEIGHT + _TITLE)
    pieces = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="{_FONT}" font-size="11" fill="#4b5563">',
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>',
    ]
    for number, panel in enumerate(panels):
        left, top = number % columns * WIDTH, number // columns * (HEIGHT + _TITLE)
        pieces += [f'<g transform="translate({left:.0f},{top:.0f})">', *_drawn(panel), "</g>"]
    return "\n".join([*pieces, "</svg>"])


def _panels(step: str, rows: Rows) -> Iterator[Chart]:
    for what, lines in _PANELS:
        series = {name: points for name, column in lines.items() if (points := _points(rows, column))}
        if made := chart(f"{step} · {what}", series):
            yield made


def _points(rows: Rows, column: str) -> list[tuple[float, float]]:
    """(step, figure) of the rows that have it; where a step was skipped, the line has a gap."""
    found = []
    for index, row in enumerate(rows):
        if column in row:
            value = row[column]
            found.append((float(row.get("step", index)), math.nan if value is None else float(value)))
    return found


def _drawn(panel: Chart) -> Iterator[str]:
    last = " · ".join(line.last if len(panel.lines) == 1 else f"{line.name} {line.last}" for line in panel.lines)
    yield f"<title>{escape(panel.told)}</title>"
    heading = 'font-size="12" font-weight="600" fill="#111827"'
    yield f'<text x="{panel.left:.0f}" y="18" {heading}>{escape(panel.title)}</text>'
    yield f'<text x="{panel.right:.0f}" y="18" text-anchor="end">{escape(last)}</text>'
    yield f'<g transform="translate(0,{_TITLE:.0f})">'
    for y, text in panel.rows:
        yield f'<path d="M{panel.left:.0f},{y:.1f} H{panel.right:.0f}" stroke="#e5e7eb"/>'
        yield f'<text x="{panel.left - 6:.0f}" y="{y + 4:.1f}" text-anchor="end">{escape(text)}</text>'
    anchors = ("middle",) if len(panel.columns) == 1 else ("start", "end")
    for (x, text), anchor in zip(panel.columns, anchors, strict=True):
        yield f'<text x="{x:.1f}" y="{panel.height - 7:.0f}" text-anchor="{anchor}">{escape(text)}</text>'
    for line in panel.lines:
        colour = _LOOKS[line.look % len(_LOOKS)]
        yield f'<path d="{line.path}" fill="none" stroke="{colour}" stroke-width="1.6" stroke-linejoin="round"/>'
        for x, y, _ in line.dots:
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{colour}"/>'
    yield "</g>"
