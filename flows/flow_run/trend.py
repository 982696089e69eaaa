"""The trend of a reference over its nights: the history of a metric, as a picture and as a table."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from flows import figures
from stages.artifacts import Night

COLOURS = {"promoted": "#16a34a", "refused": "#dc2626", "not approved": "#d97706", "unchanged": "#6b7280"}
SHOWN = 60  # nights


def trend_metric(nights: Sequence[Night], rules: Sequence[str] = ()) -> str | None:
    """The metric whose history is drawn: that of the first rule, or the first that the newest nights have."""
    measured = [night for night in nights if night.metrics]
    if not measured:
        return None
    for metric in rules:
        if any(metric in night.metrics for night in measured):
            return metric
    for metric in ("exact_match", "sampled", "preference_accuracy", "bits_per_byte"):
        if metric in measured[-1].metrics:
            return metric
    return next(iter(sorted(measured[-1].metrics)), None)


def plot_trend(nights: Sequence[Night], metric: str, ref: str) -> bytes:
    """A PNG of a metric over the nights that measured it: each candidate by what became of it, and the reference."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [night for night in nights if metric in night.metrics]
    figure = Figure(figsize=(8.0, 3.2), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    panel: Any = figure.subplots()
    places = list(range(len(shown)))
    in_production: list[float | None] = []
    current: float | None = None
    for night in shown:
        current = night.production.get(metric, current)
        if night.state == "promoted":
            current = night.metrics[metric]
        in_production.append(current)
    known = [(place, value) for place, value in zip(places, in_production, strict=True) if value is not None]
    panel.step([place for place, _ in known], [value for _, value in known], where="post", color="#2563eb", label=ref)
    for state, colour in COLOURS.items():
        points = [(place, night.metrics[metric]) for place, night in enumerate(shown) if night.state == state]
        if points:
            panel.scatter(*zip(*points, strict=True), color=colour, label=state, zorder=3)
    panel.set_xticks(places, [night.date for night in shown], rotation=45, ha="right", fontsize=8)
    panel.set_ylabel(metric, fontsize=9)
    panel.tick_params(labelsize=8)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(fontsize=8, frameon=False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", metadata={"Software": None})
    return picture.getvalue()


def table_rows(nights: Sequence[Night], metric: str | None) -> list[dict[str, Any]]:
    """The last nights for a table, newest first: date, what was new, the metric, the decision."""
    return [
        {
            "night": night.date,
            "decision": night.state,
            "new data": night.new,
            metric or "metric": _shown(night.metrics, metric),
            "production": _shown(night.production, metric),
            "model": figures.short(night.artifact),
            "why": night.message,
        }
        for night in reversed(nights[-SHOWN:])
    ]


def _shown(metrics: dict[str, float], metric: str | None) -> str:
    return figures.number(metrics[metric]) if metric in metrics else ""
