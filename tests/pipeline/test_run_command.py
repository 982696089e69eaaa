"""The `headrace` command as a user meets it: real processes, real signals, what is printed and the exit codes."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from toy_recipe import write_toy

from flows.service.local_server import LocalServer, quiet_prefect

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_toy(tmp_path)
    return tmp_path


def environment() -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("PREFECT_API_URL", "HEADRACE_STORE")}
    return clean | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"}


def headrace(folder: Path, *arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flows.cli", *arguments]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=180, **more)


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", "-m", "flows.cli", *arguments]
    return subprocess.Popen(
        command, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def read_until(process: subprocess.Popen[str], pattern: str) -> str:
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if re.search(pattern, line):
            return said
    raise AssertionError(f"{pattern!r} was never said:\n{said}")


def wait_for_progress(folder: Path, step: str) -> None:
    """Wait until the log of a step tells of progress."""
    limit = time.monotonic() + 60
    while not any('"progress"' in log.read_text() for log in folder.glob(f".headrace/logs/*/{step}.jsonl")):
        assert time.monotonic() < limit
        time.sleep(0.05)


def test_a_run_shows_results_samples_the_final_model_and_what_to_do_next(folder: Path) -> None:
    done = headrace(folder, "run", "toy.yaml", "--no-prefect")
    assert done.returncode == 0, done.stderr
    assert "Headrace toy: 4 steps, nothing cached" in done.stdout
    assert re.search(r"better +50\.0%   \(500 held-out problems, ±2\.2\)", done.stdout)
    assert re.search(r"better +Answer: 1 ✓", done.stdout)
    final = re.search(r"Final model  better  (sha256:[0-9a-f]{64})", done.stdout)
    assert final is not None
    assert "headrace lineage better" in done.stdout

    plan = json.loads(headrace(folder, "plan", "toy.yaml", "--json").stdout)
    assert {step["status"] for step in plan} == {"hit"}
    assert next(step["artifact"] for step in plan if step["step"] == "better") == final[1]


def test_json_gives_every_event_and_one_final_object(folder: Path) -> None:
    done = headrace(folder, "run", "toy.yaml", "--no-prefect", "--json")
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert events[-1]["type"] == "run"
    assert events[-1]["state"] == "done"
    assert set(events[-1]["steps"]) == {"words", "model", "better", "report"}
    assert {"step", "progress", "metric", "log", "outcome"} <= {event["type"] for event in events}
    assert "Headrace toy" in done.stderr


def test_a_failed_step_says_why_in_one_sentence_and_exits_1(folder: Path) -> None:
    done = headrace(folder, "run", "toy.yaml", "--no-prefect", "--set", "words.bad=true")
    assert done.returncode == 1
    assert 'step words failed before it started (83): words.txt line 3: "messages" is missing.\n' in done.stdout
    assert "Not run for that: model, better, report." in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["run", "toy.yaml", "--set", "better.rat=1"], "Did you mean rate?"),
        (["run", "absent.yaml"], "absent.yaml: no such file."),
        (["run", "toy.yaml", "--until", "wrds"], "--until wrds: no such step. Did you mean words?"),
        (["run", "toy.yaml", "--runner", "moon"], "--runner moon: no such runner."),
        (["run", "toy.yaml", "--store", "gs://bucket/x"], "unknown kind of store"),
        (["plan", "toy.yaml", "--force", "nobody"], "no such step"),
        (["lineage", "grpo"], "No run is recorded here."),
        (["status", "golden-otter"], "has no runs yet"),
        (["verify", "sha256:12"], "at least 6 hexadecimal digits"),
        (["verify", "base", "--all"], "not both"),
        (["run", "toy.yaml", "--workers", "0"], "--workers"),
    ],
)
def test_a_bad_request_is_one_clear_sentence_and_exits_2(folder: Path, arguments: list[str], told: str) -> None:
    done = headrace(folder, *arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder / ".headrace" / "runs").exists()


def test_a_prefect_server_that_does_not_answer_is_said_in_a_sentence(folder: Path) -> None:
    command = [sys.executable, "-m", "flows.cli", "run", "toy.yaml"]
    dead = environment() | {"PREFECT_API_URL": "http://127.0.0.1:9/api"}  # port 9, "discard": nothing listens there
    done = subprocess.run(command, cwd=folder, env=dead, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "the Prefect server http://127.0.0.1:9/api" in done.stderr
    assert "--no-prefect" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("place", ["file", "file/below"])
@pytest.mark.parametrize("options", [["--no-prefect"], []])
def test_a_store_that_cannot_be_is_said_in_a_sentence(folder: Path, place: str, options: list[str]) -> None:
    (folder / "file").write_text("")
    done = headrace(folder, "run", "toy.yaml", "--store", place, *options)
    assert done.returncode == 2
    assert "store" in done.stderr
    assert str(folder / "file") in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_run_saves_exits_with_its_signal_and_goes_on(folder: Path, number: signal.Signals) -> None:
    slow = ["--set", "better.max_steps=300", "--set", "better.pause=0.1"]
    process = start(folder, "run", "toy.yaml", "--no-prefect", *slow)
    read_until(process, r"better +running")
    wait_for_progress(folder, "better")
    process.send_signal(number)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    saved = re.search(r"^better: saved at step (\d+)", said, re.MULTILINE)
    assert saved is not None, said
    assert "Stopping: what runs is saved first." in said
    assert "Run the same command to go on from there." in said

    plan = headrace(folder, "plan", "toy.yaml", *slow).stdout
    assert f"saved progress at step {saved[1]}" in plan
    done = headrace(folder, "run", "toy.yaml", "--no-prefect", "--set", "better.max_steps=300")
    assert done.returncode == 0
    assert f"better  resumed at step {saved[1]}" in done.stdout


@pytest.mark.parametrize("gone", ["terminal", "pipe"])
def test_a_run_whose_output_is_gone_saves_and_exits_as_by_its_signal(folder: Path, gone: str) -> None:
    slow = ["--set", "better.max_steps=600", "--set", "better.pause=0.1"]
    command = [sys.executable, "-m", "flows.cli", "run", "toy.yaml", "--no-prefect", *slow]
    ours, its = pty.openpty() if gone == "terminal" else os.pipe()
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment(),
        stdout=its,
        stderr=its,
        start_new_session=True,
        # The terminal that hangs up signals the session whose own it is.
        preexec_fn=(lambda: fcntl.ioctl(1, termios.TIOCSCTTY, 0)) if gone == "terminal" else None,
    )
    os.close(its)
    said = b""
    while not re.search(rb"better.*(step [1-9]|running)", said):
        said += os.read(ours, 65536)
    wait_for_progress(folder, "better")
    os.close(ours)
    assert process.wait(60) == 128 + (signal.SIGHUP if gone == "terminal" else signal.SIGPIPE)
    [document] = json.loads(headrace(folder, "status", "--json").stdout)
    assert (document["state"], document["steps"]["better"]["status"]) == ("stopped", "stopped")
    assert "saved progress at step" in headrace(folder, "plan", "toy.yaml", *slow).stdout


def test_a_second_interrupt_kills_a_stage_that_does_not_stop(folder: Path) -> None:
    stubborn = ["better.max_steps=600", "better.pause=0.1", "better.ignore_stop=true"]
    process = start(folder, "run", "toy.yaml", "--no-prefect", *(word for item in stubborn for word in ("--set", item)))
    read_until(process, r"better +running")
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    read_until(process, "Stopping: what runs is saved first")
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Killing what still runs" in said
    assert "better: stopped before its first save; it starts again next time." in said


def test_a_store_that_is_lost_in_the_middle_of_a_run_is_no_bad_request(folder: Path) -> None:
    process = start(
        folder, "run", "toy.yaml", "--no-prefect", "--set", "model.max_steps=20", "--set", "model.pause=0.1"
    )
    read_until(process, r"model +running")
    (folder / ".headrace" / "runs").rename(folder / "runs-elsewhere")
    (folder / ".headrace" / "runs").write_text("in the way")
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 1, said
    assert "runs is a file where a folder must be" in said
    assert "run the same command once the store is back" in said
    assert "Traceback" not in said


def test_a_whole_run_in_prefect_with_a_server_of_its_own_is_interrupted_and_leaves_nothing_behind(folder: Path) -> None:
    slow = ["--set", "better.max_steps=600", "--set", "better.pause=0.1"]
    process = start(folder, "run", "toy.yaml", *slow)
    said = read_until(process, r"better +running")
    wait_for_progress(folder, "better")
    assert "Starting a Prefect server" in said
    [server] = [
        child for child in psutil.Process(process.pid).children() if "flows.service.local_server" in child.cmdline()
    ]
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=90)
    assert process.returncode == 128 + signal.SIGTERM, said
    assert re.search(r"^better: saved at step \d+", said, re.MULTILINE), said
    assert "Traceback" not in said
    assert not server.is_running()


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before its first answer", "while a step runs"])
def test_a_frozen_prefect_server_keeps_nobody_waiting(folder: Path, when: str) -> None:
    process = start(folder, "run", "toy.yaml", "--set", "better.max_steps=600", "--set", "better.pause=0.1")
    read_until(process, "Starting a Prefect server" if when.startswith("before") else r"better +running")
    command = psutil.Process(process.pid)
    server = next(child for child in command.children() if "flows.service.local_server" in child.cmdline())
    server.suspend()
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    if when.startswith("while"):
        read_until(process, r"better +stopped")
        process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)  # the server alone would be waited for for minutes
    assert process.returncode == 130
    assert psutil.wait_procs([server], timeout=30)[1] == []


def test_the_prefect_server_of_a_killed_run_ends_by_itself(folder: Path) -> None:
    program = (
        "from flows.service.local_server import LocalServer\nimport time\n"
        "server = LocalServer()\nprint(server._process.pid, flush=True)\ntime.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=folder, env=environment()
    )
    assert process.stdout is not None
    server = Path("/proc") / process.stdout.readline().strip()
    assert server.exists()
    process.kill()
    process.wait()
    for _ in range(600):
        if not server.exists() or " Z " in (server / "stat").read_text():
            return
        time.sleep(0.1)
    raise AssertionError("the server outlives the run that it was for")


def test_a_server_whose_run_is_gone_ends_also_where_its_own_end_hangs() -> None:
    program = (
        "import signal, threading, time\nfrom flows.service import local_server\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nlocal_server.STOP_SECONDS = 0.2\n"
        "threading.Thread(target=local_server._end_with_parent, daemon=True).start()\ntime.sleep(60)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment(), stdin=subprocess.DEVNULL, timeout=50)
    assert done.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_a_server_that_ends_while_it_starts_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one does where two first runs of a user make Prefect's database at once."""
    database = tmp_path / "later" / "prefect.db"
    monkeypatch.setenv("PREFECT_SERVER_DATABASE_CONNECTION_URL", f"sqlite+aiosqlite:///{database}")
    quiet_prefect()
    server = LocalServer()
    try:
        assert server._process.wait() != 0
        database.parent.mkdir()
        server.wait(500)
        assert database.is_file()
    finally:
        server.stop()


def test_on_a_terminal_the_table_is_drawn_in_place(folder: Path) -> None:
    parent, child = pty.openpty()
    command = [sys.executable, "-m", "flows.cli", "run", "toy.yaml", "--no-prefect"]
    process = subprocess.Popen(command, cwd=folder, env=environment() | {"TERM": "xterm"}, stdout=child, stderr=child)
    os.close(child)
    said = b""
    while True:
        try:
            data = os.read(parent, 65536)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        said += data
    os.close(parent)
    assert process.wait() == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said.decode())
    assert re.search(r"words +toy\.words +done +\d", text)
    assert re.search(r"report +toy\.report +done +\d", text)
    assert "Final model  better" in text


def test_the_listing_verbs_read_what_a_run_left(folder: Path) -> None:
    assert headrace(folder, "run", "toy.yaml", "--no-prefect").returncode == 0
    runs = json.loads(headrace(folder, "status", "--json").stdout)
    name = runs[0]["id"]
    assert runs[0]["state"] == "done"
    assert re.search(rf"{name} +toy +done", headrace(folder, "status").stdout)
    assert re.search(r"better +done", headrace(folder, "status", name[:6]).stdout)
    assert "read 18 characters" in headrace(folder, "logs", name, "words").stdout
    assert "step 3: loss 0.333" in headrace(folder, "logs", "model").stdout
    events = [json.loads(line) for line in headrace(folder, "logs", "--json").stdout.splitlines()]
    assert {event["step"] for event in events} == {"words", "model", "better", "report"}

    tree = headrace(folder, "lineage", "better").stdout
    assert re.search(r"^better  checkpoint  [0-9a-f]{12}", tree)
    assert "1 file, 18 B: a.txt" in tree
    graph = json.loads(headrace(folder, "lineage", f"{name}/better", "--json").stdout)
    assert len(graph["nodes"]) == 4
    assert headrace(folder, "lineage", graph["root"][7:17], "--mermaid").stdout.startswith("flowchart TD")

    pulled = headrace(folder, "pull", "better", "Ann's copy")
    assert pulled.returncode == 0
    command = pulled.stdout.splitlines()[-1].removeprefix("Check it at any time: ")
    assert subprocess.run(command, shell=True, cwd=folder, capture_output=True).returncode == 0
    assert headrace(folder, "pull", "better", "Ann's copy").returncode == 2

    near = headrace(folder, "lineage", "bettr")
    assert near.returncode == 2
    assert "Did you mean better?" in near.stderr
    not_a_model = headrace(folder, "sample", "words", "hello")
    assert not_a_model.returncode == 2
    assert "words is a dataset; sample takes a checkpoint" in not_a_model.stderr
    assert json.loads(headrace(folder, "refs", "--json").stdout) == []


def test_verify_names_a_damaged_blob_its_file_and_its_artifact(folder: Path) -> None:
    assert headrace(folder, "run", "toy.yaml", "--no-prefect").returncode == 0
    assert headrace(folder, "verify").stdout.startswith("ok: 8 artifacts, ")  # sources of three stages among them
    graph = json.loads(headrace(folder, "lineage", "better", "--json").stdout)
    entry = next(item for item in graph["nodes"][0]["files"] if item["path"] == "training.jsonl")
    blob = folder / ".headrace" / "blobs" / entry["sha256"][:2] / entry["sha256"]
    data = bytearray(blob.read_bytes())
    data[0] ^= 1
    blob.chmod(0o644)
    blob.write_bytes(data)
    for arguments in (["verify"], ["verify", "better"], ["verify", "--all"]):
        found = headrace(folder, *arguments)
        assert found.returncode == 1
        assert entry["sha256"] in found.stdout
        assert f"training.jsonl of artifact {graph['root']}" in found.stdout
    damages = json.loads(headrace(folder, "verify", "better", "--json").stdout)["damages"]
    assert [(item["path"], item["artifact"]) for item in damages] == [("training.jsonl", graph["root"])]
    assert headrace(folder, "verify", "words").returncode == 0


def test_help_imports_nothing_heavy() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "flows.cli", "--help"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not imported & {"prefect", "torch", "transformers", "pydantic", "pyarrow", "numpy", "matplotlib"}


def test_a_plan_imports_neither_torch_nor_prefect(folder: Path) -> None:
    program = (
        "import sys; from flows.command.running import Request, show_plan\n"
        "show_plan(Request('toy.yaml'), as_json=True)\n"
        "print(sorted({'torch', 'transformers', 'prefect'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stderr.strip() == "[]"
