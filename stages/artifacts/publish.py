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

import json
import os
import stat
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path

from stages.artifacts.fetch import is_complete
from stages.artifacts.leases import gc_is_running
from stages.artifacts.manifest import FileEntry, Manifest, check_path, manifest_key
from stages.artifacts.store import NotInStore, Store, StoreError, hash_file
from stages.os_errors import explained

_GC_SECONDS = 0.5
_TRIES = 5
_SETTLED_NS = 2_000_000_000


def publish(store: Store, folder: Path, kind: str, cache: HashCache | None = None) -> str:
    """Store every file below `folder` as one artifact and return its digest ("sha256:<64 hex>").

    Folders without files leave no trace.

    Raises:
        ValueError: the folder has no file, a link, a special file or a name that is not allowed; or an unknown kind.
        StoreError: the store cannot be written, or a file cannot be read.
    """
    return import_files(store, files_below(folder), kind, cache)


def import_files(store: Store, files: list[tuple[str, Path]], kind: str, cache: HashCache | None = None) -> str:
    """Store files from anywhere as one artifact: pairs of the path in the artifact and the file. Returns the digest.

    `cache` remembers hashes: a file that did not change since, and whose blob is there, is not read.

    Raises: as `publish`.
    """
    _check(files, kind, look=cache is None)
    paths = [file for _, file in files]
    if cache is None:
        stored = store.put_blobs(paths)
    else:
        marks = [cache.mark(file) for file in paths]
        known = [cache.known(file, mark) for file, mark in zip(paths, marks, strict=True)]
        stored = store.put_blobs(paths, known)
        for file, mark, had, (sha256, _) in zip(paths, marks, known, stored, strict=True):
            if had is None:
                cache.remember(file, mark, sha256)
    entries = [FileEntry(path, size, sha256) for (path, _), (sha256, size) in zip(files, stored, strict=True)]
    manifest = Manifest(kind, tuple(entries))
    _put_manifest(store, manifest)
    if gc_is_running(store):
        _put_again(store, manifest, dict(files))
    return manifest.digest


def _put_manifest(store: Store, manifest: Manifest) -> None:
    key = manifest_key(manifest.digest)
    try:
        if store.get(key) == manifest.to_json():
            return
    except NotInStore:
        pass
    if store.put(key, manifest.to_json(), if_absent=True) is None and store.get(key) != manifest.to_json():
        store.put(key, manifest.to_json())  # what was there is damaged


def _put_again(store: Store, manifest: Manifest, files: dict[str, Path]) -> None:
    """Make every object of an artifact young: a gc may have condemned an old one that was found there a moment ago.

    Raises:
        StoreError: a gc that takes no heed of what is young goes on removing it.
    """
    for _ in range(_TRIES):
        for entry in manifest.files:
            store.put_file(entry.blob, files[entry.path], sha256=entry.sha256)
        store.put(manifest_key(manifest.digest), manifest.to_json())
        time.sleep(_GC_SECONDS)  # what it had looked at just before is removed by now
        if is_complete(store, manifest.digest):
            return
    raise StoreError(f"a gc of store {store.url} removes what is published now; publish again when it has ended")


def manifest_of(files: list[tuple[str, Path]], kind: str, cache: HashCache | None = None) -> Manifest:
    """The manifest that `import_files` would store, without storing anything.

    Raises: as `publish`.
    """
    _check(files, kind, look=cache is None)
    entries = []
    for path, file in files:
        sha256, size = cache.hash(file) if cache is not None else hash_file(file)
        entries.append(FileEntry(path, size, sha256))
    return Manifest(kind, tuple(entries))


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


def _check(files: list[tuple[str, Path]], kind: str, *, look: bool = True) -> None:
    """Everything that can be refused before a byte is stored: names, clashes, kind, and (`look`) what is no file."""
    Manifest(kind, tuple(FileEntry(path, 0, "0" * 64) for path, _ in files))
    for _, file in files if look else ():
        try:
            mode = os.stat(file).st_mode
        except OSError as error:
            raise StoreError(f"cannot read {file}: {explained(error)}") from error
        if not stat.S_ISREG(mode):
            raise ValueError(f"{file} is not a regular file; an artifact holds files only")


class HashCache:
    """Remembers the SHA-256 of files by path, size, times and inode, in a JSON file: planning reads no data twice.

    A file that changed less than two seconds before it was hashed is not remembered: it could change again within the
    resolution of its time stamp. A cache that cannot be read or written is a cache that is empty; without a path, it
    lasts as long as the object.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._changed = False
        self._entries: dict[str, list[int | str]] = {}
        try:
            loaded = json.loads(path.read_bytes()) if path is not None else None
        except (OSError, ValueError):
            return
        if isinstance(loaded, dict):
            self._entries = {key: value for key, value in loaded.items() if isinstance(value, list) and len(value) == 5}

    def hash(self, path: Path) -> tuple[str, int]:
        """The SHA-256 (hex) and size of a file.

        Raises:
            StoreError: it cannot be read.
        """
        mark = self.mark(path)
        known = self.known(path, mark)
        if known is not None:
            return known
        sha256, size = hash_file(path)
        self.remember(path, mark, sha256)
        return sha256, size

    def mark(self, path: Path) -> list[int]:
        """What shows that a file changed: its size, times and inode.

        Raises:
            ValueError: it is not a regular file.
            StoreError: it cannot be read.
        """
        try:
            now = os.stat(path)
        except OSError as error:
            raise StoreError(f"cannot read {path}: {explained(error)}") from error
        if not stat.S_ISREG(now.st_mode):
            raise ValueError(f"{path} is not a regular file; an artifact holds files only")
        return [now.st_size, now.st_mtime_ns, now.st_ctime_ns, now.st_ino]

    def known(self, path: Path, mark: list[int]) -> tuple[str, int] | None:
        """The SHA-256 (hex) and size of a file that has the mark, if it had it when it was hashed; else None."""
        with self._lock:
            entry = self._entries.get(_place(path))
        return (str(entry[4]), mark[0]) if entry is not None and entry[:4] == mark else None

    def remember(self, path: Path, mark: list[int], sha256: str) -> None:
        """Keep the hash of a file that had the mark before it was read, unless it changed since or only just before."""
        if self.mark(path) == mark and time.time_ns() - max(mark[1], mark[2]) > _SETTLED_NS:
            with self._lock:
                self._entries[_place(path)] = [*mark, sha256]
                self._changed = True

    def save(self) -> None:
        """Write what was learnt. Call it once, after hashing."""
        with self._lock:
            if not self._changed or self.path is None:
                return
            data = json.dumps(self._entries)
            self._changed = False
        temporary = self.path.with_name(f"{self.path.name}.{uuid.uuid4().hex}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(data)
            os.replace(temporary, self.path)
        except OSError:  # only time is lost
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def _place(path: Path) -> str:
    text = os.fspath(path)
    return text if text.startswith("/") else os.path.abspath(text)
