"""A second Docker Engine whose disk is small, so that it can be full, with an image that holds what toy stages need."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import docker
import shared_engine

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "headrace-stage:toys"
_DOCKERFILE = """
FROM headrace-base:local
COPY constraints.txt /build/
RUN pip install --no-cache-dir --constraint /build/constraints.txt pydantic rfc8785
RUN mkdir -p /scratch && chmod 1777 /scratch
ENV PYTHONPATH=/app PYTHONHASHSEED=0 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/scratch
COPY stages /app/stages
RUN python -m compileall -q /app/stages
USER 10001:10001
ENTRYPOINT ["python", "-m", "stages"]
"""


class SmallEngine:
    """A running engine. `address` is what DOCKER_HOST takes, `disk` the file system that all it keeps is on."""

    def __init__(self, folder: Path, address: str) -> None:
        self.address = address
        self.disk = folder / "data"

    def fill(self) -> None:
        """Leave no room on its disk."""
        with open(self.disk / "filler", "wb", buffering=0) as file:
            for size in (1 << 20, 4096, 1):
                try:
                    while True:
                        file.write(b"x" * size)
                except OSError:
                    continue

    def free(self) -> None:
        """Take away what `fill` has left."""
        (self.disk / "filler").unlink(missing_ok=True)


@contextmanager
def small_engine(size: str = "600m") -> Iterator[SmallEngine]:
    """An engine with a disk of `size` in memory, which is gone after the block. Needs root and the script.

    Raises:
        OSError: it cannot be had here.
    """
    with tempfile.TemporaryDirectory(prefix="headrace-small-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "data").mkdir()
        _run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder / "data")])
        environment = os.environ | {"ENGINE_DIR": str(folder)}
        script = str(shared_engine.script())
        try:
            said = _run(["bash", script, "up"], environment)
            address = said.partition("DOCKER_HOST=")[2].strip()
            _run(["bash", str(Path(script).parent / "base-image.sh")], environment | {"DOCKER_HOST": address})
            client = docker.DockerClient(address)
            client.images.build(fileobj=_context(), custom_context=True, tag=IMAGE, network_mode="host", rm=True)
            client.close()
            yield SmallEngine(folder, address)
        finally:
            subprocess.run(["bash", script, "down"], env=environment, capture_output=True, timeout=120)
            subprocess.run(["umount", "--lazy", str(folder / "data")], capture_output=True)


def _run(command: list[str], environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise OSError(f"{command[:2]}: {done.stderr.strip()[-500:]}")
    return done.stdout


def _context() -> io.BytesIO:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.add(ROOT / "constraints.txt", "constraints.txt")
        archive.add(ROOT / "stages", "stages", filter=lambda item: None if "__pycache__" in item.name else item)
        dockerfile = tarfile.TarInfo("Dockerfile")
        dockerfile.size = len(_DOCKERFILE)
        archive.addfile(dockerfile, io.BytesIO(_DOCKERFILE.encode()))
    file.seek(0)
    return file
