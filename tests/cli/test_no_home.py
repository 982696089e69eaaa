"""A user without a home folder, as in a container, or with one that cannot be written: nothing strange happens."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest
from test_store_verbs import headrace

from flows.plan import cache_path
from flows.recipe_model import RecipeError
from flows.service import installation
from flows.service.deploy_settings import read_settings
from flows.service.local_server import quiet_prefect
from stages.artifacts import HashCache, StoreError, open_cache, open_store

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def homeless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder, for a user whom the system does not know."""

    def unknown(uid: int) -> pwd.struct_passwd:
        raise KeyError(uid)

    for name in ("HOME", "HEADRACE_HOME", "HEADRACE_CACHE_DIR", "XDG_CACHE_HOME", "PREFECT_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_without_a_home_folder_nothing_is_kept_and_no_folder_of_that_name_is_made(homeless: Path) -> None:
    (homeless / "rows.txt").write_text("rows")
    assert headrace(homeless, "import", "rows.txt", "--ref", "data").returncode == 0
    assert headrace(homeless, "lineage", "data").returncode == 0
    assert open_cache() is None
    assert {path.name for path in homeless.iterdir()} == {"rows.txt", ".headrace"}
    bucket = open_store("s3://bucket/prefix")
    assert cache_path(bucket) is None
    hashes = HashCache(None)
    assert hashes.hash(homeless / "rows.txt")[1] == 4
    hashes.save()


def test_an_installation_asks_for_a_folder(homeless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert installation.running() is None
    refused = headrace(homeless, "up", "--port", "0", "--browser-port", "0")
    assert (refused.returncode, refused.stderr) == (
        2,
        "headrace: this user has no home folder; set HEADRACE_HOME to a folder for the installation's data\n",
    )
    (homeless / "file").write_text("")
    monkeypatch.setenv("HEADRACE_HOME", str(homeless / "file" / "home"))
    refused = headrace(homeless, "up", "--port", "0", "--browser-port", "0")
    assert refused.returncode == 2
    assert "file/home: Not a directory; set HEADRACE_HOME to another folder" in refused.stderr


def test_a_tilde_that_leads_nowhere_is_one_sentence(homeless: Path) -> None:
    with pytest.raises(StoreError, match="there is no such home folder; give the whole path"):
        open_store("~/store")
    (homeless / "headrace.yaml").write_text("store: ~nobody-of-this-name/store\n")
    with pytest.raises(RecipeError, match="there is no such home folder; give the whole path"):
        read_settings()


@pytest.mark.parametrize("home", ["none", "file"])
def test_prefect_gets_a_folder_of_its_own_for_the_time_of_the_process(home: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    environment = {name: value for name, value in os.environ.items() if name not in ("HOME", "PREFECT_HOME")}
    environment |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    code = "import pwd\ndef unknown(uid): raise KeyError\npwd.getpwuid = unknown\n"
    if home == "file":
        environment["HOME"] = str(tmp_path / "file")
    code += "from flows.service.local_server import quiet_prefect\nquiet_prefect()\nimport os, prefect.settings\n"
    code += "print(prefect.settings.get_current_settings().home, os.access(os.environ['PREFECT_HOME'], os.W_OK))\n"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    folder, _, writable = done.stdout.strip().rpartition(" ")
    assert folder.startswith(f"{tmp_path}/headrace-prefect-")
    assert writable == "True"
    assert {path.name for path in tmp_path.iterdir()} == {"file"}


def test_a_home_that_can_be_written_is_left_to_prefect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PREFECT_HOME")
    quiet_prefect()
    assert "PREFECT_HOME" not in os.environ
