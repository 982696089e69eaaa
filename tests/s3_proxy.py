"""A proxy before the S3 server that does what networks and busy servers do: cuts, loses, delays, refuses.

It passes real requests to the real server, and answers itself only with what S3 says when it is overloaded or denies.
"""

from __future__ import annotations

import http.client
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from email.utils import format_datetime, parsedate_to_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

# What to do with a request: "pass", "slow down", "cut request", "cut answer", "lose answer", "freeze",
# "flip" (a bit of the answer), "accept" (say that it is done, whatever the server said), ("error", status, code), or
# ("answer", status, body), or ("clock", seconds), for a server whose clock is so far ahead.
Fault = Any
Choose = Callable[[str, str, int], Fault]  # method, path with query, number of the request (from 0)


class _Server(ThreadingHTTPServer):
    """Says nothing of clients that hang up in the middle of an answer: that is what these tests have them do."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class Proxy:
    """A running proxy.

    Attributes:
        endpoint: its URL.
        requests: (method, path, headers) of every request so far.
        choose: says what happens to a request; change it at any time.
    """

    def __init__(self, upstream: str) -> None:
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.choose: Choose = lambda method, path, number: "pass"
        self._lock = threading.Lock()
        place = urlsplit(upstream)
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def _handle(self) -> None:
                headers = dict(self.headers.items())
                with proxy._lock:
                    number = len(proxy.requests)
                    proxy.requests.append((self.command, self.path, headers))
                fault = proxy.choose(self.command, self.path, number)
                length = int(self.headers.get("Content-Length", 0))
                if fault == "cut request":
                    self.rfile.read(length // 2)
                    self._cut()
                    return
                body = self.rfile.read(length)
                if fault == "freeze":
                    time.sleep(3)
                if fault == "slow down":
                    fault = ("error", 503, "SlowDown")
                if isinstance(fault, tuple) and fault[0] == "error":
                    _, status, code = fault[:3]
                    text = f"<Error><Code>{code}</Code><Message>as the test wants</Message></Error>".encode()
                    self._answer(status, dict(fault[3]) if len(fault) > 3 else {}, text)
                    return
                if isinstance(fault, tuple) and fault[0] == "answer":
                    self._answer(fault[1], {}, fault[2].encode())
                    return
                connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=60)
                try:
                    connection.request(self.command, self.path, body=body, headers=headers)
                    answer = connection.getresponse()
                    data = answer.read()
                finally:
                    connection.close()
                if fault == "accept" and answer.status >= 400:
                    self._answer(200, {"ETag": '"as-if-it-were-done"'}, b"")
                    return
                if fault == "lose answer":
                    self._cut()
                    return
                kept = {k: v for k, v in answer.getheaders() if k.lower() not in ("transfer-encoding", "connection")}
                if fault == "flip" and data:
                    data = bytes([data[0] ^ 1]) + data[1:]
                if isinstance(fault, tuple) and fault[0] == "clock":
                    kept, data = _shifted(kept, data, fault[1])
                if fault == "cut answer":
                    self.send_response_only(answer.status)
                    for name, value in (kept | {"Content-Length": str(len(data))}).items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(data[: len(data) // 2])
                    self._cut()
                    return
                self._answer(answer.status, kept, data)

            def _answer(self, status: int, headers: dict[str, str], data: bytes) -> None:
                self.send_response_only(status)
                length = headers.get("Content-Length", str(len(data))) if self.command == "HEAD" else str(len(data))
                for name, value in {**headers, "Content-Length": length}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            def _cut(self) -> None:
                self.wfile.flush()
                self.close_connection = True

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _handle

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _shifted(headers: dict[str, str], data: bytes, seconds: float) -> tuple[dict[str, str], bytes]:
    """An answer as if the server's clock, which dates the objects too, were so many seconds ahead."""
    shift = timedelta(seconds=seconds)
    for name, value in headers.items():
        if name.lower() in ("date", "last-modified"):
            headers[name] = format_datetime(parsedate_to_datetime(value) + shift, usegmt=True)

    def later(match: re.Match[bytes]) -> bytes:
        time = datetime.fromisoformat(match[2].decode()) + shift
        return match[1] + time.isoformat(timespec="seconds").replace("+00:00", "Z").encode()

    return headers, re.sub(rb"(<(?:LastModified|Initiated)>)([^<]+)", later, data)


@contextmanager
def proxy(upstream: str) -> Iterator[Proxy]:
    running = Proxy(upstream)
    try:
        yield running
    finally:
        running.close()
