"""The verb `up`: a Prefect server with its pages, the deployments, a worker that runs them, and the lineage browser.

The model: this process starts the others, each in a session of its own with its output in a log file, waits until all
are healthy, and watches them: what dies is started again, on the same port with the same data. Ctrl-C or SIGTERM ends
them: the worker first, so that runs save and their states are told, the server last.

Invariants:
- Everything listens on 127.0.0.1 only, sends no analytics and works with no internet.
- Data (runs, pages, leases of slots) is in the folder of `flows.service.installation` and survives a restart. With
  `PREFECT_SERVER_DATABASE_CONNECTION_URL` set, the database is that one (PostgreSQL).
- Children end when this process does, by kill -9 too.
- What the pages say becomes true again: a run whose process is gone, whatever took it, is scheduled again, goes on from
  what is saved, and is Crashed after `ATTEMPTS` attempts (`reconcile`).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from flows.flow_run.pages import BROWSER
from flows.runners.process import die_with
from flows.service import installation
from flows.service.deploy_settings import DeploySettings, read_settings
from flows.service.local_server import NoServer, check_port, quiet_prefect, server_command, with_this_package
from flows.signals import SIGNALS, interrupting

PORT = 4200
BROWSER_PORT = 4280
STARTUP_SECONDS = 600.0  # a minute on a busy machine; what ends meanwhile is told at once
WORKER_STOP_SECONDS = 90.0  # in which runs save, longer than their grace period
STOP_SECONDS = 15.0
LOOK_SECONDS = 1.0
RECONCILE_SECONDS = 10.0
LOG_BYTES = 20_000_000
BROWSER_MODULE = "flows.lineage.browser"


@dataclass
class Child:
    """One process of the installation, started again when it dies."""

    name: str
    command: list[str]
    environment: dict[str, str]
    healthy: Callable[[], bool]
    stop_seconds: float = STOP_SECONDS
    orphaned: signal.Signals = signal.SIGTERM  # what it gets when the command is killed
    process: subprocess.Popen[bytes] | None = None
    restarts: int = 0
    due: float = 0.0
    _log: IO[bytes] | None = field(default=None, repr=False)

    @property
    def log_path(self) -> Path:
        return installation.home() / "logs" / f"{self.name}.log"

    def start(self) -> None:
        """Start it. To be called from the main thread: the child ends when the thread that started it does."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        if self.log_path.is_file() and self.log_path.stat().st_size > LOG_BYTES:
            self.log_path.replace(self.log_path.with_suffix(".log.1"))
        self._log = self._log or open(self.log_path, "ab")  # noqa: SIM115 (as long as the child)
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=self.environment,
            start_new_session=True,
            preexec_fn=die_with(os.getpid(), self.orphaned),
        )

    def wait(self, seconds: float) -> None:
        """Return once it is healthy.

        Raises:
            NoServer: it ended, or is not healthy in time.
        """
        assert self.process is not None
        end = time.monotonic() + seconds
        while not self.healthy():
            if self.process.poll() is not None:
                raise NoServer(f"the {self.name} ended with code {self.process.returncode}.{self._last_words()}")
            if time.monotonic() > end:
                raise NoServer(f"the {self.name} is not healthy after {seconds:.0f} s.{self._last_words()}")
            time.sleep(0.2)

    def keep_up(self, say: Callable[[str], None]) -> None:
        """Start it again where it has died, after a pause that grows."""
        now = time.monotonic()
        if self.process is not None and self.process.poll() is not None:
            code, self.process = self.process.returncode, None
            pause = min(30.0, 2.0 ** min(self.restarts, 5) - 1)
            self.restarts, self.due = self.restarts + 1, now + pause
            say(f"The {self.name} ended with code {code}; it is started again. Its log: {self.log_path}")
        if self.process is None and now >= self.due:
            self.start()

    def stop(self) -> None:
        """End it, by force where it does not go in time."""
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(self.stop_seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdin:
            self.process.stdin.close()

    def _last_words(self) -> str:
        try:
            said = self.log_path.read_bytes()[-3000:].decode(errors="replace").splitlines()[-12:]
        except OSError:
            said = []
        return f" It said:\n{chr(10).join(said)}\n" if said else " "


def up(settings_file: Path | None, *, port: int, browser_port: int, runs: int) -> int:
    """Start everything, and return when asked to stop (the exit code: 0).

    Args:
        settings_file: of `flows.service.deploy_settings`.
        port: of the server; 0 for any that is free.
        browser_port: of the lineage browser; 0 for any that is free.
        runs: flow runs that the worker runs at once.

    Raises:
        RecipeError: the settings are wrong; nothing was started.
        NoServer: it runs already, a port is taken, or something does not come up.
    """
    settings = read_settings(settings_file)
    held = installation.lock()
    if held is None:
        known = installation.running()
        where = f" at {known.pages} (process {known.pid})" if known else ""
        raise NoServer(f"`headrace up` runs already{where}. Set HEADRACE_HOME for another installation.")
    quiet_prefect()
    with held, interrupting():
        _Installation(settings, check_port(port), check_port(browser_port), runs).serve()
    return 0


class _Installation:
    """The processes of one `headrace up`."""

    def __init__(self, settings: DeploySettings, port: int, browser_port: int, runs: int) -> None:
        self.settings = settings
        self.pages = f"http://127.0.0.1:{port}"
        self.api = f"{self.pages}/api"
        has_browser = importlib.util.find_spec(BROWSER_MODULE) is not None
        self.browser = f"http://127.0.0.1:{browser_port}" if has_browser else ""
        environment = self._environment()
        self.server = Child("server", server_command(port), environment, lambda: _answers(f"{self.api}/health"))
        self.worker = Child(
            "worker",
            [
                *(sys.executable, "-P", "-m", "prefect", "worker", "start", "--type", "process"),
                *("--pool", settings.work_pool, "--name", worker_name(), "--limit", str(runs)),
            ],
            environment,
            self._worker_online,
            WORKER_STOP_SECONDS,
            # Asked to end, it would tell the server, which ends too, that its runs have crashed, or not end at all.
            signal.SIGKILL,
        )
        self.children = [self.server, self.worker]
        if has_browser:  # the one place where the lineage browser joins the installation
            command = [sys.executable, "-P", "-m", BROWSER_MODULE]
            command += ["--store", settings.store, "--port", str(browser_port)]
            self.children.append(
                Child("lineage browser", command, environment, lambda: _answers(self.browser, any_status=True))
            )
        self._missing: set[str] = set()

    def _environment(self) -> dict[str, str]:
        """The environment of all children: the user's, without what leads to another Prefect, and without the
        webhook's address, which is in a block by then and no business of stages."""
        from flows.service.automations import HEARTBEAT_SECONDS, WEBHOOK

        left_out = ("PREFECT_PROFILE", "PREFECT_API_KEY", WEBHOOK)
        ours = {name: value for name, value in os.environ.items() if name not in left_out}
        ours |= {
            "PREFECT_HOME": str(installation.home()),
            "PREFECT_API_URL": self.api,
            "PREFECT_UI_URL": self.pages,
            "PREFECT_SERVER_UI_API_URL": self.api,
            "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DO_NOT_TRACK": "1",
            # In memory, the leases of slots would be lost when the server is restarted.
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
            # SQLite has one writer at a time: on a busy machine its turn may take longer than Prefect's 10 and 5 s.
            "PREFECT_SERVER_DATABASE_TIMEOUT": "60",
            "PREFECT_SERVER_DATABASE_CONNECTION_TIMEOUT": "30",
            "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_SECONDS),
            "PREFECT_WORKER_QUERY_SECONDS": "2",
            "PYTHONPATH": with_this_package(os.environ.get("PYTHONPATH")),
        }
        if self.browser:
            ours[BROWSER] = self.browser
        return ours

    def serve(self) -> None:
        """Start all, say where they are, and watch them until a signal comes."""
        begun = time.monotonic()
        print("Starting the server, the worker and the pages (10 to 60 s) …", flush=True)
        try:
            self.server.start()
            self.server.wait(STARTUP_SECONDS)
            self._with_server(self._deploy)
            for child in self.children[1:]:
                child.start()
            for child in self.children[1:]:
                child.wait(STARTUP_SECONDS)
            installation.announce(installation.Addresses(os.getpid(), self.api, self.pages, self.browser))
            self._say_where(time.monotonic() - begun)
            self._watch()
        except KeyboardInterrupt:
            print("Stopping: what runs is saved first.", flush=True)
        finally:
            installation.withdraw()
            self._stop()
        print("Stopped. `headrace up` starts it again, with all of its runs.", flush=True)

    def _say_where(self, seconds: float) -> None:
        lines = [
            f"Ready in {seconds:.0f} s",
            f"  Prefect          {self.pages}/v2/",
            f"  pipeline form    {self.pages}/v2/deployments",
        ]
        if self.browser:
            lines.append(f"  lineage browser  {self.browser}")
        lines += [
            f"  store            {self.settings.store}",
            f"  data and logs    {installation.home()}",
            "`headrace run` in another terminal uses this server. Ctrl-C stops it.",
        ]
        print("\n".join(lines), flush=True)

    def _watch(self) -> None:
        looked = time.monotonic()
        while True:
            time.sleep(LOOK_SECONDS)
            for child in self.children:
                child.keep_up(lambda text: print(text, flush=True))
            if time.monotonic() - looked > RECONCILE_SECONDS and self.server.healthy():
                looked = time.monotonic()
                self._with_server(self._reconcile)

    def _stop(self) -> None:
        """End the children, the server last; runs that were stopped by this go on at the next start."""
        with _no_more_signals():
            self.worker.stop()
            self._stop_runs()
            if self.worker.process is not None and self.server.healthy():
                self._with_server(self._reconcile, at_once=True)
            for child in reversed(self.children):
                child.stop()

    def _stop_runs(self) -> None:
        """Have the runs that the worker has left save and end: a worker that is told to stop does not wait for them."""
        from flows.service.reconcile import flow_processes

        end = time.monotonic() + WORKER_STOP_SECONDS
        told: set[int] = set()
        while left := set((flow_processes(self.api) or {}).values()):
            late = time.monotonic() > end
            for pid in left if late else left - told:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
            told |= left
            time.sleep(0.2)

    def _with_server(self, work: Callable[..., None], **options: bool) -> None:
        """Do something with Prefect's client led to our server."""
        from prefect.settings import PREFECT_API_KEY, PREFECT_API_URL, temporary_settings

        with temporary_settings({PREFECT_API_URL: self.api}, restore_defaults={PREFECT_API_KEY}):
            work(**options)

    def _deploy(self) -> None:
        from flows.service.deploy import deploy, lines

        for line in lines(asyncio.run(deploy(self.settings)), self.settings):
            print(line, flush=True)

    def _reconcile(self, at_once: bool = False) -> None:
        from flows.service.reconcile import reconcile

        try:
            self._missing = reconcile(self.settings.work_pool, None if at_once else self._missing)
        except Exception as error:  # the server may go at any moment; the next look finds the same
            print(f"The runs could not be looked at ({type(error).__name__}: {error}); it is tried again.", flush=True)

    def _worker_online(self) -> bool:
        import json

        request = urllib.request.Request(
            f"{self.api}/work_pools/{self.settings.work_pool}/workers/filter",
            data=b"{}",
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                workers = json.loads(answer.read())
        except (OSError, ValueError):
            return False
        return any(item["name"] == worker_name() and item["status"] == "ONLINE" for item in workers)


def worker_name() -> str:
    """The name of this machine's worker."""
    import platform

    return f"headrace@{platform.node()}"


def _answers(url: str, *, any_status: bool = False) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError:
        return any_status
    except OSError:
        return False


class _no_more_signals:
    """For the time of the block, signals that ask to stop are noted and not obeyed: stopping is under way."""

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)

    def __exit__(self, *error: object) -> None:
        return None
