"""Runs publish, fetch, save, promote, a whole computation and gc, and fails or kills them at each single point.

`python faults.py STORE FOLDER MODE...` prints one JSON object: for each scenario how many points there are and how many
cases were run, and what went wrong.

Modes, each applied to every point in turn, with a real process (a fork) for each case:
- `fail`: an operation of the store raises before it does anything; `lost`: it is done, and then raises.
- `kill`, `kill-after`: SIGKILL before, or right after, an operation of the store.
- `system`: SIGKILL before each call to the system that changes something (a folder), or each request (S3).

After each case: every artifact that is visible is whole, `verify` finds nothing, and running the scenario again,
without the fault, ends as it should.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from stages.artifacts import (
    FolderStore,
    Result,
    Store,
    StoreError,
    WorkArea,
    acquire,
    collect,
    fetch,
    is_complete,
    open_store,
    promote,
    publish,
    read_lease,
    read_ref,
    read_result,
    ref_names,
    verify_all,
    write_result,
)
from stages.artifacts import folder as folder_module
from stages.artifacts.s3 import S3Store
from stages.artifacts.s3_client import make_client

KEY, OTHER = "ab" * 32, "cd" * 32
MODES = ("fail", "lost", "kill", "kill-after", "system")
_DONE, _FAILED, _BROKEN = 0, 3, 4


class Faulty:
    """A store that counts its operations and, at one of them, fails or kills the process."""

    def __init__(self, store: Store, at: int = 0, mode: str = "") -> None:
        self.store, self.at, self.mode = store, at, mode
        self.url, self.remote = store.url, store.remote
        self.count = 0
        self.lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.store, name)
        return self._listing if name == "list" else lambda *given, **named: self._do(lambda: method(*given, **named))

    def _do(self, operation: Callable[[], Any]) -> Any:
        with self.lock:
            self.count += 1
            here = self.count == self.at
        if here and self.mode == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if here and self.mode == "fail":
            raise StoreError("the connection was cut")
        try:
            answer = operation()
        finally:
            if here and self.mode == "kill-after":
                os.kill(os.getpid(), signal.SIGKILL)
        if here and self.mode == "lost":
            raise StoreError("the connection was cut, and the answer lost")
        return answer

    def _listing(self, prefix: str) -> Iterator[Any]:
        return self._do(lambda: iter(list(self.store.list(prefix))))

    def put_blobs(self, paths: Sequence[Path], known: Any = None) -> list[tuple[str, int]]:
        """One blob after another, so that each is an operation of its own."""
        return [self.put_blob(path, known=had) for path, had in zip(paths, known or [None] * len(paths), strict=True)]


class Points:
    """Counts calls to the system, or requests of S3, and kills the process before one of them."""

    def __init__(self, at: int) -> None:
        self.at, self.count, self.lock = at, 0, threading.Lock()

    def pass_by(self, *given: Any, **named: Any) -> None:
        with self.lock:
            self.count += 1
            if self.count == self.at:
                os.kill(os.getpid(), signal.SIGKILL)

    def watch(self, store: Store) -> None:
        if isinstance(store, S3Store):
            store.client.meta.events.register_first("before-send.s3", self.pass_by)
            return
        folder_module._WRITERS = 1  # several threads make their folders in another order each time
        for name in ("rename", "link", "unlink", "fsync", "mkdir", "rmdir", "replace", "utime"):
            setattr(os, name, self._watched(getattr(os, name)))

    def _watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*given: Any, **named: Any) -> Any:
            self.pass_by()
            return call(*given, **named)

        return watched


# Scenarios: what is there before, what is done, and what must be so after a run that was not disturbed


def files(folder: Path, *texts: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for text in texts:
        (folder / f"{text}.txt").write_text(text * 200)
    return folder


def nothing(store: Store, folder: Path) -> None:
    return


def do_publish(store: Store, folder: Path) -> None:
    publish(store, files(folder / "output", "one", "two", "three"), "report")


def check_publish(store: Store, folder: Path, finished: bool) -> None:
    if finished:
        assert len(list(store.list("manifests/"))) == 1


def before_fetch(store: Store, folder: Path) -> None:
    digest = publish(store, files(folder / "made", "one", "two"), "report")
    (folder / "digest").write_text(digest)


def do_fetch(store: Store, folder: Path) -> None:
    target = folder / "fetched"
    if not target.exists():
        fetch(store, (folder / "digest").read_text(), target)


def check_fetch(store: Store, folder: Path, finished: bool) -> None:
    target = folder / "fetched"
    if finished or target.exists():
        assert sorted(path.name for path in target.iterdir()) == ["one.txt", "two.txt"]
        assert (target / "two.txt").read_text() == "two" * 200


def save(store: Store, folder: Path, step: int) -> None:
    work = WorkArea(store, KEY, folder / "scratch")
    work.save(step, files(folder / f"progress-{uuid.uuid4().hex}", f"step-{step}", "other"))
    work.wait()


def before_save(store: Store, folder: Path) -> None:
    save(store, folder, 1)
    save(store, folder, 2)


def do_save(store: Store, folder: Path) -> None:
    save(store, folder, 3)
    assert (WorkArea(store, KEY, folder / "scratch").latest() or (0,))[0] == 3


def check_save(store: Store, folder: Path, finished: bool) -> None:
    latest = WorkArea(store, KEY, folder / "scratch").latest()
    assert latest is not None
    step, restored = latest
    assert step in ((3,) if finished else (2, 3))
    assert (restored / f"step-{step}.txt").read_text() == f"step-{step}" * 200


def before_promote(store: Store, folder: Path) -> None:
    for name in ("old", "new"):
        (folder / name).write_text(publish(store, files(folder / f"made-{name}", name), "report"))
    promote(store, "production", (folder / "old").read_text(), who="me")


def do_promote(store: Store, folder: Path) -> None:
    promote(store, "production", (folder / "new").read_text(), who="me")


def check_promote(store: Store, folder: Path, finished: bool) -> None:
    ref = read_ref(store, "production")
    named = [(folder / name).read_text() for name in ("old", "new")]
    assert [move.artifact for move in ref.history] in ([named] if finished else [named[:1], named])


def do_compute(store: Store, folder: Path) -> None:
    """What a stage process does: lease, save, publish, result, drop, release."""
    lease = acquire(store, KEY, stage="count", step="a", run="r", seconds=30.0)
    assert lease is not None
    with lease:
        work = WorkArea(store, KEY, folder / "scratch", lease=lease)
        work.save(1, files(folder / f"progress-{uuid.uuid4().hex}", "state"))
        work.wait()
        artifact = publish(store, files(folder / "output", "one", "two"), "report")
        stamp = "2026-11-30T10:00:00.000+00:00"
        values = {"artifact": artifact, "kind": "report", "stage": "count", "step": "a", "key": KEY, "run": "r"}
        write_result(store, Result(**values, started=stamp, finished=stamp), lease)
        work.drop()


def check_compute(store: Store, folder: Path, finished: bool) -> None:
    found = read_result(store, "count", KEY)
    if found is not None:
        assert is_complete(store, found.artifact)
    if finished:
        assert found is not None
        assert list(store.list(f"work/{KEY}/")) == []
        lease = read_lease(store, KEY)
        assert lease is not None
        assert lease.holder is None


def before_gc(store: Store, folder: Path) -> None:
    kept = publish(store, files(folder / "made-kept", "kept", "shared"), "report")
    (folder / "kept").write_text(kept)
    gone = publish(store, files(folder / "made-gone", "gone", "shared"), "report")
    stamp = "2026-11-30T10:00:00.000+00:00"
    values = {"artifact": gone, "kind": "report", "stage": "count", "step": "a", "key": OTHER, "run": "r"}
    write_result(store, Result(**values, started=stamp, finished=stamp))
    work = WorkArea(store, OTHER, folder / "scratch")
    work.save(1, files(folder / "progress", "state"))
    work.wait()
    promote(store, "production", kept, who="me")


def do_gc(store: Store, folder: Path) -> None:
    collect(store, delete=True, retention=0.0, grace=0.0)


def check_gc(store: Store, folder: Path, finished: bool) -> None:
    assert ref_names(store) == ["production"]
    assert is_complete(store, (folder / "kept").read_text())
    if finished:
        kinds = sorted(info.key.split("/")[0] for info in store.list(""))
        assert kinds == ["blobs", "blobs", "manifests", "refs"], kinds


SCENARIOS: dict[str, tuple[Callable[..., None], Callable[..., None], Callable[..., None]]] = {
    "publish": (nothing, do_publish, check_publish),
    "fetch": (before_fetch, do_fetch, check_fetch),
    "save": (before_save, do_save, check_save),
    "promote": (before_promote, do_promote, check_promote),
    "compute": (nothing, do_compute, check_compute),
    "gc": (before_gc, do_gc, check_gc),
}


# Running them


class Bench:
    """Makes stores, each as a scenario needs it, and runs scenarios in forks."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder
        self.remote = url.startswith("s3:")
        # Never used here, so that no connection is shared with the forks.
        self.clients = (make_client(), make_client()) if self.remote else (None, None)

    def open(self, url: str, *, forked: bool) -> Store:
        store = open_store(url)
        if isinstance(store, S3Store):
            store._made, store._pid = self.clients[1 if forked else 0], os.getpid()
        return store

    def fresh(self, scenario: str) -> tuple[str, Path]:
        """A store and a folder as they are before the scenario. A folder is copied, for speed."""
        name = f"{scenario}-{uuid.uuid4().hex[:12]}"
        url, folder = f"{self.url}/{name}", self.folder / name
        before = SCENARIOS[scenario][0]
        if self.remote:
            folder.mkdir()
            before(self.open(url, forked=False), folder)
            return url, folder
        template, stored = self.folder / f"template-{scenario}", Path(self.url) / f"template-{scenario}"
        if not template.exists():
            template.mkdir()
            before(open_store(stored), template)
        shutil.copytree(template, folder)
        if stored.exists():
            shutil.copytree(stored, url)
        return url, folder

    def case(self, scenario: str, mode: str, at: int) -> int:
        """Run one case. Returns how many points its process passed; raises AssertionError where something is wrong."""
        _, do, check = SCENARIOS[scenario]
        url, folder = self.fresh(scenario)
        os.environ["HEADRACE_CACHE_DIR"] = str(folder / "cache")  # what a killed fetch left in it is found by the next
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            self._child(do, url, folder, mode, at, write)
        os.close(write)
        with open(read, "rb") as answers:
            told = answers.read()
        _, status = os.waitpid(pid, 0)
        killed = os.WIFSIGNALED(status)
        code = -os.WTERMSIG(status) if killed else os.WEXITSTATUS(status)
        kill = mode in ("kill", "kill-after", "system")
        expected = {_DONE} if at == 0 else {-signal.SIGKILL} if kill else {_DONE, _FAILED}
        assert code in expected, f"it ended with {code}: {told.decode()}"
        store = self.open(url, forked=False)
        self._check_whole(store)
        check(store, folder, at == 0)
        do(store, folder)
        self._check_whole(store)
        check(store, folder, True)
        shutil.rmtree(folder)
        if isinstance(store, FolderStore):
            shutil.rmtree(store.root, ignore_errors=True)
        return int(json.loads(told)) if at == 0 else 0

    def _child(self, do: Callable[..., None], url: str, folder: Path, mode: str, at: int, write: int) -> None:
        code = _BROKEN
        try:
            store: Any = self.open(url, forked=True)
            points = Points(at)
            if mode == "system":
                points.watch(store)
            else:
                store = Faulty(store, at, mode)
            do(store, folder)
            os.write(write, str(points.count if mode == "system" else store.count).encode())
            code = _DONE
        except StoreError as error:
            os.write(write, str(error).encode())
            code = _FAILED
        except BaseException:
            os.write(write, traceback.format_exc().encode())
        finally:
            os._exit(code)

    def _check_whole(self, store: Store) -> None:
        for info in store.list("manifests/"):
            digest = "sha256:" + info.key.rpartition("/")[2].removesuffix(".json")
            assert is_complete(store, digest), f"{digest} is visible and not whole"
        damages = [str(damage) for damage in verify_all(store)]
        assert damages == []


def main(url: str, folder: Path, modes: Sequence[str]) -> dict[str, Any]:
    bench = Bench(url, folder)
    report: dict[str, Any] = {"points": {}, "cases": 0, "wrong": []}
    for scenario in SCENARIOS:
        for mode in modes:
            level = "system" if mode == "system" else "store"
            points = bench.case(scenario, mode, 0)
            name = f"{scenario}, {level}"
            report["points"][name] = max(points, report["points"].get(name, 0))
            for at in range(1, points + 1):
                report["cases"] += 1
                try:
                    bench.case(scenario, mode, at)
                except Exception:
                    report["wrong"].append(f"{scenario}, {mode} at {at} of {points}: {traceback.format_exc()}")
    return report


if __name__ == "__main__":
    begun = time.monotonic()
    with contextlib.redirect_stdout(sys.stderr):
        found = main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
    print(json.dumps(found | {"seconds": round(time.monotonic() - begun, 1)}))
