"""The log of one container, read through the engine while it grows: what the stage in it said, whole and in order.

The model: the engine keeps the log and gives it from its beginning, as a stream that it holds open while the container
runs. A stream can end early, by an error or without one, and can fall silent for ever where the connection was lost
without a word (an engine behind a network). The log is then asked for again, and the bytes that were read are skipped.

Invariants:
- Each byte of standard output is given once, in order.
- The log counts as read only when a read that began after the container's end came as far as those before it and found
  nothing more. Where that cannot be had, `problem` says why.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import docker
from docker.errors import APIError, NotFound

from flows.runners.engine import AWAY

_PAUSE = 0.5  # seconds between two tries to read
_SILENCE = 10.0  # seconds without a word after which the stream of an ended container is cut
_LAST_READS = 5  # tries to read the end of the log
_STDERR_LINES = 2000


class ContainerLog:
    """Reads the log of a container.

    Args:
        ended: set once the container has ended, by whoever watches it.

    Attributes:
        problem: why the end of the log could not be read; "" otherwise.
    """

    def __init__(self, client: docker.DockerClient, container: str, ended: threading.Event) -> None:
        self.problem = ""
        self._client, self._container, self._ended = client, container, ended
        self._stream: Any = None
        self._pieces = 0  # that came so far, of all streams
        self._read_out = threading.Event()

    def output(self) -> Iterator[bytes]:
        """Standard output in pieces, to the end of the container. May be called once."""
        try:
            yield from self._output()
        finally:
            self.close()

    def close(self) -> None:
        """Say that nobody reads it any more."""
        self._read_out.set()

    def _output(self) -> Iterator[bytes]:
        read = 0
        tries = _LAST_READS
        while True:
            over = self._ended.is_set()  # asked before reading, so that nothing written before the end is missed
            position = 0
            more = False
            problem = "it breaks off"
            try:
                for piece in self._from_the_start(follow=not over):
                    fresh = piece[max(0, read - position) :]
                    position += len(piece)
                    if fresh:
                        read, more = position, True
                        yield fresh
                if over and position == read and not more:
                    return
            except NotFound:
                if over:
                    return
            except (APIError, *AWAY, OSError, struct.error) as error:
                problem = str(error)
            if not over:
                self._ended.wait(_PAUSE)
                continue
            tries = _LAST_READS if more else tries - 1
            if tries == 0:
                self.problem = f"the end of its log could not be read from the Docker Engine: {problem}"
                return
            if not more:
                time.sleep(_PAUSE)

    def _from_the_start(self, *, follow: bool) -> Iterator[bytes]:
        stream = self._client.api.logs(self._container, stdout=True, stderr=False, stream=True, follow=follow)
        self._stream = stream
        try:
            for piece in stream:
                self._pieces += 1
                yield piece
        finally:
            self._stream = None
            with contextlib.suppress(Exception):
                stream.close()

    def cut_silence(self) -> None:
        """Cut a stream that says nothing more, so that it is read anew, until all is read.

        Called once the container has ended, by another thread than the reader's.
        """
        seen = -1
        while not self._read_out.wait(_SILENCE):
            stream = self._stream
            if stream is not None and self._pieces == seen:
                with contextlib.suppress(Exception):
                    stream.close()
            seen = self._pieces

    def stderr(self) -> bytes:
        """The last lines of standard error; nothing where the engine does not give them."""
        for _ in range(2):  # the first may meet a connection that was lost
            try:
                return bytes(self._client.api.logs(self._container, stdout=False, stderr=True, tail=_STDERR_LINES))
            except APIError:
                break
            except AWAY:
                continue
        return b""
