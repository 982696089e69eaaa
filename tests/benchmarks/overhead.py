"""What it costs to run a stage somewhere: a step that does nothing, by each runner, beside a bare import of torch.

A toy stage says when its own first line and its last line run. Two spans of a step are measured, on one clock:

- start: from the call of the runner to the stage's first own line, the import of torch and transformers included.
- end: from the stage's last own line until the runner has given its exit code, so that the result is in the store.

The sides alternate with `bare`, a new interpreter that imports torch and transformers: what a stage that starts from
nothing cannot do without. The process runner has imported them once and forks; its first step is shown by itself. Where
no Docker Engine answers or it has no stage image, docker is not measured. Workpool is measured on a Prefect server and
a worker of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flows.runners.base import Runner, RunnerError
from stages.contract import StageSpec
from stages.fingerprint import stage_fingerprint
from tests.benchmarks._machine import ROOT, machine

CONFIG = '''
from stages.contract import StageConfig


class Config(StageConfig):
    """Does nothing, with torch."""

    OUTPUT = "report"
    number: int = 0
'''
STAGE = """
import time

import torch
import transformers


def run(context):
    context.emit({"type": "metric", "at": 0, "values": {"first_line": time.time()}})
    (context.output / "nothing.txt").write_text(str(context.config.number))
    context.emit({"type": "metric", "at": 1, "values": {"last_line": time.time()}})
"""


class Toy:
    """A stage that does nothing, in a folder, and the specs of its attempts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0
        stage = folder / "code" / "idle" / "stage_of_nothing"
        stage.mkdir(parents=True)
        for name, text in (("config", CONFIG), ("stage", STAGE), ("__init__", "")):
            (stage / f"{name}.py").write_text(text)
        (stage.parent / "__init__.py").touch()
        # A container of root's runs as another user unless it is allowed to be root: the benchmark asks for that.
        self.store = folder / "store"
        self.store.mkdir()

    def spec(self) -> StageSpec:
        self.count += 1
        scratch = self.folder / "scratch" / str(self.count)
        scratch.mkdir(parents=True)
        name = "idle.stage_of_nothing"
        code = stage_fingerprint(name, [], [self.folder / "code"])
        return StageSpec(
            stage=name,
            step=f"s{self.count}",
            run="overhead",
            key=uuid.uuid4().hex * 2,
            config={"number": self.count},
            inputs={},
            store=str(self.store),
            scratch=str(scratch),
            python_path=[str(self.folder / "code")],
            record={"code": {"digest": code.digest, "files": code.files}},
        )

    def measure(self, runner: Runner) -> tuple[float, float]:
        """Seconds before the first own line of a step, and after its last."""
        spec = self.spec()
        begun = time.time()
        handle = runner.start(spec)
        lines: dict[str, float] = {}
        said = []
        for event in handle.events():
            said.append(event)
            if event["type"] == "metric":
                lines |= event["values"]
        code = handle.wait()
        ended = time.time()
        if code != 0:
            raise SystemExit(f"the step ended with {code}: {handle.verdict} {said[-3:]}")
        return lines["first_line"] - begun, ended - lines["last_line"]


def bare() -> float:
    """Seconds of an interpreter that imports torch and transformers."""
    begun = time.time()
    subprocess.run([sys.executable, "-c", "import torch, transformers"], check=True, env=_quiet())
    return time.time() - begun


def _quiet() -> dict[str, str]:
    return os.environ | {"PYTHONHASHSEED": "0"}


@contextmanager
def process_runner() -> Iterator[Runner]:
    from flows.runners.process import ProcessRunner

    yield ProcessRunner(gpus=[])


@contextmanager
def docker_runner() -> Iterator[Runner]:
    from flows.runners import engine
    from flows.runners.docker import DockerRunner, DockerSettings

    settings = DockerSettings.of_environment()
    client = engine.connect()
    image = engine.find_image(client, settings.image)
    client.close()
    if image.stale:
        raise RunnerError(f"image {image.name} holds other code; `headrace images build stage` makes it anew")
    user = "0:0" if os.getuid() == 0 else settings.user
    yield DockerRunner(DockerSettings(settings.image, settings.network, user), gpus=[])


@contextmanager
def workpool_runner(folder: Path) -> Iterator[Runner]:
    """The runner on a Prefect server and a worker of a process pool, which end with the block."""
    from flows.service.local_server import LocalServer, quiet_prefect

    quiet_prefect()
    os.environ["PREFECT_HOME"] = str(folder / "prefect")
    server = LocalServer()
    worker = None
    try:
        server.wait(600)
        os.environ["PREFECT_API_URL"] = server.url
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PREFECT_WORKER_QUERY_SECONDS": "1"}
        deploy = [sys.executable, "-m", "flows.service.stage_deployments", "--pool", "overhead"]
        subprocess.run(deploy, check=True, env=environment, stdout=subprocess.DEVNULL)
        command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "overhead", "--type", "process"]
        log = open(folder / "worker.log", "wb")  # noqa: SIM115 (the worker's for as long as it lives)
        worker = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=folder)
        from flows.runners.workpool import WorkPoolRunner

        yield WorkPoolRunner()
    finally:
        if worker is not None:
            worker.terminate()
            worker.wait()
        server.stop()
        os.environ.pop("PREFECT_API_URL", None)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.overhead", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    quick = parser.parse_args().quick
    rounds = 3 if quick else 7
    with tempfile.TemporaryDirectory(prefix="headrace-overhead-") as name:
        folder = Path(name)
        toy = Toy(folder)
        spans: dict[str, list[tuple[float, float]]] = {}
        first: dict[str, tuple[float, float]] = {}
        bares: list[float] = []
        missing: list[str] = []
        sides: list[tuple[str, Callable[[], Any]]] = [
            ("process", process_runner),
            ("docker", docker_runner),
            ("workpool", lambda: workpool_runner(folder)),
        ]
        bare()  # the files are in the page cache from here on
        for side, make in sides:
            try:
                with make() as runner:
                    try:
                        first[side] = toy.measure(runner)
                        for number in range(rounds):
                            bares.append(bare())
                            spans.setdefault(side, []).append(toy.measure(runner))
                            start, end = spans[side][-1]
                            print(f"{side} {number}: start {start:.2f} s, end {end:.2f} s, bare {bares[-1]:.2f} s")
                    finally:
                        runner.close()
            except RunnerError as error:
                missing.append(f"{side} was not measured: {error}.")
                print(missing[-1])
    result = report(spans, first, bares, quick)
    result["notes"] = [
        "Medians of a step that does nothing but import torch and transformers. `start` is from the call of the runner "
        "to the stage's first own line, `end` from its last to its exit code, the result being stored; `first step` "
        'meets a cold runner. `bare` is `python -c "import torch, transformers"`, alternating with them.',
        *missing,
    ]
    print(json.dumps(result))


def report(
    spans: dict[str, list[tuple[float, float]]], first: dict[str, tuple[float, float]], bares: list[float], quick: bool
) -> dict[str, Any]:
    alone = statistics.median(bares)
    figures: dict[str, dict[str, float]] = {"bare import": {"start_s": round(alone, 3)}}
    ratios: dict[str, float | None] = {}
    for side, found in spans.items():
        start = statistics.median(one for one, _ in found)
        end = statistics.median(one for _, one in found)
        figures[side] = {
            "start_s": round(start, 3),
            "end_s": round(end, 3),
            "first_step_start_s": round(first[side][0], 3),
        }
        ratios[f"{side}_start_to_bare_import"] = round(start / alone, 3)
    if "process" in figures:
        ratios["process_seconds_a_step"] = round(figures["process"]["start_s"] + figures["process"]["end_s"], 3)
    if "docker" in figures:
        ratios["docker_seconds_beyond_the_bare_import"] = round(figures["docker"]["start_s"] - alone, 3)
    return {
        "benchmark": "overhead",
        "quick": quick,
        "ratios": ratios,
        "goals": {"process_seconds_a_step": ["<=", 0.5], "docker_seconds_beyond_the_bare_import": ["<=", 1.5]},
        "figures": figures,
        "machine": machine(),
    }


if __name__ == "__main__":
    main()
