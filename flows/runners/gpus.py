"""Which GPUs of this machine are free for a stage.

Invariant: a GPU that one stage has is lent to no other stage of this user on this machine, whatever run or process that
belongs to. Each GPU is a file that is locked while it is lent; the lock of a killed process is free at once.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import threading
from pathlib import Path
from typing import IO

from flows.runners.base import RunnerError
from flows.scratch import private_folder

_POLL = 1.0  # seconds between two looks at GPUs that other processes have


def visible_gpus() -> list[str]:
    """The GPUs this process may use, as CUDA_VISIBLE_DEVICES names them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [item.strip() for item in given.split(",") if item.strip() not in ("", "-1", "NoDevFiles")]
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(
        ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return listed.stdout.split() if listed.returncode == 0 else []


class GpuPool:
    """Lends GPUs to stages, so that steps that run at once never share one.

    Args:
        gpus: names as in CUDA_VISIBLE_DEVICES; those of this machine, looked up when first asked for, when None.
    """

    def __init__(self, gpus: list[str] | None = None) -> None:
        self._all = gpus
        self._taken: dict[str, IO[bytes]] = {}  # with the file whose lock says so to other processes
        self._changed = threading.Condition()

    def take(self, count: int, step: str) -> list[str]:
        """Wait for `count` free GPUs and take them; [] at once for none.

        Raises:
            RunnerError: the machine has fewer.
        """
        if count == 0:
            return []
        with self._changed:
            if self._all is None:
                self._all = visible_gpus()
            if count > len(self._all):
                raise RunnerError(
                    f"step {step} asks for {count} GPU{'s' * (count > 1)} (resources.gpus), and this machine has "
                    f"{len(self._all) or 'none'}; set resources.gpus: 0 to train on the CPU"
                )
            while len(taken := self._lock_free(count)) < count:
                self._unlock(taken)
                self._changed.wait(_POLL)  # those of other processes are given back unheard
            return taken

    def give_back(self, gpus: list[str]) -> None:
        """Free what `take` gave."""
        with self._changed:
            self._unlock(gpus)
            self._changed.notify_all()

    def _lock_free(self, count: int) -> list[str]:
        """Lock up to `count` GPUs that nobody has."""
        found: list[str] = []
        for name in self._all or []:
            if len(found) == count:
                break
            if name in self._taken:
                continue
            file = open(_lock_path(name), "ab")  # noqa: SIM115 (it holds the lock)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                continue
            self._taken[name] = file
            found.append(name)
        return found

    def _unlock(self, gpus: list[str]) -> None:
        for name in gpus:
            if (file := self._taken.pop(name, None)) is not None:
                file.close()


def _lock_path(gpu: str) -> Path:
    """The file of a GPU, the same for every process of this user."""
    return private_folder("headrace-gpus") / f"{re.sub(r'[^A-Za-z0-9-]', '_', gpu)}.lock"
