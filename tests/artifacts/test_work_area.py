"""Saved progress: whole, verified, the last two, gone when the result is there."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from stages.artifacts import Store, StoreError, WorkArea, open_store

KEY = "ab" * 32


def snapshot(tmp_path: Path, text: str) -> Path:
    folder = tmp_path / f"snapshot-{time.monotonic_ns()}"
    (folder / "optimizer").mkdir(parents=True)
    (folder / "step.txt").write_text(text)
    (folder / "optimizer" / "state.bin").write_bytes(text.encode() * 1000)
    return folder


def area(tmp_path: Path, store: Store, warnings: list[str] | None = None) -> WorkArea:
    scratch = tmp_path / f"scratch-{time.monotonic_ns()}"
    return WorkArea(store, KEY, scratch, warn=None if warnings is None else warnings.append)


def restored(work: WorkArea) -> tuple[int, str] | None:
    found = work.latest()
    if found is None:
        return None
    step, folder = found
    text = (folder / "step.txt").read_text()
    assert (folder / "optimizer" / "state.bin").read_bytes() == text.encode() * 1000
    assert sorted(path.name for path in folder.iterdir()) == ["optimizer", "step.txt"]
    return step, text


def test_the_newest_progress_comes_back_and_two_are_kept(tmp_path: Path, store: Store) -> None:
    work = area(tmp_path, store)
    assert work.latest() is None
    for step in (0, 5, 10, 200):
        folder = snapshot(tmp_path, str(step))
        work.save(step, folder)
        work.wait()
        assert not folder.exists()
        assert restored(area(tmp_path, store)) == (step, str(step))
    assert work.steps() == [200, 10]
    assert len(list(store.list("work/"))) == 2 * 3  # a record and two files for each
    assert restored(WorkArea(store, "cd" * 32, tmp_path / "other")) is None  # of another key


def test_a_save_says_that_it_is_done_once_it_can_be_restored(tmp_path: Path, store: Store) -> None:
    work = area(tmp_path, store)
    seen: list[object] = []
    work.save(3, snapshot(tmp_path, "three"), lambda: seen.append(restored(area(tmp_path, store))))
    work.wait()
    assert seen == [(3, "three")]


def test_saving_the_same_step_again_gives_the_later_one(tmp_path: Path, store: Store) -> None:
    work = area(tmp_path, store)
    for text in ("first", "second"):
        work.save(7, snapshot(tmp_path, text))
        work.wait()
        time.sleep(1.1 if store.remote else 0.02)  # S3 dates objects by the second
    assert restored(work) == (7, "second")


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "record"])
def test_damaged_progress_is_passed_over_for_the_one_before(tmp_path: Path, store: Store, damage: str) -> None:
    work = area(tmp_path, store)
    for step in (1, 2):
        work.save(step, snapshot(tmp_path, f"step {step}"))
        work.wait()
    record = next(info.key for info in store.list(f"work/{KEY}/000000000002-"))
    token = record.removesuffix(".json").rpartition("-")[2]
    key = next(store.list(f"work/{KEY}/data/{token}/")).key
    data = store.get(key)
    if damage == "flip":
        store.put(key, bytes([data[0] ^ 1]) + data[1:])
    elif damage == "truncate":
        store.put(key, data[:3])
    elif damage == "remove":
        store.delete(key)
    else:
        store.put(record, b'{"step": 2, "files": [{"path": "../../x"}], "seconds": 0}')
    warnings: list[str] = []
    again = area(tmp_path, store, warnings)
    assert restored(again) == (1, "step 1")
    assert len(warnings) == 1
    assert "saved progress of step 2 is unusable" in warnings[0]
    assert again.steps() == [1]
    again.save(2, snapshot(tmp_path, "step 2 again"))
    assert restored(again) == (2, "step 2 again")  # latest waits for the save in flight
    assert again.steps() == [2, 1]


def test_a_failed_save_is_reported_and_leaves_the_last_good_one(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    work = area(tmp_path, store)
    work.save(1, snapshot(tmp_path, "good"))
    work.wait()
    (tmp_path / "store" / "tmp").rmdir()
    (tmp_path / "store" / "tmp").write_text("in the way")
    folder = snapshot(tmp_path, "bad")
    said: list[str] = []
    work.save(2, folder, lambda: said.append("saved"))
    with pytest.raises(StoreError, match=r"progress could not be saved: .*is a file where a folder must be"):
        work.wait()
    work.wait()  # said once
    assert not said
    assert (folder / "step.txt").exists()  # what was not saved is not removed
    work.save(3, folder)
    with pytest.raises(StoreError, match="progress could not be saved"):
        work.save(4, snapshot(tmp_path, "later"))
    assert restored(work) == (1, "good")
    (tmp_path / "store" / "tmp").unlink()
    work.save(5, folder)
    work.wait()
    assert restored(work) == (5, "bad")


def test_only_one_save_is_in_flight(tmp_path: Path, store: Store) -> None:
    work = area(tmp_path, store)
    for step in range(6):
        work.save(step, snapshot(tmp_path, str(step)))
        assert sum(thread.name == "save" for thread in threading.enumerate()) <= 1
    work.wait()
    assert work.steps() == [5, 4]


def test_what_cannot_be_saved_is_refused_at_once(tmp_path: Path, store: Store) -> None:
    work = area(tmp_path, store)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no files"):
        work.save(1, tmp_path / "empty")
    for step in (-1, 1.5, True, 10**12):
        with pytest.raises(ValueError, match="progress is saved at a step"):
            work.save(step, snapshot(tmp_path, "x"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is not a stage key"):
        WorkArea(store, "../x", tmp_path)


def test_dropping_leaves_nothing_of_this_key_and_all_of_others(tmp_path: Path, store: Store) -> None:
    work, other = area(tmp_path, store), WorkArea(store, "cd" * 32, tmp_path / "other")
    work.save(1, snapshot(tmp_path, "one"))
    other.save(2, snapshot(tmp_path, "two"))
    other.wait()
    work.drop()
    work.drop()
    assert work.latest() is None
    assert not list(store.list(f"work/{KEY}"))
    assert restored(other) == (2, "two")


def test_files_of_unfinished_saves_go_once_they_are_old(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    for token, age in (("a" * 32, 7200), ("b" * 32, 60)):
        key = f"work/{KEY}/data/{token}/0"
        store.put(key, b"half a save")
        past = time.time() - age
        os.utime(tmp_path / "store" / key, (past, past))
    work = area(tmp_path, store)
    work.save(1, snapshot(tmp_path, "one"))
    work.wait()
    names = {info.key.split("/")[3] for info in store.list(f"work/{KEY}/data/")}
    assert "a" * 32 not in names
    assert "b" * 32 in names  # another process may still be writing it


def test_the_time_of_earlier_attempts_is_kept(tmp_path: Path, store: Store) -> None:
    work = area(tmp_path, store)
    time.sleep(0.3)
    work.save(1, snapshot(tmp_path, "one"))
    work.wait()
    again = area(tmp_path, store)
    assert again.earlier_seconds == 0.0
    again.latest()
    assert again.earlier_seconds >= 0.3
    again.save(2, snapshot(tmp_path, "two"))
    third = area(tmp_path, store)
    again.wait()
    third.latest()
    assert third.earlier_seconds >= again.earlier_seconds


SAVER = """
import sys, time
from pathlib import Path
from stages.artifacts import WorkArea, open_store
root = Path(sys.argv[1])
work = WorkArea(open_store(sys.argv[2]), "ab" * 32, root / "scratch")
found = work.latest()
step = 0 if found is None else found[0]
print(step, flush=True)
while True:
    step += 1
    folder = root / f"snapshot-{step}-{time.monotonic_ns()}"
    (folder / "optimizer").mkdir(parents=True)
    (folder / "step.txt").write_text(f"step {step}")
    (folder / "optimizer" / "state.bin").write_bytes(f"step {step}".encode() * 1000)
    work.save(step, folder)
    print(step, flush=True)
"""


def test_a_stage_killed_at_any_moment_loses_at_most_what_was_in_flight(tmp_path: Path, store: Store) -> None:
    generator, reached = random.Random(1), 0
    for _ in range(6):
        process = subprocess.Popen(
            [sys.executable, "-c", SAVER, str(tmp_path), store.url], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert int(process.stdout.readline()) >= reached  # it began where the last one was
        time.sleep(generator.random() * 0.2)
        process.kill()
        said = process.communicate()[0].split()
        assert process.returncode == -signal.SIGKILL
        warnings: list[str] = []
        found = restored(area(tmp_path, store, warnings))
        assert warnings == []  # nothing partial was ever visible
        started = int(said[-1]) if said else reached
        if found is not None:
            assert found[1] == f"step {found[0]}"
            assert found[0] >= max(reached, started - 1)  # a save that was followed by another had ended
            reached = found[0]
    assert reached > 0
