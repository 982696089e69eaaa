"""The work area: saved progress of a stage that has not finished.

    work/<key>/data/<token>/<n>          the files of one save
    work/<key>/<step, 12 digits>-<token>.json   put last: which files, with sizes and SHA-256

Invariants:
- Progress is visible whole or not at all, and `latest` gives only progress whose every byte was verified; damaged
  progress is removed, and the one before is taken.
- The two newest saves are kept, so a save that is cut short or damaged never costs more than one interval.
- Under a lease that another process has taken over, nothing is saved any more.
- One save is in flight at most. One that failed is reported by the next `save` or `wait`, and leaves the last good one.
"""

from __future__ import annotations

import json
import re
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from stages.artifacts.fetch import copy_blob
from stages.artifacts.leases import Lease
from stages.artifacts.manifest import FileEntry, canonical_json, check_path
from stages.artifacts.publish import files_below
from stages.artifacts.store import Damaged, NotInStore, Store, StoreError, remove_folder
from stages.os_errors import explained

_KEPT = 2
_ORPHAN_SECONDS = 3600.0  # files of a save that was never finished are removed when they are this old


class WorkArea:
    """Saves and restores the progress of one stage key. Implements `stages.contract.Work`.

    Args:
        store: where progress is kept.
        key: the stage key.
        scratch: a folder for restored progress; it is this work area's alone.
        warn: called with one sentence when saved progress had to be passed over.
        lease: the lease on the key, checked before progress becomes visible; None for readers.

    Attributes:
        earlier_seconds: how long earlier attempts had worked for the progress that `latest` gave last.
    """

    def __init__(
        self,
        store: Store,
        key: str,
        scratch: Path,
        *,
        warn: Callable[[str], None] | None = None,
        lease: Lease | None = None,
    ) -> None:
        if not re.fullmatch(r"[0-9a-f]{8,64}", key):
            raise ValueError(f"{key!r} is not a stage key (8 to 64 lowercase hexadecimal digits)")
        self._store = store
        self._prefix = f"work/{key}/"
        self._scratch = scratch
        self._warn = warn or (lambda message: None)
        self._lease = lease
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._begun = time.monotonic()
        self.earlier_seconds = 0.0

    def save(self, step: int, folder: Path, then: Callable[[], None] | None = None) -> None:
        """Start to keep the files of `folder` as the progress at `step`; waits only for a save that is in flight.

        The files must not change afterwards. The folder is removed once they are durable.

        Args:
            then: called by the thread that saves, once they are durable.

        Raises:
            ValueError: the step is negative, or the folder holds no files, links, or names that are not allowed.
            StoreError: the save before this one failed.
        """
        if type(step) is not int or not 0 <= step < 10**12:
            raise ValueError(f"progress is saved at a step from 0 to 10**12, not at {step!r}")
        self.wait()
        files = files_below(folder)
        seconds = self.earlier_seconds + time.monotonic() - self._begun
        # Not a daemon: a process that ends without `wait` still finishes its save.
        self._thread = threading.Thread(target=self._save, args=(step, folder, files, seconds, then), name="save")
        self._thread.start()

    def wait(self) -> None:
        """Return once the save in flight, if any, is durable.

        Raises:
            StoreError: it failed; the progress saved before it is still there.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise StoreError(f"progress could not be saved: {failure}") from failure

    def latest(self) -> tuple[int, Path] | None:
        """The newest complete, verified progress: its step and a folder with its files. None if there is none."""
        self.wait()
        for name in self._names():
            try:
                return self._restore(name)
            except (NotInStore, Damaged) as error:
                self._warn(f"saved progress of step {int(name[:12])} is unusable and removed: {error}")
                self._store.delete(f"{self._prefix}{name}.json")  # or it would count as one of the two that are kept
        return None

    def steps(self) -> list[int]:
        """The steps at which progress is kept, newest first, without verifying it."""
        return [int(name[:12]) for name in self._names()]

    def drop(self) -> None:
        """Remove all progress under the key."""
        self.wait()
        for prefix in (self._prefix, self._prefix + "data/"):  # what points to the files goes before the files
            for info in list(self._store.list(prefix)):
                if prefix != self._prefix or "/data/" not in info.key:
                    self._store.delete(info.key)

    def _names(self) -> list[str]:
        """Names of the saves ("<step>-<token>"), newest first."""
        found = []
        for info in self._store.list(self._prefix):
            match = re.fullmatch(r"(\d{12}-[0-9a-f]{32})\.json", info.key.removeprefix(self._prefix))
            if match:
                found.append((match[1][:12], info.modified, match[1]))
        return [name for _, _, name in sorted(found, reverse=True)]

    def _save(
        self,
        step: int,
        folder: Path,
        files: list[tuple[str, Path]],
        seconds: float,
        then: Callable[[], None] | None,
    ) -> None:
        token = uuid.uuid4().hex
        try:
            entries = []
            for number, (path, file) in enumerate(files):
                sha256 = self._store.put_file(f"{self._prefix}data/{token}/{number}", file)
                entries.append({"path": path, "sha256": sha256, "size": file.stat().st_size})
            if self._lease is not None:
                self._lease.check()
            record = {"files": entries, "seconds": round(seconds, 3), "step": step}
            self._store.put(f"{self._prefix}{step:012d}-{token}.json", canonical_json(record))
            if then is not None:
                then()
        except BaseException as error:
            self._failure = error
            return
        remove_folder(folder)
        try:
            self._thin()
        except StoreError as error:  # the save itself is good
            self._warn(f"older progress could not be removed: {error}")

    def _thin(self) -> None:
        """Keep the newest saves; remove the others, and files that no save names and that are old."""
        names = self._names()
        for name in names[_KEPT:]:
            self._store.delete(f"{self._prefix}{name}.json")
        kept = {name[13:] for name in names[:_KEPT]}
        dropped = {name[13:] for name in names[_KEPT:]}
        limit = self._store.now() - _ORPHAN_SECONDS
        for info in list(self._store.list(self._prefix + "data/")):
            token = info.key.removeprefix(self._prefix + "data/").split("/")[0]
            # A young file that nothing names may belong to a save of another process that is still going on.
            if token in dropped or (token not in kept and info.modified < limit):
                self._store.delete(info.key)

    def _restore(self, name: str) -> tuple[int, Path]:
        key = f"{self._prefix}{name}.json"
        step, token = int(name[:12]), name[13:]
        entries, seconds = _parse(key, self._store.get(key), step)
        folder = self._scratch / name
        remove_folder(folder)
        try:
            for number, entry in enumerate(entries):
                target = folder / entry.path
                target.parent.mkdir(parents=True, exist_ok=True)
                blob = f"{self._prefix}data/{token}/{number}"
                copy_blob(self._store, entry, target, f"the progress of step {step}", blob)
        except OSError as error:
            raise StoreError(f"cannot write {folder}: {explained(error)}") from error
        self.earlier_seconds = seconds
        self._begun = time.monotonic()
        return step, folder


def _parse(key: str, data: bytes, step: int) -> tuple[list[FileEntry], float]:
    """The files and seconds of a save. Raises `Damaged` where it is not one of that step."""
    try:
        record = json.loads(data)
        entries = [FileEntry(check_path(item["path"]), int(item["size"]), item["sha256"]) for item in record["files"]]
        if record["step"] != step or not entries:
            raise ValueError("wrong step or no files")
        return entries, float(record["seconds"])
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{key} is not a record of saved progress ({error})") from None
