"""What the index points to, read from the store itself: results, and single files of artifacts."""

from __future__ import annotations

from pathlib import Path

from flows.lineage import queries
from flows.lineage.index import Index
from stages.artifacts import (
    Damaged,
    FileEntry,
    Manifest,
    NotInStore,
    Result,
    Store,
    hash_file,
    parse_result,
    read_manifest,
    result_key,
)
from stages.artifacts.manifest import sha256_hex


def makers(index: Index, digest: str, known: dict[str, Result] | None = None) -> list[tuple[Result, str]]:
    """The results that gave an artifact, newest first, each with the name of the output that it is ("" for the main).

    Those that a forced run replaced count too. A result that cannot be read is left out; `verify` names it.

    Args:
        known: results by their object's key that were read before, for one may have given several artifacts; what is
            read now is added.
    """
    known = {} if known is None else known
    found = []
    for making in queries.makings(index, digest):
        key = result_key(making.stage, making.key)
        try:
            current = known[key] = known.get(key) or parse_result(index.store, key)
        except (NotInStore, Damaged):
            continue
        for result in (current, *older(current)):
            gave = {"": result.artifact, **result.outputs}.get(making.output) == digest
            if gave and (result, making.output) not in found:
                found.append((result, making.output))
    return found


def older(result: Result) -> list[Result]:
    """The results that this one replaced under its key, newest first."""
    return [
        Result.model_validate({name: value for name, value in entry.items() if name != "same_bytes"})
        for entry in reversed(result.history)
    ]


def entry_of(manifest: Manifest, path: str) -> FileEntry | None:
    """The file of an artifact at a path; None where there is none."""
    return next((entry for entry in manifest.files if entry.path == path), None)


def read_bytes(store: Store, digest: str, path: str, limit: int = 64 << 20) -> bytes:
    """The bytes of a small file of an artifact, verified.

    Raises:
        NotInStore: the store has no such artifact, or the artifact no such file.
        Damaged: the bytes have another hash, or are more than `limit`.
    """
    entry = _entry(store, digest, path)
    data = store.get(entry.blob, limit=limit)
    if sha256_hex(data) != entry.sha256:
        raise Damaged(f"{path} of artifact {digest} is damaged: its bytes have another hash")
    return data


def copy_file(store: Store, digest: str, path: str, target: Path) -> Path:
    """Copy a file of an artifact to `target`, verified, and return that.

    Raises: as `read_bytes`.
    """
    entry = _entry(store, digest, path)
    store.get_file(entry.blob, target, size=entry.size)
    if hash_file(target)[0] != entry.sha256:
        target.unlink()
        raise Damaged(f"{path} of artifact {digest} is damaged: its bytes have another hash")
    return target


def _entry(store: Store, digest: str, path: str) -> FileEntry:
    entry = entry_of(read_manifest(store, digest), path)
    if entry is None:
        raise NotInStore(f"artifact {digest} has no file {path}")
    return entry
