"""The report of an evaluation: figures as JSON, a table in Markdown, a plot, and every completion.

Invariant: the same measurements give the same bytes (the plot too, with the same matplotlib and fonts): no times.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stages.evaluate.config import COLUMNS
from stages.evaluate.measures import Answer

_COLOURS = {
    "exact_match": "#2563eb",
    "sampled": "#93c5fd",
    "shows_work": "#a3a3a3",
    "sampled_showing_work": "#5eead4",
    "preference_accuracy": "#f59e0b",
}


@dataclass(frozen=True)
class Measured:
    """All that was measured of one model."""

    label: str
    metrics: dict[str, float]
    answers: list[Answer]

    def to_bytes(self) -> bytes:
        """As JSON, to keep with the stage's progress."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Measured:
        """What `to_bytes` kept."""
        content = json.loads(data)
        return cls(content["label"], content["metrics"], [Answer(**answer) for answer in content["answers"]])


def write_report(
    folder: Path, models: Sequence[Measured], counts: dict[str, int], samples_shown: int
) -> dict[str, Any]:
    """Write report.json, report.md, report.png and, when prompts were answered, completions.parquet.

    Args:
        counts: how much was measured: text_bytes, text_tokens, prompts, sampled, pairs.
        samples_shown: how many prompts are shown with every model's greedy answer, the first ones.

    Returns:
        The content of report.json.
    """
    report = {
        "models": {model.label: model.metrics for model in models},
        "samples": _samples(models, samples_shown),
        "counts": counts,
    }
    text = json.dumps(report, indent=2, ensure_ascii=False)
    (folder / "report.json").write_text(text + "\n", encoding="utf-8")
    (folder / "report.md").write_text(markdown(report), encoding="utf-8")
    plot(report, folder / "report.png")
    if any(model.answers for model in models):
        _write_completions(models, folder / "completions.parquet")
    return report


def _samples(models: Sequence[Measured], shown: int) -> list[dict[str, Any]]:
    greedy = {model.label: [answer for answer in model.answers if answer.sample < 0] for model in models}
    first = next(iter(greedy.values()), [])
    return [
        {
            "prompt": first[row].prompt,
            "answers": {
                label: {"completion": answers[row].completion, "correct": answers[row].score >= 1}
                for label, answers in greedy.items()
            },
        }
        for row in range(min(shown, len(first)))
    ]


def markdown(report: dict[str, Any]) -> str:
    """The report as Markdown: a table with standard errors, what was counted, and sample answers."""
    models: dict[str, dict[str, float]] = report["models"]
    columns = [column for column in COLUMNS if any(column[0] in metrics for metrics in models.values())]
    lines = ["# Evaluation", ""]
    lines.append("| model | " + " | ".join(heading for _, heading, _ in columns) + " |")
    lines.append("|---|" + "---:|" * len(columns))
    for label, metrics in models.items():
        cells = [_cell(metrics, name, share) for name, _, share in columns]
        lines.append(f"| {_escape(label)} | " + " | ".join(cells) + " |")
    lines.append("")
    lines.append("± is one standard error; a 95% interval is about ±2 of them.")
    counts = report["counts"]
    said = [
        (
            f"{counts['text_bytes']:,} bytes of text in {counts['text_tokens']:,} tokens"
            if "text_bytes" in counts
            else ""
        ),
        (f"{counts['prompts']:,} prompts answered greedily" if "prompts" in counts else ""),
        (f"{counts['sampled']} sampled answers to each prompt" if counts.get("sampled") else ""),
        (f"{counts['pairs']:,} preference pairs" if "pairs" in counts else ""),
    ]
    lines.append(f"Measured on {', '.join(part for part in said if part)}.")
    for sample in report["samples"]:
        lines += ["", f"**Q** {_escape(sample['prompt'])}", ""]
        for label, answer in sample["answers"].items():
            mark = "✓" if answer["correct"] else "✗"
            lines.append(f"- {_escape(label)}: {_escape(answer['completion']) or '(nothing)'} {mark}")
    return "\n".join(lines) + "\n"


def _cell(metrics: dict[str, float], name: str, share: bool) -> str:
    if name not in metrics:
        return ""
    error = metrics.get(f"{name}_stderr")
    if share:
        return f"{metrics[name]:.1%}" + (f" ±{100 * error:.1f}" if error is not None else "")
    return f"{metrics[name]:.3f}" if name == "bits_per_byte" else f"{metrics[name]:.1f}"


def _escape(text: str) -> str:
    """Text of a model or a dataset on one line of Markdown, without meaning as markup."""
    flat = " ".join(text.split())
    for character in "\\`*_|<>[]#":
        flat = flat.replace(
            character, f"\\{character}" if character not in "<>" else {"<": "&lt;", ">": "&gt;"}[character]
        )
    return flat


def plot(report: dict[str, Any], path: Path) -> None:
    """Bars of every share with 95% intervals, and bits per byte where it was measured."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    models: dict[str, dict[str, float]] = report["models"]
    labels = list(models)
    shares = [
        (name, heading)
        for name, heading, share in COLUMNS
        if share and any(name in metrics for metrics in models.values())
    ]
    has_bits = any("bits_per_byte" in metrics for metrics in models.values())
    panels = int(bool(shares)) + int(has_bits)
    figure = Figure(figsize=(max(4.0, 1.1 * len(labels) + 1.5) * panels, 3.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(1, panels, squeeze=False)[0])
    if shares:
        axis = axes.pop(0)
        width = 0.8 / len(shares)
        for number, (name, heading) in enumerate(shares):
            points = [place for place, label in enumerate(labels) if name in models[label]]
            axis.bar(
                [place + (number - (len(shares) - 1) / 2) * width for place in points],
                [100 * models[labels[place]][name] for place in points],
                width,
                yerr=[196 * models[labels[place]].get(f"{name}_stderr", 0.0) for place in points],
                label=heading,
                color=_COLOURS[name],
                error_kw={"elinewidth": 1, "capsize": 2},
            )
        axis.set_ylim(0, 105)
        axis.set_ylabel("% (with 95% interval)")
        axis.legend(frameon=False, fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
        axis.set_xticks(range(len(labels)), labels)
    if has_bits:
        axis = axes.pop(0)
        points = [place for place, label in enumerate(labels) if "bits_per_byte" in models[label]]
        bars = axis.bar(points, [models[labels[place]]["bits_per_byte"] for place in points], 0.6, color="#0f766e")
        axis.bar_label(bars, fmt="%.2f", fontsize=8)
        axis.set_ylabel("bits per byte (less is better)")
        axis.set_xticks(range(len(labels)), labels)
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png", metadata={"Software": None})


def _write_completions(models: Sequence[Measured], path: Path) -> None:
    rows = [{"model": model.label, **asdict(answer)} for model in models for answer in model.answers]
    schema = pa.schema(
        [
            ("model", pa.string()),
            ("id", pa.string()),
            ("prompt", pa.string()),
            ("sample", pa.int32()),
            ("completion", pa.string()),
            ("tokens", pa.int32()),
            ("finished", pa.bool_()),
            ("score", pa.float64()),
            ("style", pa.float64()),
        ]
    )
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path, compression="zstd")
