"""training.png: loss, learning rate and gradient norm of a run, drawn from its training.jsonl.

Invariant: the same records give the same bytes, with the same matplotlib: no time, host or random number enters.
"""

from __future__ import annotations

import json
from pathlib import Path

PANELS = (("loss", "loss"), ("learning_rate", "learning rate"), ("grad_norm", "gradient norm"))
PLOT = "training.png"


def draw_training(records: Path, path: Path) -> None:
    """Draw the plot of `records` (training.jsonl) into `path` (a PNG). Skipped steps leave a gap.

    The held-out loss, where it was measured, is drawn beside the loss.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = [json.loads(line) for line in records.read_text(encoding="utf-8").splitlines()]
    figure = Figure(figsize=(8, 7), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(PANELS), 1, sharex=True)
    for axis, (name, label) in zip(axes, PANELS, strict=True):
        values = [float("nan") if line.get(name) is None else line[name] for line in lines]
        axis.plot([line["step"] for line in lines], values, linewidth=1, label="training")
        if name == "loss" and (held := [line for line in lines if line.get("eval_loss") is not None]):
            axis.plot([line["step"] for line in held], [line["eval_loss"] for line in held], "o-", label="held out")
            axis.legend()
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    axes[-1].set_xlabel("step")
    figure.savefig(path, metadata={"Software": None})
