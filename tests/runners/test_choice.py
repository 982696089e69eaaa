"""A runner that cannot work here is refused before anything is started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flows.runners.base import RunnerError
from flows.runners.choice import make_runner

ROOT = Path(__file__).parents[2]
RECIPE = (
    "steps:\n  a:\n    stage: tokenize\n    inputs: {data: 'stdlib:this.py'}\n    format: text\n    row_length: 32\n"
)


@pytest.mark.parametrize(
    ("runner", "said"),
    [
        ("docker", "headrace: no Docker Engine answers at unix:///nowhere/docker.sock (No such file or directory); "),
        ("workpool", "headrace: --runner workpool needs a Prefect server with workers: set PREFECT_API_URL"),
    ],
)
def test_it_is_one_sentence_and_nothing_is_begun(runner: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text(RECIPE + "    train_tokenizer: {vocab_size: 300}\n")
    environment = {key: value for key, value in os.environ.items() if key != "PREFECT_API_URL"}
    environment |= {"DOCKER_HOST": "unix:///nowhere/docker.sock", "PREFECT_HOME": str(tmp_path / "prefect")}
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", "run", "one.yaml", "--runner", runner],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / ".headrace" / "runs").exists()


def test_a_runner_that_there_is_not_is_named() -> None:
    with pytest.raises(RunnerError, match=r"there is no runner 'moon'\. Runners: process, docker, workpool"):
        make_runner("moon")
