"""Lineage on a store of 100,000 artifacts and 5,000 runs: `python -m tests.benchmarks.lineage [--quick] [--store DIR]`.

The store is made first (`tests.benchmarks._lineage_store`), unless --store names one that was made before. Then its
index is made, brought up to date after nothing, one run and fifty runs, and asked: each question is the median of five,
and its answer is compared with what the store was made to hold. Last its pages are asked for over HTTP.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flows.lineage import cost, queries
from flows.lineage.graph import descend, trace
from flows.lineage.impact import impact
from flows.lineage.index import open_index
from flows.names import resolve
from stages.artifacts import open_store
from tests.benchmarks._lineage_pages import page_times
from tests.benchmarks._lineage_store import SHARED, Builder, build, run_name
from tests.benchmarks._machine import machine

GOALS: dict[str, list[Any]] = {
    "first_index_seconds": ["<=", 30.0],
    "refresh_of_nothing_seconds": ["<=", 1.0],
    "refresh_of_one_run_seconds": ["<=", 1.0],
    "impact_of_a_raw_file_seconds": ["<=", 1.0],
    "impact_of_a_shared_file_seconds": ["<=", 1.0],
    "slowest_question_seconds": ["<=", 0.3],
    "slowest_page_seconds": ["<=", 0.3],
}


def timed(function: Callable[[], Any], times: int = 5) -> tuple[float, Any]:
    """The median time of several calls, and the last answer."""
    took, answer = [], None
    for _ in range(times):
        begun = time.perf_counter()
        answer = function()
        took.append(time.perf_counter() - begun)
    return statistics.median(took), answer


def measure(folder: Path, runs: int) -> dict[str, float]:
    """Every figure, in seconds, of the store in `folder`, which has that many runs."""
    store = open_store(folder)
    figures: dict[str, float] = {}
    index = open_index(store, fresh=False)
    first = index.refresh(lambda read: print(f"\r{read:,} objects", end="", file=sys.stderr))
    print(file=sys.stderr)
    figures["first_index"] = first.seconds
    figures["refresh_of_nothing"] = timed(lambda: index.refresh())[0]
    builder = Builder(folder, seed=1)
    time.sleep(2.5)  # folders that changed within two seconds count as changed, and these shall not
    index.refresh()
    for name, count in (("one_run", 1), ("fifty_runs", 50)):
        builder.runs(count, first=runs)
        runs += count
        done = index.refresh()
        assert done.read >= 16 * count, done
        figures[f"refresh_of_{name}"] = done.seconds

    model = resolve(store, f"{run_name(SHARED)}/final", index).digest
    document = json.loads((folder / f"runs/{run_name(SHARED)}.json").read_text())
    raw = queries.files(index, document["sources"]["corpus.data"])[0]
    shared = next(file for file in queries.files(index, model) if file.path == "tokenizer.json")
    questions: dict[str, Callable[[], Any]] = {
        "list_of_runs": lambda: queries.runs(index),
        "list_of_artifacts": lambda: (queries.artifacts(index), queries.count_artifacts(index)),
        "list_of_artifacts_page_1000": lambda: queries.artifacts(index, offset=50_000),
        "run": lambda: (queries.run(index, run_name(7)), queries.steps(index, run_name(7))),
        "cost_of_a_run": lambda: cost.run_cost(index, run_name(7)),
        "artifact": lambda: (
            queries.parents(index, model),
            queries.children(index, model),
            queries.files(index, model),
            queries.makings(index, model),
            queries.metrics(index, model),
        ),
        "ancestry": lambda: trace(store, model, index),
        "cost_of_a_model": lambda: cost.model_cost(index, model),
        "references": lambda: (queries.all_refs(index), queries.history(index, "production")),
        "metric": lambda: queries.with_metric(index, "loss"),
        "name_of_an_artifact": lambda: resolve(store, "final", index),
        **{f"search_{text}": lambda text=text: queries.search(index, text) for text in ("grpo", "config", "run-0001")},
    }
    for name, ask in questions.items():
        figures[name] = timed(ask)[0]
    figures["slowest_question"] = max(figures[name] for name in questions)

    figures["impact_of_a_raw_file"], found = timed(lambda: impact(index, raw.sha256))
    made = {artifact.step for artifact in found.made}
    assert {"corpus", "chat", "base", "grpo", "final"} <= made, made
    assert sum(artifact.step == "final" for artifact in found.made) == SHARED, "the runs that share the data"
    # Thousands of checkpoints hold that one. The verb and the page count what was made from it, and list the newest.
    figures["impact_of_a_shared_file"], found = timed(lambda: impact(index, shared.sha256, limit=20))
    assert found.total > runs
    figures["impact_of_a_shared_file_with_a_list_of_all"], whole = timed(lambda: impact(index, shared.sha256), 3)
    assert len(whole.made) == found.total
    source = document["sources"]["corpus.data"]
    figures["tree_of_what_was_made"] = timed(lambda: descend(index, source), 3)[0]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a twentieth of the size")
    parser.add_argument("--store", type=Path, help="a store that was made before; it grows by 51 runs")
    given = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="headrace-lineage-"))
    os.environ["HEADRACE_CACHE_DIR"] = str(work / "cache")
    try:
        if given.store is not None:
            folder, runs = given.store, len(list((given.store / "runs").iterdir()))
        else:
            folder, runs = work / "store", 250 if given.quick else 5000
            begun = time.perf_counter()
            builder = build(folder, runs)
            print(f"made {builder.artifacts:,} artifacts in {time.perf_counter() - begun:.0f} s", file=sys.stderr)
        artifacts = sum(len(files) for _, _, files in os.walk(folder / "manifests"))
        figures = measure(folder, runs)
        pages = page_times(folder)
        figures |= {f"page_{sort.replace(' ', '_')}": seconds for sort, seconds in pages.items()}
        figures["slowest_page"] = max(pages.values())
    finally:
        shutil.rmtree(work, ignore_errors=True)
    for name, seconds in figures.items():
        print(f"{name:<32} {seconds * 1000:>12,.1f} ms")
    result = {
        "benchmark": "lineage",
        "quick": given.quick,
        "ratios": {name: figures[name.removesuffix("_seconds")] for name in GOALS},
        "goals": GOALS,
        "figures": {name: {"milliseconds": seconds * 1000} for name, seconds in figures.items()},
        "machine": machine(),
        "notes": [
            f"{artifacts:,} artifacts, {runs:,} runs; times in seconds, and below in milliseconds (medians of 5)."
        ],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
