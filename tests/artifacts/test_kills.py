"""Every verb that writes, killed at random moments, on a folder and on S3, whose server is killed too (`kills`)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

KILLS = Path(__file__).with_name("kills.py")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("where", [[], ["--s3"]], ids=["folder", "s3"])
def test_verbs_killed_at_random_moments_lose_nothing_and_leave_nothing(tmp_path: Path, where: list[str]) -> None:
    command = [sys.executable, str(KILLS), str(tmp_path / "work"), "40", "0", *where]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=3500)
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout.splitlines()[-1])
    print(report)
    assert report["wrong"] == []
    assert sum(report["killed"].values()) >= 40
