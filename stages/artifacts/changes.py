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
from collections.abc import Callable, Iterator, Mapping
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
        changed: the objects in it (not in folders below it) that are new, or were put again.
        gone: keys of objects that are no longer in it.
    """

    name: str
    mark: str
    changed: list[ObjectInfo]
    gone: list[str]


@dataclass(frozen=True)
class LastLook:
    """What was seen of a store.

    Attributes:
        parts: name -> mark of the parts that were given.
        objects: asked with the name of a part, the key -> mark of the objects that were in it.
    """

    parts: Mapping[str, str]
    objects: Callable[[str], dict[str, str]]


def changed_parts(store: Store, prefix: str, last: LastLook) -> Iterator[Part]:
    """Every part of a store below `prefix` ("manifests/"), by name where it is a folder.

    A part of the last look that is not given any more is gone.

    Raises:
        StoreError: the store cannot be read.
    """
    if isinstance(store, FolderStore):
        below: dict[str, list[str]] = {}
        for name in last.parts:
            below.setdefault(name.rpartition("/")[0], []).append(name)
        yield from _folder(store, prefix.rstrip("/"), last, below)
        return
    # Digests are spread evenly, so sixteen listings of them take a sixteenth of the time each.
    names = [f"{prefix}{digit:x}" for digit in range(16)] if prefix in ("manifests/", "blobs/") else [prefix]
    with ThreadPoolExecutor(_LISTS_AT_ONCE) as pool:
        for name, objects in zip(names, pool.map(lambda name: list(store.list(name)), names), strict=True):
            before = last.objects(name)
            changed = [info for info in objects if before.pop(info.key, None) != info.mark]
            yield Part(name, "", changed, list(before))


def _folder(store: FolderStore, name: str, last: LastLook, below: dict[str, list[str]]) -> Iterator[Part]:
    path = f"{store.root}/{name}"
    try:
        now = time.time_ns()
        stat = os.stat(path)
        settled = stat.st_mtime_ns < now - _SETTLED_NS
        mark = f"{stat.st_ino:x}-{stat.st_mtime_ns:x}" if settled else ""
        if mark and last.parts.get(name) == mark:
            yield Part(name, mark, [], [])
            folders = below.get(name, [])
        else:
            folders, changed = [], []
            before = last.objects(name)
            with os.scandir(path) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(f"{name}/{entry.name}")
                    elif entry.is_file(follow_symlinks=False):
                        try:
                            found = entry.stat()
                        except FileNotFoundError:
                            continue
                        key, its_mark = f"{name}/{entry.name}", file_mark(found)
                        if before.pop(key, None) != its_mark:
                            changed.append(ObjectInfo(key, found.st_size, found.st_mtime, its_mark))
            changed.sort(key=lambda info: info.key)
            yield Part(name, mark, changed, list(before))
    except (FileNotFoundError, NotADirectoryError):  # nothing stored yet, or its last object was removed just now
        return
    except OSError as error:
        raise StoreError(f"store {store.url}: cannot list {name}: {error.strerror or error}") from error
    for folder in sorted(folders):
        yield from _folder(store, folder, last, below)
