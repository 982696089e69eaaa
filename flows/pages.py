"""The pages that a run leaves in Prefect: artifacts with its steps and metrics, curves, evaluation and lineage.

Keys are the recipe's name and what the page is, so that each page of a recipe has a history over its runs:
`quickstart-metrics`, `quickstart-loss`, `quickstart-evaluation`, `quickstart-lineage`. Prefect allows lowercase
letters, digits and dashes in a key.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flows import figures, summary
from flows.lineage.graph import trace
from flows.lineage.render import mermaid, tree
from stages.artifacts import Store


@dataclass(frozen=True)
class StepRow:
    """A step of the run as its page shows it."""

    step: str
    stage: str
    status: str
    artifact: str | None
    seconds: float | None
    metrics: dict[str, float]
    message: str = ""


def page_key(recipe: str, page: str) -> str:
    """The key of a page: "My Recipe_2" and "loss" give "my-recipe-2-loss"."""
    name = re.sub(r"[^a-z0-9]+", "-", recipe.lower()).strip("-") or "recipe"
    return f"{name}-{page}"


def publish_pages(store: Store, recipe: str, rows: Sequence[StepRow], made: Sequence[summary.Made]) -> list[str]:
    """Create the pages of a run that is over; call inside its flow run. Returns the keys of those that were made.

    A page with nothing on it (no training, no evaluation) is left out.

    Raises:
        StoreError: an artifact of the run cannot be read.
    """
    from prefect.artifacts import create_image_artifact, create_markdown_artifact, create_table_artifact

    keys = [page_key(recipe, "metrics")]
    create_table_artifact([_row(row) for row in rows], key=keys[-1], description=f"Steps of {recipe} and their metrics")
    if curves := summary.training_curves(store, made):
        keys.append(page_key(recipe, "loss"))
        picture = base64.b64encode(summary.plot_curves(curves)).decode()
        create_image_artifact(
            f"data:image/png;base64,{picture}", key=keys[-1], description=f"Training curves: {', '.join(curves)}"
        )
    if report := summary.read_report(store, made):
        keys.append(page_key(recipe, "evaluation"))
        create_markdown_artifact(_evaluation(report), key=keys[-1], description=f"Evaluation of {recipe}")
    if last := summary.final_model(store, made) or (made[-1] if made else None):
        keys.append(page_key(recipe, "lineage"))
        create_markdown_artifact(
            _lineage(store, last), key=keys[-1], description=f"What {last.step} of {recipe} was made from"
        )
    return keys


def _row(row: StepRow) -> dict[str, Any]:
    return {
        "step": row.step,
        "stage": row.stage,
        "state": row.status,
        "seconds": None if row.seconds is None else round(row.seconds, 1),
        "artifact": row.artifact or "",
        "metrics": " · ".join(f"{name} {figures.number(value)}" for name, value in row.metrics.items()),
        "message": row.message,
    }


def _evaluation(report: dict[str, Any]) -> str:
    headings, rows = summary.results_table(report)
    lines = ["| " + " | ".join(["model", *headings[1:]]) + " |", "|---|" + "---:|" * (len(headings) - 1)]
    lines += ["| " + " | ".join(_plain(cell) for cell in row) + " |" for row in rows]
    for sample in report.get("samples") or []:
        lines += ["", f"**Q** {_plain(str(sample.get('prompt', '')))}", ""]
        for label, answer in (sample.get("answers") or {}).items():
            mark = {True: " ✓", False: " ✗"}.get(answer.get("correct"), "")
            lines.append(f"- **{_plain(label)}** {_plain(str(answer.get('completion', '')))}{mark}")
    return "\n".join(lines)


def _lineage(store: Store, last: summary.Made) -> str:
    graph = trace(store, last.artifact)
    return "\n".join(
        [
            f"`{last.artifact}` ({last.step})",
            "",
            "```mermaid",
            mermaid(graph),
            "```",
            "",
            "```",
            tree(graph).replace("```", "'''"),
            "```",
        ]
    )


def _plain(text: str) -> str:
    """Text of a model or data set on one line, without meaning as Markdown or HTML."""
    flat = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    flat = flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_|\[\]#~$!])", r"\\\1", flat)
