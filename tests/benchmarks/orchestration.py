"""What orchestration costs: `python -m tests.benchmarks.orchestration [--quick]`.

An all-cached run of as many steps as the quickstart has, in a flow against a server that is there already; the time
that a step's task takes beyond a bare Prefect task that does nothing, the two taking turns; and the memory of a flow's
process, which must not hold torch. The store holds results of toy stages, so that what is measured is orchestration.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.benchmarks._machine import ROOT, machine

STEPS = 12  # as many as the quickstart has
GOALS = {"cached_run_seconds": ["<=", 5.0], "step_overhead_ms": ["<=", 100.0], "flow_process_holds_torch": ["<=", 0]}

# One process: it starts a server, then alternates the sides inside it.
SIDES = """
import json, statistics, sys, time
from pathlib import Path
sys.path.insert(0, {pipeline!r})
from flows.service.local_server import quiet_prefect, start_server, serving
quiet_prefect()
begun = time.perf_counter()
from flows.pipeline import Session, run_in_prefect
from flows.plan import make_plan
from flows.recipe import load_recipe
imports = time.perf_counter() - begun
from prefect import flow, task
from prefect.cache_policies import NO_CACHE

folder, rounds, steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])

@task(cache_policy=NO_CACHE, persist_result=False)
def nothing(number):
    return None

@flow(persist_result=False)
def bare(count):
    for number in range(count):
        nothing.submit(number).wait()

def ours(name, until=()):
    plan = make_plan(load_recipe(str(folder / "chain.yaml")), folder / "store", until=until)
    session = Session(plan, name, workers=1)
    state = run_in_prefect(session, {{"recipe": str(folder / "chain.yaml"), "store": str(folder / "store")}})
    assert state.is_completed(), state
    return session.result

def timed(function, *arguments):
    begun = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - begun

with serving(start_server()):
    ours("first")
    result = ours("second")
    assert all(step.status == "cached" for step in result.steps.values()), "equal before timed: all are cached"
    bare(steps)
    whole, one, plain, single = [], [], [], []
    for number in range(rounds):
        whole.append(timed(ours, f"all-{{number}}"))
        plain.append(timed(bare, steps))
        one.append(timed(ours, f"one-{{number}}", ("s1",)))
        single.append(timed(bare, 1))
    status = Path("/proc/self/status").read_text()
    print(json.dumps({{
        "imports": imports, "whole": whole, "plain": plain, "one": one, "single": single,
        "peak_mib": int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024,
        "torch": int("torch" in sys.modules or "transformers" in sys.modules),
    }}))
"""


def write_chain(folder: Path) -> None:
    """A chain of STEPS toy steps after one that reads a file, in the shape of a recipe."""
    sys.path.insert(0, str(ROOT / "tests" / "pipeline"))
    from toy_recipe import write_toy

    write_toy(folder)
    lines = ["name: chain", "steps:", '  s1: {stage: toy.words, inputs: {data: "data/*.txt"}}']
    lines.append("  s2: {stage: toy.train, inputs: {data: s1}}")
    for number in range(3, STEPS + 1):
        lines.append(f"  s{number}: {{stage: toy.train, inputs: {{data: s1, model: s{number - 1}}}, rate: 0.{number}}}")
    (folder / "chain.yaml").write_text("\n".join(lines) + "\n")


def measure(rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="headrace-bench-orchestration-") as name:
        folder = Path(name)
        write_chain(folder)
        script = SIDES.format(pipeline=str(ROOT / "tests" / "pipeline"))
        environment = {
            "PYTHONPATH": f"{ROOT}:{folder}",
            "PATH": "/usr/bin:/bin",
            "HOME": name,
            "PREFECT_HOME": f"{name}/prefect",
            "HEADRACE_HOME": f"{name}/headrace",
        }
        done = subprocess.run(
            [sys.executable, "-c", script, name, str(rounds), str(STEPS)],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return result


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.orchestration")
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    begun = time.perf_counter()
    found = measure(3 if quick else 9)
    middle = {name: statistics.median(found[name]) for name in ("whole", "plain", "one", "single")}
    # What one more step costs, ours and bare: the runs of one step take out what a run itself costs.
    ours = (middle["whole"] - middle["one"]) / (STEPS - 1)
    bare = (middle["plain"] - middle["single"]) / (STEPS - 1)
    result = {
        "benchmark": "orchestration",
        "ratios": {
            "cached_run_seconds": middle["whole"],
            "step_overhead_ms": 1000 * (ours - bare),
            "flow_process_holds_torch": found["torch"],
            "cached_run_vs_bare_flow": middle["whole"] / middle["plain"],
        },
        "goals": GOALS,
        "figures": {
            "all cached": {"seconds": middle["whole"], "a step ms": 1000 * ours},
            "bare prefect tasks": {"seconds": middle["plain"], "a step ms": 1000 * bare},
            "imports of a flow's process": {"seconds": found["imports"]},
            "flow process": {"peak MiB": found["peak_mib"]},
        },
        "notes": [f"A run of {STEPS} cached steps one after another, beyond the start of the server; medians."],
        "machine": machine(),
        "quick": quick,
        "seconds": round(time.perf_counter() - begun, 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
