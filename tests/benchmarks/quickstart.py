"""The quickstart over three seeds: what each model scores, and how many seconds each step takes.

It times nothing against a peer. Its ratios say by how much each stage of training beats the one before it in greedy
exact match, the least over the seeds; its goals are that every one does by more than three standard errors of a
difference (about 9 points at 500 problems).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from stages.artifacts import open_store, pull
from tests.benchmarks._machine import ROOT, machine

MODELS = ("base", "sft", "dpo", "grpo")
MEASURES = ("bits_per_byte", "exact_match", "sampled", "shows_work", "sampled_showing_work", "preference_accuracy")
GOAL = 0.09


def run(seed: int, store: Path) -> tuple[dict[str, dict[str, float]], dict[str, float], float]:
    """Run the recipe whole. Returns the report's models, the seconds of each step, and those of the run."""
    command = [sys.executable, "-m", "flows.cli", "run", "quickstart", "--no-prefect", "--json"]
    command += ["--store", str(store), "--set", f"seed={seed}"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    last = ""
    for line in process.stdout:
        event = json.loads(line)
        if event.get("type") == "step" and event.get("state") in ("done", "failed"):
            print(f"seed {seed}: {event['step']} {event['state']} in {event['seconds']} s", flush=True)
        last = line
    if process.wait() != 0:
        raise SystemExit(f"the run of seed {seed} ended with code {process.returncode}")
    final: dict[str, Any] = json.loads(last)
    folder = store / f"report-{seed}"
    pull(open_store(store), final["steps"]["report"]["artifact"], folder)
    report = json.loads((folder / "report.json").read_text())
    return report["models"], {step: made["seconds"] for step, made in final["steps"].items()}, final["seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.quickstart")
    parser.add_argument("--quick", action="store_true", help="one seed")
    parser.add_argument("--store", type=Path, help="an empty folder to keep the runs in")
    given = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    seeds = [0] if given.quick else [0, 1, 2]
    figures: dict[str, dict[str, float]] = {}
    seconds: dict[str, dict[str, float]] = {}
    gains: dict[str, list[float]] = {f"{after}_over_{before}": [] for before, after in pairwise(MODELS)}
    with tempfile.TemporaryDirectory(prefix="headrace-quickstart-") as temporary:
        for seed in seeds:
            models, steps, whole = run(seed, (given.store or Path(temporary)).absolute())
            for label in MODELS:
                figures[f"seed {seed} {label}"] = {
                    name: models[label][name] for name in MEASURES if name in models[label]
                }
            seconds[f"seed {seed}"] = steps | {"whole run": whole}
            for before, after in pairwise(MODELS):
                gains[f"{after}_over_{before}"].append(models[after]["exact_match"] - models[before]["exact_match"])
    columns = list(seconds["seed 0"])
    table = ["Seconds of each step (steps that do not need one another overlap):", ""]
    table += [f"| | {' | '.join(columns)} |", "| --- " * (len(columns) + 1) + "|"]
    table += [f"| {name} | " + " | ".join(f"{row[key]:.1f}" for key in columns) + " |" for name, row in seconds.items()]
    result = {
        "benchmark": "quickstart",
        "ratios": {f"exact match, {name.replace('_', ' ')} (least gain)": min(gain) for name, gain in gains.items()},
        "goals": {f"exact match, {name.replace('_', ' ')} (least gain)": [">=", GOAL] for name in gains},
        "figures": figures,
        "notes": ["\n".join(table)],
        "quick": given.quick,
        "machine": machine(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
