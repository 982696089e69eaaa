"""Scratch folders of attempts: beside the store, one a run, and gone with it.

A folder of a run that was killed is removed when a later run of the same store begins on the same host: its name says
the host and the process, that process is gone, and nothing was written there for a while (its stages may still save).
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import stat
import tempfile
import time
from pathlib import Path

from stages.artifacts import FolderStore, Store, StoreError
from stages.os_errors import explained

_QUIET_SECONDS = 900.0


class ScratchFolders:
    """Makes and removes the scratch folders of one run.

    They lie in HEADRACE_SCRATCH where that is set, else in the store's folder (`scratch/`), or for other stores in a
    folder of this user's among the system's temporary files.
    """

    def __init__(self, store: Store, run: str) -> None:
        if os.environ.get("HEADRACE_SCRATCH"):
            self._root = Path(os.environ["HEADRACE_SCRATCH"]).absolute()
        elif isinstance(store, FolderStore):
            self._root = store.root / "scratch"
        else:
            self._root = private_folder("headrace")
        self._host = re.sub(r"[^\w.-]", "-", platform.node()) or "host"
        self._folder = self._root / f"{run}@{self._host}@{os.getpid()}"

    def make(self, step: str, attempt: int) -> Path:
        """A new, empty folder for an attempt of a step.

        Raises:
            StoreError: it cannot be made.
        """
        path = self._folder / f"{step}-{attempt}"
        try:
            self.remove(path)
            path.mkdir(parents=True)
        except OSError as error:
            raise StoreError(f"cannot make the scratch folder {path}: {explained(error)}") from error
        return path

    def remove(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Remove the run's folder."""
        self.remove(self._folder)

    def sweep(self) -> list[str]:
        """Remove folders of runs of this host whose process is gone. Returns the names of these runs."""
        if not self._root.is_dir():
            return []
        runs = []
        for folder in self._root.iterdir():
            run, _, rest = folder.name.partition("@")
            host, _, pid = rest.rpartition("@")
            if host == self._host and pid.isdigit() and not _alive(int(pid)):
                runs.append(run)
                if _quiet(folder):
                    self.remove(folder)
        return runs


def private_folder(name: str) -> Path:
    """A folder for temporary files that all processes of this user share, and no other user can reach into.

    Raises:
        StoreError: it cannot be made, or its name is taken by another user.
    """
    folder = Path(tempfile.gettempdir()) / f"{name}-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise StoreError(f"cannot make {folder}: {explained(error)}; set TMPDIR to a folder of yours") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise StoreError(f"{folder} belongs to another user; set TMPDIR to a folder of yours")
    return folder


def _quiet(folder: Path) -> bool:
    """Whether nothing was written in the folder, or right below the folders of its attempts, for a while."""
    newest = 0.0
    for pattern in (".", "*", "*/*"):
        for path in folder.glob(pattern) if pattern != "." else [folder]:
            try:
                newest = max(newest, path.stat().st_mtime)
            except OSError:  # removed meanwhile
                continue
    return time.time() - newest > _QUIET_SECONDS


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
