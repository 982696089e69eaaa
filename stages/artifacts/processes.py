"""Whether a process that wrote something into a store still lives, as far as this machine can tell.

A process is told by its number, when it started, and its place: a boot of a host and a process namespace of it. What is
of another place is not known here.
"""

from __future__ import annotations

import os
from pathlib import Path


def place() -> str:
    """This boot of this host and the process namespace (containers have their own); "" where the system cannot say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def born(pid: int) -> str:
    """When a process of this namespace started, in ticks since boot; "" where there is none or it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]  # fields 3 and 22 of proc_pid_stat(5)


def is_gone(its_place: str, pid: int, its_birth: str) -> bool:
    """Whether a process of this place has ended; False for one of another place, of which nothing is known."""
    return bool(its_place) and its_place == place() and born(pid) != its_birth
