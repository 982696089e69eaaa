"""Limits on the memory of a stage: their notation, and what a stage uses now."""

from __future__ import annotations

import os
import re
from pathlib import Path

from stages.children import descendants

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BINARY_UNITS = {"ki": 1024, "mi": 1024**2, "gi": 1024**3, "ti": 1024**4}


def parse_size(text: str) -> int:
    """Bytes of a size such as "8GiB", "500MB" or "2g" (decimal units without the i).

    Raises:
        ValueError: it is not a size.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    units = _UNITS | _BINARY_UNITS
    if match is None or match[2] not in units or float(match[1]) <= 0:
        raise ValueError(f"{text!r} is not a size; write it like 8GiB or 500MB")
    return int(float(match[1]) * units[match[2]])


def show_size(count: int) -> str:
    """Bytes as "9.1 GiB"."""
    size = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def session_memory(session: int) -> int:
    """Bytes of memory that the processes of a session, and all that its leader started, hold.

    That is anonymous and shared memory, not mapped files.

    Linux only; elsewhere 0, so that no limit is ever exceeded.
    """
    total = 0
    daemons = descendants(session)
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # The name in parentheses may hold anything; after it, the fields are fixed (proc(5): 6 is the session).
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session or int(folder.name) in daemons:
                resident, shared = map(int, (folder / "statm").read_text().split()[1:3])
                shmem = _shmem(folder)
                total += (resident - shared) * os.sysconf("SC_PAGE_SIZE") + shmem
        except (OSError, ValueError, IndexError):  # it ended meanwhile
            continue
    return total


def _shmem(folder: Path) -> int:
    for line in (folder / "status").read_text().splitlines():
        if line.startswith("RssShmem:"):
            return int(line.split()[1]) * 1024
    return 0
