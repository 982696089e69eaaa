"""Standard output and standard error of the command: they take any text, and a terminal that was closed is a sink.

Without that, the first line that is printed after a terminal was closed would end a run in the middle of its saving.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import json
import os
import sys
from typing import Any, TextIO


def prepare_output() -> None:
    """Have streams that take any text: a closed one is a sink, and one that cannot show a character shows another."""
    sys.stdout = _of_terminal(sys.stdout) or open(os.devnull, "w")  # noqa: SIM115 (for as long as the process)
    sys.stderr = _of_terminal(sys.stderr) or open(os.devnull, "w")  # noqa: SIM115
    codecs.register_error("json", lambda error: (_json_escapes(error), getattr(error, "end", 0)))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="json" if "--json" in sys.argv else "replace")


def drop_output() -> None:
    """Let nothing more be written to standard output, so that leaving does not fail on it again."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Terminal(io.FileIO):
    """A terminal that takes everything, also once it is gone."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return len(memoryview(data).cast("B"))


def _of_terminal(stream: TextIO | None) -> TextIO | None:
    """The same stream, or one that outlives its terminal."""
    if not isinstance(stream, io.TextIOWrapper) or not stream.isatty():
        return stream
    buffer = io.BufferedWriter(_Terminal(stream.fileno(), "w", closefd=False))
    return io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=True)


def _json_escapes(error: UnicodeError) -> str:
    assert isinstance(error, UnicodeEncodeError)
    return json.dumps(error.object[error.start : error.end])[1:-1]
