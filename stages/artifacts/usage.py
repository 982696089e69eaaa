"""What takes how much room in a store. A blob counts once in each sum, however many artifacts hold it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from stages.artifacts.fetch import read_manifest
from stages.artifacts.reach import Making, by_artifact, makings
from stages.artifacts.results import results
from stages.artifacts.store import Damaged, NotInStore, Store, leave_out

IMPORTED = "(imported)"  # the stage and run of an artifact that no result made
CODE = "(code)"  # the same, of the sources of stages


@dataclass(frozen=True)
class Share:
    """The room that a group of artifacts takes.

    Attributes:
        artifacts: how many there are.
        size: bytes of their blobs, each counted once.
        alone: bytes of the blobs that no artifact outside the group holds: what removing the group would free.
    """

    artifacts: int
    size: int
    alone: int


@dataclass
class Usage:
    """The room that a store takes, in bytes.

    Attributes:
        kinds, stages, runs: name -> share; by the kind of an artifact, and by the stage and the run that made it (the
            newest, where several made the same bytes).
        models: the same for each checkpoint, as "step (run) digits of its digest".
        artifacts: how many artifacts there are.
        files: bytes of their files, counted as often as artifacts hold them.
        blobs: bytes of all blobs.
        unnamed: bytes of blobs that no artifact holds.
        other: first part of the key ("work", "logs", "manifests", ...) -> bytes.
        leftovers: bytes that killed writers left.
    """

    kinds: dict[str, Share] = field(default_factory=dict)
    stages: dict[str, Share] = field(default_factory=dict)
    runs: dict[str, Share] = field(default_factory=dict)
    models: dict[str, Share] = field(default_factory=dict)
    artifacts: int = 0
    files: int = 0
    blobs: int = 0
    unnamed: int = 0
    other: dict[str, int] = field(default_factory=dict)
    leftovers: int = 0

    @property
    def total(self) -> int:
        return self.blobs + sum(self.other.values()) + self.leftovers


def usage(store: Store) -> Usage:
    """Measure a store. What cannot be read is left out, and the log says so.

    Raises:
        StoreError: the store cannot be read.
    """
    blobs = {info.key: info.size for info in store.list("blobs/")}
    makers = by_artifact(making for result in results(store) for making in makings(result))
    used = Usage(blobs=sum(blobs.values()))
    held: dict[str, set[str]] = {}  # digest -> keys of its blobs
    groups: dict[str, dict[str, list[str]]] = {"kinds": {}, "stages": {}, "runs": {}, "models": {}}
    for info in store.list("manifests/"):
        match = re.fullmatch(r"manifests/[0-9a-f]{2}/([0-9a-f]{64})\.json", info.key)
        if match is None:
            continue
        digest = "sha256:" + match[1]
        try:
            manifest = read_manifest(store, digest)
        except NotInStore:  # removed just now
            continue
        except Damaged as error:
            leave_out(error)
            continue
        held[digest] = {entry.blob for entry in manifest.files}
        used.files += manifest.size
        newest = max(makers.get(digest, []), key=lambda making: making.finished, default=None)
        for grouping, name in _names(manifest.kind, newest):
            groups[grouping].setdefault(name, []).append(digest)
        if manifest.kind == "checkpoint":
            maker = f"{newest.step} ({newest.run})" if newest is not None else IMPORTED
            groups["models"][f"{maker} {digest[7:19]}"] = [digest]
    used.artifacts = len(held)
    holders: dict[str, int] = {}
    for keys in held.values():
        for key in keys:
            holders[key] = holders.get(key, 0) + 1
    used.unnamed = sum(size for key, size in blobs.items() if key not in holders)
    for grouping, members in groups.items():
        shares = {name: _share(digests, held, holders, blobs) for name, digests in members.items()}
        setattr(used, grouping, dict(sorted(shares.items(), key=lambda pair: -pair[1].size)))
    for prefix in ("manifests", "results", "refs", "nights", "leases", "work", "runs", "logs"):
        size = sum(info.size for info in store.list(f"{prefix}/"))
        if size:
            used.other[prefix] = size
    used.leftovers = sum(info.size for info in store.leftovers(0.0))
    return used


def _names(kind: str, making: Making | None) -> Iterable[tuple[str, str]]:
    yield "kinds", kind
    nobody = CODE if kind == "code" else IMPORTED
    yield "stages", making.stage if making is not None else nobody
    yield "runs", making.run if making is not None else nobody


def _share(digests: list[str], held: dict[str, set[str]], holders: dict[str, int], blobs: dict[str, int]) -> Share:
    inside: dict[str, int] = {}
    for digest in digests:
        for key in held[digest]:
            inside[key] = inside.get(key, 0) + 1
    size = sum(blobs.get(key, 0) for key in inside)
    alone = sum(blobs.get(key, 0) for key, count in inside.items() if count == holders[key])
    return Share(len(digests), size, alone)
