"""A real receiver of a webhook: an HTTP server that keeps what is posted to it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "T0K3N-of-the-webhook"


class Receiver:
    """Keeps every notice that is posted to its `url`, whose path is a secret, as those of Slack and Mattermost are."""

    def __init__(self) -> None:
        self.notices: list[dict[str, str]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                known = self.path == f"/services/{TOKEN}"
                if known:
                    receiver.notices.append(json.loads(body))
                self.send_response(204 if known else 404)
                self.end_headers()

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/services/{TOKEN}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def notice(self, test: Callable[[dict[str, str]], bool], limit: float = 120) -> dict[str, str]:
        """Wait for a notice that passes a test, and return it."""
        end = time.monotonic() + limit
        while True:
            for notice in list(self.notices):
                if test(notice):
                    return notice
            assert time.monotonic() < end, f"no such notice; there were {self.notices}"
            time.sleep(0.1)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
