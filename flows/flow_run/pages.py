"""The pages that a run leaves in Prefect: artifacts that say what ran, what was reused and why, and how good it is.

Keys are the recipe's name and what the page is, so that each page of a recipe has a history over its runs:
`quickstart-run` (the answers in one page), `quickstart-metrics`, `quickstart-loss`, `quickstart-evaluation`,
`quickstart-lineage`. Prefect allows lowercase letters, digits and dashes in a key.

Where a lineage browser runs (`HEADRACE_BROWSER_URL`, which `headrace up` sets), digests and runs link to its pages.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flows import figures
from flows.command import summary
from flows.flow_run.curves import draw_curves
from flows.lineage.graph import trace
from flows.lineage.render import mermaid, tree
from stages.artifacts import Store

BROWSER = "HEADRACE_BROWSER_URL"


@dataclass(frozen=True)
class StepRow:
    """A step of the run as its page shows it; `reason` is why it ran, or why it did not have to."""

    step: str
    stage: str
    status: str
    artifact: str | None
    seconds: float | None
    metrics: dict[str, float]
    message: str = ""
    reason: str = ""


def page_key(recipe: str, page: str) -> str:
    """The key of a page: "My Recipe_2" and "loss" give "my-recipe-2-loss"."""
    name, rest = (re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") for text in (recipe, page))
    return f"{name or 'recipe'}-{rest}"


class PageMaker:
    """Makes the pages of a run that is over; to be used inside its flow run.

    Args:
        recipe: name of the recipe.
        run: name of the run.
    """

    def __init__(self, store: Store, recipe: str, run: str) -> None:
        self.store, self.recipe, self.run = store, recipe, run

    def publish(self, rows: Sequence[StepRow], made: Sequence[summary.Made]) -> list[str]:
        """Create the pages. Returns the keys of those that were made: one with nothing on it is left out.

        Raises:
            StoreError: an artifact of the run cannot be read.
        """
        from prefect.artifacts import create_image_artifact, create_markdown_artifact, create_table_artifact

        last = summary.final_model(self.store, made) or (made[-1] if made else None)
        report = summary.read_report(self.store, made)
        keys = [page_key(self.recipe, "run"), page_key(self.recipe, "metrics")]
        create_markdown_artifact(
            run_page(self.recipe, self.run, self.store.url, rows, last, report),
            key=keys[0],
            description=f"What ran of {self.recipe}, what was reused and why, and what came out",
        )
        create_table_artifact(
            [_row(row) for row in rows], key=keys[1], description=f"Steps of {self.recipe} and their metrics"
        )
        if curves := summary.training_curves(self.store, made):
            keys.append(page_key(self.recipe, "loss"))
            picture = base64.b64encode(draw_curves(curves).encode()).decode()
            create_image_artifact(
                f"data:image/svg+xml;base64,{picture}",
                key=keys[-1],
                description=f"Training curves: {', '.join(curves)}",
            )
        if report:
            keys.append(page_key(self.recipe, "evaluation"))
            create_markdown_artifact(_evaluation(report), key=keys[-1], description=f"Evaluation of {self.recipe}")
        if last:
            keys.append(page_key(self.recipe, "lineage"))
            create_markdown_artifact(
                _lineage(self.store, last),
                key=keys[-1],
                description=f"What {last.step} of {self.recipe} was made from",
            )
        return keys


def browser_link(text: str, kind: str, name: str) -> str:
    """Markdown that leads to the lineage browser's page of an artifact, run or ref; plain text without a browser."""
    browser = os.environ.get(BROWSER, "").rstrip("/")
    return f"[{text}]({browser}/{kind}/{name})" if browser else text


def run_page(
    recipe: str,
    run: str,
    store: str,
    rows: Sequence[StepRow],
    last: summary.Made | None,
    report: dict[str, Any] | None,
) -> str:
    """Markdown that answers: what ran, what was reused and why, how good is it, where is the model."""
    ran = [row for row in rows if row.status == "done"]
    reused = [row for row in rows if row.status == "cached"]
    ill = [row for row in rows if row.status not in ("done", "cached")]
    seconds = sum(row.seconds or 0.0 for row in ran)
    lines = [
        f"Run {browser_link(_plain(run), 'run', run)} of {_plain(recipe)}: **{len(ran)} ran** "
        f"({figures.duration(seconds)} of steps), **{len(reused)} reused**"
        + (f", **{len(ill)} did not end well**" if ill else ""),
        "",
        "| step | | why | took | result |",
        "|---|---|---|---:|---|",
    ]
    for row in rows:
        why = row.message if row.status in ("failed", "skipped", "stopped") else _why(row)
        took = figures.duration(row.seconds) if row.seconds is not None and row.status != "cached" else ""
        digest = figures.short(row.artifact)
        result = browser_link(f"`{digest}`", "artifact", row.artifact) if row.artifact else ""
        lines.append(f"| {_plain(row.step)} | {row.status} | {_plain(why)} | {took} | {result} |")
    if report:
        lines += ["", "**How good**", "", *_table(report)]
    if last is not None:
        short = (
            f"sha256:{figures.short(last.artifact)}"  # a whole one is wider than the page; the table of metrics has it
        )
        link = browser_link(f"`{short}`", "artifact", last.artifact)
        lines += ["", f"**The model** is {_plain(last.step)}: {link} in store `{store}`", ""]
        lines += ["```", f"headrace pull {short} my-model --store {store}", "```"]
    return "\n".join(lines)


def _why(row: StepRow) -> str:
    if row.status == "cached":
        return row.message or row.reason or "same inputs, settings and code as a result in the store"
    return row.reason or "never run"


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


def _table(report: dict[str, Any]) -> list[str]:
    headings, rows = summary.results_table(report)
    lines = ["| " + " | ".join(["model", *headings[1:]]) + " |", "|---|" + "---:|" * (len(headings) - 1)]
    return [*lines, *("| " + " | ".join(_plain(cell) for cell in row) + " |" for row in rows)]


def _evaluation(report: dict[str, Any]) -> str:
    lines = _table(report)
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
            f"{browser_link(f'`{last.artifact}`', 'artifact', last.artifact)} ({last.step})",
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
