"""A small chain of stages of its own, written to a folder: words -> model -> better -> report. It needs no torch."""

from __future__ import annotations

import textwrap
from pathlib import Path

WORDS = """
from stages.contract import Input, StageConfig

class Config(StageConfig):
    NEEDS_TORCH = False
    INPUTS = {"data": Input(("source",))}
    OUTPUT = "dataset"
    bad: bool = False
"""
WORDS_STAGE = """
from stages.contract import Refused

def run(context):
    text = "".join(path.read_text() for path in sorted(context.inputs["data"].rglob("*.txt")))
    if context.config.bad:
        raise Refused('words.txt line 3: "messages" is missing')
    (context.output / "words.txt").write_text(" ".join(sorted(text.split())))
    context.log(f"read {len(text)} characters")
    context.summary(rows=len(text.split()))
"""
TRAIN = """
from typing import Annotated
from stages.contract import Input, NotIdentity, StageConfig

class Config(StageConfig):
    NEEDS_TORCH = False
    INPUTS = {"data": Input(("dataset",)), "model": Input(("checkpoint",), required=False)}
    OUTPUT = "checkpoint"
    rate: float = 0.1
    max_steps: int = 3
    pause: Annotated[float, NotIdentity()] = 0.0
    ignore_stop: Annotated[bool, NotIdentity()] = False
    hold: Annotated[str, NotIdentity()] = ""
"""
# `hold` is a file: while it is there the stage stays at its second step, and says so by a file HOLD.here.
TRAIN_STAGE = """
import json, time
from pathlib import Path
from stages.contract import Stopped

def run(context):
    config = context.config
    latest = context.work.latest()
    done, rows = 0, []
    if latest is not None:
        done = latest[0]
        rows = json.loads((latest[1] / "rows.json").read_text())
        context.resumed(done)
    while done < config.max_steps:
        done += 1
        time.sleep(config.pause)
        rows.append({"step": done, "loss": 1.0 / done})
        context.metric(done, loss=1.0 / done)
        context.progress(done, config.max_steps, loss=1.0 / done, tokens_per_second=1000.0)
        while config.hold and done == 2 and Path(config.hold).exists():
            Path(config.hold + ".here").touch()
            if context.stop_requested and not config.ignore_stop:
                break
            time.sleep(0.05)
        if context.stop_requested and not config.ignore_stop and done < config.max_steps:
            folder = context.scratch / f"save{done}"
            folder.mkdir()
            (folder / "rows.json").write_text(json.dumps(rows))
            context.work.save(done, folder)
            context.work.wait()
            context.saved(done, 0.01)
            raise Stopped(f"stopped at step {done}")
    (context.output / "training.jsonl").write_text("".join(json.dumps(row) + chr(10) for row in rows))
    (context.output / "config.json").write_text(json.dumps({"rate": config.rate}))
    context.summary(loss=1.0 / done)
"""
REPORT = """
from stages.contract import Input, StageConfig

class Config(StageConfig):
    NEEDS_TORCH = False
    INPUTS = {"models": Input(("checkpoint",), many=True)}
    OUTPUT = "report"
"""
REPORT_STAGE = """
import json

def run(context):
    labels = list(context.many("models"))
    models = {name: {"exact_match": 0.25 * (i + 1), "exact_match_stderr": 0.022} for i, name in enumerate(labels)}
    answers = {name: {"completion": f"Answer: {i}", "correct": bool(i)} for i, name in enumerate(labels)}
    samples = [{"prompt": "What is 0 + 1?", "answers": answers}]
    report = {"models": models, "counts": {"prompts": 500}, "samples": samples}
    (context.output / "report.json").write_text(json.dumps(report))
    figures = {f"{name}/exact_match": values["exact_match"] for name, values in models.items()}
    context.summary(models=len(labels), **figures)
"""
RECIPE = """
name: toy
steps:
  words:  {stage: toy.words, inputs: {data: "data/*.txt"}}
  model:  {stage: toy.train, inputs: {data: words}}
  better: {stage: toy.train, inputs: {data: words, model: model}, rate: 0.2}
  report: {stage: toy.report, inputs: {models: [model, better]}}
"""


def write_toy(folder: Path) -> Path:
    """Write the stages, their data and the recipe to a folder. Returns the recipe's path."""
    stages = {"words": (WORDS, WORDS_STAGE), "train": (TRAIN, TRAIN_STAGE), "report": (REPORT, REPORT_STAGE)}
    for name, (config, stage) in stages.items():
        package = folder / "toy" / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "config.py").write_text(textwrap.dedent(config))
        (package / "stage.py").write_text(textwrap.dedent(stage))
    (folder / "toy" / "__init__.py").write_text("")
    (folder / "data").mkdir()
    (folder / "data" / "a.txt").write_text("to be or not to be")
    recipe = folder / "toy.yaml"
    recipe.write_text(RECIPE)
    return recipe
