"""Stages in containers of a real engine: what each gets, and every way to end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
from container_runs import Runs, containers
from engine_proxy import EngineProxy, engine_proxy
from toy_stages import Toys

from flows.endings import StepResult
from flows.runners import container_log
from flows.runners import docker as docker_runner
from flows.runners import engine as engine_module
from flows.runners.docker import DockerRunner, DockerSettings
from stages.artifacts import open_store, read_log, read_result

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]  # the first one builds the image

COUNT = "a: {stage: COUNT, total: 6}"
LOOK = """
import json, os

class Told(int):
    def __format__(self, spec):
        return self.text

def look(total):
    status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
    def writable(path):
        try:
            open(path + "/x", "w").close()
            return True
        except OSError:
            return False
    shm = os.statvfs("/dev/shm")
    told = Told(total)
    told.text = json.dumps({
        "uid": os.getuid(), "gid": os.getgid(), "capabilities": int(status["CapEff"], 16),
        "writable": [path for path in ("/", "/app", "/etc", "/scratch", "/tmp", "/scratch/code/0") if writable(path)],
        "environment": dict(os.environ), "shm": shm.f_blocks * shm.f_frsize,
        "first": open("/proc/1/cmdline").read(), "cores": len(os.sched_getaffinity(0)),
    })
    return told
"""


def until(condition: Callable[[], Any], seconds: float = 120) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited too long"
        time.sleep(0.05)


def value(step: StepResult, store: Path | str) -> str:
    """What the toy stage wrote as its value."""
    from stages.artifacts import fetch

    assert step.artifact is not None, step.message
    with tempfile.TemporaryDirectory() as folder:
        fetch(open_store(store), step.artifact, Path(folder) / "x")
        return (Path(folder) / "x" / "value.txt").read_text()


def told(runs: Runs, kind: str) -> list[dict[str, Any]]:
    return [event for event in runs.events if event["type"] == kind]


def test_a_stage_runs_in_a_container_and_its_record_names_the_image(runs: Runs, stage_image: str) -> None:
    result = runs(runs.toys.recipe("a: {stage: COUNT, total: 4}\nb: {stage: COUNT, inputs: {data: a}, beta: 0.5}"))
    assert result.state == "done", result
    assert value(result.steps["b"], runs.toys.store) == "10 0.5 10 0.1 "  # 1 + 2 + 3 + 4, and what it read of `a`
    step = result.steps["a"]
    assert step.key is not None
    stored = read_result(open_store(runs.toys.store), f"{runs.toys.package}.count", step.key)
    assert stored is not None
    assert stored.record["image"] == {"name": stage_image, "digest": stage_image}
    assert [event["done"] for event in told(runs, "progress") if event["step"] == "a"] == [1, 2, 3, 4]
    log = list(read_log(open_store(runs.toys.store), "run-1", "a"))
    assert [event["text"] for event in log if event.get("level") == "stderr"] == ["a stray print"]


def test_a_container_has_little_to_break_and_knows_only_what_the_store_needs(
    runs: Runs, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEADRACE_DOCKER_USER", raising=False)
    monkeypatch.setenv("MY_SECRET_TOKEN", "of no concern")
    monkeypatch.setenv("WANTED", "yes")
    monkeypatch.setenv("HEADRACE_STAGE_ENV", "WANTED")
    (runs.toys.folder / "looking.py").write_text(LOOK)
    (runs.toys.folder / "private.txt").write_text("not a part of the code")
    step = "a: {stage: COUNT, reward: 'looking:look', resources: {shm: 80MiB, memory: 2GiB, threads: 1}}"
    result = runs(runs.toys.recipe(step), store=s3_url)
    assert result.state == "done", result
    found = json.loads(value(result.steps["a"], s3_url).rpartition("}")[0] + "}")
    assert (found["uid"], found["gid"], found["capabilities"]) == (10001, 10001, 0)
    assert found["writable"] == ["/scratch", "/tmp"]
    assert found["shm"] == 80 << 20
    assert "init" in found["first"]
    given = found["environment"]
    assert given["WANTED"] == "yes"
    assert given["AWS_ENDPOINT_URL_S3"] == os.environ["AWS_ENDPOINT_URL_S3"]
    assert "MY_SECRET_TOKEN" not in given
    assert not [name for name in given if name.startswith(("PREFECT_", "PYTEST_", "DOCKER_"))]
    assert found["cores"] == len(os.sched_getaffinity(0))  # a limit on CPUs does not change the number of threads


def test_root_does_not_become_root_in_a_container_unless_it_is_asked_for(
    stage_image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEADRACE_DOCKER_USER", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 0)
    runs = Runs(Toys(tmp_path))
    step = runs(runs.toys.recipe(COUNT)).steps["a"]
    assert step.status == "failed"
    assert step.code is None
    assert "stage containers do not run as root" in step.message
    assert "HEADRACE_DOCKER_USER=0:0" in step.message


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_folder_store_of_a_plain_user_is_written_as_that_user(
    stage_image: str, engine: docker.DockerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock").removeprefix("unix://")
    if not os.path.exists(address):
        pytest.skip("the engine has no socket of this machine")
    monkeypatch.setenv("HEADRACE_DOCKER_USER", "0:0")
    folder = Path(tempfile.mkdtemp(prefix="headrace-user-"))
    try:
        runs = Runs(Toys(folder))
        path = runs.toys.recipe(COUNT)
        assert runs(path, store=str(folder / "roots-own")).state == "done"  # and everything is imported by now
        monkeypatch.delenv("HEADRACE_DOCKER_USER")
        for place in [folder, *folder.rglob("*")]:
            os.chown(place, 12345, 12345)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.setgroups([os.stat(address).st_gid])
                os.setgid(12345)
                os.setuid(12345)
                os.chdir(folder)
                result = runs(path)
                print(result, file=sys.stderr)
                code = 0 if result.state == "done" else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        owners = {entry.stat().st_uid for entry in runs.toys.store.rglob("*")}
        assert owners == {12345}
    finally:
        subprocess.run(["rm", "-rf", str(folder)], check=True)


def test_a_refusal_and_a_tripwire_end_as_with_any_runner(runs: Runs) -> None:
    path = runs.toys.recipe("a: {stage: COUNT, trouble: refuse}\nb: {stage: COUNT, trouble: tripwire@2}")
    result = runs(path)
    assert {name: (step.code, step.attempts) for name, step in result.steps.items()} == {"a": (83, 1), "b": (80, 1)}
    assert result.steps["a"].message == "data line 3: it is blank"


def test_a_stage_that_is_killed_goes_on_from_its_last_save(runs: Runs) -> None:
    runs.toys.store.mkdir()
    marker = runs.toys.store / "killed"
    result = runs(runs.toys.recipe(f"a: {{stage: COUNT, total: 6, trouble: kill@4, marker: {marker}}}"))
    step = result.steps["a"]
    assert (step.status, step.attempts) == ("done", 2), step
    assert [event["at"] for event in told(runs, "resumed")] == [3]
    assert value(step, runs.toys.store) == "21 0.1 "


def test_a_container_that_is_killed_from_outside_goes_on_from_its_last_save(
    runs: Runs, engine: docker.DockerClient, own_installation: str
) -> None:
    killed: list[str] = []

    def kill(event: dict[str, Any]) -> None:
        if event["type"] == "saved" and event["at"] == 3 and not killed:
            killed.append("yes")
            for container in containers(engine, own_installation):
                container.kill("SIGKILL")

    runs.react = kill
    result = runs(runs.toys.recipe("a: {stage: COUNT, total: 8, delay: 0.3}"))
    assert (result.steps["a"].status, result.steps["a"].attempts) == ("done", 2), result.steps["a"]
    assert told(runs, "resumed")[0]["at"] >= 3


def test_a_stage_that_uses_up_its_memory_is_told_so_and_not_tried_again(runs: Runs) -> None:
    step = "a: {stage: COUNT, trouble: memory@2, resources: {memory: 150MiB}}"
    ended = runs(runs.toys.recipe(step)).steps["a"]
    assert (ended.status, ended.attempts) == ("failed", 1)
    assert ended.message.startswith("killed: it used up its resources.memory of 150.0 MiB; raise that")


def test_a_child_killed_for_memory_does_not_fail_a_stage_that_ends_well(runs: Runs) -> None:
    (runs.toys.folder / "hungry.py").write_text(
        "import subprocess, sys\n\n\ndef feed(total):\n"
        "    code = 'held = bytearray(300 << 20); held[::4096] = bytes(len(held[::4096]))'\n"
        "    return 1000 * total + subprocess.run([sys.executable, '-c', code]).returncode\n"
    )
    step = "a: {stage: COUNT, total: 4, reward: 'hungry:feed', resources: {memory: 150MiB}}"
    result = runs(runs.toys.recipe(step))
    assert result.steps["a"].status == "done", result.steps["a"]
    # 1000 * 10 - 9: the child was killed, its parent was not.
    assert value(result.steps["a"], runs.toys.store).startswith("9991 ")


def test_a_full_disk_is_named(runs: Runs) -> None:
    (runs.toys.folder / "filling.py").write_text(
        "def fill(total):\n    with open('/dev/full', 'w') as file:\n        file.write('x' * 100_000)\n"
    )
    step = runs(runs.toys.recipe("a: {stage: COUNT, total: 2, reward: 'filling:fill'}")).steps["a"]
    assert step.status == "failed"
    assert "no space is left on the disk" in step.message
    assert "/scratch" in step.message


def test_an_image_that_is_missing_is_named_before_anything_is_started(runs: Runs) -> None:
    step = runs(runs.toys.recipe(COUNT), settings=DockerSettings("no-such-image:1", user="0:0")).steps["a"]
    assert step.code is None
    assert "has no image no-such-image:1; make it with `headrace images build`" in step.message


def test_an_image_without_stages_is_told_from_one_with(runs: Runs, base_image: str) -> None:
    step = runs(runs.toys.recipe(COUNT), settings=DockerSettings(base_image, user="0:0")).steps["a"]
    assert f"image {base_image} is not one of stages" in step.message


def test_a_missing_gpu_runtime_is_named(runs: Runs, engine: docker.DockerClient) -> None:
    if "nvidia" in (engine.info().get("Runtimes") or {}):
        pytest.skip("this engine has a GPU runtime")
    for gpus in (["0"], None):  # this machine says that it has one; it sees none, so that the engine has to know
        step = runs(runs.toys.recipe("a: {stage: COUNT, resources: {gpus: 1}}"), gpus=gpus).steps["a"]
        assert step.code is None
        assert "step a: the Docker Engine at" in step.message
        assert "has no GPU runtime (nvidia-container-toolkit). Set resources.gpus: 0 for CPU" in step.message


def test_a_network_that_the_engine_lacks_is_named(runs: Runs, stage_image: str) -> None:
    settings = DockerSettings(stage_image, network="no-such-network", user="0:0")
    step = runs(runs.toys.recipe(COUNT), settings=settings).steps["a"]
    assert "set HEADRACE_DOCKER_NETWORK to a network that the engine has" in step.message


def test_an_engine_that_is_not_there_is_named(runs: Runs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    step = runs(runs.toys.recipe(COUNT)).steps["a"]
    assert step.message.startswith(f"no Docker Engine answers at unix://{tmp_path}/none.sock (")
    assert "start it, or set DOCKER_HOST" in step.message


def test_an_image_of_other_code_is_found_out_and_named(runs: Runs, base_image: str, stage_image: str) -> None:
    import io

    client = docker.from_env()
    change = f"FROM {stage_image}\nUSER 0\nRUN echo 'changed = 1' >> /app/stages/contract.py && \
        echo 'changed = 1' >> /app/stages/seeds.py\nLABEL headrace.code=sha256:0\nUSER 10001\n"
    other, _ = client.images.build(
        fileobj=io.BytesIO(change.encode()), tag="headrace-stage:other", network_mode="host", rm=True
    )
    recipe = runs.toys.folder / "real.yaml"
    recipe.write_text(
        "steps:\n  corpus:\n    stage: tokenize\n    inputs: {data: 'stdlib:this.py'}\n    format: text\n"
        "    reader: stages.examples.stdlib_text:documents\n    train_tokenizer: {vocab_size: 300}\n"
        "    row_length: 96\n  base:\n    stage: pretrain\n    inputs: {data: corpus}\n    hidden_size: 32\n"
        "    num_hidden_layers: 1\n    num_attention_heads: 2\n    max_steps: 1\n    train_batch_size: 2\n"
    )
    try:
        result = runs(str(recipe), settings=DockerSettings("headrace-stage:other", user=_user()))
        step = next(step for step in result.steps.values() if step.status == "failed")
        assert step.code == 83
        assert "image headrace-stage:other holds other code than this installation" in step.message
        assert "stages/seeds.py" in step.message
        assert "`headrace images build`" in step.message
    finally:
        client.images.remove(other.id, force=True)


def _user() -> str | None:
    return os.environ.get("HEADRACE_DOCKER_USER")


@pytest.fixture
def proxy(engine: docker.DockerClient, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineProxy]:
    address = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    if not address.startswith("unix://"):
        pytest.skip("the engine has no socket of this machine")
    with tempfile.TemporaryDirectory() as folder, engine_proxy(Path(folder), address) as running:
        monkeypatch.setenv("DOCKER_HOST", running.address)
        yield running


def test_a_log_stream_that_breaks_off_loses_and_repeats_nothing(runs: Runs, proxy: EngineProxy) -> None:
    cut: list[int] = []

    def cut_three_times(event: dict[str, Any]) -> None:
        if event["type"] == "progress" and event["done"] in (5, 12, 20) and event["done"] not in cut:
            cut.append(event["done"])
            proxy.hang_up()

    runs.react = cut_three_times
    result = runs(runs.toys.recipe("a: {stage: COUNT, total: 30, delay: 0.1, save_steps: 100}"))
    assert (result.state, result.steps["a"].attempts) == ("done", 1), result.steps["a"]
    assert cut == [5, 12, 20]
    assert [event["done"] for event in told(runs, "progress")] == list(range(1, 31))


def test_a_connection_that_falls_silent_loses_nothing_and_holds_nobody_up(
    runs: Runs, proxy: EngineProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = engine_module.connect
    monkeypatch.setattr(engine_module, "connect", lambda: connect(timeout=2))
    monkeypatch.setattr(docker_runner, "_WAIT", 2)
    monkeypatch.setattr(container_log, "_SILENCE", 1.0)

    def fall_silent(event: dict[str, Any]) -> None:
        if event["type"] == "progress" and event["done"] == 3:
            proxy.fall_silent()

    runs.react = fall_silent
    result = runs(runs.toys.recipe("a: {stage: COUNT, total: 10, delay: 0.1, save_steps: 100}"))
    assert (result.state, result.steps["a"].attempts) == ("done", 1), result.steps["a"]
    assert [event["done"] for event in told(runs, "progress")] == list(range(1, 11))


def test_an_engine_is_reached_over_tcp_by_connections_that_the_kernel_watches(
    runs: Runs, engine: docker.DockerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    if not address.startswith("unix://"):
        pytest.skip("the engine has no socket of this machine")
    timers: set[str] = set()
    with engine_proxy(None, address) as proxy:
        monkeypatch.setenv("DOCKER_HOST", proxy.address)

        def look(event: dict[str, Any]) -> None:
            for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[2] == f"0100007F:{proxy.port:04X}" and fields[3] == "01":  # established, to the proxy
                    timers.add(fields[5].partition(":")[0])

        runs.react = look
        result = runs(runs.toys.recipe("a: {stage: COUNT, total: 6, delay: 0.1, save_steps: 100}"))
    assert result.state == "done", result.steps["a"]
    assert timers == {"02"}  # proc_net_tcp: the timer that runs is that of keepalive


def test_a_stage_outlives_an_engine_that_is_away_for_a_while(runs: Runs, proxy: EngineProxy) -> None:
    def go_away(event: dict[str, Any]) -> None:
        if event["type"] == "progress" and event["done"] == 3:
            proxy.go_away()
            threading.Timer(3.0, proxy.come_back).start()

    runs.react = go_away
    result = runs(runs.toys.recipe("a: {stage: COUNT, total: 12, delay: 0.1, save_steps: 100}"))
    assert (result.state, result.steps["a"].attempts) == ("done", 1), result.steps["a"]
    assert [event["done"] for event in told(runs, "progress")] == list(range(1, 13))


def test_an_engine_that_stays_away_ends_the_step_and_says_so(
    runs: Runs, proxy: EngineProxy, engine: docker.DockerClient, own_installation: str
) -> None:
    runs.react = lambda event: proxy.go_away() if event["type"] == "progress" and event["done"] == 2 else None
    result = runs(runs.toys.recipe("a: {stage: COUNT, total: 40, delay: 0.2}"), away_seconds=2)
    step = result.steps["a"]
    assert (step.status, step.attempts) == ("failed", 1)
    assert f"lost: the Docker Engine at {proxy.address} has not answered for 2 s" in step.message
    left = containers(engine, own_installation)  # nothing could tell it to stop: the next run's start would
    assert len(left) == 1
    left[0].remove(force=True, v=True)


def test_a_container_that_somebody_removes_is_started_again(
    runs: Runs, engine: docker.DockerClient, own_installation: str
) -> None:
    removed: list[str] = []

    def remove(event: dict[str, Any]) -> None:
        if event["type"] == "saved" and event["at"] == 2 and not removed:
            removed.append("yes")
            for container in containers(engine, own_installation):
                container.remove(force=True, v=True)

    runs.react = remove
    result = runs(runs.toys.recipe("a: {stage: COUNT, total: 8, delay: 0.3}"))
    assert (result.steps["a"].status, result.steps["a"].attempts) == ("done", 2), result.steps["a"]


def test_a_run_that_is_stopped_saves_and_leaves_no_container(runs: Runs) -> None:
    def stop(event: dict[str, Any]) -> None:
        if event["type"] == "progress" and event["done"] == 3:
            assert runs.execution is not None
            runs.execution.stop()

    runs.react = stop
    path = runs.toys.recipe("a: {stage: COUNT, total: 100, delay: 0.2}")
    first = runs(path)
    assert (first.state, first.steps["a"].code) == ("stopped", 75)
    saved = first.steps["a"].saved_step
    assert saved is not None
    runs.react = lambda event: None
    again = runs(path, "a.delay=0")
    assert again.state == "done"
    assert told(runs, "resumed")[0]["at"] >= saved
    assert value(again.steps["a"], runs.toys.store) == "5050 0.1 "


def test_a_stage_that_does_not_stop_is_killed_when_its_grace_is_over(runs: Runs) -> None:
    runner = runs.runner = DockerRunner()

    def stop(event: dict[str, Any]) -> None:
        if event["type"] == "progress" and event["done"] == 2:
            assert runs.execution is not None
            runs.execution.stop(kill=True)

    runs.react = stop
    result = runs(runs.toys.recipe("a: {stage: COUNT, total: 50, delay: 0.5}"))
    runner.close()
    assert result.state == "stopped"
    assert result.steps["a"].code == -signal.SIGKILL


def test_containers_of_dead_runs_are_stopped_with_time_to_save_and_others_are_left_alone(
    runs: Runs, engine: docker.DockerClient, own_installation: str, stage_image: str
) -> None:
    path = runs.toys.recipe("a: {stage: COUNT, total: 200, delay: 0.3}")
    command = [sys.executable, "-m", "flows.cli", "run", path, "--no-prefect", "--runner", "docker", "--json"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    flow = subprocess.Popen(command, cwd=runs.toys.folder, env=environment, stdout=subprocess.PIPE, text=True)
    assert flow.stdout is not None
    for line in flow.stdout:
        if '"saved"' in line:
            break
    flow.kill()
    flow.wait()
    flow.stdout.close()
    orphan = containers(engine, own_installation)
    assert [container.status for container in orphan] == ["running"]

    other = f"{own_installation}-other"
    bystander = engine.containers.create(
        stage_image, entrypoint=["sleep", "600"], network_mode="host", labels={"headrace.installation": other}
    )
    bystander.start()
    try:
        result = runs(path, "a.delay=0", store=str(runs.toys.folder / ".headrace"))
        assert result.state == "done"
        assert containers(engine, own_installation) == []
        bystander.reload()
        assert bystander.status == "running"
    finally:
        bystander.remove(force=True, v=True)
    assert told(runs, "resumed"), "the orphan saved nothing"
    assert value(result.steps["a"], runs.toys.folder / ".headrace") == "20100 0.1 "
    assert not told(runs, "waiting")  # it was stopped before the new one began, and let its lease go


def test_fifty_containers_come_and_go_without_a_leak(
    runs: Runs, engine: docker.DockerClient, own_installation: str
) -> None:
    def counted() -> tuple[int, int, int]:
        descriptors = len(os.listdir("/proc/self/fd"))
        volumes = engine.volumes.list(filters={"label": f"headrace.installation={own_installation}"})
        return descriptors, threading.active_count(), len(volumes)

    steps = "\n".join(f"s{number}: {{stage: COUNT, total: 2, beta: {number}.5}}" for number in range(50))
    runs(runs.toys.recipe(COUNT))  # what is made once is there
    before = counted()
    volumes: list[int] = []
    runs.react = lambda event: volumes.append(counted()[2]) if event["type"] == "progress" and not volumes else None
    result = runs(runs.toys.recipe(steps))
    assert volumes[0] > 0
    assert result.state == "done"
    assert len({step.artifact for step in result.steps.values()}) == 50
    assert containers(engine, own_installation) == []
    until(lambda: all(now <= then + 2 for now, then in zip(counted()[:2], before[:2], strict=True)), 30)
    assert counted()[2] == 0
