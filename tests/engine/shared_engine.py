"""One Docker Engine and one image for all test processes of this machine, of one test run or of several.

Whoever needs the engine first starts it, and whoever needs it last ends it. One that was there before stays.
"""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest


def script() -> Path:
    """The script that starts an engine; it may be missing."""
    return Path(__file__).resolve().parents[3] / "shared" / "tools" / "engine.sh"


@contextmanager
def started_engine() -> Iterator[str]:
    """The address of an engine that lives at least as long as the block. Skips the test where none can be started."""
    with _file("users") as users, _file("started") as started:
        with alone("engine"):
            fcntl.flock(users, fcntl.LOCK_SH)
            before = _pid()
            done = subprocess.run(["bash", str(script()), "up"], capture_output=True, text=True, timeout=300)
            address = re.search(r"DOCKER_HOST=(\S+)", done.stdout)
            if done.returncode or address is None:
                pytest.skip(f"no Docker Engine can be started here: {done.stderr.strip()[-300:]}")
            if _pid() != before:
                _note(started, _pid())
        try:
            yield address[1]
        finally:
            with alone("engine"):
                fcntl.flock(users, fcntl.LOCK_UN)
                if _nobody_else(users) and _noted(started) == _pid():
                    subprocess.run(["bash", str(script()), "down"], capture_output=True, timeout=120)


@contextmanager
def alone(what: str) -> Iterator[None]:
    """A block that one process at a time is in."""
    with _file(what) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _nobody_else(users: IO[str]) -> bool:
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _pid() -> str:
    folder = os.environ.get("ENGINE_DIR") or f"{os.environ.get('TMPDIR', '/tmp')}/headrace-engine"
    try:
        pid = (Path(folder) / "docker.pid").read_text().strip()
        return f"{pid} {Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[19]}"
    except OSError:
        return ""


def _note(file: IO[str], pid: str) -> None:
    file.seek(0)
    file.truncate()
    file.write(pid)
    file.flush()


def _noted(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _file(name: str) -> IO[str]:
    return open(Path(tempfile.gettempdir()) / f"headrace-tests-{os.getuid()}-{name}.lock", "a+")
