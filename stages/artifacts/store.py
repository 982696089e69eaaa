"""Object stores: keys to bytes, whole or not at all. Here, a folder.

Invariants of every store:
- An object appears with all of its bytes or not at all, whatever is killed and whenever, and is durable (fsync of the
  file and of its folder) when `put` returns.
- `put(..., if_absent=True)` lets exactly one of several writers win.
- Keys are relative paths with "/"; nothing outside the store's folder is ever touched.
- Errors a person can cause (read-only, full, not a folder) are one sentence of a `StoreError`.

A folder store keeps unfinished files in `tmp/` until they are renamed (or linked) into place; leftovers of killed
writers are removed a day later.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol
from urllib.parse import unquote, urlsplit

from stages.artifacts.manifest import blob_key, check_path

CHUNK = 1 << 20
_STALE_SECONDS = 24 * 3600.0
_FULL = (errno.ENOSPC, errno.EDQUOT)
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


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
    """One stored object: its key, size in bytes, and time of last change (unix seconds)."""

    key: str
    size: int
    modified: float


class Store(Protocol):
    """What every store offers. All methods raise `StoreError`."""

    url: str

    def get(self, key: str) -> bytes:
        """All bytes of an object; `NotInStore` if there is none."""

    def exists(self, key: str) -> bool: ...

    def size(self, key: str) -> int | None:
        """Bytes of an object, None if there is none."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Every object whose key starts with `prefix`, sorted by key."""

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> bool:
        """Store `data`. Returns False, and changes nothing, if `if_absent` and the object is there already."""

    def put_file(self, key: str, path: Path, *, sha256: str | None = None) -> str:
        """Store a file's bytes. Returns their SHA-256 (hex); `Damaged` if it is not `sha256`, where that is given."""

    def put_blob(self, path: Path) -> tuple[str, int]:
        """Store a file as `blobs/ab/<sha256>`, reading it once. Returns its SHA-256 (hex) and size in bytes."""

    def get_file(self, key: str, path: Path) -> tuple[str, int]:
        """Copy an object to a new file, reading it once. Returns the SHA-256 (hex) and size of what was copied."""

    def hash(self, key: str) -> str:
        """The SHA-256 (hex) of an object's bytes, read now."""

    def append(self, key: str, data: bytes) -> None:
        """Add `data` at the end of an object, made if absent. Only logs are written so."""

    def delete(self, key: str) -> None:
        """Remove an object; nothing happens if there is none."""


def open_store(url: str | Path) -> Store:
    """Open the store at a folder or a `file://` URL. The folder is made when something is first put there.

    Raises:
        StoreError: the URL's scheme is unknown, or the path is not a folder.
    """
    text = str(url)
    if not text.strip():
        raise StoreError("the store's name is empty; give a folder, such as .headrace")
    scheme = text.split("://", 1)[0].lower() if "://" in text else ""
    if scheme == "s3":
        raise StoreError(f"{text}: stores on S3 are not there yet; give a folder")
    if scheme == "file":
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost"):
            raise StoreError(f"{text}: a file:// store must be on this host (file:///folder)")
        return FolderStore(Path(unquote(parts.path)))
    if scheme:
        raise StoreError(f"{text}: unknown kind of store {scheme!r}; give a folder or a file:// URL")
    return FolderStore(Path(text).expanduser())


class FolderStore:
    """A store in a folder of a POSIX file system. Safe for many processes at once."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.url = str(self.root)
        self._tidied = False
        try:
            self.url.encode()
            there = self.root.exists()
        except UnicodeEncodeError:
            raise StoreError(f"store {self.url!r}: its path is not UTF-8 text; give another with --store") from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise StoreError(
                f"store {self.url[:200]!r} cannot be opened: {reason}; give another with --store"
            ) from None
        if there and not self.root.is_dir():
            raise StoreError(f"store {self.root} is a file, not a folder; give another place with --store")

    def __repr__(self) -> str:
        return f"FolderStore({self.url!r})"

    def get(self, key: str) -> bytes:
        with self._errors(key, "read"):
            return self._path(key).read_bytes()

    def exists(self, key: str) -> bool:
        return self.size(key) is not None

    def size(self, key: str) -> int | None:
        path = self._path(key)
        try:
            with self._errors(key, "read"):
                return path.stat().st_size if path.is_file() else None
        except NotInStore:
            return None

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        folder, _, _ = prefix.rpartition("/")
        start = self.root / check_path(folder) if folder else self.root
        with self._errors(prefix, "list"):
            found = sorted(self._walk(start), key=lambda info: info.key)
        yield from (info for info in found if info.key.startswith(prefix))

    def _walk(self, folder: Path) -> Iterator[ObjectInfo]:
        try:
            entries = list(os.scandir(folder))
        except (FileNotFoundError, NotADirectoryError):  # nothing stored yet, or removed while listing
            return
        for entry in entries:
            path = Path(entry.path)
            if entry.is_dir(follow_symlinks=False):
                if path != self.root / "tmp":
                    yield from self._walk(path)
            elif entry.is_file(follow_symlinks=False):
                try:
                    stat = entry.stat()
                except FileNotFoundError:
                    continue
                yield ObjectInfo(path.relative_to(self.root).as_posix(), stat.st_size, stat.st_mtime)

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> bool:
        target = self._path(key)
        with self._errors(key, "write"), self._temporary() as (temporary, file):
            file.write(data)
            return self._place(temporary, file, target, if_absent=if_absent)

    def put_file(self, key: str, path: Path, *, sha256: str | None = None) -> str:
        target = self._path(key)
        with _source(path) as source, self._errors(key, "write"), self._temporary() as (temporary, file):
            digest, _ = _copy(source, file, path)
            if sha256 is not None and digest != sha256:
                raise Damaged(f"{path} has the hash {digest}, not {sha256}: it changed while it was stored")
            self._place(temporary, file, target)
        return digest

    def put_blob(self, path: Path) -> tuple[str, int]:
        with _source(path) as source, self._errors(str(path), "write"), self._temporary() as (temporary, file):
            digest, size = _copy(source, file, path)
            # Replacing a blob that is there costs nothing more and heals one that was damaged.
            self._place(temporary, file, self._path(blob_key(digest)))
        return digest, size

    def get_file(self, key: str, path: Path) -> tuple[str, int]:
        with self._errors(key, "read"):
            source = open(self._path(key), "rb")  # noqa: SIM115 (errors of reading and of writing are told apart)
        with source:
            try:
                with open(path, "xb") as file:
                    return _copy(source, file, self._path(key))
            except OSError as error:
                raise StoreError(f"cannot write {path}: {error.strerror or error}") from error

    def hash(self, key: str) -> str:
        with self._errors(key, "read"), open(self._path(key), "rb") as source:
            return _copy(source, None, self._path(key))[0]

    def append(self, key: str, data: bytes) -> None:
        target = self._path(key)
        with self._errors(key, "write"):
            self._make_folder(target.parent)
            descriptor = os.open(target, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(descriptor, view) :]
            finally:
                os.close(descriptor)

    def delete(self, key: str) -> None:
        path = self._path(key)
        try:
            with self._errors(key, "delete"):
                path.unlink()
        except NotInStore:
            return
        # Folders that became empty go too; one that another process fills just now stays.
        for folder in path.parents:
            if folder == self.root or folder.parent == self.root:
                break
            try:
                folder.rmdir()
            except OSError:
                break

    def _path(self, key: str) -> Path:
        return self.root / check_path(key)

    @contextmanager
    def _errors(self, what: str, verb: str) -> Iterator[None]:
        """Turn the system's errors into one sentence each."""
        try:
            yield
        except FileNotFoundError as error:
            raise NotInStore(f"store {self.url} has no {what}") from error
        except OSError as error:
            if error.errno in _FULL:
                message = f"store {self.url} is full; free some space, or give another place with --store"
                raise FullStore(message) from error
            if error.errno in _READ_ONLY:
                message = (
                    f"store {self.url}: no permission to {verb} {what} ({error.strerror}); check who owns the folder"
                )
                raise ReadOnlyStore(message) from error
            raise StoreError(f"store {self.url}: cannot {verb} {what}: {error.strerror or error}") from error

    @contextmanager
    def _temporary(self) -> Iterator[tuple[Path, IO[bytes]]]:
        """A new file in `tmp/`, gone afterwards unless it was renamed."""
        folder = self.root / "tmp"
        self._make_folder(folder)
        self._tidy(folder)
        path = folder / uuid.uuid4().hex
        # Not tempfile: its files are private to the user, and objects follow the umask.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            with open(descriptor, "wb") as file:
                yield path, file
        finally:
            path.unlink(missing_ok=True)

    def _place(self, temporary: Path, file: IO[bytes], target: Path, *, if_absent: bool = False) -> bool:
        """Make a finished temporary file the object `target`, durably."""
        file.flush()
        os.fsync(file.fileno())
        for attempt in range(100):
            try:
                self._make_folder(target.parent)
                if if_absent:
                    os.link(temporary, target)
                else:
                    os.rename(temporary, target)
                break
            except FileExistsError:
                return False
            except FileNotFoundError:  # a delete removed a folder as empty just now
                if attempt == 99:
                    raise
        _fsync_folder(target.parent)
        return True

    def _make_folder(self, folder: Path) -> None:
        """`mkdir -p` whose new folders are durable."""
        if folder.is_dir():
            return
        if folder.parent != folder:
            self._make_folder(folder.parent)
        try:
            folder.mkdir()
        except FileExistsError:
            if not folder.is_dir():
                raise StoreError(f"store {self.url}: {folder} is a file where a folder must be; move it away") from None
            return
        _fsync_folder(folder.parent)

    def _tidy(self, folder: Path) -> None:
        if self._tidied:
            return
        self._tidied = True
        limit = time.time() - _STALE_SECONDS
        for entry in os.scandir(folder):
            try:
                if entry.stat(follow_symlinks=False).st_mtime < limit:
                    os.unlink(entry.path)
            except (FileNotFoundError, IsADirectoryError):
                continue


def hash_file(path: Path) -> tuple[str, int]:
    """The SHA-256 (hex) and size of a file.

    Raises:
        StoreError: it cannot be read.
    """
    with _source(path) as source:
        return _copy(source, None, path)


@contextmanager
def _source(path: Path) -> Iterator[IO[bytes]]:
    try:
        file = open(path, "rb")  # noqa: SIM115 (errors of the body are not errors of opening)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
    with file:
        yield file


def _copy(source: IO[bytes], target: IO[bytes] | None, name: Path) -> tuple[str, int]:
    """Copy (or, without a target, only hash) in one pass. Returns the SHA-256 (hex) and the number of bytes."""
    digest = hashlib.sha256()
    size = 0
    while True:
        try:
            chunk = source.read(CHUNK)
        except OSError as error:
            raise StoreError(f"cannot read {name}: {error.strerror or error}") from error
        if not chunk:
            return digest.hexdigest(), size
        digest.update(chunk)
        if target is not None:
            target.write(chunk)
        size += len(chunk)


def _fsync_folder(folder: Path) -> None:
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
