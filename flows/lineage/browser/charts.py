"""Curves as pictures: what the SVG of a chart needs, worked out from rows of figures.

Every chart reads without scripts: its axis has a few round values, each line is named at its end or in the legend, and
`Chart.told` says in words what is to be seen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flows import figures

WIDTH, HEIGHT = 340.0, 190.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 12.0, 12.0, 24.0
_POINTS = 300  # more than a chart has pixels are thinned, keeping what stands out
Series = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
        name: what it is.
        look: number of its colour, from 0.
        path: SVG path, a new piece after each gap.
        dots: (x, y, value), drawn where there are few points.
        last: its last value.
    """

    name: str
    look: int
    path: str
    dots: list[tuple[float, float, str]]
    last: str


@dataclass(frozen=True)
class Chart:
    """A chart for the template `chart.html`.

    Attributes:
        rows, columns: (position, text) of the values on the axes.
        told: what it shows, in a sentence.
    """

    title: str
    lines: list[Line]
    rows: list[tuple[float, str]]
    columns: list[tuple[float, str]]
    told: str
    width: float = WIDTH
    height: float = HEIGHT
    left: float = _LEFT
    right: float = WIDTH - _RIGHT
    top: float = _TOP
    bottom: float = HEIGHT - _BOTTOM


def chart(title: str, series: Mapping[str, Series], *, share: bool = False, across: str = "step") -> Chart | None:
    """A chart of named lines; None where no line has a finite point.

    Args:
        series: name -> (x, y), in the order of x; what is not finite is a gap.
        share: show values as percentages.
        across: what x is.
    """
    finite = {
        name: [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)] for name, points in series.items()
    }
    every = [point for points in finite.values() for point in points]
    if not every:
        return None
    low_x, high_x = min(x for x, _ in every), max(x for x, _ in every)
    least, most = min(y for _, y in every), max(y for _, y in every)
    marks = [0.0, 0.5, 1.0] if share and least == most and 0 <= least <= 1 else _round_values(least, most)
    low, high = min(marks[0], least), max(marks[-1], most)

    def place_x(x: float) -> float:
        part = (x - low_x) / (high_x - low_x) if high_x > low_x else 0.5
        return _LEFT + part * (WIDTH - _LEFT - _RIGHT)

    def place_y(y: float) -> float:
        return HEIGHT - _BOTTOM - (y - low) / (high - low) * (HEIGHT - _TOP - _BOTTOM)

    def said(value: float) -> str:
        return figures.percent(value) if share else figures.number(value)

    lines = []
    for look, (name, points) in enumerate(series.items()):
        if finite[name]:
            few = finite[name] if len(finite[name]) <= 24 else []
            dots = [(place_x(x), place_y(y), f"{across} {x:g}: {said(y)}") for x, y in few]
            last = said(finite[name][-1][1])
            lines.append(Line(name, look, _path(_thinned(points), place_x, place_y), dots, last))
    rows = [(place_y(mark), said(mark) if share else f"{mark:.6g}") for mark in marks]
    ends = [low_x] if low_x == high_x else [low_x, high_x]
    columns = [(place_x(x), f"{x:,.6g}") for x in ends]
    return Chart(title, lines, rows, columns, _told(title, finite, said, across))


def _told(title: str, finite: Mapping[str, Series], said: Any, across: str) -> str:
    parts = []
    for name, points in finite.items():
        if points:
            whose = "" if name == title else f"{name}: "
            (first, start), (last, end) = points[0], points[-1]
            parts.append(
                f"{whose}{said(start)} at {across} {first:g}"
                + (f", {said(end)} at {across} {last:g}" if len(points) > 1 else "")
                + (
                    f"; least {said(min(y for _, y in points))}, most {said(max(y for _, y in points))}"
                    if len(points) > 2
                    else ""
                )
            )
    return f"{title}. {'. '.join(parts)}."


def _round_values(low: float, high: float) -> list[float]:
    """Two to six round values over a range and a little beyond."""
    if high - low < 1e-12 * max(abs(low), abs(high), 1e-12):
        pad = abs(high) * 0.1 or 1.0
        low, high = low - pad, high + pad
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def _thinned(points: Series) -> Series:
    """At most about `_POINTS` points: of each stretch the least and the greatest, so that no spike is lost."""
    if len(points) <= _POINTS:
        return points
    stretch = 2 * len(points) / _POINTS
    kept: list[tuple[float, float]] = [points[0]]
    for number in range(_POINTS // 2):
        part = points[int(number * stretch) : int((number + 1) * stretch)]
        if part:
            ends = {min(part, key=_height), max(part, key=_height)}
            kept.extend(point for point in part if point in ends)
    return [*kept, points[-1]]


def _height(point: tuple[float, float]) -> float:
    return point[1] if math.isfinite(point[1]) else -math.inf


def _path(points: Series, place_x: Any, place_y: Any) -> str:
    parts, broken = [], True
    for x, y in points:
        if not (math.isfinite(x) and math.isfinite(y)):
            broken = True
            continue
        parts.append(f"{'M' if broken else 'L'}{place_x(x):.1f},{place_y(y):.1f}")
        broken = False
    return " ".join(parts)


# Curves of training


_FIRST = ("loss", "eval_loss", "reward", "rewards/accuracies", "rewards/margins", "entropy", "kl", "grad_norm")
_LEFT_OUT = frozenset({"step", "epoch", "seconds", "weight", "tokens", "target_tokens"})


def curves(rows_of: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Chart]:
    """A chart for each figure of one training or several (label -> rows of training.jsonl), the telling ones first.

    A validation loss shares the chart of the loss it belongs to.
    """
    series: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for label, rows in rows_of.items():
        for index, row in enumerate(rows):
            step = _figure(row.get("step", index))
            for name, value in row.items():
                if name in _LEFT_OUT or step is None or (figure := _figure(value)) is None:
                    continue
                series.setdefault(name, {}).setdefault(label, []).append((step, figure))
    if "loss" in series and "eval_loss" in series:
        held_out = series.pop("eval_loss")
        several = len(rows_of) > 1
        series["loss"] = {("training" if not several else name): points for name, points in series["loss"].items()} | {
            (f"{name} validation" if several else "validation"): points for name, points in held_out.items()
        }
    order = sorted(series, key=lambda name: (_FIRST.index(name) if name in _FIRST else len(_FIRST), "/" in name))
    charts = []
    for name in order:
        lines = {
            (name if len(series[name]) == 1 and len(rows_of) == 1 else label): pts
            for label, pts in series[name].items()
        }
        if made := chart(name.replace("_", " "), lines):
            charts.append(made)
    return charts


def _figure(value: Any) -> float | None:
    """A number, also one that JSON writes as text ("NaN"); None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    return (
        {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}.get(value) if isinstance(value, str) else None
    )
