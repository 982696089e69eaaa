"""How long the pages of the lineage browser take on a large store, over HTTP, from the real command.

Each sort of page is asked for once for each of several things chosen at random (other artifacts, runs and files each
time, so that nothing is warm but the process), and the median is told. Every answer must be 200 and name its subject.
"""

from __future__ import annotations

import http.client
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from urllib.parse import quote

from flows.lineage import queries
from flows.lineage.index import open_index
from stages.artifacts import open_store


def page_times(store: Path, times: int = 9) -> dict[str, float]:
    """Sort of page -> median seconds of one, on a store whose index is made.

    Args:
        times: how many pages of each sort are asked for.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "flows.lineage.browser", "--port", "0", "--store", str(store)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        found = re.search(r"http://localhost:(\d+)", process.stdout.readline())
        assert found is not None, "browse did not start"
        client = http.client.HTTPConnection("localhost", int(found[1]), timeout=120)
        _seconds(client, "/", "Overview")  # the first page loads the templates
        return {
            sort: median(_seconds(client, path, named) for path, named in pages)
            for sort, pages in _addresses(store, times).items()
        }
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def _seconds(client: http.client.HTTPConnection, path: str, named: str) -> float:
    begun = time.perf_counter()
    client.request("GET", quote(path, safe="/:?=&@,"))
    answer = client.getresponse()
    text = answer.read().decode()
    took = time.perf_counter() - begun
    if answer.status != 200 or named not in text:
        raise AssertionError(f"{path} gave {answer.status} without {named!r}")
    return took


def _addresses(store: Path, times: int) -> dict[str, list[tuple[str, str]]]:
    """Sort of page -> (address, text that must be on it)."""
    rng = random.Random(0)
    index = open_index(open_store(store))
    total = queries.count_runs(index)
    runs = [queries.runs(index, limit=1, offset=rng.randrange(total))[0].name for _ in range(times)]
    kinds = ("checkpoint", "dataset", "report", "rollouts", "source")
    some = {
        kind: [
            queries.artifacts(
                index, kind=kind, limit=1, offset=rng.randrange(queries.count_artifacts(index, kind=kind))
            )[0]
            for _ in range(times)
        ]
        for kind in kinds
    }
    files = [queries.files(index, item.digest, limit=1)[0] for item in some["source"]]
    references = [ref.name for ref in queries.all_refs(index)]
    models = [item.digest for item in some["checkpoint"]]
    sorts = {
        "overview": [("/", "Overview")] * times,
        "runs": [(f"/runs?page={rng.randrange(total // 50 or 1)}", "Runs") for _ in range(times)],
        "run": [(f"/run/{name}", name) for name in runs],
        "artifacts": [(f"/artifacts?kind={kind}", kind) for kind in kinds for _ in range(times // len(kinds) + 1)],
        **{f"artifact {kind}": [(f"/artifact/{item.digest}", item.digest) for item in some[kind]] for kind in kinds},
        "lineage": [(f"/artifact/{digest}/lineage", digest[7:19]) for digest in models],
        "room": [("/room", "By stage")] * times,
        "references": [("/refs", "References")] * times,
        "reference": [(f"/ref/{name}", name) for name in (rng.choices(references, k=times) if references else [])],
        "compare": [
            (f"/compare?a={a}&b={b}", a[7:19]) for a, b in zip(models, reversed(models), strict=True) if a != b
        ],
        "search": [(f"/search?q={text}", text) for text in (*runs, "grpo", "loss", models[0][7:15], files[0].path)],
        "impact of a file": [(f"/file/{file.sha256}", file.sha256) for file in files],
        "metric": [(f"/metric/{name}", "Metric") for name in rng.choices(queries.metric_names(index), k=times)],
    }
    return {sort: pages for sort, pages in sorts.items() if pages}


if __name__ == "__main__":
    for sort, seconds in page_times(Path(sys.argv[1])).items():
        print(f"{sort:<24} {1000 * seconds:7.0f} ms")
