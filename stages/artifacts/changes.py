"""What was put into a store, or deleted, since one last looked: cheaper than listing all of it.

The rule. In a folder, an object is renamed or linked into its place (logs apart, which are not looked at here), and
that changes the time of the folder it lies in. So a folder with the time that it had at the last look holds the objects
that it held then, and is not read again; the cost is one `stat` for each of the few hundred folders. A folder that
changed within the last two seconds may change again within one tick of its clock, so it counts as changed next time
too. A bucket cannot tell, so it is listed: one request for 1,000 objects, several at a time.

What is written into an object's file by hand, in its place, is seen when something else of its folder changes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from stages.artifacts.folder import FolderStore, file_mark
from stages.artifacts.store import ObjectInfo, Store, StoreError

_SETTLED_NS = 2_000_000_000
_LISTS_AT_ONCE = 8


@dataclass(frozen=True)
class Part:
    """A part of a store: a folder, or all objects whose keys begin alike.

    Attributes:
        name: of the folder or beginning.
        mark: equal at two looks only if no object came, went or was put again between them; "" equals nothing.
        objects: what is in it (not in folders below it); None where the mark is the one that was known.
    """

    name: str
    mark: str
    objects: list[ObjectInfo] | None


def changed_parts(store: Store, prefix: str, known: Mapping[str, str]) -> Iterator[Part]:
    """Every part of a store below `prefix` ("manifests/"). A part that is known and not given any more is gone.

    Args:
        known: name -> mark of the parts that the last look gave.

    Raises:
        StoreError: the store cannot be read.
    """
    if isinstance(store, FolderStore):
        below: dict[str, list[str]] = {}
        for name in known:
            below.setdefault(name.rpartition("/")[0], []).append(name)
        yield from _folder(store, prefix.rstrip("/"), known, below)
        return
    # Digests are spread evenly, so sixteen listings of them take a sixteenth of the time each.
    names = [f"{prefix}{digit:x}" for digit in range(16)] if prefix in ("manifests/", "blobs/") else [prefix]
    with ThreadPoolExecutor(_LISTS_AT_ONCE) as pool:
        for name, objects in zip(names, pool.map(lambda name: list(store.list(name)), names), strict=True):
            yield Part(name, "", objects)


def _folder(store: FolderStore, name: str, known: Mapping[str, str], below: dict[str, list[str]]) -> Iterator[Part]:
    path = f"{store.root}/{name}"
    try:
        now = time.time_ns()
        stat = os.stat(path)
        settled = stat.st_mtime_ns < now - _SETTLED_NS
        mark = f"{stat.st_ino:x}-{stat.st_mtime_ns:x}" if settled else ""
        if mark and known.get(name) == mark:
            yield Part(name, mark, None)
            folders = below.get(name, [])
        else:
            folders, objects = [], []
            with os.scandir(path) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(f"{name}/{entry.name}")
                    elif entry.is_file(follow_symlinks=False):
                        try:
                            found = entry.stat()
                        except FileNotFoundError:
                            continue
                        key = f"{name}/{entry.name}"
                        objects.append(ObjectInfo(key, found.st_size, found.st_mtime, file_mark(found)))
            yield Part(name, mark, objects)
    except (FileNotFoundError, NotADirectoryError):  # nothing stored yet, or its last object was removed just now
        return
    except OSError as error:
        raise StoreError(f"store {store.url}: cannot list {name}: {error.strerror or error}") from error
    for folder in folders:
        yield from _folder(store, folder, known, below)
