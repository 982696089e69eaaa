"""What every process that Headrace starts by fork needs: to die with its parent, and to end without unwinding it.

Light: `flows` and the tests use it too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1
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
