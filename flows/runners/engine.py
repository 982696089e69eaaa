"""The Docker Engine as the runner sees it: how it is found, what its errors mean, and whose containers are on it.

Every container of Headrace carries labels: the installation (this project's code, used by this user on this host), the
process of the flow that started it, and run, step and key. Invariants:

- An error of the engine becomes one sentence that says what to change.
- Only a container whose flow is known to be dead is reaped: its installation is this one, and its flow is a process of
  this boot and process namespace that has ended, or of an earlier boot. All others are left alone.
"""

from __future__ import annotations

import getpass
import hashlib
import os
import platform
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import requests
import urllib3
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection

import stages
from flows.runners.base import RunnerError

INSTALLATION = "headrace.installation"
OWNER = "headrace.owner"
RUN, STEP, KEY, ATTEMPT = "headrace.run", "headrace.step", "headrace.key", "headrace.attempt"
CODE = "headrace.code"  # on images: `code_digest` of the stages in it

# What a call raises while the engine is away, or when it goes. APIError, its own word, is one too: catch that first.
AWAY = (requests.RequestException, urllib3.exceptions.HTTPError)

# Seconds of silence before the kernel asks, seconds between its questions, and their number, where a system has them.
_WATCH = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6))
_GPU_ERRORS = ("could not select device driver", "nvidia-container", "unknown or invalid runtime name: nvidia")


@dataclass(frozen=True)
class Image:
    """An image of the engine: what it was called, its id ("sha256:..."), and the digest of the code in it, or ""."""

    name: str
    id: str
    code: str

    @property
    def stale(self) -> bool:
        """Whether it is known to hold other code than this installation."""
        return self.code not in ("", "unknown", code_digest())


def connect(timeout: float = 60) -> docker.DockerClient:
    """A client of the engine that the environment names (DOCKER_HOST, DOCKER_CERT_PATH, DOCKER_TLS_VERIFY).

    Raises:
        RunnerError: none answers there.
    """
    try:
        client = docker.from_env(timeout=int(timeout))
        for scheme in ("http://", "https://"):  # an engine on another machine; a socket has a scheme of its own
            client.api.mount(scheme, _LastingConnections())
        client.ping()
    except (DockerException, *AWAY) as error:
        raise RunnerError(
            f"no Docker Engine answers at {where()} ({_root(error)}); start it, or set DOCKER_HOST"
        ) from None
    return client


class _LastingConnections(HTTPAdapter):
    """Connections that the kernel watches: a stage may say nothing for an hour, and what stands between this machine
    and the engine forgets an idle connection without telling either."""

    def init_poolmanager(self, *arguments: Any, **options: Any) -> None:
        options["socket_options"] = [
            *HTTPConnection.default_socket_options,
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            *((socket.IPPROTO_TCP, getattr(socket, name), value) for name, value in _WATCH if hasattr(socket, name)),
        ]
        super().init_poolmanager(*arguments, **options)


def where() -> str:
    """The address of the engine."""
    return os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"


def _root(error: BaseException) -> str:
    """The innermost reason of an error, such as "Connection refused"."""
    for cause in (error.__cause__, error.__context__):
        if cause is not None:
            return _root(cause)
    found = error.args[1] if len(error.args) > 1 and isinstance(error.args[1], str) else str(error)
    return found.strip().rstrip(".") or type(error).__name__


def find_image(client: docker.DockerClient, name: str) -> Image:
    """The image that `name` means now.

    Raises:
        RunnerError: the engine has none of that name.
    """
    try:
        found = client.images.get(name)
    except ImageNotFound:
        made = "pull it" if "/" in name or "@" in name else "make it with `headrace images build`"
        raise RunnerError(
            f"the Docker Engine at {where()} has no image {name}; {made}, or set HEADRACE_STAGE_IMAGE to another"
        ) from None
    except APIError as error:
        raise RunnerError(f"image {name}: {explained(error)}") from None
    return Image(name, str(found.id), str((found.labels or {}).get(CODE, "")))


def explain(error: APIError, step: str, gpus: int, image: str) -> str:
    """Why the container of a step cannot be made or started, and what to change."""
    text = explained(error)
    low = text.lower()
    if gpus and any(sign in low for sign in _GPU_ERRORS):
        return (
            f"step {step}: the Docker Engine at {where()} has no GPU runtime (nvidia-container-toolkit). Set "
            "resources.gpus: 0 for CPU, or install it there; `headrace doctor` checks"
        )
    if full := full_disk(text):
        return f"step {step}: {full}"
    if "network" in low and "not found" in low:
        return f"step {step}: {text}; set HEADRACE_DOCKER_NETWORK to a network that the engine has, such as host"
    if "executable file not found" in low or "no such file or directory" in low:
        return no_stages(step, image, text)
    return f"step {step}: the Docker Engine refuses its container: {text}"


def full_disk(text: str) -> str:
    """What to say where the engine's words mean that its disk is full; "" where they do not."""
    if "no space left on device" not in text.lower():
        return ""
    return f"the disk of the Docker Engine is full ({text}); free some (`docker system prune`)"


def no_stages(step: str, image: str, text: str) -> str:
    """What to say of an image whose entry point is not that of stages."""
    return f"step {step}: image {image} is not one of stages ({text}); make one with `headrace images build`"


def explained(error: APIError) -> str:
    """The engine's own words, on one line."""
    return " ".join(str(error.explanation or error).split())


# Whose containers


def installation() -> str:
    """Names this installation: HEADRACE_INSTALLATION, or this project's code as used by this user on this host."""
    given = os.environ.get("HEADRACE_INSTALLATION")
    if given:
        return given
    parts = (platform.node(), _user(), str(Path(__file__).resolve().parents[2]))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without a name
        return str(os.getuid())


def owner() -> str:
    """Names this process, for as long as the host knows it: boot, process namespace, pid and start."""
    return " ".join((*_place(), str(os.getpid()), _born(os.getpid())))


def is_dead(named: str) -> bool:
    """Whether the process that `owner` named is known to have ended."""
    try:
        boot, namespace, pid, born = named.split()
    except ValueError:
        return False
    here_boot, here_namespace = _place()
    if boot != here_boot:
        return True  # the label also says that it was this host
    return namespace == here_namespace and _born(int(pid)) != born


def _place() -> tuple[str, str]:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot, os.readlink("/proc/self/ns/pid")
    except OSError:
        return "unknown", "unknown"


def _born(pid: int) -> str:
    """When a process started, in ticks since boot; "-" where there is none or it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "-"
    return "-" if fields[0] in ("Z", "X") else fields[19]  # fields 3 and 22 of proc_pid_stat(5)


def orphans(client: docker.DockerClient) -> list[Any]:
    """The containers of this installation whose flow is dead, running or not."""
    listed = client.containers.list(
        all=True, filters={"label": f"{INSTALLATION}={installation()}"}, ignore_removed=True
    )
    return [container for container in listed if is_dead(container.labels.get(OWNER, ""))]


def reap(client: docker.DockerClient, grace: float) -> list[str]:
    """Stop the containers of dead flows, letting them save for `grace` seconds, and remove them.

    Returns:
        The steps that they ran, as "run/step".
    """
    found = orphans(client)
    for container in found:  # all are told first, so that they save at the same time
        try:
            container.kill("SIGTERM")
        except (NotFound, APIError):  # gone, or not running
            continue
    for container in found:
        try:
            container.stop(timeout=int(grace))
            container.remove(v=True, force=True)
        except (NotFound, APIError):  # another flow reaps it too
            continue
    return [f"{item.labels.get(RUN, '?')}/{item.labels.get(STEP, '?')}" for item in found]


_code: dict[Path, str] = {}


def code_digest(*packages: str) -> str:
    """The digest of the source files of packages of this project (`stages` when none is named), comments and all."""
    root = Path(stages.__file__ or "").resolve().parent.parent
    digest = hashlib.sha256()
    for package in packages or ("stages",):
        key = root / package
        if key not in _code:
            inner = hashlib.sha256()
            for path in sorted(key.rglob("*.py")):
                data = path.read_bytes()
                inner.update(f"{path.relative_to(root).as_posix()}\0{len(data)}\0".encode() + data)
            _code[key] = inner.hexdigest()
        digest.update(f"{package} {_code[key]}\n".encode())
    return "sha256:" + digest.hexdigest()
