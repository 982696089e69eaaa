"""Object stores: keys to bytes, whole or not at all. What every store offers, its errors, and how one is opened.

Invariants of every store:
- An object appears with all of its bytes or not at all, whatever is killed and whenever, and is durable (fsync of the
  file and of its folder) when `put` returns.
- `put(..., if_absent=True)` lets exactly one of several writers win, and so does `put(..., if_match=tag)` among those
  who read the object with that tag: no update is lost.
- Keys are relative paths with "/"; nothing outside the store's folder or prefix is ever touched.
- A listing of what is damaged in part goes on with the rest, and says what it left out (`leave_out`).
- Errors a person can cause (read-only, full, not a folder, wrong credentials) are one sentence of a `StoreError`.

The backends are `stages.artifacts.folder` and `stages.artifacts.s3`.
"""

from __future__ import annotations

import builtins
import hashlib
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

from stages.os_errors import explained

CHUNK = 1 << 20
_SMALL = 1 << 20  # bytes; of smaller files there are more on the way at once
_LARGE_AT_ONCE = 4
_SMALL_AT_ONCE = 16
_LOG = logging.getLogger("headrace.store")
_LEFT_OUT: set[str] = set()
_WORKER = threading.local()  # of a thread of `in_parallel`: `given_up` says that its work is for nothing
_T = TypeVar("_T")
_R = TypeVar("_R")


class StoreError(Exception):
    """The store cannot do what was asked; the message is one sentence that says what to mend."""


class NotInStore(StoreError):
    """There is no such object."""


class ReadOnlyStore(StoreError):
    """The store may not be written (or read) by this user."""


class FullStore(StoreError):
    """No space, or no quota, is left."""


class Damaged(StoreError):
    """An object's bytes are not those that its name or manifest promises."""


@dataclass(frozen=True)
class ObjectInfo:
    """One stored object: its key, size in bytes, and time of last change (unix seconds).

    Attributes:
        mark: what is another whenever the object was put again, where the store can tell; to compare, nothing else.
    """

    key: str
    size: int
    modified: float
    mark: str = ""


class Store(Protocol):
    """What every store offers. All methods raise `StoreError`.

    Attributes:
        url: what `open_store` takes, without anything secret.
        remote: whether reading crosses a network, so that copies on this machine pay.
    """

    url: str
    remote: bool

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        """All bytes of an object; `NotInStore` if there is none, `Damaged` and unread if it has more than `limit`."""

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """At most `length` bytes of an object from `start` on, fewer where it ends: for a look into large objects.

        They are not compared with any hash. `NotInStore` if there is no such object.
        """

    def get_with_tag(self, key: str) -> tuple[bytes, str]:
        """All bytes of an object and the tag of this version of it, for `put(..., if_match=tag)`."""

    def exists(self, key: str) -> bool: ...

    def size(self, key: str) -> int | None:
        """Bytes of an object, None if there is none."""

    def sizes(self, keys: Iterable[str]) -> dict[str, int]:
        """Bytes of those of the objects that are there, in as few requests as serve."""

    def infos(self, keys: Iterable[str]) -> dict[str, ObjectInfo]:
        """What is known of those of the objects that are there, as `list` tells it, in as few requests as serve."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Every object whose key starts with `prefix`, sorted by key."""

    def put(self, key: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None) -> str | None:
        """Store `data` and return its tag.

        Returns None, and changes nothing, if `if_absent` and the object is there already, or if `if_match` is given and
        the object has another tag or is not there. A tag stands for content: writers who must tell their own object
        from an equal one put something of their own into it.
        """

    def put_file(self, key: str, path: Path, *, sha256: str | None = None) -> str:
        """Store a file's bytes. Returns their SHA-256 (hex); `Damaged` if it is not `sha256`, where that is given."""

    def put_blob(self, path: Path, *, known: tuple[str, int] | None = None) -> tuple[str, int]:
        """Store a file as `blobs/ab/<sha256>`. Returns the SHA-256 (hex) and size of the bytes that were stored.

        `known` is the hash and size that the file is known to have: if that blob is there, the file is not read.
        """

    def put_blobs(
        self, paths: Sequence[Path], known: Sequence[tuple[str, int] | None] | None = None
    ) -> builtins.list[tuple[str, int]]:
        """`put_blob` of many files at once, in the same order."""

    def get_file(self, key: str, path: Path, *, size: int | None = None, resume: bool = False) -> tuple[str, int]:
        """Copy an object to a new file, reading it once. Returns the SHA-256 (hex) and size of what was copied.

        `size`, where it is known, lets large objects be fetched in parts. With `resume`, a file that is there is taken
        for the beginning of the object, and on errors what was copied stays for the next try.
        """

    def hash(self, key: str) -> str:
        """The SHA-256 (hex) of an object's bytes, read now."""

    def append(self, key: str, data: bytes) -> None:
        """Add `data` at the end of an object, made if absent. Only logs are written so.

        The object may go on in others, whose keys `is_segment` knows: together, sorted by key, they hold all bytes.
        """

    def delete(self, key: str) -> None:
        """Remove an object; nothing happens if there is none."""

    def delete_many(self, keys: Iterable[str]) -> None:
        """`delete` of many, in as few requests as serve. On errors some may be removed already."""

    def leftovers(self, older_than: float, *, remove: bool = False) -> builtins.list[ObjectInfo]:
        """What killed writers left behind, apart from the objects, if begun more than `older_than` seconds ago."""

    def now(self) -> float:
        """The time by the clock that dates the objects (unix seconds)."""


def open_store(url: str | Path) -> Store:
    """Open the store at a folder, a `file://` URL or `s3://bucket/prefix`.

    A folder is made when something is first put there; a bucket must be there, and is looked at when it is first used.

    Raises:
        StoreError: the URL's scheme is unknown or lacks its slashes, or the path is not a folder.
    """
    text = str(url)
    if not text.strip():
        raise StoreError("the store's name is empty; give a folder, such as .headrace")
    scheme = text.split("://", 1)[0].lower() if "://" in text else ""
    from stages.artifacts.folder import FolderStore

    if scheme == "s3":
        try:
            from stages.artifacts.s3 import S3Store
        except ImportError as error:
            raise StoreError(
                f"{text}: stores on S3 need the package botocore, which cannot be imported: {error}"
            ) from None
        return S3Store(text)
    if scheme == "file":
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost"):
            raise StoreError(f"{text}: a file:// store must be on this host (file:///folder)")
        return FolderStore(Path(unquote(parts.path)))
    if scheme:
        raise StoreError(f"{text}: unknown kind of store {scheme!r}; give a folder, a file:// or an s3:// URL")
    for prefix, begins in (("s3:", "s3://"), ("file:", "file:///")):
        if text.lower().startswith(prefix):
            meant = begins + text[len(prefix) :].lstrip("/")
            raise StoreError(f"{text}: write {meant}, or ./{text} for a folder of that name")
    try:
        return FolderStore(Path(text).expanduser())
    except RuntimeError:
        raise StoreError(f"store {text}: there is no such home folder; give the whole path with --store") from None


def leave_out(error: StoreError) -> None:
    """Say that a listing goes on without an object that cannot be read: once for each object, as a warning in the log.

    Programs without logging of their own show it on standard error.
    """
    if str(error) not in _LEFT_OUT:
        _LEFT_OUT.add(str(error))
        _LOG.warning("%s; it is left out here, and `headrace verify` names all damage", error)


def is_segment(key: str, base: str) -> bool:
    """Whether an object is part of the appended object `base`: itself, or `base` with "." and six digits."""
    return key == base or re.fullmatch(re.escape(base) + r"\.\d{6}", key) is not None


def check_limit(url: str, key: str, size: int, limit: int | None) -> None:
    """Refuse to read an object that is larger than its kind may be.

    Raises:
        Damaged: it is.
    """
    if limit is not None and size > limit:
        raise Damaged(f"{key} in store {url} has {size:,} bytes, more than the {limit:,} that it may have")


def hash_file(path: Path) -> tuple[str, int]:
    """The SHA-256 (hex) and size of a file.

    Raises:
        StoreError: it cannot be read.
    """
    with open_source(path) as source:
        return copy_stream(source, None, path)


@contextmanager
def open_source(path: Path) -> Iterator[IO[bytes]]:
    try:
        file = open(path, "rb")  # noqa: SIM115 (errors of the body are not errors of opening)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {explained(error)}") from error
    with file:
        yield file


def copy_stream(source: IO[bytes], target: IO[bytes] | None, name: Path, at_most: int | None = None) -> tuple[str, int]:
    """Copy (or, without a target, only hash) in one pass. Returns the SHA-256 (hex) and the number of bytes."""
    digest = hashlib.sha256()
    size = 0
    given_up: threading.Event | None = getattr(_WORKER, "given_up", None)
    while True:
        if given_up is not None and given_up.is_set():
            raise StoreError(f"copying {name} was given up, for what it was needed for has failed")
        try:
            chunk = source.read(CHUNK if at_most is None else min(CHUNK, at_most - size))
        except OSError as error:
            raise StoreError(f"cannot read {name}: {explained(error)}") from error
        if not chunk:
            return digest.hexdigest(), size
        digest.update(chunk)
        if target is not None:
            target.write(chunk)
        size += len(chunk)


def fsync_folder(folder: Path) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:  # what was put here is deleted already, and its folder with it
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_folder(folder: Path) -> None:
    """Remove a folder of temporary files, if it is there."""
    shutil.rmtree(folder, ignore_errors=True)


def in_parallel(pool: Executor, function: Callable[[_T], _R], items: Iterable[_T]) -> list[_R]:
    """`map` whose first error, or interrupt, is raised at once.

    Calls that have not begun are dropped then, and copies that go on (`copy_stream`) end: nobody waits for gigabytes
    that nobody wants any more.
    """
    given_up = threading.Event()

    def call(item: _T) -> _R:
        _WORKER.given_up = given_up
        return function(item)

    futures = [pool.submit(call, item) for item in items]
    try:
        for future in as_completed(futures):
            future.result()
        return [future.result() for future in futures]
    except BaseException:
        given_up.set()
        pool.shutdown(wait=False, cancel_futures=True)
        raise


def in_parallel_by_size(function: Callable[[_T], _R], items: Sequence[_T], size: Callable[[_T], int]) -> list[_R]:
    """`in_parallel` of what moves files: large ones first, a few at a time, then small ones, many at a time.

    Args:
        size: bytes that an item moves.
    """
    done: dict[int, _R] = {}
    small = [size(item) <= _SMALL for item in items]
    for kind, at_once in ((False, _LARGE_AT_ONCE), (True, _SMALL_AT_ONCE)):
        indices = [index for index, is_small in enumerate(small) if is_small == kind]
        with ThreadPoolExecutor(at_once) as pool:
            done.update(zip(indices, in_parallel(pool, lambda index: function(items[index]), indices), strict=True))
    return [done[index] for index in range(len(items))]
