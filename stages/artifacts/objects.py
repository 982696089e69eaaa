"""Raw data in a bucket of S3, as the input of a run: found by a pattern, hashed once, and brought into a store.

The model: an object is known by its address, size, time and ETag. Its SHA-256 needs one reading of its bytes, which is
remembered for as long as those stay the same: of data that grows, only what is new is read. What was read is kept in
the cache of this machine, so that it is not fetched again to be stored, as far as it fits there.

Invariants:
- A pattern means the same as for files of this machine: "*" and "?" stay within a folder, "**" crosses folders, and
  neither matches a name that begins with a dot; without them it is one object, or a folder with all below it.
- A hash is that of the very object that was listed: one that is replaced while it is read is refused.
- Nothing in that bucket is ever written.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from stages.artifacts.cache import BlobCache, open_cache, room_for
from stages.artifacts.hash_cache import HashCache
from stages.artifacts.manifest import FileEntry
from stages.artifacts.store import Damaged, StoreError, in_parallel_by_size
from stages.artifacts.temporary import folder_in
from stages.os_errors import explained

if TYPE_CHECKING:
    from stages.artifacts.s3 import S3Store

SCHEME = "s3://"


@dataclass(frozen=True)
class DataObject:
    """An object of a bucket, as it was listed.

    Attributes:
        place: the folder of the bucket that it was found in.
        url: s3://bucket/key.
        key: its name below that folder.
        size: bytes.
        mark: what is another whenever the object was put again.
    """

    place: S3Store = field(repr=False, compare=False)
    url: str
    key: str
    size: int
    mark: tuple[str, ...]

    def known(self, hashes: HashCache) -> tuple[str, int] | None:
        """The SHA-256 (hex) and size, if they are remembered of this very object."""
        return hashes.known_of(self._address, [self.size, *self.mark])

    def read(self, cache: BlobCache | None) -> tuple[str, int]:
        """The SHA-256 (hex) and size of its bytes, which are read now and kept in the cache of this machine.

        Raises:
            StoreError: it cannot be read, or is another object by now.
        """
        if cache is None:
            sha256, size = self.place.hash(self.key), self.size
        else:
            partial = cache.root / "partial" / f"data-{uuid.uuid4().hex}"
            try:
                sha256, size = self.place.get_file(self.key, partial, size=self.size)
                cache.adopt(partial, sha256)
            finally:
                with suppress(OSError):
                    partial.unlink()
        if size != self.size or not self.place.is_still(self.key, self.mark[0]):
            raise StoreError(f"{self.url} was replaced while it was read; try again")
        return sha256, size

    @contextmanager
    def copy(self, sha256: str) -> Iterator[Path]:
        """A file with its bytes on this machine: of the cache, or fetched for this moment.

        Raises:
            StoreError: it cannot be read.
            Damaged: it has other bytes than those that were hashed.
        """
        entry = FileEntry(self.key, self.size, sha256)
        scratch = os.environ.get("HEADRACE_SCRATCH") or tempfile.gettempdir()
        with _fetched_in(Path(scratch)) as folder:
            path = folder / "data"
            cache = open_cache()
            if cache is None or not cache.take(entry, path, link=True):
                found = self.place.get_file(self.key, path, size=self.size)
                if found != (sha256, self.size):
                    raise Damaged(f"{self.url} has other bytes than a moment ago; try again")
            yield path

    def remember(self, hashes: HashCache, sha256: str) -> None:
        """Let `known` find the SHA-256 (hex) next time."""
        hashes.keep(self._address, [self.size, *self.mark], sha256)

    @property
    def _address(self) -> str:
        return f"{self.place.address}/{self.key}"


@contextmanager
def _fetched_in(scratch: Path) -> Iterator[Path]:
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(folder_in(scratch, "headrace-"))
        except OSError as error:
            raise StoreError(f"cannot write {scratch}: {explained(error)}") from error
        yield folder


def size_of(file: Path | DataObject) -> int:
    """Bytes of a file of this machine, or of an object."""
    return file.size if isinstance(file, DataObject) else file.stat().st_size


def find_objects(pattern: str) -> tuple[str, list[DataObject]]:
    """The objects that a pattern `s3://bucket/path` matches, and the folder (a URL) that their paths start from.

    Raises:
        ValueError: it matches nothing.
        StoreError: the URL is not of that form, or the bucket cannot be listed.
    """
    from stages.artifacts.s3 import S3Store  # botocore takes a quarter of a second to import

    bucket, _, path = pattern.removeprefix(SCHEME).partition("/")
    parts = [part for part in path.split("/") if part]
    fixed = next((number for number, part in enumerate(parts) if glob.has_magic(part)), None)
    if fixed is not None:
        place = S3Store("/".join([f"{SCHEME}{bucket}", *parts[:fixed]]), noun="data")
        wanted = parts[fixed:]
        begin = wanted[0][: next(at for at, letter in enumerate(wanted[0]) if letter in "*?[")]
        found = [item for item in _listed(place, begin) if _matches(item.key.split("/"), wanted)]
        if not found:
            raise ValueError(f"{pattern!r} matches no object below {place.url}")
        return place.url, found
    if parts and not path.endswith("/"):
        place = S3Store("/".join([f"{SCHEME}{bucket}", *parts[:-1]]), noun="data")
        alone = [item for item in _listed(place, parts[-1]) if item.key == parts[-1]]
        if alone:
            return place.url, alone
    place = S3Store("/".join([f"{SCHEME}{bucket}", *parts]), noun="data")
    found = [item for item in _listed(place, "") if _matches(item.key.split("/"), ["**"])]
    if not found:
        what = "has no objects" if not parts or path.endswith("/") else "is no object, and no folder of objects"
        raise ValueError(f"{pattern} {what}")
    return place.url, found


def _listed(place: S3Store, begin: str) -> list[DataObject]:
    """Every object whose key starts so, but the empty ones that consoles make for folders."""
    return [
        DataObject(place, f"{place.url}/{info.key}", info.key, info.size, (info.mark, str(info.modified)))
        for info in place.list(begin)
        if not info.key.endswith("/") and info.key
    ]


def _matches(parts: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether a path is one that a glob gives: "**" at the end is every file below, else any number of folders."""
    if not wanted:
        return not parts
    if wanted[0] == "**":
        visible = parts and not parts[0].startswith(".")
        if len(wanted) == 1:
            return bool(parts) and not any(part.startswith(".") for part in parts)
        return _matches(parts, wanted[1:]) or bool(visible and _matches(parts[1:], wanted))
    if not parts or (parts[0].startswith(".") and not wanted[0].startswith(".")):
        return False
    return fnmatch.fnmatchcase(parts[0], wanted[0]) and _matches(parts[1:], wanted[1:])


def hash_objects(objects: Sequence[DataObject], hashes: HashCache | None) -> list[tuple[str, int]]:
    """The SHA-256 (hex) and size of each; those that are not remembered are read, several at once.

    Raises:
        StoreError: one cannot be read, or was replaced meanwhile.
    """
    found = {item: known for item in objects if hashes is not None and (known := item.known(hashes))}
    unknown = [item for item in dict.fromkeys(objects) if item not in found]
    if not unknown:
        return [found[item] for item in objects]
    cache = room_for(open_cache(), [FileEntry(item.url, item.size, item.url) for item in unknown])
    read = in_parallel_by_size(lambda item: item.read(cache), unknown, lambda item: item.size)
    found.update(zip(unknown, read, strict=True))
    if hashes is not None:
        for item in unknown:
            item.remember(hashes, found[item][0])
    return [found[item] for item in objects]
