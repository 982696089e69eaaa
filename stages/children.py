"""What every process that Headrace starts needs: to die with its parent, to take along what it started itself, and to
end without unwinding its parent.

Light: `flows` and the tests use it too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# Looked up once, before any fork: a child of several threads must not load libraries.
_prctl: Any = ctypes.CDLL(None).prctl if sys.platform.startswith("linux") else None


def die_with_parent(parent: int, number: int = signal.SIGTERM) -> bool:
    """Have the kernel send a signal to this process when the thread that started it ends (Linux only).

    Args:
        parent: its process.
        number: the signal.

    Returns:
        Whether the parent was still there when that was asked for. If not, nothing will be sent.
    """
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    return os.getppid() == parent


def adopt_orphans() -> None:
    """Have what this process started become its child when the parent in between ends: daemons too (Linux only)."""
    if _prctl is not None:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_children(but: Collection[int] = ()) -> None:
    """Kill and reap all children of this process but those named, and then those that it adopts for that."""
    spared = set(but)
    while children := {pid for pid, parent in _parents().items() if parent == os.getpid()} - spared:
        for pid in children:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except (ProcessLookupError, ChildProcessError):
                continue
            except PermissionError:  # it has become another user's
                spared.add(pid)


def descendants(pid: int) -> set[int]:
    """The processes that a process started, and those that these did; none on systems that do not tell (Linux does)."""
    parents = _parents()
    found: set[int] = set()
    while new := {child for child, parent in parents.items() if parent in found | {pid}} - found:
        found |= new
    return found


def _parents() -> dict[int, int]:
    """Process -> its parent, for all of this machine."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it ended meanwhile
            # The name in parentheses may hold anything; the fields after it are fixed (proc(5): 4 is the parent).
            found[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    return found


def end_with(body: Callable[[], int]) -> NoReturn:
    """Do all that a forked child is for, and end it with the code that `body` returns; 1 where it raises."""
    code = 1
    try:
        code = body()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
