"""Putting artifacts into a store.

Invariants:
- Blobs first, the manifest last: whoever sees a manifest sees all of its files, and a killed publisher leaves nothing
  but unused blobs.
- Every file is read from the disk once; the hash is of the bytes that were copied (or checked by the server that got
  them), so a file that changes meanwhile cannot lie.
- What is published beside a gc is put anew, so that nothing which the gc had condemned before is missing from it.
- Publishing the same files again, also at the same time, gives the same digest and leaves the store as it was.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from stages.artifacts.fetch import is_complete
from stages.artifacts.hash_cache import HashCache
from stages.artifacts.leases import gc_is_running, outwait_gc
from stages.artifacts.manifest import FileEntry, Manifest, blob_key, check_path, manifest_key
from stages.artifacts.objects import DataObject, hash_objects
from stages.artifacts.store import NotInStore, Store, StoreError, hash_file, in_parallel
from stages.os_errors import explained

_TRIES = 5
_OBJECTS_AT_ONCE = 4


def publish(store: Store, folder: Path, kind: str, cache: HashCache | None = None) -> str:
    """Store every file below `folder` as one artifact and return its digest ("sha256:<64 hex>").

    Folders without files leave no trace.

    Raises:
        ValueError: the folder has no file, a link, a special file or a name that is not allowed; or an unknown kind.
        StoreError: the store cannot be written, or a file cannot be read.
    """
    return import_files(store, files_below(folder), kind, cache)


def import_files(
    store: Store, files: Sequence[tuple[str, Path | DataObject]], kind: str, cache: HashCache | None = None
) -> str:
    """Store files from anywhere as one artifact: pairs of the path in the artifact and the file. Returns the digest.

    `cache` remembers hashes: a file that did not change since, and whose blob is there, is not read. Objects of a
    bucket are fetched if their hash is not remembered, or the store lacks their blob.

    Raises: as `publish`.
    """
    _check(files, kind, look=cache is None)
    paths = [file for _, file in files if isinstance(file, Path)]
    objects = [file for _, file in files if isinstance(file, DataObject)]
    if cache is None:
        stored = store.put_blobs(paths)
    else:
        marks = [cache.mark(file) for file in paths]
        known = [cache.known(file, mark) for file, mark in zip(paths, marks, strict=True)]
        stored = store.put_blobs(paths, known)
        for file, mark, had, (sha256, _) in zip(paths, marks, known, stored, strict=True):
            if had is None:
                cache.remember(file, mark, sha256)
    manifest = _manifest(files, kind, stored, _put_objects(store, objects, cache))
    _put_manifest(store, manifest)
    if gc_is_running(store):
        _put_again(store, manifest, dict(files))
    return manifest.digest


def _manifest(
    files: Sequence[tuple[str, Path | DataObject]],
    kind: str,
    local: Sequence[tuple[str, int]],
    remote: Sequence[tuple[str, int]],
) -> Manifest:
    """The manifest of files, whose hashes and sizes are given in order: of those of this machine, and of objects."""
    here, there = iter(local), iter(remote)
    entries = []
    for path, file in files:
        sha256, size = next(here if isinstance(file, Path) else there)
        entries.append(FileEntry(path, size, sha256))
    return Manifest(kind, tuple(entries))


def _put_objects(store: Store, objects: Sequence[DataObject], cache: HashCache | None) -> list[tuple[str, int]]:
    """Store those objects of a bucket whose blobs are not there. Returns the SHA-256 (hex) and size of each."""
    if not objects:
        return []
    hashed = hash_objects(objects, cache)
    found = store.sizes(blob_key(sha256) for sha256, _ in hashed)
    lacking = {
        sha256: item
        for item, (sha256, size) in zip(objects, hashed, strict=True)
        if found.get(blob_key(sha256)) != size
    }
    with ThreadPoolExecutor(_OBJECTS_AT_ONCE) as pool:
        in_parallel(pool, lambda given: _put_blob(store, *given), lacking.items())
    return hashed


def _put_blob(store: Store, sha256: str, file: Path | DataObject) -> None:
    if isinstance(file, Path):
        store.put_file(blob_key(sha256), file, sha256=sha256)
        return
    with file.copy(sha256) as path:
        store.put_file(blob_key(sha256), path, sha256=sha256)


def _put_manifest(store: Store, manifest: Manifest) -> None:
    key = manifest_key(manifest.digest)
    try:
        if store.get(key) == manifest.to_json():
            return
    except NotInStore:
        pass
    if store.put(key, manifest.to_json(), if_absent=True) is None and store.get(key) != manifest.to_json():
        store.put(key, manifest.to_json())  # what was there is damaged


def _put_again(store: Store, manifest: Manifest, files: dict[str, Path | DataObject]) -> None:
    """Make every object of an artifact young: a gc may have condemned an old one that was found there a moment ago.

    Raises:
        StoreError: a gc that takes no heed of what is young goes on removing it.
    """
    for _ in range(_TRIES):
        for entry in manifest.files:
            _put_blob(store, entry.sha256, files[entry.path])
        store.put(manifest_key(manifest.digest), manifest.to_json())
        outwait_gc(store)  # what it had looked at just before is removed by now
        if is_complete(store, manifest.digest):
            return
    raise StoreError(f"a gc of store {store.url} removes what is published now; publish again when it has ended")


def manifest_of(files: Sequence[tuple[str, Path | DataObject]], kind: str, cache: HashCache | None = None) -> Manifest:
    """The manifest that `import_files` would store, without storing anything.

    Raises: as `publish`.
    """
    _check(files, kind, look=cache is None)
    paths = [file for _, file in files if isinstance(file, Path)]
    local = [cache.hash(file) if cache is not None else hash_file(file) for file in paths]
    remote = hash_objects([file for _, file in files if isinstance(file, DataObject)], cache)
    return _manifest(files, kind, local, remote)


def files_below(folder: Path) -> list[tuple[str, Path]]:
    """Every file below a folder, as (path in the artifact, file), sorted.

    Raises:
        ValueError: there is none, or there is a link, a special file or a name that is not allowed.
        StoreError: the folder cannot be read.
    """
    if folder.is_symlink() or not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    found: list[tuple[str, Path]] = []
    pending = [str(folder)]
    start = len(os.path.join(folder, ""))  # where the paths in the artifact begin
    while pending:
        current = pending.pop()
        try:
            entries = list(os.scandir(current))
        except OSError as error:
            raise StoreError(f"cannot read {current}: {explained(error)}") from error
        for entry in entries:
            path = entry.path
            if entry.is_symlink():
                raise ValueError(f"{path} is a symbolic link; an artifact holds files only")
            if entry.is_dir():
                pending.append(path)
            elif entry.is_file():
                found.append((check_path(path[start:]), Path(path)))
            else:
                raise ValueError(f"{path} is not a regular file; an artifact holds files only")
    if not found:
        raise ValueError(f"{folder} holds no files; an artifact needs at least one")
    return sorted(found)


def _check(files: Sequence[tuple[str, Path | DataObject]], kind: str, *, look: bool = True) -> None:
    """Everything that can be refused before a byte is stored: names, clashes, kind, and (`look`) what is no file."""
    Manifest(kind, tuple(FileEntry(path, 0, "0" * 64) for path, _ in files))
    for _, file in files if look else ():
        if isinstance(file, DataObject):
            continue
        try:
            mode = os.stat(file).st_mode
        except OSError as error:
            raise StoreError(f"cannot read {file}: {explained(error)}") from error
        if not stat.S_ISREG(mode):
            raise ValueError(f"{file} is not a regular file; an artifact holds files only")
