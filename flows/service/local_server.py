"""The Prefect API that a run reports to: the one the user has set, or a server that lives as long as the run.

Prefect can start a temporary server by itself, but that one stands in our process group, so that Ctrl-C ends it
before the stopped run can say so, and it outlives a killed run. This one has a session of its own and watches its
standard input: when the run is gone, however it went, the pipe closes and the server ends.

Invariants:
- An API that is set (`PREFECT_API_URL`, or a Prefect profile with one) is used as it is; nothing is started. Else the
  server of a running `headrace up` is used.
- The server listens on 127.0.0.1 only, serves no pages, and sends no analytics.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from flows.service import installation

STARTUP_SECONDS = 120  # a cold start takes 20 to 28 s on a small machine; Prefect's own limit of 20 s fails there
STOP_SECONDS = 10
STARTS = 3  # of a server that ends while it starts, as one does whose database another one is just making or upgrading


class NoServer(Exception):
    """There is no Prefect server that answers; the message says why and how to go on without one."""


def quiet_prefect() -> None:
    """Set, unless the user has, what Prefect reads from the environment; call before prefect is imported.

    No analytics, and only errors on the console: its log goes to its API, the terminal belongs to the display. Where
    Prefect's folder cannot be written, it gets one that goes with this process.
    """
    _house_prefect()
    os.environ.setdefault("DO_NOT_TRACK", "1")
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", str(STARTUP_SECONDS))
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "ERROR")


def _house_prefect() -> None:
    home = installation.user_home()
    if os.environ.get("PREFECT_HOME") or (home is not None and _can_be_written(home / ".prefect")):
        return
    made = tempfile.mkdtemp(prefix="headrace-prefect-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    os.environ["PREFECT_HOME"] = made
    if home is None:
        os.environ["HOME"] = made  # Prefect asks for it when it is imported
    elif (profiles := home / ".prefect" / "profiles.toml").exists():
        os.environ.setdefault("PREFECT_PROFILES_PATH", str(profiles))


def _can_be_written(folder: Path) -> bool:
    try:
        while not folder.exists():
            folder = folder.parent
    except OSError:  # a folder above it may not be looked into
        return False
    return os.access(folder, os.W_OK | os.X_OK)


def configured_api() -> str | None:
    """The API URL of the environment or the active Prefect profile; None when there is none."""
    if url := os.environ.get("PREFECT_API_URL"):
        return url
    from prefect.settings import get_current_settings

    return get_current_settings().api.url


def start_server() -> LocalServer | LastingServer | None:
    """Begin to start a server unless an API is configured or `headrace up` runs. Returns at once; `serving` waits.

    Raises:
        NoServer: an API is configured, and nothing answers there.
    """
    quiet_prefect()
    url = configured_api()
    if url is None and (up := installation.running()) is not None:
        if up.browser:
            os.environ.setdefault("HEADRACE_BROWSER_URL", up.browser)
        return LastingServer(up.api, up.pages)
    if url is None:
        return LocalServer()
    url = without_user(url)
    try:
        urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=30).close()
    except urllib.error.HTTPError:
        pass  # something answers: whether it lets us in is for Prefect to say
    except (OSError, ValueError) as error:
        raise NoServer(
            f"the Prefect server {url} (PREFECT_API_URL, or the active Prefect profile) does not answer: "
            f"{getattr(error, 'reason', error)}. Start it, or unset it; `headrace run --no-prefect` needs none."
        ) from None
    return None


@dataclass(frozen=True)
class LastingServer:
    """The server of a `headrace up` that runs: there already, and not ours to end."""

    url: str
    pages: str

    def wait(self) -> None:
        """It is there."""

    def stop(self) -> None:
        """It stays."""

    def ask_to_end(self) -> None:
        """It stays."""


class LocalServer:
    """A Prefect server in a process of its own, gone when this process is."""

    def __init__(self) -> None:
        self._starts = 0
        self._start()

    def _start(self) -> None:
        self._starts += 1
        self.port = check_port(0)
        self.url = f"http://127.0.0.1:{self.port}/api"
        self._process = subprocess.Popen(
            server_command(self.port, pages=False),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": with_this_package(os.environ.get("PYTHONPATH"))},
        )
        self._said: list[str] = []
        output = self._process.stdout
        threading.Thread(target=self._read, args=(output,), name="prefect-server-output", daemon=True).start()

    def wait(self, seconds: float = STARTUP_SECONDS) -> None:
        """Return once the server answers. One that ends before it does is started again, up to `STARTS` times.

        Raises:
            NoServer: it ended each time, or did not answer in time.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self._process.poll() is not None:
                if self._starts == STARTS:
                    raise NoServer(self._failure(f"ended with code {self._process.returncode} while it started"))
                self.stop()
                self._start()
                end = time.monotonic() + seconds
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                    if answer.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        raise NoServer(self._failure(f"did not answer within {seconds:.0f} s"))

    def stop(self) -> None:
        """End the server, by force when it does not go by itself. Safe to call twice."""
        self.ask_to_end()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdin and not self._process.stdin.closed:
            self._process.stdin.close()

    def ask_to_end(self) -> None:
        """Have it end, also where it is frozen, and do not wait for it."""
        if self._process.poll() is None:
            self._process.terminate()
            self._process.send_signal(signal.SIGCONT)

    def _read(self, output: IO[bytes]) -> None:
        said: list[str] = []
        self._said = said
        for line in output:
            said[:] = [*said[-19:], line.decode(errors="replace").rstrip()]

    def _failure(self, what: str) -> str:
        said = f" It said:\n{chr(10).join(self._said)}\n" if self._said else " "
        return f"the Prefect server of this run {what}.{said}`headrace run --no-prefect` does without it."


@contextmanager
def serving(server: LocalServer | LastingServer | None) -> Iterator[None]:
    """Wait for `server`, point Prefect at it for the time of the block, and end it. None: the configured API stands.

    Raises:
        NoServer: see `LocalServer.wait`.
    """
    if server is None:
        yield
        return
    try:
        server.wait()
        from prefect.settings import PREFECT_API_URL, temporary_settings

        with temporary_settings({PREFECT_API_URL: server.url}):
            try:
                yield
            finally:
                _send_what_is_queued()
    finally:
        server.stop()


def run_link(flow_run_id: str, server: LastingServer | None = None) -> str | None:
    """The page of a flow run on `server`, or the configured one; None where no pages are known.

    The link starts at /v2/: a bare deep link opens the older pages in a new browser, which do not draw Mermaid.
    """
    from prefect.settings import get_current_settings

    pages = server.pages if server is not None else without_user(str(get_current_settings().ui_url or ""))
    return f"{str(pages).rstrip('/').removesuffix('/v2')}/v2/runs/flow-run/{flow_run_id}" if pages else None


def without_user(url: str) -> str:
    """A URL without the name and password that it may hold: what can be shown, and asked whether it is there."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _send_what_is_queued() -> None:
    """Task states travel as events and logs in batches: without this the last ones find the server gone."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogHandler

    EventsWorker.drain_all(timeout=10)
    APILogHandler().flush()


def check_port(port: int) -> int:
    """The port, if it is free on 127.0.0.1; a free one for 0.

    Raises:
        NoServer: something listens there.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise NoServer(f"port {port} cannot be used ({error.strerror}); name another with --port.") from None
        return int(probe.getsockname()[1])


def server_command(port: int, *, pages: bool = True) -> list[str]:
    """What starts a server on 127.0.0.1, with its pages and services or, for one run, without."""
    return [sys.executable, "-m", "flows.service.local_server", str(port), *(["--pages"] if pages else [])]


def with_this_package(python_path: str | None) -> str:
    """PYTHONPATH by which a child finds this very package, wherever the command was called from."""
    return os.pathsep.join(filter(None, [str(Path(__file__).resolve().parents[2]), python_path]))


def _end_with_parent() -> None:
    while sys.stdin.buffer.read(4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(STOP_SECONDS)  # nobody is left who would end it by force, where it does not go by itself
    os.kill(os.getpid(), signal.SIGKILL)


def main(port: int, pages: bool) -> None:
    """Serve until told to end or until standard input closes."""
    os.environ["PREFECT_SERVER_UI_ENABLED"] = "1" if pages else "0"
    if not pages:
        os.environ["PREFECT__SERVER_EPHEMERAL"] = "1"
    os.environ["PREFECT__SERVER_FINAL"] = "1"
    import uvicorn

    threading.Thread(target=_end_with_parent, name="end-with-parent", daemon=True).start()
    uvicorn.run(
        "prefect.server.api.server:create_app",
        factory=True,
        host="127.0.0.1",
        port=port,
        log_level="error",
        lifespan="on",
        timeout_graceful_shutdown=3,
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), "--pages" in sys.argv[2:])
