"""What the exit code of a stage process tells of an end that the stage itself could not tell."""

from __future__ import annotations

import signal


def ending(code: int) -> str:
    """What is known of an attempt that said nothing of its end."""
    try:
        name = signal.Signals(-code).name if code < 0 else ""
    except ValueError:
        name = f"signal {-code}"
    if name:
        return f"killed by {name}{' (out of memory?)' if code == -signal.SIGKILL else ''}"
    return f"ended with exit code {code} and said nothing; `headrace logs` shows what it printed"


def was_killed(code: int) -> bool:
    """Whether a signal from outside ended the process. A process that aborts or faults itself has crashed."""
    number = -code if code < 0 else code - 128  # 137 is what shells and containers make of SIGKILL
    return number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
