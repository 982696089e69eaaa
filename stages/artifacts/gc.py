"""Removing what nothing needs any more, beside runs that go on.

The model: mark, then sweep. Marked are, with everything that they were made from: what refs name and named in their
last moves; the models of their last nights; what results gave that are younger than the retention time; what recent
runs used; what stages read that compute now (the inputs in their leases); and every artifact whose manifest is younger
than the grace period. All else is garbage: results, then manifests, then blobs, saved progress of finished keys, old
runs with their logs, free leases, and what killed writers left.

Invariants:
- Nothing younger than the grace period is removed, so what a run has just put, and not yet named, stays.
- A gc that removes things holds a lease of its own, taken before it marks: there is one at a time. Whoever publishes
  looks for it once the manifest is there. Where there is none, a later gc will see the manifest; where there is one, it
  may have condemned an old blob that the publisher found in the store, so the publisher puts its blobs again.
- Each object is looked at again right before it is removed: its age, and, once the last look is a moment old or a ref
  was moved, all marks. Manifests, blobs and logs are looked at and removed a thousand at a time; whoever needs to know
  that this is over (`outwait_gc`) sees it in the lease.
- What points goes before what it points to: killed at any moment, no artifact is visible in part.
- A result, its progress and its lease are removed under the lease on the key: never while a stage computes it.
- A ref, night, result, run, lease or marked manifest that cannot be read stops everything: what it names cannot be
  known.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial

from stages.artifacts.fetch import read_manifest
from stages.artifacts.leases import GC_KEY, GC_STEP, Lease, LeaseRecord, acquire, read_lease
from stages.artifacts.manifest import manifest_key
from stages.artifacts.nights import all_nights
from stages.artifacts.reach import Making, by_artifact, makings
from stages.artifacts.refs import refs
from stages.artifacts.results import parse_result
from stages.artifacts.runs import read_run
from stages.artifacts.store import NotInStore, ObjectInfo, Store, StoreError

RETENTION = 30 * 86400.0
GRACE = 86400.0
_KEPT_MOVES = 5  # of each ref's history, what a rollback may want
_AT_ONCE = 1000  # objects that are looked at and removed together
_LOOK_AGAIN = 1.0  # seconds after which marks are old, and at least four times what marking takes


@dataclass(frozen=True)
class Garbage:
    """An object that nothing needs: its key, size in bytes, and what it is or why it goes, in a few words."""

    key: str
    size: int
    why: str


@dataclass
class Collection:
    """What a gc found and did.

    Attributes:
        garbage: what goes (or went, where it was asked to delete), in that order.
        spared: garbage of the first look that something needed at the second, or that a stage was busy with.
        kept: artifacts that stay.
        deleted: whether garbage was removed, rather than only named.
    """

    garbage: list[Garbage] = field(default_factory=list)
    spared: list[Garbage] = field(default_factory=list)
    kept: int = 0
    deleted: bool = False

    @property
    def size(self) -> int:
        """Bytes of all garbage."""
        return sum(item.size for item in self.garbage)


@dataclass
class _Marks:
    """What is needed, as of one look.

    Attributes:
        artifacts: digests.
        results: keys of result objects.
        runs, logs: names of runs whose document, or whose logs, stay.
        finished: stage keys that have a result.
        busy: stage keys under a live lease.
        blobs: keys of blobs of all manifests that are marked.
    """

    artifacts: set[str] = field(default_factory=set)
    results: set[str] = field(default_factory=set)
    runs: set[str] = field(default_factory=set)
    logs: set[str] = field(default_factory=set)
    finished: set[str] = field(default_factory=set)
    busy: set[str] = field(default_factory=set)
    blobs: set[str] = field(default_factory=set)


def collect(
    store: Store,
    *,
    delete: bool = False,
    retention: float = RETENTION,
    grace: float = GRACE,
    removed: Callable[[Garbage], None] = lambda item: None,
) -> Collection:
    """Find what nothing needs, and remove it if asked.

    Args:
        delete: remove it; otherwise nothing in the store changes.
        retention: seconds for which results and runs are kept whatever names them.
        grace: seconds for which every object is kept. Longer than any publish takes, and not above `retention`.
        removed: called with each object that was removed.

    Raises:
        ValueError: a time is negative, or the grace period is longer than the retention.
        Damaged: something that names artifacts cannot be read; nothing (more) is removed.
        StoreError: the store cannot be read or written.
    """
    if not 0 <= grace <= retention:
        raise ValueError(f"a grace period of {grace:,.0f} s does not fit a retention of {retention:,.0f} s")
    if not delete:
        return _sweep(store, None, retention, grace, removed)
    busy: list[LeaseRecord] = []
    lease = acquire(store, GC_KEY, stage="gc", step=GC_STEP, run="gc", on_wait=busy.append, give_up=lambda: True)
    if lease is None:
        where = f"process {busy[-1].pid} on {busy[-1].host}"
        raise StoreError(f"another gc of store {store.url} is running ({where}); wait for its end")
    try:
        return _sweep(store, lease, retention, grace, removed)
    finally:
        lease.release(remove=True)


def _sweep(
    store: Store, lease: Lease | None, retention: float, grace: float, removed: Callable[[Garbage], None]
) -> Collection:
    look = _Look(store, lease, retention, grace)
    found = Collection(kept=len(look.marks.artifacts), deleted=lease is not None)
    for items in (look.results, look.runs, look.manifests, look.blobs, look.work, look.leases):
        condemned = list(items())
        if lease is None:
            found.garbage += [each.item for each in condemned]
            continue
        for start in range(0, len(condemned), _AT_ONCE):
            for item, gone in look.remove(condemned[start : start + _AT_ONCE]):
                (found.garbage if gone else found.spared).append(item)
                if gone:
                    removed(item)
    for left in store.leftovers(max(grace, 1.0), remove=lease is not None):
        item = Garbage(left.key, left.size, "left by a killed writer")
        found.garbage.append(item)
        if lease is not None:
            removed(item)
    return found


@dataclass(frozen=True)
class _Condemned:
    """Garbage of a first look.

    Attributes:
        needed: whether the marks of a later look keep it.
        seconds: how old it must be.
        stage_key: under whose lease it is removed, if under one.
    """

    item: Garbage
    needed: Callable[[_Marks], bool]
    seconds: float
    stage_key: str = ""


class _Look:
    """The state of the store as it was seen last, and what of it is garbage."""

    def __init__(self, store: Store, lease: Lease | None, retention: float, grace: float) -> None:
        self._store, self._lease, self._retention, self._grace = store, lease, retention, grace
        self._manifests: dict[str, set[str]] = {}  # digest -> keys of its blobs; content never changes
        self._looks = 0
        self._mark()

    def _mark(self) -> None:
        begun = time.monotonic()
        self.now = self._store.now()
        self._refs = self._refs_now()
        self.marks = _mark(self._store, self.now, self._retention, self._grace, self._manifests)
        self._made = time.monotonic()
        self._took = self._made - begun

    def _refs_now(self) -> list[ObjectInfo]:
        return list(self._store.list("refs/"))

    def _fresh(self) -> _Marks:
        # Moving a ref needs no time to prepare, so refs are looked at each time.
        if time.monotonic() - self._made > max(_LOOK_AGAIN, 4 * self._took) or self._refs_now() != self._refs:
            self._mark()
        return self.marks

    def _old(self, info: ObjectInfo, seconds: float) -> bool:
        return self.now - info.modified >= seconds

    def remove(self, condemned: list[_Condemned]) -> Iterator[tuple[Garbage, bool]]:
        """The second look: remove what is not needed and still old. Each, and whether it was removed."""
        for each in condemned:
            if each.stage_key:
                yield each.item, self._remove_under_lease(each)
        together = [each for each in condemned if not each.stage_key]
        if together:
            gone = self._remove_together(together)
            yield from ((each.item, each.item.key in gone) for each in together)

    def _remove_together(self, condemned: list[_Condemned]) -> set[str]:
        assert self._lease is not None
        self._looks += 1
        self._lease.tell(f"{GC_STEP} {self._looks}")
        marks = self._fresh()
        infos = self._store.infos([each.item.key for each in condemned if not each.needed(marks)])
        limits = {each.item.key: each.seconds for each in condemned}
        gone = {key for key, info in infos.items() if self._old(info, limits[key])}
        self._lease.check()  # or nobody would have waited for this
        self._store.delete_many([each.item.key for each in condemned if each.item.key in gone])
        self._lease.tell(GC_STEP)
        return gone

    def _remove_under_lease(self, condemned: _Condemned) -> bool:
        """While no stage can compute the key that it belongs to."""
        lease = acquire(self._store, condemned.stage_key, stage="gc", step="gc", run="gc", give_up=lambda: True)
        if lease is None:
            return False
        try:
            key = condemned.item.key
            if key == f"leases/{condemned.stage_key}.json":  # it goes as it is released
                return True
            if condemned.needed(self._fresh()):
                return False
            info = self._store.infos([key]).get(key)
            if info is None or not self._old(info, condemned.seconds):
                return False
            self._store.delete(key)
            return True
        finally:
            lease.release(remove=True)

    def results(self) -> Iterator[_Condemned]:
        for info in self._store.list("results/"):
            match = re.fullmatch(r"results/[^/]+/([0-9a-f]{8,64})\.json", info.key)
            if match and info.key not in self.marks.results and self._old(info, self._grace):
                item = Garbage(info.key, info.size, "result: old, and nothing needs it")
                yield _Condemned(item, partial(_needs_result, info.key, match[1]), self._grace, match[1])

    def runs(self) -> Iterator[_Condemned]:
        for prefix in ("runs/", "logs/"):
            for info in self._store.list(prefix):
                name = info.key.split("/")[1]
                run = name.removesuffix(".json") if prefix == "runs/" else name
                needed = partial(_needs_log if prefix == "logs/" else _needs_run, run)
                if not needed(self.marks) and self._old(info, self._retention):
                    item = Garbage(info.key, info.size, "run: old, and nothing that it made is kept")
                    yield _Condemned(item, needed, self._retention)

    def manifests(self) -> Iterator[_Condemned]:
        for info, digest in _manifests(self._store):
            if digest not in self.marks.artifacts and self._old(info, self._grace):
                item = Garbage(info.key, info.size, "manifest of an artifact that nothing names")
                yield _Condemned(item, partial(_needs_artifact, digest), self._grace)

    def blobs(self) -> Iterator[_Condemned]:
        for info in self._store.list("blobs/"):
            if info.key not in self.marks.blobs and self._old(info, self._grace):
                item = Garbage(info.key, info.size, "blob of no artifact that is kept")
                yield _Condemned(item, partial(_needs_blob, info.key), self._grace)

    def work(self) -> Iterator[_Condemned]:
        progress: dict[str, list[ObjectInfo]] = {}
        for info in self._store.list("work/"):
            match = re.match(r"work/([0-9a-f]{8,64})/", info.key)
            if match:
                progress.setdefault(match[1], []).append(info)
        for stage_key, infos in progress.items():
            finished = stage_key in self.marks.finished
            limit = self._grace if finished else self._retention
            if stage_key in self.marks.busy or not all(self._old(info, limit) for info in infos):
                continue
            why = "progress of a step that is finished" if finished else "progress that nobody went on from"
            for info in infos:  # by key, which has records before the files that they name
                item = Garbage(info.key, info.size, why)
                yield _Condemned(item, partial(_is_busy, stage_key), limit, stage_key)

    def leases(self) -> Iterator[_Condemned]:
        for info, lease in _leases(self._store):
            if lease.key not in self.marks.busy | {GC_KEY} and self._old(info, self._grace):
                item = Garbage(info.key, info.size, "lease that nobody holds")
                yield _Condemned(item, partial(_is_busy, lease.key), self._grace, lease.key)


def _needs_result(key: str, stage_key: str, marks: _Marks) -> bool:
    return key in marks.results or stage_key in marks.busy


def _needs_run(run: str, marks: _Marks) -> bool:
    return run in marks.runs


def _needs_log(run: str, marks: _Marks) -> bool:
    return run in marks.runs or run in marks.logs


def _needs_artifact(digest: str, marks: _Marks) -> bool:
    return digest in marks.artifacts


def _needs_blob(key: str, marks: _Marks) -> bool:
    return key in marks.blobs


def _is_busy(stage_key: str, marks: _Marks) -> bool:
    return stage_key in marks.busy


def _mark(store: Store, now: float, retention: float, grace: float, manifests: dict[str, set[str]]) -> _Marks:
    marks = _Marks()
    found: list[Making] = []
    waiting: list[str] = []

    for ref in refs(store):
        moves = [move.artifact for move in reversed(ref.history)]
        waiting.extend(list(dict.fromkeys(moves))[:_KEPT_MOVES])
    for nights in all_nights(store):
        waiting.extend(digest for digest in nights.kept() if store.exists(manifest_key(digest)))
    for info, lease in _leases(store):
        live = lease.holder is not None and lease.stage != "gc" and not lease.is_dead()
        if live and now - info.modified < max(grace, 10 * lease.seconds):
            marks.busy.add(lease.key)
            waiting.extend(lease.inputs)
    wanted: set[str] = set()  # keys of the steps of recent runs
    old_runs: dict[str, list[str]] = {}
    for info in store.list("runs/"):
        run = read_run(store, info.key.removeprefix("runs/").removesuffix(".json"))
        if run is None:
            continue
        steps = [step for step in run.get("steps", {}).values() if isinstance(step, dict)]
        used = [digest for step in steps for digest in (step.get("artifact"), *(step.get("outputs") or {}).values())]
        if now - info.modified < retention:
            marks.runs.add(run["id"])
            wanted.update(step["key"] for step in steps if step.get("key"))
            waiting.extend(digest for digest in [*used, *(run.get("sources") or {}).values()] if digest)
        else:
            old_runs[run["id"]] = [digest for digest in used if digest]
    current: dict[str, Making] = {}  # key of a result object -> what it says
    for info in store.list("results/"):
        try:
            result = parse_result(store, info.key)
        except NotInStore:
            continue
        marks.finished.add(result.key)
        history = list(makings(result))
        found.extend(history)
        current[info.key] = history[0]
        if now - info.modified < retention or result.key in marks.busy | wanted:
            marks.results.add(info.key)
            recent = datetime.fromtimestamp(now - retention, UTC).isoformat(timespec="milliseconds")
            for making in history:
                if making.current or making.finished >= recent:
                    waiting.extend([*making.made, *making.inputs])
    there = dict(_digests(store))
    waiting.extend(digest for digest, info in there.items() if now - info.modified < grace)

    makers = by_artifact(found)
    while waiting:
        digest = waiting.pop()
        if digest in marks.artifacts:
            continue
        marks.artifacts.add(digest)
        for making in makers.get(digest, []):
            # A result stays a hit only with all that it gave; lineage needs what it read.
            waiting.extend(making.inputs)
            if making.current:
                waiting.extend(making.made)
    for key, making in current.items():
        if marks.artifacts.intersection(making.made):
            marks.results.add(key)
        if key in marks.results:
            marks.logs.add(making.run)
    marks.runs.update(run for run, used in old_runs.items() if marks.artifacts.intersection(used))
    for digest in marks.artifacts & there.keys():
        if digest not in manifests:
            try:
                manifests[digest] = {entry.blob for entry in read_manifest(store, digest).files}
            except NotInStore:
                continue
        marks.blobs |= manifests[digest]
    return marks


def _digests(store: Store) -> Iterator[tuple[str, ObjectInfo]]:
    for info, digest in _manifests(store):
        yield digest, info


def _manifests(store: Store) -> Iterator[tuple[ObjectInfo, str]]:
    for info in store.list("manifests/"):
        match = re.fullmatch(r"manifests/([0-9a-f]{2})/(\1[0-9a-f]{62})\.json", info.key)
        if match:
            yield info, "sha256:" + match[2]


def _leases(store: Store) -> Iterator[tuple[ObjectInfo, LeaseRecord]]:
    for info in store.list("leases/"):
        match = re.fullmatch(r"leases/([0-9a-f]{8,64})\.json", info.key)
        if match is None:
            continue
        lease = read_lease(store, match[1])
        if lease is not None:
            yield info, lease
