"""The installation of `headrace up` on this machine: its folder, and the addresses of the one that runs.

The folder is `HEADRACE_HOME`, or `~/.headrace`: the server's database, its leases, logs, and `up.json` with the
addresses. Its lock is held for as long as `headrace up` lives, however it ends, so that `up.json` of one that was
killed is not believed.
"""

from __future__ import annotations

import fcntl
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from stages.os_errors import explained


@dataclass(frozen=True)
class Addresses:
    """Where a running `headrace up` is: its process, the API, the pages, and the lineage browser ("" for none)."""

    pid: int
    api: str
    pages: str
    browser: str = ""


class NoHome(Exception):
    """There is no folder for the installation; the message says how to give one."""


def user_home() -> Path | None:
    """The user's home folder; None where the system knows of none (a container's user that has no name)."""
    try:
        return Path.home()
    except RuntimeError:
        return None


def home() -> Path:
    """The folder, made if missing, readable by its owner only.

    Raises:
        NoHome: there is none, or it cannot be made.
    """
    folder = _place()
    if folder is None:
        raise NoHome("this user has no home folder; set HEADRACE_HOME to a folder for the installation's data")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise NoHome(f"cannot make {folder}: {explained(error)}; set HEADRACE_HOME to another folder") from None
    return folder


def _place() -> Path | None:
    given, base = os.environ.get("HEADRACE_HOME"), user_home()
    try:
        if given:
            return Path(given).expanduser().absolute()
    except RuntimeError:
        raise NoHome(f"HEADRACE_HOME is {given}, and there is no such home folder; give the whole path") from None
    return base / ".headrace" if base is not None else None


def lock() -> IO[str] | None:
    """Take the lock for as long as the returned file is open; None where another process holds it."""
    file = open(home() / "up.lock", "a")  # noqa: SIM115 (it is held open)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def announce(addresses: Addresses) -> None:
    """Say where this `headrace up` is, for commands in other terminals."""
    path = home() / "up.json"
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(asdict(addresses)))
    draft.replace(path)


def withdraw() -> None:
    """Take the announcement back."""
    with suppress(FileNotFoundError):
        (home() / "up.json").unlink()


def running() -> Addresses | None:
    """The addresses of the `headrace up` that runs; None where none does."""
    folder = _place()
    path = folder / "up.json" if folder is not None else None
    if path is None or not os.access(path, os.R_OK):
        return None
    held = lock()
    if held is not None:  # nobody holds it: it was killed
        held.close()
        return None
    try:
        return Addresses(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None
