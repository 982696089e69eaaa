"""The images: what is in them, and that a change of code rebuilds little."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import docker
import pytest
from container_runs import ROOT

from flows import images
from flows.runners.engine import code_digest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]  # the first one builds the image


def inside(client: docker.DockerClient, image: str, code: str) -> str:
    """What a piece of Python prints in a container of the image, made as a stage's is."""
    said = client.containers.run(
        image,
        ["-c", code],
        entrypoint=["python"],
        read_only=True,
        network_mode="host",
        tmpfs={"/tmp": "mode=1777"},
        remove=True,
        stderr=True,
    )
    return bytes(said).decode().strip()


def test_the_stage_image_holds_torch_and_the_stages_and_no_flows(engine: docker.DockerClient, stage_image: str) -> None:
    code = (
        "import importlib.util, json, os, sys\n"
        "names = ('torch', 'transformers', 'accelerate', 'peft', 'stages', 'prefect', 'flows')\n"
        "print(json.dumps([os.getuid(), [name for name in names if importlib.util.find_spec(name)]]))\n"
    )
    assert json.loads(inside(engine, stage_image, code)) == [
        10001,
        ["torch", "transformers", "accelerate", "peft", "stages"],
    ]


def test_the_stage_image_has_the_pinned_versions(engine: docker.DockerClient, stage_image: str) -> None:
    code = "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))"
    found = json.loads(inside(engine, stage_image, code))
    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if re.match(r"[\w.-]+==", line)
    )
    wanted = (ROOT / "images" / "stage" / "requirements.txt").read_text().split()
    normal = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found.items()}
    expected = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins.items()}
    for name in wanted:
        assert normal[name].partition("+")[0] == expected[name], name


def test_an_image_says_which_code_commit_and_version_are_in_it(engine: docker.DockerClient, stage_image: str) -> None:
    labels = engine.images.get(stage_image).labels
    assert labels["headrace.code"] == code_digest("stages")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    assert labels["org.opencontainers.image.revision"] == (commit or "unknown")
    assert images.built()["stage"]["id"] == stage_image


def link_or_copy(source: str, target: str) -> None:
    """The wheels are large."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def test_a_change_of_code_rebuilds_the_last_layers_only(
    engine: docker.DockerClient, stage_image: str, base_image: str, tmp_path: Path
) -> None:
    copy = tmp_path / "checkout"
    for name in ("stages", "images", "flows"):
        left_out = shutil.ignore_patterns("__pycache__", "built.json")
        shutil.copytree(ROOT / name, copy / name, ignore=left_out, copy_function=link_or_copy)
    for name in ("constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, copy)
    changed = copy / "stages" / "dpo" / "loss.py"
    text = changed.read_text()
    changed.unlink()  # it was a link to the checkout's
    changed.write_text(text + "\nCHANGED = 1\n")
    command = [sys.executable, "-m", "flows.cli", "images", "build", "stage", "--base", base_image, "--tag", "changed"]
    done = subprocess.run(
        [*command, "--json"], cwd=copy, env=os.environ | {"PYTHONPATH": str(copy)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)["stage"]
    try:
        assert made["id"] != stage_image
        old = engine.api.inspect_image(stage_image)["RootFS"]["Layers"]
        new = engine.api.inspect_image(made["id"])["RootFS"]["Layers"]
        shared = [layer for layer in old if layer in new]
        assert shared == old[: len(shared)]
        assert len(old) - len(shared) <= 2  # the code, and what is compiled of it
        assert inside(engine, made["id"], "import stages.dpo.loss as m; print(m.CHANGED)") == "1"
    finally:
        engine.images.remove(made["id"], force=True)


def test_a_build_that_fails_shows_what_it_said(engine: docker.DockerClient, base_image: str) -> None:
    command = [sys.executable, "-m", "flows.cli", "images", "build", "stage", "--base", "no-such-base:1"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 2
    assert "image headrace-stage:latest cannot be built from base no-such-base:1" in done.stderr
    wrong = subprocess.run(
        [*command[:4], "build", "stages"], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert wrong.returncode == 2
    assert wrong.stderr == "headrace: there is no image 'stages'. Did you mean stage? Images: stage, flows, worker.\n"


def test_the_doctor_tells_of_the_engine_and_the_image(
    engine: docker.DockerClient, stage_image: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "flows.cli", "doctor", "--json", "--store", str(tmp_path / "store")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["docker engine"]["state"] == "ok"
    assert engine.version()["Version"] in checks["docker engine"]["detail"]
    assert checks["stage image"]["state"] == "ok"
    assert checks["stage image"]["detail"].endswith("of this code")
    assert "gpu runtime" in checks
    gone = environment | {"DOCKER_HOST": f"unix://{tmp_path}/none.sock"}
    checks = {
        check["name"]: check
        for check in json.loads(subprocess.run(command, capture_output=True, text=True, env=gone).stdout)["checks"]
    }
    assert checks["docker engine"]["state"] == "failed"
    assert "start it, or set DOCKER_HOST" in checks["docker engine"]["detail"]
