"""Recomputing every hash of a store.

Each blob is read once, however many artifacts hold it; each damage is reported for every artifact that it touches.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from stages.artifacts.fetch import read_manifest
from stages.artifacts.manifest import FileEntry
from stages.artifacts.results import parse_result
from stages.artifacts.store import Damaged, NotInStore, Store


@dataclass(frozen=True)
class Damage:
    """One thing that is wrong in a store.

    Attributes:
        key: the damaged or missing object.
        problem: "missing", "damaged", ... with figures where there are any.
        artifact: the digest of an artifact that it belongs to, "" for none.
        path: the file in that artifact, "" for none.
    """

    key: str
    problem: str
    artifact: str = ""
    path: str = ""

    def __str__(self) -> str:
        whose = f" ({self.path} of artifact {self.artifact})" if self.path else ""
        return f"{self.key}{whose}: {self.problem}"


def verify_artifact(store: Store, digest: str) -> list[Damage]:
    """Recompute the hashes of an artifact's manifest and of all its files. An empty list: all is well.

    Raises:
        NotInStore: the store has no such artifact.
        ValueError: `digest` is not a full digest.
    """
    return _verify(store, digest, {})


def verify_all(store: Store) -> Iterator[Damage]:
    """Recompute every hash of the store: manifests, the blobs they name, blobs that nothing names, and what results and
    their side outputs point to."""
    problems: dict[str, str] = {}
    artifacts = set()
    for info in store.list("manifests/"):
        name = re.fullmatch(r"manifests/([0-9a-f]{2})/(\1[0-9a-f]{62})\.json", info.key)
        if name is None:
            yield Damage(info.key, "is not the name of a manifest")
            continue
        digest = "sha256:" + name[2]
        artifacts.add(digest)
        yield from _verify(store, digest, problems)
    for info in store.list("blobs/"):
        name = re.fullmatch(r"blobs/([0-9a-f]{2})/(\1[0-9a-f]{62})", info.key)
        if name is None:
            yield Damage(info.key, "is not the name of a blob")
        elif info.key not in problems:
            problem = _blob_problem(store, FileEntry("", info.size, name[2]))
            if problem:
                yield Damage(info.key, problem)
    yield from _verify_results(store, artifacts)


def _verify(store: Store, digest: str, problems: dict[str, str]) -> list[Damage]:
    """Damages of one artifact; `problems` remembers blob key -> problem ("" for none)."""
    try:
        manifest = read_manifest(store, digest)
    except Damaged as error:
        return [Damage(f"manifests/{digest[7:9]}/{digest[7:]}.json", str(error), digest)]
    found = []
    for entry in manifest.files:
        if entry.blob not in problems:
            problems[entry.blob] = _blob_problem(store, entry)
        if problems[entry.blob]:
            found.append(Damage(entry.blob, problems[entry.blob], digest, entry.path))
    return found


def _blob_problem(store: Store, entry: FileEntry) -> str:
    size = store.size(entry.blob)
    if size is None:
        return "missing"
    if size != entry.size:
        return f"has {size:,} bytes, not {entry.size:,}"
    return "" if store.hash(entry.blob) == entry.sha256 else "damaged: its bytes have another hash"


def _verify_results(store: Store, artifacts: set[str]) -> Iterator[Damage]:
    for info in store.list("results/"):
        try:
            result = parse_result(store, info.key)
        except NotInStore:  # removed just now
            continue
        except Damaged as error:
            yield Damage(info.key, str(error))
            continue
        for name, digest in {"": result.artifact, **result.outputs}.items():
            if digest not in artifacts:
                yield Damage(info.key, f"its artifact {digest} is missing" + (f" (output {name})" if name else ""))
