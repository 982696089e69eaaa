"""What goes into a stage container, and what does not: files, variables, and the user."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from flows.runners.base import RunnerError
from flows.runners.container_files import SPEC, luggage
from flows.runners.store_access import container_user, stage_environment
from stages.artifacts import open_store
from stages.contract import StageSpec
from stages.fingerprint import stage_fingerprint


def spec_of(folder: Path, files: list[str]) -> StageSpec:
    return StageSpec(
        stage="mine.count",
        step="count",
        run="run-1",
        key="ab" * 32,
        config={},
        inputs={},
        store=str(folder / "store"),
        scratch=str(folder / "scratch"),
        python_path=[str(folder / "code")],
        record={"code": {"files": {name: {} for name in files}}},
    )


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def unpacked(archive: bytes, folder: Path) -> dict[str, str]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
        assert {member.mode for member in tar if member.isfile()} == {0o444}
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_the_code_of_a_step_goes_along_whole_and_nothing_beside_it(tmp_path: Path) -> None:
    write(
        tmp_path / "code",
        {
            "mine/__init__.py": "",
            "mine/count/stage.py": "1",
            "mine/count/words.txt": "data of the package",
            "mine/.env": "SECRET=1",
            "mine/__pycache__/x.pyc": "",
            "reward.py": "2",
            "other.py": "not reached",
            "private/diary.txt": "no",
        },
    )
    inside, archive = luggage(
        spec_of(tmp_path, ["mine/__init__.py", "mine/count/stage.py", "reward.py", "stages/x.py"])
    )
    found = unpacked(archive, tmp_path / "there")
    assert set(found) - {SPEC} == {
        "code/0/mine/__init__.py",
        "code/0/mine/count/stage.py",
        "code/0/mine/count/words.txt",
        "code/0/reward.py",
    }
    assert StageSpec.model_validate_json(found[SPEC]) == inside
    assert (inside.scratch, inside.python_path) == ("/scratch", ["/scratch/code/0"])


def test_code_that_was_carried_has_the_same_fingerprint(tmp_path: Path) -> None:
    write(
        tmp_path / "code",
        {
            "mine/__init__.py": "",
            "mine/count/__init__.py": "",
            "mine/count/config.py": "import stages.contract as c\n\n\nclass Config(c.StageConfig):\n    pass\n",
            "mine/count/stage.py": "from ..helpers import one\n\n\ndef run(context):\n    one()\n",
            "mine/helpers/__init__.py": "from .numbers import one\n",
            "mine/helpers/numbers.py": "def one():\n    return 1\n",
            "space/reward.py": "def reward(x):\n    return x\n",
        },
    )
    here = stage_fingerprint("mine.count", ["space.reward:reward"], [tmp_path / "code"])
    assert "space/reward.py" in here.files
    _, archive = luggage(spec_of(tmp_path, list(here.files)))
    unpacked(archive, tmp_path / "there")
    there = stage_fingerprint("mine.count", ["space.reward:reward"], [tmp_path / "there" / "code" / "0"])
    assert there == here


def test_a_package_full_of_data_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "code", {"mine/count.py": "1"})
    with open(tmp_path / "code" / "mine" / "model.bin", "wb") as file:
        file.truncate(65 << 20)
    with pytest.raises(RunnerError, match="hold more than 64 MiB; keep data out of them"):
        luggage(spec_of(tmp_path, ["mine/count.py"]))


ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:1",
    "WANDB_API_KEY": "tracker",
    "HEADRACE_LEASE_SECONDS": "5",
    "HOME": "/home/me",
    "PREFECT_API_KEY": "no",
}


def test_a_stage_is_given_the_variables_that_its_store_needs_and_no_others(tmp_path: Path) -> None:
    bucket = open_store("s3://bucket/prefix")
    given = stage_environment(bucket, (), ENVIRONMENT)
    assert set(given) == {
        *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL_S3", "HEADRACE_LEASE_SECONDS"),
    }
    assert set(stage_environment(open_store(tmp_path), (), ENVIRONMENT)) == {"HEADRACE_LEASE_SECONDS"}
    assert stage_environment(bucket, ("wandb",), ENVIRONMENT)["WANDB_API_KEY"] == "tracker"
    asked = ENVIRONMENT | {"HEADRACE_STAGE_ENV": "HOME"}
    assert stage_environment(bucket, (), asked)["HOME"] == "/home/me"
    with pytest.raises(RunnerError, match="HEADRACE_STAGE_ENV names JUDGE_KEY, which is not set"):
        stage_environment(bucket, (), ENVIRONMENT | {"HEADRACE_STAGE_ENV": "HOME, JUDGE_KEY"})


def test_keys_of_the_users_files_are_handed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    write(
        tmp_path,
        {
            "credentials": "[team]\naws_access_key_id = filed\naws_secret_access_key = hidden\n",
            "config": "[profile team]\nregion = eu-central-1\n",
        },
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "team")
    bucket = open_store("s3://bucket/prefix")
    given = stage_environment(bucket)
    assert given == {
        "AWS_ACCESS_KEY_ID": "filed",
        "AWS_SECRET_ACCESS_KEY": "hidden",
        "AWS_DEFAULT_REGION": "eu-central-1",
    }


def test_keys_that_this_machine_has_to_renew_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    helper = tmp_path / "helper.sh"
    helper.write_text(
        '#!/bin/sh\necho \'{"Version": 1, "AccessKeyId": "a", "SecretAccessKey": "b", "SessionToken": "c", '
        '"Expiration": "2099-01-01T00:00:00Z"}\'\n'
    )
    helper.chmod(0o755)
    write(tmp_path, {"config": f"[default]\ncredential_process = {helper}\nregion = us-east-1\n"})
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(RunnerError, match=r"credentials \(custom-process\) would expire in a container"):
        stage_environment(open_store("s3://bucket/prefix"))


@pytest.mark.parametrize(
    ("store", "asked", "uid", "expected"),
    [
        ("s3://bucket/prefix", None, 0, None),
        ("s3://bucket/prefix", "5:6", 0, "5:6"),
        ("folder", None, 1000, "1000:100"),
        ("folder", "0:0", 0, "0:0"),
    ],
)
def test_who_a_container_runs_as(store: str, asked: str | None, uid: int, expected: Any, tmp_path: Path) -> None:
    opened = open_store(store if store.startswith("s3:") else tmp_path / store)
    assert container_user(opened, asked, uid, 100, "a") == expected


def test_roots_folder_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunnerError, match="do not run as root, and root's folder store"):
        container_user(open_store(tmp_path), None, 0, 0, "a")
