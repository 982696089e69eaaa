"""A miniature of the quickstart, run by the real command as a user runs it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

RUN = ("run", "mini.yaml", "--no-prefect", "--set", "steps=8")
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# One thread: the machine's other tests must not change how sums are split.
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}


def start(arguments: list[str], folder: Path, **options: Any) -> subprocess.Popen[str]:
    """Start `headrace` with `folder` as the current one."""
    return subprocess.Popen(
        [sys.executable, "-m", "flows.cli", *arguments],
        cwd=folder,
        env=ENVIRONMENT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        **options,
    )


def copy_project(folder: Path) -> Path:
    """A user's folder with the miniature recipe and its reward."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("mini.yaml", "mini_rewards.py"):
        shutil.copy(HERE / name, folder)
    return folder


def headrace(folder: Path, *arguments: str, code: int = 0, root: Path = ROOT) -> str:
    """Run the command of the sources in `root` to its end, check its exit code, and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", *arguments],
        cwd=folder,
        env=ENVIRONMENT | {"PYTHONPATH": str(root)},
        text=True,
        capture_output=True,
    )
    assert done.returncode == code, f"{arguments} gave {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def plan(folder: Path, *arguments: str, root: Path = ROOT) -> dict[str, dict[str, Any]]:
    """`headrace plan --json` by step."""
    printed = headrace(folder, "plan", "mini.yaml", "--json", "--set", "steps=8", *arguments, root=root)
    return {entry["step"]: entry for entry in json.loads(printed)}
