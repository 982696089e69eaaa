"""The store in a folder of a POSIX file system.

Unfinished files are kept in `tmp/` until they are renamed (or linked) into place; leftovers of killed writers are
removed a day later. Comparing and swapping happens under a lock (`flock` on a file in `locks/`, let go with the process
that holds it), which `put` and `delete` always take.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import io
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import IO

from stages.artifacts.manifest import blob_key, check_path, sha256_hex
from stages.artifacts.store import (
    Damaged,
    FullStore,
    NotInStore,
    ObjectInfo,
    ReadOnlyStore,
    StoreError,
    check_limit,
    copy_stream,
    fsync_folder,
    in_parallel,
    open_source,
)
from stages.os_errors import explained

_WRITERS = 16  # files stored at once: fsync waits for the disk, not for a core
_SMALL = 1 << 20  # bytes of a file that is compared with the blob that is there, before it is stored anew
_LOCKS = 256
_LOCK_SECONDS = 60.0
_NEVER_COMPARED = ("blobs/", "manifests/", "work/", "runs/", "logs/")
_NO_OBJECTS = ("tmp", "locks")
_STALE_SECONDS = 24 * 3600.0
_FULL = (errno.ENOSPC, errno.EDQUOT)
_DENIED = (errno.EACCES, errno.EPERM)
_NO_LINKS = (
    errno.EPERM,
    errno.ENOTSUP,
    errno.ENOSYS,
    errno.EMLINK,
)  # of file systems without hard links (FAT, some FUSE)


def file_mark(stat: os.stat_result) -> str:
    """What tells a file from one that was renamed into its place, and from itself before it was written to."""
    return f"{stat.st_ino:x}-{stat.st_mtime_ns:x}-{stat.st_size:x}"


def _link(temporary: Path, target: Path) -> bool:
    """Make a file the object `target` unless there is one. False where that may be done by renaming it.

    Whoever would make the object at the same time waits for its lock, or would make the same one.

    Raises:
        FileExistsError: there is one.
    """
    try:
        os.link(temporary, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if target.exists():
            raise FileExistsError from None
        return False
    return True


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class FolderStore:
    """A store in a folder of a POSIX file system. Safe for many processes at once."""

    remote = False

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

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        # Not a Path: joining one takes as long as reading a small object.
        with self._errors(key, "read"), open(f"{self.root}/{check_path(key)}", "rb") as file:
            check_limit(self.url, key, os.fstat(file.fileno()).st_size, limit)
            return file.read()

    def get_range(self, key: str, start: int, length: int) -> bytes:
        with self._errors(key, "read"), open(self._path(key), "rb") as file:
            file.seek(start)
            return file.read(length)

    def get_with_tag(self, key: str) -> tuple[bytes, str]:
        data = self.get(key)
        return data, sha256_hex(data)

    def exists(self, key: str) -> bool:
        return self.size(key) is not None

    def size(self, key: str) -> int | None:
        path = self._path(key)
        try:
            with self._errors(key, "read"):
                return path.stat().st_size if path.is_file() else None
        except NotInStore:
            return None

    def sizes(self, keys: Iterable[str]) -> dict[str, int]:
        return {key: stat.st_size for key, stat in self._stats(keys)}

    def infos(self, keys: Iterable[str]) -> dict[str, ObjectInfo]:
        return {key: ObjectInfo(key, stat.st_size, stat.st_mtime, file_mark(stat)) for key, stat in self._stats(keys)}

    def _stats(self, keys: Iterable[str]) -> Iterator[tuple[str, os.stat_result]]:
        """Of the objects that are there. Folder by folder, for the way to a file takes most of a look at it."""
        folders: dict[str, builtins.list[str]] = {}
        for key in keys:
            folders.setdefault(key.rpartition("/")[0], []).append(key)
        for folder, inside in folders.items():
            try:
                descriptor = os.open(self._path(folder) if folder else self.root, os.O_RDONLY | os.O_DIRECTORY)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError:
                for key in inside:
                    self.size(key)  # says what is wrong
                raise
            try:
                yield from self._stats_in(descriptor, len(folder) + 1 if folder else 0, inside)
            finally:
                os.close(descriptor)

    def _stats_in(self, folder: int, start: int, keys: Iterable[str]) -> Iterator[tuple[str, os.stat_result]]:
        """Of objects of one open folder; `start` is where its files' names begin in their keys."""
        for key in keys:
            name = key[start:]
            if name in ("", ".", ".."):
                check_path(key)  # refuses it
            try:
                stat = os.stat(name, dir_fd=folder)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError:
                self.size(key)  # says what is wrong
                raise
            if S_ISREG(stat.st_mode):
                yield key, stat

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
                if path.parent != self.root or path.name not in _NO_OBJECTS:
                    yield from self._walk(path)
            elif entry.is_file(follow_symlinks=False):
                try:
                    stat = entry.stat()
                except FileNotFoundError:
                    continue
                yield ObjectInfo(path.relative_to(self.root).as_posix(), stat.st_size, stat.st_mtime, file_mark(stat))

    def put(self, key: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None) -> str | None:
        target = self._path(key)
        with self._errors(key, "write"), self._temporary() as (temporary, file):
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # before the lock is held
            with self._locked(key):
                if if_match is not None and self._tag(target) != if_match:
                    return None
                placed = self._place(temporary, file, target, if_absent=if_absent)
        return sha256_hex(data) if placed else None

    def _tag(self, path: Path) -> str | None:
        try:
            return sha256_hex(path.read_bytes())
        except FileNotFoundError:
            return None

    @contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        """Alone in changing the object: other threads and processes wait. A killed holder's lock is let go.

        A holder that was frozen keeps it, so what is never compared takes no lock, and nobody waits without end.
        """
        if key.startswith(_NEVER_COMPARED):
            yield
            return
        folder = self.root / "locks"
        self._make_folder(folder)
        number = int(sha256_hex(key.encode())[:8], 16) % _LOCKS
        # The file stays for good: removing it while another process waits for it would give two of them the lock.
        descriptor = os.open(folder / f"{number:02x}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            limit = time.monotonic() + _LOCK_SECONDS
            while not _try_lock(descriptor):
                if time.monotonic() > limit:
                    name = folder / f"{number:02x}"
                    raise StoreError(
                        f"store {self.url}: {key} cannot be changed, for another process has held its lock for "
                        f"{_LOCK_SECONDS:.0f} s; end the one that is stopped (`fuser {name}` names it)"
                    )
                time.sleep(0.002)
            yield
        finally:
            os.close(descriptor)

    def put_file(self, key: str, path: Path, *, sha256: str | None = None) -> str:
        target = self._path(key)
        with open_source(path) as source, self._errors(key, "write"), self._temporary() as (temporary, file):
            digest, _ = copy_stream(source, file, path)
            if sha256 is not None and digest != sha256:
                raise Damaged(f"{path} has the hash {digest}, not {sha256}: it changed while it was stored")
            self._place(temporary, file, target)
        return digest

    def put_blob(self, path: Path, *, known: tuple[str, int] | None = None) -> tuple[str, int]:
        """Store a file as a blob: hashed while it is copied. One that is there already is replaced, which heals it."""
        return self.put_blobs([path], [known])[0]

    def put_blobs(
        self, paths: Sequence[Path], known: Sequence[tuple[str, int] | None] | None = None
    ) -> builtins.list[tuple[str, int]]:
        had = list(known or [None] * len(paths))
        sizes = self.sizes(blob_key(blob[0]) for blob in had if blob is not None)
        done = {
            index: blob
            for index, blob in enumerate(had)
            if blob is not None and sizes.get(blob_key(blob[0])) == blob[1]
        }
        rest = [index for index in range(len(paths)) if index not in done]
        entered: set[Path] = set()  # folders with new entries: each is made durable once, for all of them
        with ThreadPoolExecutor(_WRITERS) as pool:
            stored = in_parallel(pool, lambda index: self._put_blob(paths[index], entered), rest)
            with self._errors("blobs", "write"):
                in_parallel(pool, fsync_folder, sorted(entered))
        done.update(zip(rest, stored, strict=True))
        return [done[index] for index in range(len(paths))]

    def _put_blob(self, path: Path, entered: set[Path]) -> tuple[str, int]:
        with open_source(path) as source, self._errors(f"a copy of {path}", "write"):
            size = os.fstat(source.fileno()).st_size  # one that grows is stored as it was
            if size <= _SMALL:
                buffer = io.BytesIO()
                digest, size = copy_stream(source, buffer, path, at_most=size)
                target = self._path(blob_key(digest))
                if self._is(target, buffer.getbuffer()):
                    return digest, size
                with self._temporary() as (temporary, file):
                    file.write(buffer.getbuffer())
                    self._place(temporary, file, target, entered=entered)
            else:
                with self._temporary() as (temporary, file):
                    digest, size = copy_stream(source, file, path, at_most=size)
                    self._place(temporary, file, self._path(blob_key(digest)), entered=entered)
        return digest, size

    def _is(self, path: Path, data: memoryview) -> bool:
        """Whether a file is there and has this content. It is made young then, as if it had been put anew."""
        try:
            with open(path, "rb") as file:
                if os.fstat(file.fileno()).st_size != len(data) or file.read() != data:
                    return False
            os.utime(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def get_file(self, key: str, path: Path, *, size: int | None = None, resume: bool = False) -> tuple[str, int]:
        with self._errors(key, "read"):
            source = open(self._path(key), "rb")  # noqa: SIM115 (errors of reading and of writing are told apart)
        with source:
            try:
                with open(path, "wb" if resume else "xb") as file:
                    return copy_stream(source, file, self._path(key))
            except OSError as error:
                raise StoreError(f"cannot write {path}: {explained(error)}") from error

    def hash(self, key: str) -> str:
        with self._errors(key, "read"), open(self._path(key), "rb") as source:
            return copy_stream(source, None, self._path(key))[0]

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
                os.stat(path, follow_symlinks=False)
                with self._locked(key):
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

    def delete_many(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.delete(key)

    def leftovers(self, older_than: float, *, remove: bool = False) -> builtins.list[ObjectInfo]:
        limit = time.time() - older_than
        found = []
        try:
            entries = list(os.scandir(self.root / "tmp"))
        except FileNotFoundError:
            return []
        for entry in entries:
            try:
                if entry.is_dir(follow_symlinks=False):
                    continue
                stat = entry.stat(follow_symlinks=False)
                if stat.st_mtime < limit:
                    if remove:
                        os.unlink(entry.path)
                    found.append(ObjectInfo(f"tmp/{entry.name}", stat.st_size, stat.st_mtime))
            except FileNotFoundError:  # its writer has finished or tidied up
                continue
        return found

    def now(self) -> float:
        return time.time()

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
                reason = "is full" if error.errno == errno.ENOSPC else "is over the disk quota"
                message = f"store {self.url} {reason}; free some space, or give another place with --store"
                raise FullStore(message) from error
            if error.errno == errno.EROFS:
                raise ReadOnlyStore(f"store {self.url}: cannot {verb} {what}: {explained(error)}") from error
            if error.errno in _DENIED:
                message = (
                    f"store {self.url}: no permission to {verb} {what} ({error.strerror}); check who owns the folder"
                )
                raise ReadOnlyStore(message) from error
            raise StoreError(f"store {self.url}: cannot {verb} {what}: {explained(error)}") from error

    @contextmanager
    def _temporary(self) -> Iterator[tuple[Path, IO[bytes]]]:
        """A new file in `tmp/`, gone afterwards unless it was renamed."""
        folder = self.root / "tmp"
        self._make_folder(folder)
        self._tidy()
        path = folder / uuid.uuid4().hex
        # Not tempfile: its files are private to the user, and objects follow the umask.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            with open(descriptor, "wb") as file:
                yield path, file
        finally:
            path.unlink(missing_ok=True)

    def _place(
        self,
        temporary: Path,
        file: IO[bytes],
        target: Path,
        *,
        if_absent: bool = False,
        entered: set[Path] | None = None,
    ) -> bool:
        """Make a finished temporary file the object `target`, durably; with `entered`, once its folder is synced."""
        file.flush()
        os.fsync(file.fileno())
        for attempt in range(100):
            try:
                self._make_folder(target.parent)
                if not if_absent or not _link(temporary, target):
                    os.rename(temporary, target)
                break
            except FileExistsError:
                return False
            except FileNotFoundError:  # a delete removed a folder as empty just now
                if attempt == 99:
                    raise
        if entered is None:
            fsync_folder(target.parent)
        else:
            entered.add(target.parent)
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
            try:
                mode = folder.stat().st_mode
            except FileNotFoundError:  # another process has made it, and a delete removed it as empty
                return self._make_folder(folder)
            if not S_ISDIR(mode):
                raise StoreError(f"store {self.url}: {folder} is a file where a folder must be; move it away") from None
            return
        fsync_folder(folder.parent)

    def _tidy(self) -> None:
        if not self._tidied:
            self._tidied = True
            self.leftovers(_STALE_SECONDS, remove=True)
