"""Every operation of publish, fetch, save, promote, a computation and gc, failed or killed in turn (see `faults`)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FAULTS = Path(__file__).with_name("faults.py")


def walk(url: str, tmp_path: Path, *modes: str) -> None:
    folder = tmp_path / "folders"
    folder.mkdir()
    command = [sys.executable, str(FAULTS), url, str(folder), *modes]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=3000)
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout.splitlines()[-1])
    points = ", ".join(f"{name} {count}" for name, count in report["points"].items())
    print(f"{report['cases']} cases ({', '.join(modes)}) at these points: {points}; {report['seconds']} s")
    assert report["wrong"] == []
    assert report["cases"] >= 90 * len(modes)


def test_a_kill_at_any_operation_of_a_folder_leaves_it_whole(tmp_path: Path) -> None:
    walk(str(tmp_path / "store"), tmp_path, "kill")


@pytest.mark.slow
def test_no_fault_or_kill_at_any_operation_or_system_call_leaves_a_folder_in_part(tmp_path: Path) -> None:
    walk(str(tmp_path / "store"), tmp_path, "fail", "lost", "kill-after", "system")


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_no_fault_or_kill_at_any_operation_or_request_leaves_a_bucket_in_part(tmp_path: Path, s3_url: str) -> None:
    walk(s3_url, tmp_path, "fail", "lost", "kill", "kill-after", "system")
