"""Stages as containers of a Docker Engine.

The model: a container an attempt, made from the stage image by its digest. It has a read-only root, /tmp in memory, and
a scratch volume of its own at /scratch, into which the spec and the user's code are put before it starts. Its standard
output, followed through the engine, is the stage's events. A store on S3 is reached over the network, with blobs cached
in a volume that the containers of one user share; a folder store is mounted at its own path.

Invariants:
- Events are whole and in order: of a log stream that breaks off, the bytes that were read are skipped in the next.
- A container runs as a user that is not root, without capabilities, and with no variables but those it is given.
- An attempt ends with its container removed, whatever happened. What a killed flow left is reaped at the next start.
- A stage that the engine killed for its memory limit, and one in whose image the code is another, are not tried again.
  A container that was lost with its engine is.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import platform
import re
import signal
import sys
import tarfile
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import docker
from docker.errors import APIError, NotFound
from docker.types import DeviceRequest, LogConfig, Mount

from flows.runners import engine
from flows.runners.base import RunnerError
from flows.runners.container_files import OUTCOME, SCRATCH, SPEC, luggage
from flows.runners.container_log import ContainerLog
from flows.runners.engine import AWAY
from flows.runners.gpus import GpuPool, visible_gpus
from flows.runners.lines import EventLines, lost_outcome, stderr_events
from flows.runners.memory import parse_size, show_size
from flows.runners.store_access import certificates, container_user, stage_environment
from stages.artifacts import FolderStore, open_store
from stages.contract import ExitCode, StageSpec

GRACE = 60  # seconds that the engine gives a container that it stops itself, and we those of dead runs
AWAY_SECONDS = 300.0  # how long an engine may be away before a stage on it is given up
_WAIT = 30  # seconds of one request that waits for the end of a container
_PAUSE = 0.5  # between two tries to reach the engine
_DEFAULT_SHM = "1GiB"
_PIDS = 8192
_NO_COMMAND = (126, 127)  # what the init process says of an entry point that cannot be run
_OWN_CODES = {int(code) for code in ExitCode}


@dataclass(frozen=True)
class DockerSettings:
    """How containers are made.

    Attributes:
        image: name or digest of the stage image.
        network: "host", or a network of the engine.
        user: "uid:gid" of the stages; chosen by the store when empty.
    """

    image: str = "headrace-stage"
    network: str = "host"
    user: str | None = None

    @classmethod
    def of_environment(cls) -> DockerSettings:
        """The settings of HEADRACE_STAGE_IMAGE, HEADRACE_DOCKER_NETWORK and HEADRACE_DOCKER_USER."""
        get = os.environ.get
        return cls(
            get("HEADRACE_STAGE_IMAGE") or cls.image,
            get("HEADRACE_DOCKER_NETWORK") or cls.network,
            get("HEADRACE_DOCKER_USER") or None,
        )


class DockerRunner:
    """Runs each stage as a container.

    Args:
        settings: those of the environment when None.
        gpus: the GPUs to lend to stages; when None those of this machine, or where it sees none, what the engine has.
        away_seconds: how long the engine may be away before a stage on it is given up.
    """

    def __init__(
        self,
        settings: DockerSettings | None = None,
        *,
        gpus: list[str] | None = None,
        away_seconds: float = AWAY_SECONDS,
    ) -> None:
        self.settings = settings or DockerSettings.of_environment()
        known = visible_gpus() if gpus is None else gpus
        self._gpus = GpuPool(known) if known else None
        self._away = away_seconds
        self._lock = threading.Lock()
        self._client: docker.DockerClient | None = None
        self._image: engine.Image | None = None
        self._closed = False
        self._handles: list[DockerHandle] = []

    def start(self, spec: StageSpec) -> DockerHandle:
        """Start the stage of `spec`; see `flows.runners.base.Runner`."""
        with self._lock:
            client = self._client = self._client or self._prepare()
            image = self._image = self._image or engine.find_image(client, self.settings.image)
        spec = spec.model_copy(update={"record": spec.record | {"image": {"name": image.name, "digest": image.id}}})
        options = _sizes(spec) | self._place(spec)
        _, files = luggage(spec)
        gpus = self._gpus.take(spec.resources.gpus, spec.step) if self._gpus is not None else []
        requests = _device_requests(spec.resources.gpus, gpus)
        container = None
        try:
            container = self._make(client, image, spec, options, requests)
            client.api.put_archive(container, SCRATCH, files)
            with self._lock:
                if self._closed:
                    raise RunnerError("the run is being stopped")
                client.api.start(container)
                handle = DockerHandle(client, container, spec, image, self._away, lambda: self._give_back(gpus))
                self._handles = [item for item in self._handles if not item.ended] + [handle]
        except BaseException as error:
            if container is not None:
                _remove(client, container)
            self._give_back(gpus)
            if isinstance(error, APIError):
                raise RunnerError(engine.explain(error, spec.step, spec.resources.gpus, image.name)) from None
            if isinstance(error, AWAY):
                raise RunnerError(
                    f"step {spec.step}: the Docker Engine at {engine.where()} has gone away; see that it runs"
                ) from None
            raise
        handle.begin()
        return handle

    def close(self) -> None:
        """Stop what still runs, letting it save, and remove every container of this runner."""
        with self._lock:
            self._closed = True
        for handle in self._handles:
            handle.signal("SIGTERM")
        for handle in self._handles:
            handle.stop(GRACE)
            handle.remove()
        if self._client is not None:
            self._client.close()

    def _prepare(self) -> docker.DockerClient:
        """Connect, and clear away what dead runs of this installation left."""
        client = engine.connect()
        try:
            reaped = engine.reap(client, GRACE)
        except APIError as error:
            raise RunnerError(f"the Docker Engine at {engine.where()}: {engine.explained(error)}") from None
        if reaped:
            print(f"headrace: stopped what dead runs had left running: {', '.join(reaped)}", file=sys.stderr)
        return client

    def _place(self, spec: StageSpec) -> dict[str, Any]:
        """Where the container finds the store, and as whom: options of `_make`."""
        store = open_store(spec.store)
        user = container_user(store, self.settings.user, os.getuid(), os.getgid(), spec.step)
        trackers = spec.config.get("report_to") or ()
        environment = stage_environment(store, (trackers,) if isinstance(trackers, str) else tuple(trackers))
        mounts = []
        if isinstance(store, FolderStore):
            mounts.append(Mount(str(store.root), str(store.root), type="bind"))
        else:
            mounts.append(Mount("/cache", f"headrace-cache-{(user or 'image').replace(':', '-')}", type="volume"))
            environment["HEADRACE_CACHE_DIR"] = "/cache"
        if bundle := certificates():
            mounts.append(Mount("/etc/headrace/certificates.pem", str(bundle), type="bind", read_only=True))
            environment["AWS_CA_BUNDLE"] = "/etc/headrace/certificates.pem"
        # Libraries ask for the user's name, and that of a mere number is not to be found.
        environment |= {"USER": "headrace", "LOGNAME": "headrace"}
        return {"user": user, "mounts": mounts, "environment": environment}

    def _make(
        self,
        client: docker.DockerClient,
        image: engine.Image,
        spec: StageSpec,
        options: dict[str, Any],
        requests: list[DeviceRequest],
    ) -> str:
        """Create the container and return its id; nothing runs yet."""
        threads = spec.resources.threads
        own_user = options["user"] is not None and options["user"] != "0:0"
        whose = {engine.INSTALLATION: engine.installation(), engine.RUN: spec.run, engine.STEP: spec.step}
        host = client.api.create_host_config(
            network_mode=self.settings.network,
            init=True,
            read_only=True,
            tmpfs={"/tmp": "rw,nosuid,nodev,mode=1777"},
            mounts=[Mount(SCRATCH, None, type="volume", labels=whose), *options["mounts"]],
            mem_limit=options["memory"],
            memswap_limit=options["memory"],
            shm_size=options["shm"],
            nano_cpus=threads * spec.resources.processes * 1_000_000_000 if threads else None,
            pids_limit=_PIDS,
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            group_add=[str(group) for group in os.getgroups()] if own_user and not self.settings.user else None,
            device_requests=requests,
            log_config=LogConfig(type=LogConfig.types.JSON, config={}),  # whatever the engine's default drops
        )
        name = re.sub(r"[^A-Za-z0-9_.-]", "-", f"headrace-{spec.run}-{spec.step}")[:100]
        made = client.api.create_container(
            image.id,
            ["run", f"{SCRATCH}/{SPEC}"],
            name=f"{name}-{uuid.uuid4().hex[:8]}",
            user=options["user"],
            environment=options["environment"],
            labels={
                **whose,
                engine.OWNER: engine.owner(),
                engine.KEY: spec.key,
                engine.ATTEMPT: str(spec.record.get("attempt", 1)),
                "headrace.host": platform.node(),
            },
            host_config=host,
            stop_timeout=GRACE,
            use_config_proxy=False,
        )
        return str(made["Id"])

    def _give_back(self, gpus: list[str]) -> None:
        if self._gpus is not None:
            self._gpus.give_back(gpus)


def _sizes(spec: StageSpec) -> dict[str, Any]:
    sizes: dict[str, Any] = {}
    for name, text in (("memory", spec.resources.memory), ("shm", spec.resources.shm or _DEFAULT_SHM)):
        try:
            sizes[name] = parse_size(text) if text else None
        except ValueError as error:
            raise RunnerError(f"step {spec.step}: resources.{name}: {error}") from None
    return sizes


def _device_requests(count: int, gpus: list[str]) -> list[DeviceRequest]:
    if count == 0:
        return []
    if gpus:
        return [DeviceRequest(device_ids=gpus, capabilities=[["gpu"]])]
    return [DeviceRequest(count=count, capabilities=[["gpu"]])]


def _remove(client: docker.DockerClient, container: str) -> None:
    with contextlib.suppress(APIError, *AWAY):  # where it fails, the next start reaps it
        client.api.remove_container(container, v=True, force=True)


@dataclass(frozen=True)
class _End:
    """How a container ended.

    Attributes:
        code: its exit code, minus the signal's number for a signal.
        verdict: why it is not to be tried again; "" otherwise.
        message: what is known of an end that the stage could not tell; "" otherwise.
    """

    code: int
    verdict: str = ""
    message: str = ""


class DockerHandle:
    """One stage container; see `flows.runners.base.Handle`."""

    def __init__(
        self,
        client: docker.DockerClient,
        container: str,
        spec: StageSpec,
        image: engine.Image,
        away_seconds: float,
        when_ended: Any,
    ) -> None:
        self.container = container
        self.verdict = ""
        self._client, self._spec, self._image = client, spec, image
        self._away = away_seconds
        self._when_ended = when_ended
        self._over = threading.Event()
        self._end = _End(0)
        self._log = ContainerLog(client, container, self._over)
        self._removed = threading.Lock()
        self._thread = threading.Thread(target=self._await_end, name=f"container of {spec.step}", daemon=True)

    @property
    def ended(self) -> bool:
        return self._over.is_set()

    def begin(self) -> None:
        """Watch for the container's end; called once, when it has been started."""
        self._thread.start()

    def events(self) -> Iterator[dict[str, Any]]:
        """The events as they come, then what the stage wrote to standard error; then the container is removed."""
        lines = EventLines()
        spoke = ended = False
        try:
            for data in self._log.output():
                spoke = True
                for event in lines.feed(data):
                    ended = ended or event.get("type") == "outcome"
                    self._judge(event)
                    yield event
            yield from lines.rest()
            if not spoke and self._end.code in _NO_COMMAND:
                self.verdict = engine.no_stages(self._spec.step, self._image.name, f"exit code {self._end.code}")
            yield from stderr_events(self._log.stderr())
            if text := self._log.problem:
                yield {"type": "log", "level": "warning", "time": round(time.time(), 3), "text": text}
            if not ended and (left := self._left_outcome()) is not None:
                self._judge(left)
                yield left
            elif not ended and self._end.code and (message := self._end.message or self._full_disk()):
                yield lost_outcome(self._end.code, message)
        finally:
            if self.ended:
                self.remove()

    def _left_outcome(self) -> dict[str, Any] | None:
        """The outcome that the stage left in its scratch folder. An engine with a full disk drops lines of the log."""
        try:
            pieces, _ = self._client.api.get_archive(self.container, f"{SCRATCH}/{OUTCOME}")
            with tarfile.open(fileobj=io.BytesIO(b"".join(pieces))) as archive:
                file = archive.extractfile(OUTCOME)
                found = json.loads(file.read()) if file is not None else None
        except (APIError, *AWAY, OSError, KeyError, ValueError, tarfile.TarError):
            return None
        return found if isinstance(found, dict) and found.get("type") == "outcome" else None

    def _full_disk(self) -> str:
        """For an end of which nothing was said: that the engine's disk is full, where there is no room for a file."""
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w") as archive:
            probe = tarfile.TarInfo("probe")
            probe.size = 1 << 16
            archive.addfile(probe, io.BytesIO(bytes(probe.size)))
        try:
            self._client.api.put_archive(self.container, SCRATCH, file.getvalue())
        except APIError as error:
            return engine.full_disk(engine.explained(error))
        except AWAY:
            pass
        return ""

    def _judge(self, event: dict[str, Any]) -> None:
        """Say what is behind the refusal of a stage whose image holds other code than was planned."""
        if event.get("type") != "outcome" or event.get("code") != ExitCode.REFUSED or not self._image.stale:
            return
        message = str(event.get("message", ""))
        if message.startswith(("the code changed", "spec ", "there is no stage")):
            self.verdict = (
                f"image {self._image.name} holds other code than this installation ({message}); build it again with "
                "`headrace images build` (seconds)"
            )

    def wait(self) -> int:
        """Wait for the end; the exit code, or minus the number of the signal that ended it."""
        self._over.wait()
        return self._end.code

    def stop(self, grace: float) -> None:
        """Ask the stage to save and stop; kill it where it has not ended after `grace` seconds."""
        self.signal("SIGTERM")
        if not self._over.wait(grace):
            self.signal("SIGKILL")
            self._over.wait(self._away)

    def signal(self, name: str) -> None:
        """Send a signal to the stage, trying for as long as the engine may be away."""
        limit = time.monotonic() + self._away
        while not self.ended:
            try:
                self._client.api.kill(self.container, name)
                return
            except APIError:  # it has ended, or is gone
                return
            except AWAY:
                if time.monotonic() > limit:
                    return
                self._over.wait(_PAUSE)

    def remove(self) -> None:
        """Remove the container, once."""
        self._log.close()
        if self._removed.acquire(blocking=False):
            _remove(self._client, self.container)

    def _await_end(self) -> None:
        end = self._watch()
        self._end = end
        self.verdict = self.verdict or end.verdict
        self._over.set()
        self._when_ended()
        self._log.cut_silence()

    def _watch(self) -> _End:
        """Wait until the container has ended, through absences of the engine."""
        gone_since: float | None = None
        was_away = False
        while True:
            try:
                self._client.api.wait(self.container, timeout=_WAIT)
                state = self._client.api.inspect_container(self.container)["State"]
                if not state.get("Running"):
                    return self._judged(state, was_away)
                gone_since = None
            except NotFound:
                return _End(-int(signal.SIGKILL), message="its container was removed by somebody else")
            except AWAY as error:
                if isinstance(error, APIError) and not error.is_server_error():
                    return _End(1, f"lost: the Docker Engine says: {engine.explained(error)}")
                if self._answers():  # the request only took long
                    gone_since = None
                    continue
                was_away = True
                gone_since = gone_since or time.monotonic()
                if time.monotonic() - gone_since > self._away:
                    return _End(
                        1,
                        f"lost: the Docker Engine at {engine.where()} has not answered for {self._away:.0f} s; start "
                        "it and run this again: what was saved is kept",
                    )
                time.sleep(_PAUSE)

    def _answers(self) -> bool:
        try:
            self._client.api.inspect_container(self.container)
        except AWAY as error:
            return isinstance(error, APIError) and not error.is_server_error()
        return True

    def _judged(self, state: dict[str, Any], was_away: bool) -> _End:
        """What the engine's word on an ended container means."""
        code = int(state.get("ExitCode", 1))
        if state.get("OOMKilled") and code not in _OWN_CODES:
            limit = self._spec.resources.memory
            if limit:
                return _End(
                    -int(signal.SIGKILL),
                    f"killed: it used up its resources.memory of {show_size(parse_size(limit))}; raise that, or make "
                    "its batches smaller",
                )
            return _End(-int(signal.SIGKILL), message="killed: the engine's host had no memory left")
        if was_away and code not in _OWN_CODES:
            return _End(-int(signal.SIGKILL), message="its container ended while the Docker Engine was away")
        return _End(128 - code if code > 128 else code)
