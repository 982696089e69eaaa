"""Freezing a process that uses a folder store, for tests of what the others do then."""

from __future__ import annotations

import fcntl
import signal
import subprocess
import time
from pathlib import Path
from typing import Any


def freeze(process: subprocess.Popen[Any], store: Path) -> None:
    """SIGSTOP, at a moment in which the process holds no lock of a folder store: a lock would stop the others too."""
    while True:
        process.send_signal(signal.SIGSTOP)
        if not any(is_locked(path) for path in (store / "locks").glob("*")):
            return
        process.send_signal(signal.SIGCONT)
        time.sleep(0.01)


def is_locked(path: Path) -> bool:
    with open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
