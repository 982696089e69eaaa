"""Eight processes at the same keys: one winner each time, no lost update."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from contention import KEYS, REFS

from stages.artifacts import open_store, parse_result, read_lease, read_ref, result_key, verify_all

PROCESSES = 8


def contend(url: str, folder: Path, seconds: float) -> None:
    shared = folder / "shared"
    shared.mkdir(parents=True)
    for number in range(3):
        (shared / f"{number}.txt").write_text(f"{number}" * 1000)
    program = Path(__file__).with_name("contention.py")
    commands = [[sys.executable, str(program), url, str(folder), str(n), str(seconds)] for n in range(PROCESSES)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    said = [process.communicate(timeout=seconds + 120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * PROCESSES
    won = [json.loads(text) for text in said]

    store = open_store(url)
    assert len({digest for each in won for digest in each["same"]}) == 1
    assert sum(each["overlaps"] for each in won) == 0
    for key in KEYS:
        tokens = sorted(token for each in won for name, token in each["tokens"] if name == key)
        assert tokens == list(range(1, len(tokens) + 1))  # each lease was given to one, and none was skipped
        lease = read_lease(store, key)
        assert lease is not None
        assert (lease.holder, lease.token) == (None, len(tokens))
        written = sorted((token, digest) for each in won for name, token, digest in each["written"] if name == key)
        result = parse_result(store, result_key("count", key))
        assert [(old["token"], old["artifact"]) for old in result.history] == written[:-1]
        assert (result.token, result.artifact) == written[-1]
    for name in REFS:
        history = read_ref(store, name).history
        moved = sorted(digest for each in won for ref, digest in each["moved"] if ref == name)
        assert sorted(move.artifact for move in history) == moved
        assert [move.previous for move in history] == [None, *(move.artifact for move in history[:-1])]
    assert list(verify_all(store)) == []
    counts = {what: sum(len(each[what]) for each in won) for what in ("same", "moved", "tokens", "written")}
    print(f"{PROCESSES} processes, {seconds:.0f} s: {counts}, {sum(each['refused'] for each in won)} leases refused")


def test_eight_processes_win_one_at_a_time_and_lose_no_update(store_url: str, tmp_path: Path) -> None:
    contend(store_url, tmp_path / "work", 2.0)


@pytest.mark.slow
def test_eight_processes_win_one_at_a_time_for_a_minute(store_url: str, tmp_path: Path) -> None:
    contend(store_url, tmp_path / "work", 60.0)
