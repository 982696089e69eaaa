"""Checking a store. (`stages.artifacts.repair` mends it.)

Each blob is read once, however many artifacts hold it; each damage is reported for every artifact that it touches.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from stages.artifacts.fetch import read_manifest
from stages.artifacts.leases import read_lease
from stages.artifacts.manifest import FileEntry, check_digest
from stages.artifacts.refs import read_ref, ref_names
from stages.artifacts.results import parse_result
from stages.artifacts.runs import read_run
from stages.artifacts.store import Damaged, NotInStore, Store


@dataclass(frozen=True)
class Damage:
    """One thing that is wrong in a store.

    Attributes:
        key: the damaged or missing object.
        problem: "missing", "damaged", ... with figures where there are any.
        artifact: the digest of an artifact that it belongs to, "" for none.
        path: the file in that artifact, "" for none.
        size: for a blob, the bytes that it should have; None where that is not known.
    """

    key: str
    problem: str
    artifact: str = ""
    path: str = ""
    size: int | None = None

    def __str__(self) -> str:
        whose = f" ({self.path} of artifact {self.artifact})" if self.path else ""
        return f"{self.key}{whose}: {self.problem}"


def verify_artifact(store: Store, digest: str, *, quick: bool = False) -> list[Damage]:
    """Recompute the hashes of an artifact's manifest and of all its files. An empty list: all is well.

    Args:
        quick: look only whether the files are there and have their sizes.

    Raises:
        NotInStore: the store has no such artifact.
        ValueError: `digest` is not a full digest.
    """
    return _Verifier(store, quick).artifact(digest)


def verify_artifacts(store: Store, digests: Iterable[str], *, quick: bool = False) -> Iterator[Damage]:
    """`verify_artifact` of several, such as an artifact with its ancestors; one that the store lacks is a damage."""
    verifier = _Verifier(store, quick)
    for digest in digests:
        try:
            yield from verifier.artifact(digest)
        except NotInStore:
            yield _missing(digest)


def verify_all(store: Store, *, quick: bool = False) -> Iterator[Damage]:
    """Recompute every hash of the store: manifests, the blobs they name, blobs that nothing names; and read what
    results, their side outputs and refs point to, runs and leases.

    Args:
        quick: look only whether the files are there and have their sizes.
    """
    verifier = _Verifier(store, quick)
    if quick:
        verifier.sizes = {info.key: info.size for info in store.list("blobs/")}
    artifacts = set()
    for info in store.list("manifests/"):
        name = re.fullmatch(r"manifests/([0-9a-f]{2})/(\1[0-9a-f]{62})\.json", info.key)
        if name is None:
            yield Damage(info.key, "is not the name of a manifest")
            continue
        digest = "sha256:" + name[2]
        artifacts.add(digest)
        try:
            yield from verifier.artifact(digest)
        except NotInStore:  # removed just now
            artifacts.discard(digest)
    for info in store.list("blobs/"):
        name = re.fullmatch(r"blobs/([0-9a-f]{2})/(\1[0-9a-f]{62})", info.key)
        if name is None:
            yield Damage(info.key, "is not the name of a blob")
        elif info.key not in verifier.problems:
            problem = verifier.problem(FileEntry("", info.size, name[2]))
            if problem and problem != "missing":  # removed just now
                yield Damage(info.key, problem)
    yield from _verify_pointers(store, artifacts)


class _Verifier:
    """Remembers what it found of each blob: `problems` is blob key -> problem ("" for none)."""

    def __init__(self, store: Store, quick: bool) -> None:
        self._store, self._quick = store, quick
        self.problems: dict[str, str] = {}
        self.sizes: dict[str, int] | None = None  # of all blobs, where they were listed

    def artifact(self, digest: str) -> list[Damage]:
        try:
            manifest = read_manifest(self._store, digest)
        except Damaged as error:
            return [Damage(f"manifests/{digest[7:9]}/{digest[7:]}.json", str(error), digest)]
        if self._quick and self.sizes is None:
            sizes = self._store.sizes({entry.blob for entry in manifest.files})
        else:
            sizes = self.sizes or {}
        found = []
        for entry in manifest.files:
            if entry.blob not in self.problems:
                self.problems[entry.blob] = self.problem(entry, sizes)
            if self.problems[entry.blob]:
                found.append(Damage(entry.blob, self.problems[entry.blob], digest, entry.path, entry.size))
        return found

    def problem(self, entry: FileEntry, sizes: dict[str, int] | None = None) -> str:
        size = (sizes or {}).get(entry.blob) if self._quick and sizes is not None else self._store.size(entry.blob)
        if size is None:
            return "missing"
        if size != entry.size:
            return f"has {size:,} bytes, not {entry.size:,}"
        if self._quick:
            return ""
        try:
            return "" if self._store.hash(entry.blob) == entry.sha256 else "damaged: its bytes have another hash"
        except NotInStore:
            return "missing"


def _missing(digest: str) -> Damage:
    name = check_digest(digest)
    return Damage(f"manifests/{name[:2]}/{name}.json", "missing", digest)


def _verify_pointers(store: Store, artifacts: set[str]) -> Iterator[Damage]:
    """Results, refs, runs and leases that cannot be read, and results and refs whose artifacts are not there."""
    named: list[tuple[str, str, str]] = []  # key of what names it, digest, what it is there
    for info in store.list("results/"):
        try:
            result = parse_result(store, info.key)
        except NotInStore:  # removed just now
            continue
        except Damaged as error:
            yield Damage(info.key, str(error))
            continue
        named.append((info.key, result.artifact, ""))
        named.extend((info.key, digest, f" (output {name})") for name, digest in result.outputs.items())
    for name in ref_names(store):
        try:
            named.append((f"refs/{name}.json", read_ref(store, name).artifact, ""))
        except NotInStore:
            continue
        except Damaged as error:
            yield Damage(f"refs/{name}.json", str(error))
    for key, digest, what in named:
        # What was published since the manifests were listed is no damage.
        if digest not in artifacts and not store.exists(_missing(digest).key) and store.exists(key):
            yield Damage(key, f"its artifact {digest} is missing{what}", digest)
    for prefix, read in (("runs/", read_run), ("leases/", read_lease)):
        for info in store.list(prefix):
            name = info.key.removeprefix(prefix).removesuffix(".json")
            try:
                read(store, name)
            except ValueError:
                yield Damage(info.key, f"is not the name of a {prefix[:-2]}")
            except Damaged as error:
                yield Damage(info.key, str(error))
