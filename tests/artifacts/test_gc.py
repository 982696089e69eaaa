"""gc: what is needed stays, what is not goes, and runs that go on beside it lose nothing."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from stages.artifacts import (
    Damaged,
    FolderStore,
    NotInStore,
    Result,
    Store,
    StoreError,
    WorkArea,
    acquire,
    append_log,
    collect,
    is_complete,
    list_runs,
    open_store,
    promote,
    publish,
    read_result,
    usage,
    verify_all,
    write_result,
    write_run,
)
from stages.artifacts.leases import GC_KEY
from stages.artifacts.s3 import S3Store

DAY = 86400.0
ME = "me@here"


def key(number: int) -> str:
    return f"{number:064x}"


def artifact(tmp_path: Path, store: Store, *texts: str, kind: str = "report") -> str:
    folder = tmp_path / f"folder-{'-'.join(texts)}"
    folder.mkdir(exist_ok=True)
    for text in texts:
        (folder / f"{text}.txt").write_text(text * 100)
    return publish(store, folder, kind)


def result(store: Store, number: int, digest: str, inputs: dict[str, str] | None = None, **changes: Any) -> Result:
    values: dict[str, Any] = {
        "artifact": digest,
        "kind": "report",
        "stage": "sft",
        "step": f"step-{number}",
        "key": key(number),
        "run": f"run-{number}",
        "inputs": inputs or {},
        "started": "2026-11-30T10:00:00.000+00:00",
        "finished": "2026-11-30T10:00:01.000+00:00",
    }
    return write_result(store, Result(**(values | changes)))


def age(store: Store, days: float = 60.0, prefix: str = "") -> None:
    """Make everything so old, as if it had been put then. Only a folder can."""
    assert isinstance(store, FolderStore)
    then = time.time() - days * DAY
    for info in store.list(prefix):
        os.utime(store.root / info.key, (then, then))


@pytest.fixture
def folder_store(tmp_path: Path) -> FolderStore:
    made = open_store(tmp_path / "store")
    assert isinstance(made, FolderStore)
    return made


def keys(store: Store, prefix: str = "") -> set[str]:
    return {info.key for info in store.list(prefix)}


def test_what_nothing_names_goes_and_only_when_it_is_asked_for(tmp_path: Path, store: Store) -> None:
    kept, gone = artifact(tmp_path, store, "kept", "both"), artifact(tmp_path, store, "gone", "both")
    promote(store, "production", kept, who=ME)
    before = keys(store)
    found = collect(store, retention=0.0, grace=0.0)
    assert keys(store) == before
    assert not found.deleted
    assert found.size == sum(store.size(item.key) or 0 for item in found.garbage)
    removed: list[str] = []
    done = collect(store, delete=True, retention=0.0, grace=0.0, removed=lambda item: removed.append(item.key))
    assert [item.key for item in done.garbage] == [item.key for item in found.garbage] == removed
    assert before - keys(store) == set(removed)
    assert (is_complete(store, kept), is_complete(store, gone)) == (True, False)
    assert len(removed) == 2  # a manifest, and one blob: the other is shared
    assert list(verify_all(store)) == []
    assert collect(store, delete=True, retention=0.0, grace=0.0).garbage == []


def test_a_named_artifact_keeps_everything_it_was_made_from(tmp_path: Path, folder_store: FolderStore) -> None:
    store = folder_store
    data, base, model, other = (artifact(tmp_path, store, text) for text in ("data", "base", "model", "other"))
    result(store, 1, base, {"data": data})
    result(store, 2, model, {"model": base})
    result(store, 3, other, {"model": base})
    promote(store, "production", model, who=ME)
    age(store)
    collect(store, delete=True)
    assert all(is_complete(store, digest) for digest in (data, base, model))
    assert read_result(store, "sft", key(1)) is not None
    assert read_result(store, "sft", key(2)) is not None
    assert not store.exists(f"results/sft/{key(3)}.json")
    assert not is_complete(store, other)
    assert list(verify_all(store)) == []


def test_young_results_and_what_they_read_stay(tmp_path: Path, folder_store: FolderStore) -> None:
    store = folder_store
    data, old, side = (artifact(tmp_path, store, text) for text in ("data", "old", "side"))
    result(store, 1, old, {"data": data}, outputs={"rollouts": side})
    age(store, 29)
    assert collect(store, delete=True).garbage == []
    age(store, 31)
    collect(store, delete=True)
    assert keys(store) == set()


def test_what_a_forced_run_replaced_goes_when_it_is_old(tmp_path: Path, folder_store: FolderStore) -> None:
    store = folder_store
    old, new = artifact(tmp_path, store, "old"), artifact(tmp_path, store, "new")
    result(store, 1, old, finished="2020-01-01T00:00:00.000+00:00")
    age(store)
    assert [entry["artifact"] for entry in result(store, 1, new).history] == [old]
    collect(store, delete=True)
    assert (is_complete(store, old), is_complete(store, new)) == (False, True)
    found = read_result(store, "sft", key(1))
    assert found is not None
    assert [entry["artifact"] for entry in found.history] == [old]  # it is still told of
    assert list(verify_all(store)) == []


def test_what_a_recent_run_used_stays_and_old_runs_go_with_their_logs(
    tmp_path: Path, folder_store: FolderStore
) -> None:
    store = folder_store
    used, planned, source, other = (artifact(tmp_path, store, text) for text in ("used", "planned", "source", "other"))
    result(store, 1, planned)
    result(store, 2, other)
    write_run(store, {"id": "old-run", "started": "2020", "steps": {"a": {"artifact": other, "outputs": {}}}})
    append_log(store, "old-run", "a", [{"type": "log", "text": "x"}])
    age(store)
    steps = {"a": {"artifact": used, "outputs": {}}, "b": {"key": key(1), "artifact": None, "outputs": {}}}
    write_run(store, {"id": "new-run", "started": "2026", "sources": {"a.data": source}, "steps": steps})
    collect(store, delete=True)
    assert all(is_complete(store, digest) for digest in (used, planned, source))
    assert not is_complete(store, other)
    assert [run["id"] for run in list_runs(store)] == ["new-run"]
    assert keys(store, "logs/") == set()


def test_what_a_running_stage_reads_and_has_saved_stays(tmp_path: Path, folder_store: FolderStore) -> None:
    store = folder_store
    data = artifact(tmp_path, store, "data")
    for number in (1, 2):
        work = WorkArea(store, key(number), tmp_path / "scratch")
        (tmp_path / "progress").mkdir()
        (tmp_path / "progress" / "state").write_text("x")
        work.save(3, tmp_path / "progress")
        work.wait()
    age(store)
    lease = acquire(store, key(1), stage="sft", step="a", run="r", inputs=[data])
    assert lease is not None
    collect(store, delete=True)
    lease.check()
    assert is_complete(store, data)
    assert WorkArea(store, key(1), tmp_path / "scratch").steps() == [3]
    assert WorkArea(store, key(2), tmp_path / "scratch").steps() == []
    assert keys(store, "work/" + key(2)) == set()
    lease.release()
    age(store)
    collect(store, delete=True)
    assert keys(store) == set()


def test_progress_of_a_finished_step_goes_after_the_grace_period(tmp_path: Path, folder_store: FolderStore) -> None:
    store = folder_store
    (tmp_path / "progress").mkdir()
    (tmp_path / "progress" / "state").write_text("x")
    work = WorkArea(store, key(1), tmp_path / "scratch")
    work.save(3, tmp_path / "progress")
    work.wait()
    age(store, 2)
    assert collect(store, delete=True).garbage == []
    result(store, 1, artifact(tmp_path, store, "done"))
    assert {item.why for item in collect(store, delete=True).garbage} == {"progress of a step that is finished"}
    assert keys(store, "work/") == set()


def test_nothing_young_is_touched(tmp_path: Path, folder_store: FolderStore) -> None:
    store = folder_store
    artifact(tmp_path, store, "just-published")
    (tmp_path / "blob").write_text("a blob of an artifact that is being published")
    store.put_blob(tmp_path / "blob")
    assert collect(store, delete=True, retention=DAY, grace=600.0).garbage == []


@pytest.mark.parametrize("what", ["refs/production.json", f"results/sft/{key(1)}.json", "runs/r.json", "lease"])
def test_what_cannot_be_read_stops_everything(tmp_path: Path, store: Store, what: str) -> None:
    what = f"leases/{key(5)}.json" if what == "lease" else what
    artifact(tmp_path, store, "garbage")
    store.put(what, b'{"half": ')
    before = keys(store)
    with pytest.raises(Damaged, match=what):
        collect(store, delete=True, retention=0.0, grace=0.0)
    assert keys(store) - {f"leases/{GC_KEY}.json"} == before


def test_a_damaged_manifest_that_is_needed_stops_the_removal_of_its_blobs(tmp_path: Path, store: Store) -> None:
    digest = artifact(tmp_path, store, "needed")
    promote(store, "production", digest, who=ME)
    [manifest] = keys(store, "manifests/")
    store.put(manifest, b"{}")
    with pytest.raises(Damaged, match="manifests/"):
        collect(store, delete=True, retention=0.0, grace=0.0)
    assert len(keys(store, "blobs/")) == 1


def test_two_gcs_do_not_run_at_once(store: Store) -> None:
    lease = acquire(store, GC_KEY, stage="gc", step="gc", run="gc")
    assert lease is not None
    with pytest.raises(StoreError, match=rf"another gc .* is running \(process {os.getpid()} on "):
        collect(store, delete=True, retention=0.0, grace=0.0)
    collect(store, retention=0.0, grace=0.0)  # a look does no harm
    lease.release()


def test_a_result_that_a_stage_computes_again_is_spared(tmp_path: Path, store: Store) -> None:
    """The stage takes its lease between the two looks."""
    digest = artifact(tmp_path, store, "again")
    result(store, 1, digest)
    result(store, 2, artifact(tmp_path, store, "other"))
    leases = []

    def begin(item: Any) -> None:
        if not leases:  # the first of the two was removed just now
            number = 2 if item.key.endswith(f"{key(1)}.json") else 1
            leases.append((number, acquire(store, key(number), stage="sft", step="a", run="r")))

    found = collect(store, delete=True, retention=0.0, grace=0.0, removed=begin)
    [(number, lease)] = leases
    assert f"results/sft/{key(number)}.json" in [item.key for item in found.spared]
    assert store.exists(f"results/sft/{key(number)}.json")
    lease.check()
    lease.release()


@pytest.mark.parametrize("seconds", [1.0, 600.0])
def test_a_reference_that_is_moved_to_garbage_during_a_gc_keeps_it(
    tmp_path: Path, store: Store, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the marks are of before the move, as in a store that takes minutes to mark."""
    monkeypatch.setattr("stages.artifacts.gc._LOOK_AGAIN", seconds)
    monkeypatch.setattr("stages.artifacts.gc._AT_ONCE", 1)
    first, second = artifact(tmp_path, store, "first"), artifact(tmp_path, store, "second")
    moved: list[str] = []

    def promote_the_other(item: Any) -> None:
        if item.key.startswith("manifests/") and not moved:
            moved.append(second if first[7:] in item.key else first)
            promote(store, "production", moved[0], who=ME)

    found = collect(store, delete=True, retention=0.0, grace=0.0, removed=promote_the_other)
    assert is_complete(store, moved[0])
    assert [item.key for item in found.spared] == [f"manifests/{moved[0][7:9]}/{moved[0][7:]}.json"]
    assert list(verify_all(store)) == []


def test_what_is_published_while_a_gc_is_about_to_remove_it_stays(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gc has marked, and will not again; the publisher finds old blobs in the store and names them again."""
    monkeypatch.setattr("stages.artifacts.gc._LOOK_AGAIN", 600.0)
    artifact(tmp_path, store, "first", "shared")
    artifact(tmp_path, store, "second", "shared")
    time.sleep(3.1)
    published: list[str] = []

    def publish_again(item: Any) -> None:
        if not published:
            published.append("")
            published[0] = artifact(tmp_path, store, "third", "shared")

    collect(store, delete=True, retention=2.0, grace=2.0, removed=publish_again)
    assert is_complete(store, published[0])


@pytest.mark.slow
def test_publishers_beside_a_gc_lose_nothing(tmp_path: Path, store: Store) -> None:
    """Old blobs are found in the store and named again while a gc removes all that is three seconds old."""
    folders = []
    for number in range(6):
        folder = tmp_path / f"f{number}"
        folder.mkdir()
        for name in range(4):
            (folder / str(name)).write_text(f"{name} {number % 2}" * 50)
        folders.append(folder)
    stop = threading.Event()
    failures: list[str] = []

    def sweep() -> None:
        while not stop.is_set():
            collect(store, delete=True, retention=3.0, grace=3.0)

    def work(number: int) -> None:
        for turn in range(5):
            digest = publish(store, folders[number], "report")
            try:
                result(store, number, digest, run=f"run-{turn}")
            except NotInStore as error:
                failures.append(str(error))
            if not is_complete(store, digest):
                failures.append(f"{digest} is not whole right after it was published")
            time.sleep(2.8 + number / 10)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    sweeper = threading.Thread(target=sweep)
    sweeper.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    sweeper.join()
    assert failures == []
    assert list(verify_all(store)) == []


def test_what_killed_writers_left_is_removed(tmp_path: Path, folder_store: FolderStore) -> None:
    store = folder_store
    artifact(tmp_path, store, "kept")
    left = store.root / "tmp" / "0123abcd"
    left.write_text("half a blob")
    os.utime(left, (time.time() - 2 * DAY,) * 2)
    assert [item.key for item in collect(store).garbage] == ["tmp/0123abcd"]
    assert left.exists()
    collect(store, delete=True)
    assert not left.exists()


def test_an_upload_in_parts_that_was_left_goes_when_it_is_old_and_is_told_first(tmp_path: Path, s3_url: str) -> None:
    """Begun under a blob and under saved progress; one of another program in the same bucket is none of ours."""
    store = open_store(s3_url)
    assert isinstance(store, S3Store)
    kept = artifact(tmp_path, store, "kept")
    promote(store, "production", kept, who=ME)
    ours = sorted([f"blobs/aa/{'aa' * 32}", f"work/{key(1)}/data/{'0' * 32}/0"])
    for name in [*ours, "somebody/else"]:
        begun = store.client.create_multipart_upload(Bucket=store.bucket, Key=store.prefix + name)
        upload = {"Bucket": store.bucket, "Key": store.prefix + name, "UploadId": begun["UploadId"]}
        store.client.upload_part(**upload, PartNumber=1, Body=b"x" * 1000)
    assert collect(store, delete=True, retention=DAY, grace=3600.0).garbage == []  # they may go on
    time.sleep(3.1)  # uploads are dated to the second
    found = collect(store, retention=1.0, grace=1.0)
    told = [(item.key, item.size, item.why) for item in found.garbage]
    assert sorted(told) == [(name, 1000, "left by a killed writer") for name in ours]
    removed: list[str] = []
    collect(store, delete=True, retention=1.0, grace=1.0, removed=lambda item: removed.append(item.key))
    assert sorted(removed) == ours
    answer = store.client.list_multipart_uploads(Bucket=store.bucket, Prefix=store.prefix)
    assert [item["Key"] for item in answer.get("Uploads", [])] == [store.prefix + "somebody/else"]
    assert is_complete(store, kept)
    assert list(verify_all(store)) == []


def test_room_is_told_by_kind_stage_and_run_with_shared_files_once(tmp_path: Path, store: Store) -> None:
    """Files of 300, 400 and 500 bytes; "both" is in two artifacts."""
    one = artifact(tmp_path, store, "one", "both")  # 300 + 400
    artifact(tmp_path, store, "three", "both", kind="source")  # 500 + 400
    result(store, 1, one)
    (tmp_path / "loose").write_text("x" * 77)
    store.put_blob(tmp_path / "loose")
    used = usage(store)
    assert (used.artifacts, used.files, used.blobs, used.unnamed) == (2, 1600, 300 + 400 + 500 + 77, 77)
    assert {name: (s.artifacts, s.size, s.alone) for name, s in used.kinds.items()} == {
        "source": (1, 900, 500),
        "report": (1, 700, 300),
    }
    assert {name: (s.size, s.alone) for name, s in used.stages.items()} == {"(imported)": (900, 500), "sft": (700, 300)}
    assert list(used.runs) == ["(imported)", "run-1"]
    assert used.total == sum(info.size for info in store.list("")) + used.leftovers
