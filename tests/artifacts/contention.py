"""One of several processes that publish, lease, write results and move references under the same names all at once.

`python contention.py STORE FOLDER NUMBER SECONDS` works until the time is over and prints one JSON object: what it won.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from stages.artifacts import Result, acquire, open_store, promote, publish, write_result

KEYS = ["aa" * 32, "bb" * 32]
REFS = ["production", "nightly"]


def main(url: str, folder: Path, number: int, seconds: float) -> dict[str, Any]:
    store, rng = open_store(url), random.Random(number)
    won: dict[str, Any] = {"tokens": [], "written": [], "moved": [], "same": [], "refused": 0, "overlaps": 0}
    shared = folder / "shared"
    until, turn = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        turn += 1
        won["same"].append(publish(store, shared, "report"))
        own = folder / f"own-{number}-{turn}"
        own.mkdir()
        (own / "name").write_text(f"{number} {turn}")
        digest = publish(store, own, "report")
        name = rng.choice(REFS)
        promote(store, name, digest, who=f"{number}")
        won["moved"].append([name, digest])
        key = rng.choice(KEYS)
        lease = acquire(store, key, stage="count", step="a", run=str(number), seconds=60.0, give_up=lambda: True)
        if lease is None:
            won["refused"] += 1
            continue
        witness = folder / f"held-{key[:2]}"
        try:
            os.close(os.open(witness, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            won["overlaps"] += 1
        won["tokens"].append([key, lease.token])
        stamp = f"2026-11-30T10:00:00.{turn % 1000:03d}+00:00"
        values = {"artifact": digest, "kind": "report", "stage": "count", "step": "a", "key": key, "run": f"{number}"}
        write_result(store, Result(**values, started=stamp, finished=stamp, config={"turn": turn}), lease)
        won["written"].append([key, lease.token, digest])
        witness.unlink()
        lease.release()
    return won


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))))
