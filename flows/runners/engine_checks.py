"""What `headrace doctor` says of the Docker Engine. Looks, and changes nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from flows.runners import engine
from flows.runners.base import RunnerError
from flows.runners.docker import DockerSettings
from flows.runners.memory import show_size
from stages.artifacts.check import Check


def check_engine() -> Iterator[Check]:
    """The engine, its limits and GPU runtime, the stage image, and what dead runs left on it."""
    try:
        client = engine.connect(timeout=20)
    except RunnerError as error:
        if os.environ.get("DOCKER_HOST"):
            yield Check("docker engine", "failed", str(error))
        else:
            yield Check("docker engine", "ok", "none here; only --runner docker needs one")
        return
    try:
        info = client.info()
        yield _engine(info)
        yield _gpus(info)
        yield _image(client)
        if left := engine.orphans(client):
            yield Check(
                "containers", "warning", f"dead runs left {len(left)}; the next run with --runner docker removes them"
            )
    except (engine.APIError, *engine.AWAY) as error:
        yield Check("docker engine", "failed", f"{engine.where()}: {error}")
    finally:
        client.close()


def _engine(info: dict[str, Any]) -> Check:
    said = (
        f"{info.get('ServerVersion')} at {engine.where()}, {info.get('NCPU')} CPUs, "
        f"{show_size(int(info.get('MemTotal') or 0))} of memory, containers in {info.get('DockerRootDir')}"
    )
    if info.get("MemoryLimit") is False:
        return Check(
            "docker engine", "warning", f"{said}; its kernel cannot limit memory: resources.memory is not kept"
        )
    return Check("docker engine", "ok", said)


def _gpus(info: dict[str, Any]) -> Check:
    runtimes = info.get("Runtimes") or {}
    if "nvidia" in runtimes or (info.get("CDISpecDirs") and info.get("DiscoveredDevices")):
        return Check("gpu runtime", "ok", "the engine has one")
    return Check("gpu runtime", "ok", "none; resources.gpus needs nvidia-container-toolkit on the engine's host")


def _image(client: Any) -> Check:
    settings = DockerSettings.of_environment()
    try:
        image = engine.find_image(client, settings.image)
    except RunnerError as error:
        return Check("stage image", "warning", str(error))
    said = f"{image.name} is {image.id}"
    if not image.code:
        return Check("stage image", "warning", f"{said}; it does not say which code is in it")
    if image.stale:
        return Check("stage image", "warning", f"{said}, of other code; `headrace images build` makes it anew")
    return Check("stage image", "ok", f"{said}, of this code")
