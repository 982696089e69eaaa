"""Blobs of remote stores kept on this machine, shared by its runs.

    <cache>/blobs/<aa>/<sha256>     whole blobs, read-only
    <cache>/manifests/<sha256>      of what was fetched, to mend a store with; small, and apart from the limit
    <cache>/partial/<sha256>        a beginning of one that is being fetched, under a lock
    <cache>/bad/<sha256>-<time>     what turned out not to have the hash of its name

Invariants:
- Every blob is hashed each time it is handed out, so that what a disk or a program did to it is found; a bad one is put
  aside and fetched again.
- A fetch that was killed goes on where it was: what is there of a blob is hashed, and the rest fetched.
- The cache is at most as large as its limit, but for what several processes fetch at the same time; what was used
  longest ago goes first. Folders that got a blob as a hard link keep it.
- Any number of processes may use it at once. One fetches a blob, those that want it too wait as long as it gets on.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from stages.artifacts.manifest import FileEntry
from stages.artifacts.store import Store, StoreError, hash_file
from stages.os_errors import explained

DEFAULT_SIZE = 20 << 30
_STALLED_SECONDS = 30.0  # how long a fetch by another process may stand still before we fetch ourselves
_OLD_SECONDS = 7 * 24 * 3600.0  # beginnings and bad blobs are removed at this age
_MANIFEST_SECONDS = 90 * 24 * 3600.0  # manifests are removed when they were used so long ago
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


class WrongBytes(Exception):
    """What was fetched is not the blob that it should be: its SHA-256 (hex) and size."""

    def __init__(self, sha256: str, size: int) -> None:
        super().__init__(f"{size:,} bytes with the hash {sha256}")
        self.sha256, self.size = sha256, size


def open_cache() -> BlobCache | None:
    """The cache of this machine, as the environment says; None where its size is 0 or there is no place for it.

    HEADRACE_CACHE_DIR is its folder (`headrace` in XDG_CACHE_HOME or `~/.cache` when left out), HEADRACE_CACHE_SIZE its
    limit, such as 100GiB (20GiB).

    Raises:
        StoreError: the size is none, or the folder that was asked for cannot be written.
    """
    size = parse_size(os.environ.get("HEADRACE_CACHE_SIZE", ""))
    if size == 0:
        return None
    asked, root = os.environ.get("HEADRACE_CACHE_DIR"), cache_folder()
    if root is None:
        return None
    try:
        for name in ("blobs", "partial"):
            (root / name).mkdir(parents=True, exist_ok=True)
        usable = os.access(root / "blobs", os.W_OK)
    except OSError:
        usable = False
    if not usable and asked:
        raise StoreError(f"the cache folder {root} cannot be written; set HEADRACE_CACHE_DIR to another one")
    return BlobCache(root, size) if usable else None


def cache_folder() -> Path | None:
    """Where this user's caches on this machine lie, whether or not it is there: see `open_cache`.

    None where nothing says so, and the user has no home folder (in a container, say).
    """
    if asked := os.environ.get("HEADRACE_CACHE_DIR"):
        return Path(asked).absolute()
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return None if folder.startswith("~") else Path(folder, "headrace").absolute()


def parse_size(text: str) -> int:
    """Bytes of a size such as "500MiB", "20G" or "0"; the default where it is empty.

    Raises:
        StoreError: it is none.
    """
    if not text.strip():
        return DEFAULT_SIZE
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise StoreError(f"HEADRACE_CACHE_SIZE is {text!r}; set it to a size such as 20GiB, or to 0 for no cache")
    return int(float(match[1]) * (1 << _UNITS[match[2].upper()]))


class BlobCache:
    """Whole, verified blobs in a folder of this machine.

    Args:
        root: its folder, which is there.
        limit: bytes that the blobs may take.
    """

    def __init__(self, root: Path, limit: int) -> None:
        self.root = root
        self.limit = limit

    def __repr__(self) -> str:
        return f"BlobCache({str(self.root)!r}, {self.limit})"

    def path(self, sha256: str) -> Path:
        return self.root / "blobs" / sha256[:2] / sha256

    def holds(self, sha256: str, size: int) -> bool:
        """Whether a blob is there, at its size."""
        try:
            return self.path(sha256).stat().st_size == size
        except OSError:
            return False

    def take(self, entry: FileEntry, target: Path, *, link: bool) -> bool:
        """Put a blob of the cache at `target`, verified. False if it is not there, or was bad and is put aside now.

        Args:
            link: as a hard link where that can be (the file is read-only then), else as a copy.
        """
        path = self.path(entry.sha256)
        try:
            sha256, size = hash_file(path)
        except StoreError:
            return False
        if (sha256, size) != (entry.sha256, entry.size):
            self._put_aside(path)
            return False
        with suppress(OSError):
            os.utime(path)  # used now
        return self._hand_out(path, target, link=link)

    def fill(self, store: Store, key: str, entry: FileEntry, target: Path, *, link: bool) -> None:
        """Fetch a blob into the cache and put it at `target`. Goes on where an earlier try was cut.

        Raises:
            WrongBytes: the store's blob has other bytes.
            NotInStore: the store has none.
            StoreError: the store or the cache cannot be used.
        """
        while not self._fill(store, key, entry, target, link=link):
            if self.take(entry, target, link=link):
                return

    def _fill(self, store: Store, key: str, entry: FileEntry, target: Path, *, link: bool) -> bool:
        """`fill`, or False where another process has fetched the blob meanwhile."""
        with self._writing(), self._partial(entry) as partial:
            if partial is None:
                return False
            begun = partial.exists() and partial.stat().st_size > 0
            sha256, size = store.get_file(key, partial, size=entry.size, resume=True)
            if begun and (sha256, size) != (entry.sha256, entry.size):  # the beginning may be what is wrong
                partial.unlink()
                sha256, size = store.get_file(key, partial, size=entry.size, resume=True)
            if (sha256, size) != (entry.sha256, entry.size):
                self._put_aside(partial)
                raise WrongBytes(sha256, size)
            os.chmod(partial, 0o444)
            path = self.path(entry.sha256)
            path.parent.mkdir(parents=True, exist_ok=True)
            if not self._hand_out(partial, target, link=link):
                raise StoreError(f"cannot write {target}: the fetched file vanished")
            os.replace(partial, path)
            return True

    def adopt(self, path: Path, sha256: str) -> None:
        """Take a file of this hash, which lies in the cache's folder, as a blob.

        Raises:
            StoreError: the cache cannot be written.
        """
        with self._writing():
            os.chmod(path, 0o444)
            target = self.path(sha256)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)

    def keep_manifest(self, sha256: str, data: bytes) -> None:
        """Keep a verified manifest, for those who mend a store. Where it cannot be written, it is not kept."""
        path = self.root / "manifests" / sha256
        temporary = path.with_name(f"{sha256}.{uuid.uuid4().hex}")
        with suppress(OSError):
            if path.exists():
                os.utime(path)  # used now
                return
            path.parent.mkdir(exist_ok=True)
            temporary.write_bytes(data)
            os.replace(temporary, path)

    def find(self, sha256: str) -> Path | None:
        """A blob or a manifest that is there, whatever its bytes are by now."""
        for path in (self.path(sha256), self.root / "manifests" / sha256):
            if path.is_file():
                return path
        return None

    def make_room(self, size: int) -> None:
        """Remove what was used longest ago until `size` more bytes fit, as far as they can."""
        with self._lock(self.root / "lock") as locked:
            if not locked:  # another process does it
                return
            blobs = sorted(self._blobs(), key=lambda found: found[1])
            total = sum(found[2] for found in blobs)
            for path, _, taken in blobs:
                if total + size <= self.limit:
                    break
                with suppress(OSError):
                    path.unlink()
                total -= taken
            self._tidy()

    def _blobs(self) -> Iterator[tuple[Path, float, int]]:
        """Every blob, with the time of its last use and its size."""
        for folder in _scan(self.root / "blobs"):
            if folder.is_dir(follow_symlinks=False):
                for entry in _scan(Path(folder.path)):
                    with suppress(FileNotFoundError):
                        stat = entry.stat(follow_symlinks=False)
                        yield Path(entry.path), stat.st_mtime, stat.st_size

    def _tidy(self) -> None:
        for name, seconds in (("partial", _OLD_SECONDS), ("bad", _OLD_SECONDS), ("manifests", _MANIFEST_SECONDS)):
            for entry in _scan(self.root / name):
                with suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_mtime < time.time() - seconds:
                        os.unlink(entry.path)

    def _put_aside(self, path: Path) -> None:
        with suppress(OSError):
            (self.root / "bad").mkdir(exist_ok=True)
            os.replace(path, self.root / "bad" / f"{path.name[:64]}-{time.time_ns()}")

    def _hand_out(self, path: Path, target: Path, *, link: bool) -> bool:
        try:
            if link:
                try:
                    os.link(path, target)
                    return True
                except OSError as error:
                    if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EACCES):
                        raise
            shutil.copyfile(path, target)
        except FileNotFoundError:
            if path.exists():
                raise
            return False  # removed to make room
        return True

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, StoreError) as error:
            cause = error if isinstance(error, OSError) else error.__cause__
            if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
                said = "is full; free some space, or set HEADRACE_CACHE_DIR to another or HEADRACE_CACHE_SIZE=0"
                raise StoreError(f"the disk of the cache {self.root} {said}") from error
            if isinstance(error, StoreError):
                raise
            raise StoreError(f"cannot write the cache {self.root}: {explained(error)}") from error

    @contextmanager
    def _partial(self, entry: FileEntry) -> Iterator[Path | None]:
        """The file to fetch a blob into, alone; None where another process has fetched it meanwhile."""
        partial = self.root / "partial" / entry.sha256
        grown, since = -1, time.monotonic()
        while True:
            with self._lock(partial.with_name(entry.sha256 + ".lock")) as locked:
                if locked:
                    try:
                        yield None if self.holds(entry.sha256, entry.size) else partial
                    finally:
                        partial.with_name(entry.sha256 + ".lock").unlink(missing_ok=True)
                    return
            size = partial.stat().st_size if partial.exists() else 0
            if size != grown:
                grown, since = size, time.monotonic()
            if time.monotonic() - since > _STALLED_SECONDS:
                alone = partial.with_name(f"{entry.sha256}.{uuid.uuid4().hex}")
                try:
                    yield alone
                finally:
                    alone.unlink(missing_ok=True)
                return
            time.sleep(0.05)

    @contextmanager
    def _lock(self, path: Path) -> Iterator[bool]:
        """Whether the lock could be had at once. It is let go with the process, however that ends."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            # Whoever had the lock before may have removed its file; then a newer one is the lock.
            try:
                mine = os.fstat(descriptor).st_ino == os.stat(path).st_ino
            except FileNotFoundError:
                mine = False
            if mine:
                os.utime(path)  # or it would be tidied away as old
            yield mine
        finally:
            os.close(descriptor)


def room_for(cache: BlobCache | None, entries: Iterable[FileEntry]) -> BlobCache | None:
    """The cache, with room made for those files that it lacks; None if they would not fit into it at all."""
    if cache is None:
        return None
    sizes = {entry.sha256: entry.size for entry in entries}
    if sum(sizes.values()) > cache.limit:
        return None
    lacking = sum(size for sha256, size in sizes.items() if not cache.holds(sha256, size))
    if lacking:
        cache.make_room(lacking)
    return cache


def _scan(folder: Path) -> list[os.DirEntry[str]]:
    try:
        return list(os.scandir(folder))
    except OSError:
        return []
