"""The services of the compose file, run together as plain processes of this machine, by the commands that it has."""

from __future__ import annotations

import json
import os
import pwd
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import s3_server as server_module
import yaml

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[2]
SERVICES: dict[str, Any] = yaml.safe_load((ROOT / "infra" / "compose.yaml").read_text())["services"]
KEYS = {"S3_KEY": "a-key", "S3_SECRET": "a-secret-of-this-test"}
PASSWORD = "the-database-of-this-test"


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def wait_for(what: str, answers: Any, process: subprocess.Popen[bytes], log: Path) -> None:
    limit = time.monotonic() + 600
    while not answers():
        assert process.poll() is None, f"{what} ended: {log.read_text()[-3000:]}"
        assert time.monotonic() < limit, f"{what} does not answer: {log.read_text()[-3000:]}"
        time.sleep(0.3)


def status_of(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


class Stack:
    """The services, started one by one; each is a process group that `stop` ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []
        self.environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": str(ROOT)}

    def start(self, name: str, command: list[str], more: dict[str, str], **options: Any) -> tuple[Any, Path]:
        log = self.folder / f"{name}.log"
        with open(log, "wb") as file:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self.environment | more,
                stdout=file,
                stderr=file,
                start_new_session=True,
                **options,
            )
        self.processes.append(process)
        return process, log

    def stop(self) -> None:
        for process in reversed(self.processes):
            for number, seconds in ((signal.SIGTERM, 40), (signal.SIGKILL, 20)):
                try:
                    os.killpg(process.pid, number)
                    process.wait(seconds)
                    break
                except ProcessLookupError:
                    break
                except subprocess.TimeoutExpired:
                    continue

    def postgres(self) -> str:
        """A database as the compose file makes it: user and name prefect, a password. Returns its address."""
        found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
        if not found:
            pytest.skip("PostgreSQL is not installed (Debian's package postgresql)")
        programs = found[-1].parent
        options: dict[str, Any] = {}
        place = Path(tempfile.mkdtemp(prefix="headrace-postgres-"))
        self.database = place
        if os.getuid() == 0:  # it refuses to run as root
            account = pwd.getpwnam("postgres")
            os.chown(place, account.pw_uid, account.pw_gid)
            options = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
        secret = place / "password"
        secret.write_text(PASSWORD)
        secret.chmod(0o644)
        data = place / "data"
        init = ["--pgdata", str(data), "--username", "prefect", "--auth", "scram-sha-256", "--pwfile", str(secret)]
        subprocess.run([programs / "initdb", *init], check=True, capture_output=True, cwd=place, **options)
        (port,) = free_ports(1)
        command = [str(programs / "postgres"), "-D", str(data), "-p", str(port), "-h", "127.0.0.1", "-k", str(place)]
        process, log = self.start("postgres", command, {}, **options)
        check = [programs / "pg_isready", "-h", "127.0.0.1", "-p", str(port), "-U", "prefect", "-d", "postgres"]
        wait_for("PostgreSQL", lambda: subprocess.run(check, capture_output=True).returncode == 0, process, log)
        sql = [programs / "psql", "-h", "127.0.0.1", "-p", str(port), "-U", "prefect", "-d", "postgres"]
        subprocess.run(
            [*sql, "-c", "CREATE DATABASE prefect"],
            check=True,
            capture_output=True,
            env=self.environment | {"PGPASSWORD": PASSWORD},
        )
        wanted = SERVICES["server"]["environment"]["PREFECT_API_DATABASE_CONNECTION_URL"]
        head, _, _ = wanted.partition("${")
        return f"{head}{PASSWORD}@127.0.0.1:{port}/prefect"

    def s3(self) -> dict[str, str]:
        """The S3 store, by the script of the compose file. Returns the environment of its clients."""
        script = SERVICES["s3"]["command"][0].replace("$$", "$")
        names = ["master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc"]
        names += ["s3.port.grpc", "s3.port.iceberg", "s3.port.lance"]
        port, *others = free_ports(len(names) + 1)
        data = self.folder / "s3"
        data.mkdir()
        for old, new in (
            ("/run/s3.json", str(self.folder / "s3.json")),
            ("-dir=/data", f"-dir={data}"),
            ("-ip=s3", "-ip=127.0.0.1"),
            ("-ip.bind=0.0.0.0", "-ip.bind=127.0.0.1"),
            ("-s3.port=8333", f"-s3.port={port}"),
            ("exec weed", f"exec {shlex.quote(str(server_module.binary()))}"),
        ):
            assert old in script, old
            script = script.replace(old, new)
        script = script.rstrip() + "".join(f" -{name}={number}" for name, number in zip(names, others, strict=True))
        process, log = self.start("s3", ["/bin/sh", "-c", script], KEYS)
        wait_for("the S3 store", lambda: status_of(f"http://127.0.0.1:{port}/") == 403, process, log)
        assert (self.folder / "s3.json").stat().st_mode & 0o077 == 0
        return {
            "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": KEYS["S3_KEY"],
            "AWS_SECRET_ACCESS_KEY": KEYS["S3_SECRET"],
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "HEADRACE_STORE": "s3://headrace/store",
            "BUCKET": "headrace",
        }

    def server(self, database: str) -> str:
        """The Prefect server, with the settings of the compose file. Returns its API."""
        (port,) = free_ports(1)
        given = {key: str(value) for key, value in SERVICES["server"]["environment"].items()}
        given |= {
            "PREFECT_API_DATABASE_CONNECTION_URL": database,
            "PREFECT_SERVER_UI_API_URL": f"http://127.0.0.1:{port}/api",
            "PREFECT_HOME": str(self.folder / "server"),
        }
        command = [*SERVICES["server"]["command"]]
        assert command[:3] == ["prefect", "server", "start"]
        command = [sys.executable, "-m", *command[:3], "--host", "127.0.0.1", "--port", str(port)]
        process, log = self.start("server", command, given)
        api = f"http://127.0.0.1:{port}/api"
        wait_for("the Prefect server", lambda: status_of(f"{api}/health") == 200, process, log)
        return api

    def worker(self, more: dict[str, str]) -> None:
        command = [*SERVICES["worker"]["command"]]
        assert command[:3] == ["prefect", "worker", "start"]
        kept = [part for part in command if part != "--with-healthcheck"]  # its port is fixed
        more = more | {"PREFECT_WORKER_QUERY_SECONDS": "1", "PREFECT_HOME": str(self.folder / "worker")}
        self.start("worker", [sys.executable, "-m", *kept], more)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, dict[str, str]]]:
    """PostgreSQL, the S3 store, the Prefect server, what `setup` makes, and a worker; with the settings of clients."""
    made = Stack(tmp_path_factory.mktemp("stack"))
    try:
        settings = made.s3() | {"PREFECT_API_URL": made.server(made.postgres()), "DO_NOT_TRACK": "1"}
        settings |= {"HEADRACE_CACHE_DIR": str(made.folder / "cache"), "PREFECT_HOME": str(made.folder / "client")}
        script = SERVICES["setup"]["command"][0].replace("$$", "$").replace("/tmp/", f"{made.folder}/")
        script = script.replace("python -", f"{sys.executable} -")
        script = script.replace("headrace deploy", f"{sys.executable} -m flows.cli deploy")
        for _ in range(2):  # again, it changes nothing
            done = subprocess.run(
                ["/bin/sh", "-ec", script],
                cwd=made.folder,
                env=made.environment | settings,
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, done.stdout + done.stderr
        made.worker(settings)
        yield made, settings
    finally:
        made.stop()
        shutil.rmtree(getattr(made, "database", made.folder / "none"), ignore_errors=True)


def headrace(stack: Stack, settings: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flows.cli", *arguments],
        cwd=stack.folder,
        env=stack.environment | settings,
        capture_output=True,
        text=True,
    )


def test_a_run_goes_through_all_services(stack: tuple[Stack, dict[str, str]]) -> None:
    services, settings = stack
    (services.folder / "words.txt").write_text("".join(f"line {number} of the text\n" for number in range(200)))
    (services.folder / "words.yaml").write_text(
        "name: words\nsteps:\n  corpus:\n    stage: tokenize\n    inputs: {data: words.txt}\n    format: text\n"
        "    row_length: 32\n    train_tokenizer: {vocab_size: 280}\n"
    )
    done = headrace(services, settings, "run", "words.yaml", "--runner", "workpool", "--json")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["steps"]["corpus"]["status"] == "done"
    bucket = boto3.client(
        "s3",
        endpoint_url=settings["AWS_ENDPOINT_URL_S3"],
        region_name="us-east-1",
        aws_access_key_id=KEYS["S3_KEY"],
        aws_secret_access_key=KEYS["S3_SECRET"],
    )
    keys = [item["Key"] for item in bucket.list_objects_v2(Bucket="headrace")["Contents"]]
    assert [key for key in keys if key.startswith("store/results/tokenize/")]
    states = query(services, "SELECT name FROM flow_run WHERE state_type = 'COMPLETED'")
    assert any(name.endswith("/corpus") for name in states)  # the server's memory is in PostgreSQL


def query(stack: Stack, sql: str) -> list[str]:
    """The first column of what the database of the server says."""
    address = next(
        process.args
        for process in stack.processes
        if "postgres" in str(process.args[0])  # type: ignore[index]
    )
    port = address[address.index("-p") + 1]  # type: ignore[index, union-attr]
    program = Path(str(address[0])).parent / "psql"  # type: ignore[index]
    command = [program, "-h", "127.0.0.1", "-p", str(port), "-U", "prefect", "-d", "prefect", "-At", "-c", sql]
    environment = stack.environment | {"PGPASSWORD": PASSWORD}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.split("\n")


def test_the_browser_shows_the_store_of_the_stack(stack: tuple[Stack, dict[str, str]]) -> None:
    services, settings = stack
    (port,) = free_ports(1)
    command = [*SERVICES["browser"]["command"]]
    assert command[:3] == ["python", "-m", "flows.lineage.browser"]
    command = [sys.executable, *command[1:3], "--host", "127.0.0.1", "--port", str(port)]
    process, log = services.start("browser", command, settings)
    wait_for("the browser", lambda: status_of(f"http://127.0.0.1:{port}/") == 200, process, log)


def test_the_nightly_flow_passes_through_the_services(stack: tuple[Stack, dict[str, str]]) -> None:
    services, settings = stack
    (services.folder / "nightly.yaml").write_text(
        "store: s3://headrace/store\nwork_pool: headrace\nnightly:\n  words:\n    recipe: night.yaml\n"
    )
    (services.folder / "night.yaml").write_text(
        "name: night\nsteps:\n  corpus:\n    stage: tokenize\n    inputs: {data: words.jsonl}\n    format: text\n"
        "    row_length: 32\n    train_tokenizer: {vocab_size: 280}\n    validation_fraction: 0.1\n"
        "  base:\n    stage: pretrain\n    inputs: {data: corpus}\n    hidden_size: 32\n    num_hidden_layers: 1\n"
        "    num_attention_heads: 2\n    max_steps: 3\n    train_batch_size: 2\n"
        "  report:\n    stage: evaluate\n    inputs: {models: [base], text: corpus}\n"
    )
    rows = [json.dumps({"text": f"line {number} of the text"}) for number in range(300)]
    (services.folder / "words.jsonl").write_text("\n".join(rows) + "\n")
    deployed = headrace(services, settings, "deploy", "nightly.yaml")
    assert deployed.returncode == 0, deployed.stdout + deployed.stderr
    run = [sys.executable, "-m", "prefect", "deployment", "run", "nightly/words", "--watch"]
    watched = subprocess.run(
        run, cwd=services.folder, env=services.environment | settings, capture_output=True, text=True, timeout=1800
    )
    assert watched.returncode == 0, watched.stdout + watched.stderr
    refs = headrace(services, settings, "refs", "words", "--json")
    assert refs.returncode == 0, refs.stderr
    assert "sha256:" in refs.stdout
