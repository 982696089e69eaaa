"""Fixtures of `tests/sampling/tiny_alignment.py` for the tests in this folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "sampling"))

from tiny_alignment import _one_thread, attempt, checkpoint, dataset  # noqa: F401
