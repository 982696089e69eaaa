"""`headrace doctor`: what works is said to work, and a server that breaks its promises is found out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import s3_server as server_module
from s3_proxy import Proxy

from flows.command.doctor import doctor
from flows.service import installation
from stages.artifacts import open_store
from stages.artifacts.check import check_store


def states(url: str) -> dict[str, str]:
    return {check.name: check.state for check in check_store(open_store(url))}


def test_a_sound_store_keeps_every_promise_and_nothing_of_the_checks(store_url: str) -> None:
    found = states(store_url)
    assert set(found.values()) == {"ok"}
    expected = {"store", "conditional writes", "listing", "deleting"}
    assert set(found) == expected | ({"checksums", "clock"} if store_url.startswith("s3:") else set())
    assert list(open_store(store_url).list("")) == []
    assert open_store(store_url).leftovers(0) == []


def test_a_server_that_says_done_whatever_it_was_asked_is_found_out(s3_url: str, through: Proxy) -> None:
    through.choose = lambda method, path, number: "accept" if method == "PUT" else "pass"
    checks = {check.name: check for check in check_store(open_store(s3_url))}
    assert checks["conditional writes"].state == "unsafe"
    assert "If-None-Match, If-Match" in checks["conditional writes"].detail
    assert "let one run at a time use this store" in checks["conditional writes"].detail
    assert checks["checksums"].state == "warning"
    assert "single objects, uploads in parts" in checks["checksums"].detail


def test_a_store_that_cannot_be_used_is_one_failed_check(
    s3_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert states("s3://no-such-bucket/x") == {"store": "failed"}
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", server_module.READER[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server_module.READER[1])
    assert doctor(s3_url, as_json=True) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["ok"] is False
    failed = [check for check in said["checks"] if check["state"] == "failed"]
    assert [check["name"] for check in failed] == ["store"]
    assert "s3:PutObject" in failed[0]["detail"]


def test_the_doctor_looks_at_the_machine_without_importing_torch(tmp_path: Path, s3_url: str) -> None:
    code = (
        "import sys\n"
        "from flows.command.doctor import doctor\n"
        "rc = doctor(sys.argv[1], as_json=True)\n"
        "assert 'torch' not in sys.modules\n"
        "sys.exit(rc)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, s3_url], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    checks = {check["name"]: check["detail"] for check in json.loads(ended.stdout)["checks"]}
    assert {"python", "packages", "gpus", "prefect", "disk for scratch", "cache", "checksums"} <= set(checks)
    assert "torch " in checks["packages"]


def test_a_prefect_server_that_does_not_answer_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    assert doctor(str(tmp_path / "store"), as_json=False) == 1
    out = capsys.readouterr().out
    assert "FAILED   prefect" in out
    assert "correct PREFECT_API_URL" in out
    assert "is not there yet; the first run makes it" in out
    assert not (tmp_path / "store").exists()


def test_the_server_of_headrace_up_is_the_one_that_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    held = installation.lock()
    assert held is not None
    with held:
        installation.announce(installation.Addresses(os.getpid(), "http://127.0.0.1:9/api", "http://127.0.0.1:9/v2/"))
        assert doctor(str(tmp_path / "store"), as_json=False) == 1
    assert "FAILED   prefect              http://127.0.0.1:9/api does not answer" in capsys.readouterr().out
