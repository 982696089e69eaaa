"""What a finished run has to tell: its evaluation, sample answers, training curves, and the model it ends in.

Everything is read from artifacts of the store, so a run whose steps were all cached tells the same as the one that
computed them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flows import figures
from stages.artifacts import Damaged, NotInStore, Store, read_manifest
from stages.evaluate.config import COLUMNS

SAMPLES = 3
ANSWER = 60  # characters of an answer that are shown


@dataclass(frozen=True)
class Made:
    """What a step of a run gave: the digest of its main artifact, with the step's stage and what it needed."""

    step: str
    stage: str
    artifact: str
    needs: tuple[str, ...] = ()


def artifact_file(store: Store, digest: str, path: str) -> bytes | None:
    """The bytes of one file of an artifact, verified; None where the artifact has no such file.

    Raises:
        NotInStore: the store has no such artifact.
        Damaged: the file's bytes are missing or not those of the manifest.
    """
    for entry in read_manifest(store, digest).files:
        if entry.path == path:
            try:
                data = store.get(entry.blob)
            except NotInStore:
                raise Damaged(f"{entry.blob} ({path} of artifact {digest}) is missing from {store.url}") from None
            if hashlib.sha256(data).hexdigest() != entry.sha256:
                raise Damaged(f"{entry.blob} ({path} of artifact {digest}) is damaged: its bytes have another hash")
            return data
    return None


def read_report(store: Store, made: Sequence[Made]) -> dict[str, Any] | None:
    """The report.json of the run's last step that gave a `report`; None where it has none."""
    for step in reversed(made):
        if read_manifest(store, step.artifact).kind != "report":
            continue
        if (data := artifact_file(store, step.artifact, "report.json")) is not None:
            report = json.loads(data)
            return report if isinstance(report, dict) else None
    return None


def results_table(report: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of a report: one row a model, the metrics that any model has as columns."""
    models: dict[str, dict[str, float]] = report.get("models") or {}
    columns = [column for column in COLUMNS if any(column[0] in metrics for metrics in models.values())]
    rows = []
    for label, metrics in models.items():
        cells = [_cell(metrics, name, share) for name, _, share in columns]
        rows.append([label, *cells])
    return ["", *(heading for _, heading, _ in columns)], rows


def _cell(metrics: Mapping[str, float], name: str, share: bool) -> str:
    if name not in metrics:
        return ""
    return figures.percent(metrics[name]) if share else figures.number(metrics[name])


def report_lines(report: Mapping[str, Any]) -> list[str]:
    """A report as lines of text: the table, how much was measured, and sample answers of every model."""
    headings, rows = results_table(report)
    if not rows:
        return []
    widths = [max(len(row[i]) for row in [headings, *rows]) for i in range(len(headings))]
    table = [
        "  " + "   ".join(cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(cells))
        for cells in (zip(row, widths, strict=True) for row in [headings, *rows])
    ]
    lines = [line.rstrip() for line in table]
    if note := _uncertainty(report):
        lines[-1] += f"   {note}"
    for sample in (report.get("samples") or [])[:SAMPLES]:
        lines += ["", *_sample_lines(sample, max(len(row[0]) for row in rows))]
    return lines


def _uncertainty(report: Mapping[str, Any]) -> str:
    """ "(500 held-out problems, ±2.2)": how many prompts, and the largest standard error in points."""
    count = (report.get("counts") or {}).get("prompts")
    errors = [metrics.get("exact_match_stderr") for metrics in (report.get("models") or {}).values()]
    known = [error for error in errors if error is not None]
    if not count or not known:
        return ""
    return f"({figures.count(count)} held-out problems, ±{100 * max(known):.1f})"


def _sample_lines(sample: Mapping[str, Any], width: int) -> list[str]:
    lines = [f"  Q  {_one_line(str(sample.get('prompt', '')), 100)}"]
    for label, answer in (sample.get("answers") or {}).items():
        mark = {True: " ✓", False: " ✗"}.get(answer.get("correct"), "")
        text = _one_line(str(answer.get("completion", "")), ANSWER) or "(nothing)"
        lines.append(f"     {label:<{width}}  {text}{mark}")
    return lines


def _one_line(text: str, limit: int) -> str:
    """Text of a model or data set on one line, without control characters, cut to a length."""
    flat = "".join(char if char.isprintable() else " " for char in text)
    flat = " ".join(flat.split())
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


def final_model(store: Store, made: Sequence[Made]) -> Made | None:
    """The last checkpoint of the chain: the one whose ancestors in the run hold the most checkpoints."""
    checkpoints: dict[str, int] = {}
    depth: dict[str, int] = {}
    for step in made:
        above = max((depth.get(name, 0) for name in step.needs), default=0)
        is_checkpoint = read_manifest(store, step.artifact).kind == "checkpoint"
        depth[step.step] = above + is_checkpoint
        if is_checkpoint:
            checkpoints[step.step] = depth[step.step]
    if not checkpoints:
        return None
    last = max(checkpoints, key=lambda name: checkpoints[name])
    return next(step for step in made if step.step == last)


def training_curves(store: Store, made: Sequence[Made]) -> dict[str, list[dict[str, float]]]:
    """Step name -> the rows of its checkpoint's training.jsonl (step, loss, ...), for the steps that trained."""
    curves = {}
    for step in made:
        data = artifact_file(store, step.artifact, "training.jsonl")
        if data is None:
            continue
        rows = [json.loads(line) for line in data.splitlines() if line.strip()]
        if any("loss" in row for row in rows):
            curves[step.step] = rows
    return curves
