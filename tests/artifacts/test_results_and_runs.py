"""Results, runs and logs."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from stages.artifacts import (
    Damaged,
    NotInStore,
    Result,
    Store,
    append_log,
    list_runs,
    processes,
    publish,
    read_log,
    read_result,
    read_run,
    result_key,
    results,
    verify_all,
    write_result,
    write_run,
)

KEY = "ab" * 32


def artifact(tmp_path: Path, store: Store, text: str) -> str:
    folder = tmp_path / f"folder-{text}"
    folder.mkdir(exist_ok=True)
    (folder / "a.txt").write_text(text)
    return publish(store, folder, "report")


def a_result(digest: str, **changes: Any) -> Result:
    values: dict[str, Any] = {
        "artifact": digest,
        "kind": "report",
        "stage": "sft",
        "step": "sft",
        "key": KEY,
        "run": "run-1",
        "config": {"learning_rate": 1e-3},
        "identity": {"learning_rate": 1e-3},
        "started": "2026-11-30T10:00:00.000+00:00",
        "finished": "2026-11-30T10:00:01.000+00:00",
        "metrics": {"loss": 1.25},
    }
    return Result(**(values | changes))


def test_a_result_comes_back_as_it_was_written(tmp_path: Path, store: Store) -> None:
    result = a_result(artifact(tmp_path, store, "x"), outputs={"rollouts": artifact(tmp_path, store, "y")})
    assert read_result(store, "sft", KEY) is None
    assert write_result(store, result) == result
    assert read_result(store, "sft", KEY) == result
    assert read_result(store, "dpo", KEY) is None
    assert read_result(store, "sft", "cd" * 32) is None
    assert [info.key for info in store.list("results/")] == [f"results/sft/{KEY}.json"]


def test_metrics_that_are_not_numbers_survive(tmp_path: Path, store: Store) -> None:
    metrics = {"loss": float("nan"), "gap": float("inf")}
    write_result(store, a_result(artifact(tmp_path, store, "x"), metrics=metrics, record={"deep": [float("-inf")]}))
    result = read_result(store, "sft", KEY)
    assert result is not None
    assert math.isnan(result.metrics["loss"])
    assert result.metrics["gap"] == math.inf


@pytest.mark.parametrize("which", ["artifact", "output"])
def test_a_result_is_no_hit_unless_every_object_is_there(tmp_path: Path, store: Store, which: str) -> None:
    main, side = artifact(tmp_path, store, "main"), artifact(tmp_path, store, "side")
    write_result(store, a_result(main, outputs={"rollouts": side}))
    assert read_result(store, "sft", KEY) is not None
    text = b"main" if which == "artifact" else b"side"
    blob = next(info.key for info in store.list("blobs/") if store.get(info.key) == text)
    store.delete(blob)
    assert read_result(store, "sft", KEY) is None
    store.put(blob, text[:2])
    assert read_result(store, "sft", KEY) is None
    store.put(blob, text)
    assert read_result(store, "sft", KEY) is not None
    digest = main if which == "artifact" else side
    store.delete(f"manifests/{digest[7:9]}/{digest[7:]}.json")
    assert read_result(store, "sft", KEY) is None
    found = list(verify_all(store))
    assert [damage.key for damage in found] == [f"results/sft/{KEY}.json"]
    assert digest in found[0].problem


def test_a_result_cannot_be_written_before_its_artifacts(tmp_path: Path, store: Store) -> None:
    with pytest.raises(NotInStore, match="publish it before its result"):
        write_result(store, a_result("sha256:" + "0" * 64))
    with pytest.raises(NotInStore):
        write_result(store, a_result(artifact(tmp_path, store, "x"), outputs={"a": "sha256:" + "0" * 64}))
    assert list(store.list("results/")) == []


def test_an_older_result_becomes_history_that_says_whether_bytes_differ(tmp_path: Path, store: Store) -> None:
    one, two = artifact(tmp_path, store, "one"), artifact(tmp_path, store, "two")
    write_result(store, a_result(one, run="run-1"))
    write_result(store, a_result(one, run="run-2"))
    write_result(store, a_result(two, run="run-3"))
    stored = write_result(store, a_result(two, run="run-4", outputs={"side": one}))
    assert [(entry["run"], entry["artifact"], entry["same_bytes"]) for entry in stored.history] == [
        ("run-1", one, True),
        ("run-2", one, False),
        ("run-3", two, False),
    ]
    assert read_result(store, "sft", KEY) == stored
    assert all("history" not in entry for entry in stored.history)


def test_results_are_listed_newest_first_even_without_their_artifacts(tmp_path: Path, store: Store) -> None:
    digest = artifact(tmp_path, store, "x")
    for stage, key, second in (("sft", "1" * 64, 1), ("dpo", "2" * 64, 3), ("sft", "3" * 64, 2)):
        finished = f"2026-11-30T10:00:0{second}.000+00:00"
        write_result(store, a_result(digest, stage=stage, key=key, finished=finished))
    store.delete(f"manifests/{digest[7:9]}/{digest[7:]}.json")
    assert [result.key[0] for result in results(store)] == ["2", "3", "1"]
    assert [result.key[0] for result in results(store, "sft")] == ["3", "1"]
    assert list(results(store, "grpo")) == []


def test_what_is_no_result_counts_as_none_and_is_named_by_verify(tmp_path: Path, store: Store) -> None:
    digest = artifact(tmp_path, store, "x")
    write_result(store, a_result(digest))
    text = store.get(f"results/sft/{KEY}.json")
    other = "cd" * 32
    for data in (b"", b"{}", text[:-5], text.replace(digest.encode(), b"sha256:x"), text):
        store.put(f"results/sft/{other}.json", data)  # the last one belongs to another key
        assert read_result(store, "sft", other) is None
        assert [result.key for result in results(store)] == [KEY]
        assert [damage.key for damage in verify_all(store)] == [f"results/sft/{other}.json"]


def test_names_of_results_stay_inside_their_folder() -> None:
    assert result_key("my.stage", "0123abcd") == "results/my.stage/0123abcd.json"
    for stage, key in (("../x", KEY), ("a/b", KEY), ("", KEY), ("sft", "../x"), ("sft", ""), ("sft", "AB" * 32)):
        with pytest.raises(ValueError):
            result_key(stage, key)


def test_runs_are_written_replaced_and_listed_newest_first(store: Store) -> None:
    assert list(list_runs(store)) == []
    assert read_run(store, "run-1") is None
    write_run(store, {"id": "run-1", "started": "2026-11-30T10:00:00+00:00", "state": "running"})
    write_run(store, {"id": "golden-otter", "started": "2026-11-30T11:00:00+00:00"})
    write_run(store, {"id": "run-1", "started": "2026-11-30T10:00:00+00:00", "state": "done"})
    run = read_run(store, "run-1")
    assert run is not None
    assert run["state"] == "done"
    assert [run["id"] for run in list_runs(store)] == ["golden-otter", "run-1"]
    store.put("runs/bad.json", b"{")
    with pytest.raises(Damaged, match=r"runs/bad\.json"):
        read_run(store, "bad")
    assert len(list(list_runs(store))) == 2
    for bad in ({}, {"id": ""}, {"id": "../x"}, {"id": "a/b"}, {"id": "x", "y": object()}, {"id": "x", "y": math.nan}):
        with pytest.raises(ValueError):
            write_run(store, bad)


def test_a_run_whose_process_was_killed_is_not_running_any_more(store: Store) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    steps = {"base": {"status": "running"}, "sft": {"status": "waiting"}, "data": {"status": "done"}}
    here = {"pid": child.pid, "place": processes.place(), "born": processes.born(child.pid)}
    run: dict[str, Any] = {"id": "golden-otter", "state": "running", "started": "2026", "steps": steps}
    for number, process in enumerate((here, here | {"place": "another"}, {"pid": child.pid}, here | {"pid": "x"})):
        write_run(store, run | {"id": f"otter-{number}"} | process)
    write_run(store, run | {"id": "otter-4", "state": "done"} | here)
    states = {found["id"]: found["state"] for found in list_runs(store)}
    assert states == {f"otter-{number}": "running" for number in range(4)} | {"otter-4": "done"}
    child.kill()
    child.wait()
    assert [(read_run(store, f"otter-{number}") or {})["state"] for number in range(1, 5)] == [*["running"] * 3, "done"]
    killed = read_run(store, "otter-0")
    assert killed is not None
    assert killed["state"] == "killed"
    assert {name: step["status"] for name, step in killed["steps"].items()} == {
        "base": "killed",
        "sft": "stopped",
        "data": "done",
    }


def test_a_run_of_another_machine_that_is_silent_for_long_is_lost_until_it_is_heard_of_again(store: Store) -> None:
    steps = {"base": {"status": "running"}, "sft": {"status": "waiting"}, "data": {"status": "done"}}
    run: dict[str, Any] = {"id": "far-otter", "state": "running", "started": "2026", "steps": steps, "place": "another"}
    here = {"place": processes.place(), "pid": os.getpid(), "born": processes.born(os.getpid())}
    others = {"patient": {"heartbeat": 60}, "older": {}, "here": {"heartbeat": 0.1} | here, "odd": {"heartbeat": "x"}}
    for name, more in others.items():
        write_run(store, run | {"id": name} | more)
    write_run(store, run | {"heartbeat": 0.3})
    assert (read_run(store, "far-otter") or {})["state"] == "running"
    limit = time.monotonic() + 30
    while (read_run(store, "far-otter") or {})["state"] == "running" and time.monotonic() < limit:
        time.sleep(0.2)
    found = {document["id"]: document["state"] for document in list_runs(store)}
    assert found == {"far-otter": "lost"} | dict.fromkeys(others, "running")
    lost = read_run(store, "far-otter") or {}
    assert {name: step["status"] for name, step in lost["steps"].items()} == {
        "base": "lost",
        "sft": "stopped",
        "data": "done",
    }
    write_run(store, run | {"heartbeat": 0.3})
    assert (read_run(store, "far-otter") or {})["state"] == "running"


def test_logs_grow_by_step_and_read_by_run_in_order_of_time(store: Store) -> None:
    append_log(store, "run-1", "sft", [{"time": 1.0, "text": "a"}, {"time": 4.0, "text": "ü\n\ud800"}])
    append_log(store, "run-1", "dpo", [{"time": 3, "text": "b"}])
    append_log(store, "run-1", "sft", [])
    append_log(store, "run-1", "sft", [{"time": 5, "path": Path("/x")}])
    append_log(store, "run-10", "sft", [{"time": 2, "text": "of another run"}])
    assert [event["time"] for event in read_log(store, "run-1", "sft")] == [1.0, 4.0, 5]
    assert [event["time"] for event in read_log(store, "run-1")] == [1.0, 3, 4.0, 5]
    assert list(read_log(store, "run-2", "sft")) == []
    assert list(read_log(store, "run-2")) == []
    for name in ("../x", "", "a/b", "x\n"):
        with pytest.raises(ValueError):
            append_log(store, name, "sft", [{"a": 1}])
        with pytest.raises(ValueError):
            append_log(store, "run", name, [{"a": 1}])


def test_a_log_line_cut_short_by_a_kill_is_left_out(store: Store) -> None:
    append_log(store, "run", "sft", [{"time": 1}])
    store.append("logs/run/sft.jsonl", b'{"time": 2, "te')
    assert list(read_log(store, "run", "sft")) == [{"time": 1}]
