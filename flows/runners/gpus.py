"""Which GPUs of this machine are free for a stage."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading

from flows.runners.base import RunnerError


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
        self._taken: set[str] = set()
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
            self._changed.wait_for(lambda: len(self._free()) >= count)
            taken = self._free()[:count]
            self._taken.update(taken)
            return taken

    def give_back(self, gpus: list[str]) -> None:
        """Free what `take` gave."""
        with self._changed:
            self._taken.difference_update(gpus)
            self._changed.notify_all()

    def _free(self) -> list[str]:
        return [name for name in self._all or [] if name not in self._taken]
