"""`python -m stages run`: real processes running a toy stage."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stages.artifacts import (
    ancestors,
    append_log,
    collect,
    fetch,
    is_complete,
    open_store,
    publish,
    read_log,
    read_result,
    results,
    verify_all,
)

KEY = "ab" * 32
STAGE = "toy.counter"


def outcome_of(toy: Any, name: str = "one") -> dict[str, Any]:
    return json.loads((toy.root / "scratch" / name / "outcome.json").read_text())


def test_a_finished_stage_leaves_artifacts_a_result_and_no_progress(toy: Any) -> None:
    done = toy.run(toy.spec(total=5, record={"git": "abc", "attempt": 2}))
    assert done.returncode == 0, done.stderr
    events = toy.parse(done.stdout)
    assert [event["type"] for event in events] == ["progress"] * 5 + ["outcome"]
    assert events[0]["figures"] == {"loss": None}  # NaN is not JSON
    store = open_store(toy.store)
    result = read_result(store, STAGE, KEY)
    assert result is not None
    assert events[-1] | {"time": 0, "step": ""} == outcome_of(toy) | {"time": 0, "step": ""}
    assert (events[-1]["artifact"], events[-1]["outputs"]) == (result.artifact, result.outputs)
    fetch(store, result.artifact, toy.root / "out")
    assert (toy.root / "out" / "sum.txt").read_text() == "55"  # 1 + 4 + 9 + 16 + 25
    assert set(result.outputs) == {"trace"}  # the side output that was left empty is none
    assert result.metrics == {"total": 55.0, "ratio": 0.5}
    assert result.identity == {"total": 5, "behaviour": "count"}
    assert result.config["pause"] == 0.0
    assert (result.run, result.step, result.attempts, result.record["git"]) == ("run-1", "one", 2, "abc")
    assert result.logs == "logs/run-1/one.jsonl"
    assert "toy/counter/arithmetic.py" in result.code["files"]
    assert result.environment["libraries"]["torch"]
    assert not list(store.list("work/"))
    assert [path.name for path in (toy.root / "scratch" / "one").iterdir()] == ["outcome.json"]
    assert list(verify_all(store)) == []


def test_stray_output_never_reaches_the_events(toy: Any) -> None:
    done = toy.run(toy.spec())
    toy.parse(done.stdout)
    assert "a stray print" in done.stderr
    assert "a stray write" in done.stderr


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_no_text_that_a_stage_prints_ends_it(toy: Any, monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", encoding)  # as a locale without UTF-8 has it
    done = toy.run(toy.spec(behaviour="speak"))
    assert done.returncode == 0
    assert "caf\u00e9 \\ud800" in done.stderr


def test_a_full_disk_under_the_scratch_folder_is_one_sentence(toy: Any) -> None:
    ended = toy.run(toy.spec(behaviour="full"))
    assert ended.returncode == 1
    scratch = toy.root / "scratch" / "one"
    message = f"{scratch}: no space is left on the disk; free some, or choose a place on another disk"
    assert toy.parse(ended.stdout)[-1]["message"] == outcome_of(toy)["message"] == message


@pytest.mark.parametrize(
    ("behaviour", "code", "state", "message"),
    [
        ("refuse", 83, "refused", "data/train.jsonl line 3: field x is missing; add it"),
        ("tripwire", 80, "halted", "entropy fell"),
        ("nonfinite", 81, "halted", "loss is nan"),
        ("budget", 82, "halted", "10 s are spent"),
        ("crash", 1, "crashed", "ZeroDivisionError: no way"),
        ("exit", 1, "crashed", "SystemExit: 0"),
        ("nothing", 1, "crashed", "RuntimeError: stage toy.counter ended without writing anything to its output"),
    ],
)
def test_every_way_to_end_has_its_code_and_sentence(
    toy: Any, behaviour: str, code: int, state: str, message: str
) -> None:
    ended = toy.run(toy.spec(behaviour=behaviour))
    outcome = toy.parse(ended.stdout)[-1]
    assert ended.returncode == outcome["code"] == code
    assert (outcome["type"], outcome["state"], outcome["message"]) == ("outcome", state, message)
    assert outcome_of(toy)["code"] == code
    assert list(results(open_store(toy.store))) == []
    traceback = [event for event in toy.parse(ended.stdout) if event.get("level") == "error"]
    assert len(traceback) == (1 if state == "crashed" else 0)


def test_the_checkpoint_of_a_halted_run_is_kept_and_never_taken_for_its_result(toy: Any) -> None:
    store = open_store(toy.store)
    (toy.root / "data").mkdir()
    (toy.root / "data" / "x").write_text("x")
    data = publish(store, toy.root / "data", "source")
    for _ in range(2):  # a run that is started again halts again
        ended = toy.run(toy.spec(behaviour="halt", inputs={"data": data}))
        outcome = toy.parse(ended.stdout)[-1]
        assert (ended.returncode, outcome["code"], outcome["artifact"]) == (80, 80, None)
    kept = outcome["kept"]
    fetch(store, kept, toy.root / "kept")
    assert (toy.root / "kept" / "weights.txt").read_text() == "as they were"
    assert ancestors(store, kept) == [kept, data]
    assert read_result(store, STAGE, KEY) is None
    assert list(results(store, STAGE)) == []
    [record] = results(store)
    assert (record.stage, record.step, record.run, record.kind) == ("halted", "one", "run-1", "checkpoint")
    assert record.record == {"stage": STAGE, "key": KEY, "why": "entropy fell"}
    collect(store, delete=True, retention=3600.0, grace=0.0)
    assert is_complete(store, kept)
    assert list(verify_all(store)) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"total": -1}, "config of step one: total: Input should be greater than or equal to 0"),
        ({"config": {"total": 1, "totl": 2}}, "config of step one: totl: Extra inputs are not permitted"),
        ({"stage": "toy.absent"}, "there is no stage 'toy.absent' (no module toy.absent.config)"),
        ({"inputs": {"dta": "sha256:" + "0" * 64}}, "step one: stage toy.counter has no input dta (data)"),
        ({"resources": {"processes": 2}}, "step one: resources.processes is 2, and stage toy.counter runs in one"),
    ],
)
def test_a_bad_request_is_refused_in_one_sentence(toy: Any, changes: dict[str, Any], message: str) -> None:
    ended = toy.run(toy.spec(**changes))
    assert ended.returncode == 83
    assert toy.parse(ended.stdout)[-1]["message"].startswith(message)


def test_a_spec_that_cannot_be_read_is_refused(toy: Any) -> None:
    (toy.root / "bad.json").write_text('{"stage": "x"}')
    for path, words in ((toy.root / "bad.json", "step: Field required"), (toy.root / "none.json", "No such file")):
        ended = toy.run(path)
        assert ended.returncode == 83
        assert words in toy.parse(ended.stdout)[-1]["message"]


def test_inputs_are_fetched_verified_and_checked_for_their_kind(toy: Any) -> None:
    store = open_store(toy.store)
    folder = toy.root / "raw"
    folder.mkdir()
    (folder / "rows.txt").write_text("some rows")
    source, report = publish(store, folder, "source"), publish(store, folder, "report")
    assert toy.run(toy.spec(inputs={"data": source})).returncode == 0
    result = read_result(store, STAGE, KEY)
    assert result is not None
    fetch(store, result.artifact, toy.root / "out")
    assert (toy.root / "out" / "data.txt").read_text() == "rows.txt"

    ended = toy.run(toy.spec("kind", inputs={"data": report}, forced=True))
    assert ended.returncode == 83
    assert toy.parse(ended.stdout)[-1]["message"] == "step kind: input data is a report; it takes a source"

    blob = next(path for path in (toy.store / "blobs").rglob("*") if path.is_file() and path.read_text() == "some rows")
    blob.write_text("some rowz")
    ended = toy.run(toy.spec("damaged", inputs={"data": source}, forced=True))
    assert ended.returncode == 83
    message = toy.parse(ended.stdout)[-1]["message"]
    assert blob.name in message
    assert "--force" in message


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_next_run_goes_on_to_the_same_bytes(toy: Any, number: int) -> None:
    whole = toy.run(toy.spec("whole", key="cd" * 32, total=12))
    assert whole.returncode == 0
    events = toy.root / "events"
    process = toy.start(toy.spec(total=12, pause=0.2), events)
    toy.wait_for_progress(events, 3)
    process.send_signal(number)
    process.send_signal(number)  # a second one while it saves changes nothing
    assert process.wait(60) == 75
    stopped = toy.parse(events.read_text())
    count = stopped[-2]["step"] and stopped[-1]["message"].removeprefix("saved at step ")
    assert stopped[-1]["state"] == "stopped"

    resumed = toy.run(toy.spec(total=12))
    assert resumed.returncode == 0
    first = toy.parse(resumed.stdout)[0]
    assert first["type"] == "resumed"
    store = open_store(toy.store)
    ours, theirs = read_result(store, STAGE, KEY), read_result(store, STAGE, "cd" * 32)
    assert ours is not None
    assert theirs is not None
    assert (ours.artifact, ours.outputs) == (theirs.artifact, theirs.outputs)
    assert ours.seconds > int(count) * 0.2  # the time of the first attempt counts
    assert not list(store.list(f"work/{KEY}/"))


def test_a_killed_stage_resumes_from_its_last_save(toy: Any) -> None:
    events = toy.root / "events"
    process = toy.start(toy.spec(total=8, pause=0.1), events)
    toy.wait_for_progress(events, 4)
    process.kill()
    assert process.wait(60) == -signal.SIGKILL
    store = open_store(toy.store)
    assert read_result(store, STAGE, KEY) is None
    resumed = toy.run(toy.spec(total=8))
    assert resumed.returncode == 0
    assert toy.parse(resumed.stdout)[0]["type"] == "resumed"
    result = read_result(store, STAGE, KEY)
    assert result is not None
    assert result.metrics["total"] == 204.0  # 1 + 4 + ... + 64
    assert list(verify_all(store)) == []


def test_a_reader_that_has_gone_stops_neither_stage_nor_save(toy: Any) -> None:
    command = [sys.executable, "-m", "stages", "run", str(toy.spec(total=6, pause=0.05))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(60) == 0
    assert read_result(open_store(toy.store), STAGE, KEY) is not None


def test_a_forced_run_keeps_the_older_result_and_says_when_bytes_differ(toy: Any) -> None:
    assert toy.run(toy.spec()).returncode == 0
    again = toy.run(toy.spec(forced=True))
    assert [event for event in toy.parse(again.stdout) if event["type"] == "log"] == []
    arithmetic = toy.code / "toy" / "counter" / "arithmetic.py"
    arithmetic.write_text("def square(x):\n    return x * x * x\n")
    other = toy.run(toy.spec(forced=True))
    warnings = [event["text"] for event in toy.parse(other.stdout) if event.get("level") == "warning"]
    assert len(warnings) == 1
    assert "the same key gave other bytes" in warnings[0]
    result = read_result(open_store(toy.store), STAGE, KEY)
    assert result is not None
    assert [entry["same_bytes"] for entry in result.history] == [True, False]


def test_code_that_changed_after_planning_is_refused(toy: Any) -> None:
    from stages.fingerprint import stage_fingerprint

    planned = stage_fingerprint(STAGE, [], [toy.code])
    record = {"code": {"digest": planned.digest, "files": planned.files}}
    assert toy.run(toy.spec(record=record)).returncode == 0
    arithmetic = toy.code / "toy" / "counter" / "arithmetic.py"
    arithmetic.write_text("def square(x):\n    return x ** 2\n")
    ended = toy.run(toy.spec(record=record))
    assert ended.returncode == 83
    message = toy.parse(ended.stdout)[-1]["message"]
    assert message == "the code changed after the run was planned: toy/counter/arithmetic.py (square); run it again"


def test_code_that_is_edited_and_then_imported_during_the_run_is_refused(toy: Any) -> None:
    from stages.fingerprint import stage_fingerprint

    package = toy.code / "toy" / "counter"
    (package / "late.py").write_text("VALUE = 1\n")
    (package / "stage.py").write_text(
        "from pathlib import Path\n"
        "def run(context):\n"
        "    Path(__file__).with_name('late.py').write_text('VALUE = 2\\n')\n"
        "    from toy.counter import late\n"
        "    (context.output / 'value.txt').write_text(str(late.VALUE))\n"
    )
    planned = stage_fingerprint(STAGE, [], [toy.code])
    ended = toy.run(toy.spec(record={"code": {"digest": planned.digest, "files": planned.files}}))
    assert ended.returncode == 83
    assert "toy/counter/late.py was edited and then imported" in toy.parse(ended.stdout)[-1]["message"]
    assert read_result(open_store(toy.store), STAGE, KEY) is None


def test_a_store_that_is_a_file_is_one_sentence(toy: Any) -> None:
    toy.store.write_text("not a folder")
    ended = toy.run(toy.spec())
    outcome = toy.parse(ended.stdout)[-1]
    assert (ended.returncode, outcome["state"]) == (1, "crashed")
    assert outcome["message"].endswith("is a file, not a folder; give another place with --store")


def test_sets_iterate_in_the_same_order_in_every_process(toy: Any) -> None:
    (toy.code / "toy" / "counter" / "stage.py").write_text(
        "import os\n"
        "def run(context):\n"
        "    seed = os.environ['PYTHONHASHSEED']\n"
        "    (context.output / 'x').write_text(seed + ''.join({'ab', 'cd', 'ef', 'gh', 'ij'}))\n"
    )
    texts = set()
    for name, key in (("one", "1" * 64), ("two", "2" * 64)):
        environment = os.environ | {"PYTHONHASHSEED": "7" if name == "one" else "random"}
        command = [sys.executable, "-m", "stages", "run", str(toy.spec(name, key=key))]
        assert subprocess.run(command, env=environment, capture_output=True).returncode == 0
        result = read_result(open_store(toy.store), STAGE, key)
        assert result is not None
        fetch(open_store(toy.store), result.artifact, toy.root / name)
        texts.add((toy.root / name / "x").read_text())
    assert len(texts) == 1
    assert texts.pop().startswith("0")


def test_an_unknown_command_exits_2_and_shows_the_commands() -> None:
    ended = subprocess.run([sys.executable, "-m", "stages", "fly"], capture_output=True, text=True)
    assert ended.returncode == 2
    assert "run SPEC.json" in ended.stderr


def test_events_can_be_kept_as_the_log_of_a_run(toy: Any, tmp_path: Path) -> None:
    events = toy.parse(toy.run(toy.spec()).stdout)
    store = open_store(toy.store)
    for event in events:
        append_log(store, "run-1", "one", [event])
    assert list(read_log(store, "run-1", "one")) == events
