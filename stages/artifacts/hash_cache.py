"""Remembering the hashes of files and objects, so that what has not changed is not read again."""

from __future__ import annotations

import json
import os
import stat
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from stages.artifacts.store import StoreError, hash_file
from stages.os_errors import explained

_LEFT_SECONDS = 3600.0  # after which an unfinished file belongs to nobody
_SETTLED_NS = 2_000_000_000


class HashCache:
    """Remembers the SHA-256 of files by path, size, times and inode, in a JSON file: planning reads no data twice.

    Of an object of a bucket it remembers that of its address, size, ETag and time. A file that changed less than two
    seconds before it was hashed is not remembered: it could change again within the resolution of its time stamp. A
    cache that cannot be read or written is a cache that is empty; without a path, it lasts as long as the object.
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
            self._entries = {key: value for key, value in loaded.items() if isinstance(value, list) and value}

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
        found = self.known_of(_place(path), mark)
        return None if found is None else (found[0], mark[0])

    def known_of(self, address: str, mark: Sequence[int | str]) -> tuple[str, int] | None:
        """The SHA-256 (hex) and size (the first of the mark) of what had this address and mark when it was read."""
        with self._lock:
            entry = self._entries.get(address)
        return (str(entry[-1]), int(mark[0])) if entry is not None and entry[:-1] == list(mark) else None

    def keep(self, address: str, mark: Sequence[int | str], sha256: str) -> None:
        """Remember the hash of what has this address and mark, whose size is the first of it."""
        with self._lock:
            self._entries[address] = [*mark, sha256]
            self._changed = True

    def remember(self, path: Path, mark: list[int], sha256: str) -> None:
        """Keep the hash of a file that had the mark before it was read, unless it changed since or only just before."""
        if self.mark(path) == mark and time.time_ns() - max(mark[1], mark[2]) > _SETTLED_NS:
            self.keep(_place(path), mark, sha256)

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
            self._remove_left()
        except OSError:  # only time is lost
            with suppress(OSError):
                temporary.unlink(missing_ok=True)

    def _remove_left(self) -> None:
        """Remove what processes left that were killed in `save`."""
        assert self.path is not None
        for left in self.path.parent.glob(f"{self.path.name}.*"):
            with suppress(OSError):
                if left.stat().st_mtime < time.time() - _LEFT_SECONDS:
                    left.unlink()


def _place(path: Path) -> str:
    text = os.fspath(path)
    return text if text.startswith("/") else os.path.abspath(text)
