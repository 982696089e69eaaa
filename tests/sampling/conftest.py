"""Fixtures of `tiny_alignment` for the tests in this folder."""

from tiny_alignment import _one_thread, attempt, checkpoint, dataset  # noqa: F401
