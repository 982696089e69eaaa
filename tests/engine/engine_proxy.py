"""A socket before the Docker Engine's own that can hang up, and stay away for a while, as an engine that restarts does,
or fall silent, as a connection through a network can.

What goes through it is the real engine's; nothing is answered in its place.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class EngineProxy:
    """A running proxy, at a socket in the file system or, without a path, at a port of the loopback address.

    `address` is what DOCKER_HOST takes.
    """

    def __init__(self, path: Path | None, upstream: str) -> None:
        self.path = path
        self.port = 0
        self._upstream = upstream.removeprefix("unix://")
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._silent: set[socket.socket] = set()
        self._listener: socket.socket | None = None
        self.accepted = 0
        self.come_back()

    def come_back(self) -> None:
        """Listen (again)."""
        if self.path is None:
            self._listener = socket.create_server(("127.0.0.1", self.port))
            self.port = self._listener.getsockname()[1]
        else:
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(str(self.path))
        self._listener.listen(64)
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.port}" if self.path is None else f"unix://{self.path}"

    def hang_up(self) -> None:
        """Cut every connection that there is; new ones are taken."""
        with self._lock:
            cut, self._open = self._open, []
        for one in cut:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def fall_silent(self) -> None:
        """Let nothing through any more on the connections that there are, which stay open; new ones work."""
        with self._lock:
            self._silent.update(self._open)

    def go_away(self) -> None:
        """Cut every connection and take no more, until `come_back`."""
        assert self._listener is not None
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            if self.path is not None:
                os.unlink(self.path)
        self.hang_up()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX)
            far.connect(self._upstream)
            with self._lock:
                self._open += [near, far]
                self.accepted += 1
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if source not in self._silent:
                    sink.sendall(data)
        if source not in self._silent:
            with contextlib.suppress(OSError):
                sink.shutdown(socket.SHUT_WR)


@contextmanager
def engine_proxy(folder: Path | None, upstream: str) -> Iterator[EngineProxy]:
    """A proxy in `folder`, whose path must be short, or at a port, before the engine at `upstream`."""
    proxy = EngineProxy(folder / "docker.sock" if folder is not None else None, upstream)
    try:
        yield proxy
    finally:
        proxy.go_away()
