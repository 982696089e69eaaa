"""`python -m stages serve`: a real server forking real stages."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from stages.artifacts import fetch, open_store, read_manifest, read_result
from stages.fingerprint import needs_torch

STAGE = "toy.counter"


def gone(pid: int, seconds: float = 30) -> bool:
    """Whether a process that is not our child has ended (or is a zombie) before the time is up."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_stages_run_side_by_side_and_end_with_their_codes(toy: Any, server: Any) -> None:
    assert server.ready == {"type": "ready", "pid": server.process.pid}
    server.start("good", toy.spec("good", key="1" * 64))
    ended = [server.answer()]
    server.start("bad", toy.spec("bad", key="2" * 64, behaviour="refuse"))
    ended.append(server.answer())
    assert {"type": "exited", "id": "good", "code": 0, "signal": None} in ended
    assert {"type": "exited", "id": "bad", "code": 83, "signal": None} in ended
    assert server.events("good")[-1]["state"] == "done"
    assert server.events("bad")[-1]["state"] == "refused"
    assert "a stray print" in (server.folder / "good.err").read_text()
    assert read_result(open_store(toy.store), STAGE, "1" * 64) is not None
    assert server.close() == 0


def test_term_saves_kill_kills_and_both_resume_to_the_same_bytes(toy: Any, server: Any) -> None:
    server.start("whole", toy.spec("whole", key="3" * 64, total=10))
    assert server.answer()["code"] == 0
    server.start("stopped", toy.spec("stopped", key="1" * 64, total=10, pause=0.2))
    server.start("killed", toy.spec("killed", key="2" * 64, total=10, pause=0.2))
    toy.wait_for_progress(server.folder / "stopped.events", 2)
    toy.wait_for_progress(server.folder / "killed.events", 2)
    server.ask({"id": "stopped", "signal": "TERM"})
    server.ask({"id": "killed", "signal": "KILL"})
    ends = {answer["id"]: answer for answer in (server.answer(), server.answer())}
    assert ends["stopped"] == {"type": "exited", "id": "stopped", "code": 75, "signal": None}
    assert ends["killed"] == {"type": "exited", "id": "killed", "code": None, "signal": "SIGKILL"}
    server.ask({"id": "killed", "signal": "TERM"})  # it has ended; nothing happens
    artifacts = set()
    for name, key in (("stopped", "1" * 64), ("killed", "2" * 64), ("whole", "3" * 64)):
        if name != "whole":
            server.start(name, toy.spec(name, key=key, total=10))
            assert server.answer()["code"] == 0
            assert "resumed" in [event["type"] for event in server.events(name)]
        result = read_result(open_store(toy.store), STAGE, key)
        assert result is not None
        artifacts.add(result.artifact)
    assert len(artifacts) == 1


def test_a_crash_of_native_code_is_told_as_its_signal(toy: Any, server: Any) -> None:
    server.start("abort", toy.spec(behaviour="abort"))
    assert server.answer() == {"type": "exited", "id": "abort", "code": None, "signal": "SIGABRT"}


def test_stages_run_the_code_that_is_on_disk_when_they_start(toy: Any, server: Any) -> None:
    server.start("before", toy.spec("before", key="1" * 64, total=3))
    assert server.answer()["code"] == 0
    (toy.code / "toy" / "counter" / "arithmetic.py").write_text("def square(x):\n    return 100 * x * x\n")
    server.start("after", toy.spec("after", key="2" * 64, total=3))
    assert server.answer()["code"] == 0
    totals = [read_result(open_store(toy.store), STAGE, key * 64).metrics["total"] for key in "12"]  # type: ignore[union-attr]
    assert totals == [14.0, 1400.0]


def test_the_end_of_requests_lets_stages_save_before_the_server_exits(toy: Any, server: Any) -> None:
    pid = server.start("slow", toy.spec(total=500, pause=0.1))["pid"]
    toy.wait_for_progress(server.folder / "slow.events", 2)
    assert server.close() == 0
    assert gone(pid, 0.2)
    assert server.events("slow")[-1]["state"] == "stopped"
    assert list(open_store(toy.store).list("work/"))


def test_a_server_that_is_asked_to_end_lets_its_stages_save(toy: Any, server: Any) -> None:
    server.start("slow", toy.spec(total=500, pause=0.1))
    toy.wait_for_progress(server.folder / "slow.events", 2)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    assert server.events("slow")[-1]["state"] == "stopped"


def test_stages_save_when_the_server_is_killed(toy: Any, server: Any) -> None:
    pid = server.start("slow", toy.spec(total=500, pause=0.1))["pid"]
    toy.wait_for_progress(server.folder / "slow.events", 2)
    server.process.kill()
    assert gone(pid)
    assert server.events("slow")[-1]["state"] == "stopped"


def test_stages_that_do_not_stop_are_killed_after_the_grace_period(toy: Any, tmp_path: Path) -> None:
    stage = toy.code / "toy" / "counter" / "stage.py"
    stage.write_text("import time\ndef run(context):\n    context.progress(1, 2)\n    time.sleep(600)\n")
    command = [sys.executable, "-m", "stages", "serve", "--lazy", "--grace", "0.5"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        process.stdin.write(f'{{"id": "x", "spec": "{toy.spec()}", "events": "{tmp_path}/events"}}\n')
        process.stdin.flush()
        toy.wait_for_progress(tmp_path / "events", 1)
        answers, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert answers.splitlines()[-1] == '{"type": "exited", "id": "x", "code": null, "signal": "SIGKILL"}'


def test_what_a_stage_leaves_running_is_killed_with_it(toy: Any, server: Any) -> None:
    leader = server.start("child", toy.spec(behaviour="child", total=1))["pid"]
    assert server.answer()["code"] == 0
    # The child of the stage slept in the stage's process group; no member of that group is left.
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            os.killpg(leader, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError("the stage's child is still there")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the kernel for orphans")
@pytest.mark.parametrize("end", ["done", "killed"])
def test_a_daemon_that_has_left_the_session_of_its_stage_is_killed_with_it(toy: Any, server: Any, end: str) -> None:
    other = server.start("other", toy.spec("other", key="cd" * 32, total=400, pause=0.05))["pid"]
    server.start("one", toy.spec(behaviour="daemon", total=2 if end == "done" else 400, pause=0.05))
    toy.wait_for_progress(server.folder / "one.events", 1)
    daemon = int((toy.root / "scratch" / "one" / "daemon.pid").read_text())
    if end == "killed":
        server.ask({"id": "one", "signal": "KILL"})
    assert server.answer()["id"] == "one"
    assert gone(daemon)
    assert not gone(other, seconds=0.1)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the kernel for orphans")
def test_a_stage_of_its_own_takes_its_daemon_along(toy: Any) -> None:
    stage = toy.start(toy.spec(behaviour="daemon", total=1), toy.root / "events")
    assert stage.wait(60) == 0
    assert gone(int((toy.root / "scratch" / "one" / "daemon.pid").read_text()), seconds=0.1)


def test_events_can_go_to_a_pipe_that_is_being_read(toy: Any, server: Any) -> None:
    pipe = server.folder / "pipe"
    os.mkfifo(pipe)
    server.ask({"id": "unread", "spec": str(toy.spec()), "events": str(pipe)})
    assert server.answer()["type"] == "refused"  # nobody reads it
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reader, True)
    server.ask({"id": "read", "spec": str(toy.spec()), "events": str(pipe)})
    assert server.answer()["type"] == "started"
    with open(reader, encoding="utf-8") as file:
        events = toy.parse(file.read())  # up to the end of the stage
    assert events[-1]["state"] == "done"


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"id": "x", "spec": "/nowhere/spec.json", "events": "e"}, "cannot read the spec /nowhere/spec.json"),
        ({"id": "x", "spec": "SPEC", "events": "/nowhere/events"}, "cannot open the events"),
        ({"id": "x", "spec": "SPEC"}, "cannot open the events"),
        ({"id": "x", "signal": "HUP"}, "unknown signal 'HUP'"),
        ({"name": "x"}, "not a JSON object with an id"),
        ([1, 2], "not a JSON object with an id"),
    ],
)
def test_a_bad_request_is_refused_and_the_server_goes_on(toy: Any, server: Any, request_: Any, words: str) -> None:
    if isinstance(request_, dict) and request_.get("spec") == "SPEC":
        request_ = request_ | {"spec": str(toy.spec())}
    server.ask(request_)
    answer = server.answer()
    assert answer["type"] == "refused"
    assert words in answer["message"]
    server.start("good", toy.spec())
    assert server.answer()["code"] == 0


def test_the_same_id_cannot_run_twice_at_once(toy: Any, server: Any) -> None:
    server.start("slow", toy.spec("slow", total=500, pause=0.1))
    refused = server.start("slow", toy.spec("other", key="1" * 64))
    assert refused == {"type": "refused", "id": "slow", "message": "slow is running already"}
    assert server.close() == 0


def test_ctrl_c_in_the_terminal_is_left_to_the_parent(toy: Any, server: Any) -> None:
    server.process.send_signal(signal.SIGINT)
    server.start("good", toy.spec())
    assert server.answer()["code"] == 0


def test_needs_torch_is_read_without_importing(toy: Any) -> None:
    assert needs_torch(STAGE, [toy.code]) is False
    config = toy.code / "toy" / "counter" / "config.py"
    config.write_text(config.read_text().replace("NEEDS_TORCH: ClassVar[bool] = False", "NEEDS_TORCH = True"))
    assert needs_torch(STAGE, [toy.code]) is True
    config.write_text("raise SystemExit('imported')\nclass Config:\n    NEEDS_TORCH = False\n")
    assert needs_torch(STAGE, [toy.code]) is False
    assert needs_torch("toy.absent", [toy.code]) is True


def test_torch_is_loaded_once_for_the_stages_that_need_it_and_works_after_the_fork(toy: Any, server: Any) -> None:
    package = toy.code / "toy" / "counter"
    config = (package / "config.py").read_text()
    (package / "config.py").write_text(config.replace("    NEEDS_TORCH: ClassVar[bool] = False\n", ""))
    (package / "stage.py").write_text(
        "import sys\n"
        "LOADED = 'torch' in sys.modules and 'transformers' in sys.modules\n"
        "import torch\n"
        "def run(context):\n"
        "    x = torch.arange(90000.0).reshape(300, 300).requires_grad_()\n"
        "    (x @ x).sum().backward()\n"
        "    ones = float((torch.ones(400, 400) @ torch.ones(400, 400)).sum())\n"
        "    (context.output / 'x').write_text(f'{LOADED} {ones} {x.grad.isfinite().all().item()}')\n"
    )
    for name, key in (("first", "1" * 64), ("second", "2" * 64)):
        server.start(name, toy.spec(name, key=key))
        assert server.answer()["code"] == 0
        result = read_result(open_store(toy.store), STAGE, key)
        assert result is not None
        assert result.environment["threads"] >= 1
        # 400 * 400 * 400
        fetch(open_store(toy.store), result.artifact, toy.root / name)
        assert (toy.root / name / "x").read_text() == "True 64000000.0 True"


def test_without_lazy_torch_is_loaded_in_idle_moments_and_requests_are_still_served(toy: Any, tmp_path: Path) -> None:
    package = toy.code / "toy" / "counter"
    (package / "stage.py").write_text(
        "import sys\ndef run(context):\n    (context.output / 'x').write_text(str('accelerate' in sys.modules))\n"
    )
    command = [sys.executable, "-m", "stages", "serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        texts = []
        for number in range(100):
            key = f"{number:064x}"
            spec = toy.spec(f"s{number}", key=key)
            process.stdin.write(f'{{"id": "{number}", "spec": "{spec}", "events": "{tmp_path}/events-{number}"}}\n')
            process.stdin.flush()
            for line in process.stdout:
                if '"exited"' in line:
                    assert f'"id": "{number}", "code": 0' in line
                    break
            result = read_result(open_store(toy.store), STAGE, key)
            assert result is not None
            manifest = read_manifest(open_store(toy.store), result.artifact)
            texts.append(open_store(toy.store).get(manifest.files[0].blob).decode())
            if texts[-1] == "True":
                break
            time.sleep(0.4)  # longer than the moment that counts as idle
        process.stdin.close()
        assert process.wait(60) == 0
    assert texts[0] == "False"
    assert texts[-1] == "True"
