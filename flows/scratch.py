"""Scratch folders of attempts: beside the store, one a run, and gone with it.

A folder of a run that was killed is removed when a later run of the same store begins on the same host: its name says
the host and the process, that process is gone, and nothing was written there for a while (its stages may still save).
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import tempfile
import time
from pathlib import Path

from stages.artifacts import FolderStore, Store, StoreError
from stages.os_errors import explained

_QUIET_SECONDS = 900.0


class ScratchFolders:
    """Makes and removes the scratch folders of one run.

    They lie in the store's folder (`scratch/`), or in HEADRACE_SCRATCH or the system's folder for temporary files for
    other stores.
    """

    def __init__(self, store: Store, run: str) -> None:
        if os.environ.get("HEADRACE_SCRATCH"):
            self._root = Path(os.environ["HEADRACE_SCRATCH"]).absolute()
        elif isinstance(store, FolderStore):
            self._root = store.root / "scratch"
        else:
            self._root = Path(tempfile.gettempdir()) / "headrace"
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
