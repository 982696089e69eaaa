"""PostgreSQL in place of SQLite, by one setting: a real server in a folder of the test's own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from installed import Installed, prepared


def programs() -> Path | None:
    """The folder with initdb and pg_ctl."""
    for folder in [*sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True), Path("/usr/local/bin")]:
        if (folder / "initdb").is_file() and (folder / "pg_ctl").is_file():
            return folder
    return None


BIN = programs()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BIN is None, reason="there is no PostgreSQL server (apt-get install postgresql)"),
    pytest.mark.skipif(
        os.getuid() == 0 and shutil.which("setpriv") is None, reason="root needs setpriv for PostgreSQL"
    ),
]


@pytest.fixture
def database() -> Iterator[str]:
    """The URL of an empty database."""
    folder = Path(tempfile.mkdtemp(prefix="headrace-postgresql-"))  # pytest's own folders are for their owner only
    prefix: list[str] = []
    if os.getuid() == 0:  # PostgreSQL does not run as root
        prefix = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        os.chown(folder, 65534, 65534)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def run(program: str, *arguments: str) -> None:
        subprocess.run([*prefix, str(BIN / program), *arguments], cwd=folder, check=True, timeout=300)  # type: ignore[operator]

    data = str(folder / "data")
    run("initdb", "-D", data, "-U", "prefect", "-A", "trust")
    run("pg_ctl", "-D", data, "-w", "-l", f"{folder}/log", "-o", f"-p {port} -k {folder} -h 127.0.0.1", "start")
    try:
        yield f"postgresql+asyncpg://prefect@127.0.0.1:{port}/postgres"
    finally:
        run("pg_ctl", "-D", data, "-m", "fast", "stop")
        shutil.rmtree(folder, ignore_errors=True)


def test_runs_are_kept_in_postgresql_and_survive_a_restart(database: str, tmp_path: Path) -> None:
    installation = prepared(tmp_path / "own")
    installation.environment["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = database
    try:
        installation.start()
        run = installation.run("headrace/pipeline", recipe="toy.yaml")
        assert run.state_name == "Completed"
        assert not (installation.home / "prefect.db").exists()
        assert installation.stop() == 0
        installation.start()
        assert Installed.read(installation, run.id).state_name == "Completed"
    finally:
        installation.stop()
