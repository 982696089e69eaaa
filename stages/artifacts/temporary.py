"""Folders for the time of one piece of work, and what killed processes left of theirs.

A folder belongs to a process for as long as it holds a lock on it, which the system lets go with the process, however
that ends. So the next process that makes one of the same name removes those whose process is gone, and never one that
is in use, by whatever host or container.
"""

from __future__ import annotations

import fcntl
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from stages.artifacts.store import remove_folder


@contextmanager
def folder_in(parent: Path, name: str) -> Iterator[Path]:
    """A new folder `<name><32 hexadecimal digits>` in `parent`, which is made too. It is removed at the end.

    It may be renamed meanwhile; then it stays.

    Raises:
        OSError: it cannot be made.
    """
    parent.mkdir(parents=True, exist_ok=True)
    _remove_left(parent, name)
    folder, descriptor = _make(parent, name)
    try:
        yield folder
    finally:
        remove_folder(folder)
        os.close(descriptor)


def _make(parent: Path, name: str) -> tuple[Path, int]:
    while True:
        folder = parent / f"{name}{uuid.uuid4().hex}"
        folder.mkdir()
        # Until it is locked another process may take it for one that was left.
        with suppress(FileNotFoundError):
            descriptor = _open(folder)
            if _lock(descriptor) is not False and folder.exists():
                return folder, descriptor
            os.close(descriptor)


def _remove_left(parent: Path, name: str) -> None:
    with os.scandir(parent) as entries:
        left = [Path(entry.path) for entry in entries if re.fullmatch(re.escape(name) + "[0-9a-f]{32}", entry.name)]
    for folder in left:
        with suppress(OSError):  # a file or a link, another user's, or removed just now
            descriptor = _open(folder)
            if _lock(descriptor):
                remove_folder(folder)
            os.close(descriptor)


def _open(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _lock(descriptor: int) -> bool | None:
    """Whether the lock could be had; None where the file system (of some networks) locks no folders."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
