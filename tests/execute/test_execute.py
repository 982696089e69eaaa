"""Running plans: hits, failures, retries, stops and kills, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from toy_stages import Toys

from flows.command import listing
from flows.command.display import Board
from flows.command.running import Request, outcome_lines
from flows.endings import RunResult
from flows.execute import Execution, execute, run_all
from flows.lineage import verbs
from flows.names import UnknownName, resolve
from flows.plan import make_plan
from flows.recipe import load_recipe
from flows.reproduce import reproduce
from flows.runners.process import ProcessRunner
from stages.artifacts import list_runs, open_store, read_log, read_run, results

Event = dict[str, Any]


@pytest.fixture(scope="module")
def runner() -> Iterator[ProcessRunner]:
    made = ProcessRunner(preload=False, gpus=[])
    yield made
    made.close()


class Runs:
    """Runs recipes of toy stages, and keeps the events of the last run."""

    def __init__(self, toys: Toys, runner: ProcessRunner) -> None:
        self.toys, self.runner = toys, runner
        self.events: list[Event] = []
        self.count = 0
        self.react: Callable[[Event], None] = lambda event: None

    def hear(self, event: Event) -> None:
        self.events.append(event)
        self.react(event)

    def __call__(self, path: str, *overrides: str, store: str = "store", workers: int = 2, **options: Any) -> RunResult:
        self.events.clear()
        self.count += 1
        plan = make_plan(load_recipe(path, overrides), self.toys.folder / store, **options)
        return execute(plan, runner=self.runner, run_id=f"run-{self.count}", listener=self.hear, workers=workers)

    def states(self) -> list[str]:
        """ "step state" in the order told, waiting left out."""
        told = [event for event in self.events if event["type"] == "step" and event["state"] != "waiting"]
        return [f"{event['step']} {event['state']}" for event in told]


@pytest.fixture
def runs(toys: Toys, runner: ProcessRunner) -> Runs:
    return Runs(toys, runner)


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited too long"
        time.sleep(0.02)


ONE = "a: {stage: COUNT, total: 6}"


def test_a_secret_that_a_stage_says_is_heard_by_nobody(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOYS_API_TOKEN", "disk of toys")  # what the crash of the toy stage tells
    result = runs(runs.toys.recipe("a: {stage: COUNT, trouble: crash@1}"))
    assert result.steps["a"].message == "RuntimeError: the [secret] is on fire"
    assert any("[secret]" in str(event.get("text")) for event in runs.events)
    assert "disk of toys" not in str(runs.events)


def test_a_run_computes_what_is_missing_and_the_next_takes_it(runs: Runs) -> None:
    path = runs.toys.recipe("a: {stage: COUNT, total: 4}\nb: {stage: COUNT, inputs: {data: a}, beta: 0.5}")
    first = runs(path)
    assert first.state == "done"
    assert runs.states() == ["a running", "a done", "b running", "b done"]
    assert first.steps["a"].metrics == {"total": 10.0}  # 1 + 2 + 3 + 4
    second = runs(path)
    assert runs.states() == ["a cached", "b cached"]
    assert [step.artifact for step in second.steps.values()] == [step.artifact for step in first.steps.values()]
    assert second.steps["a"].metrics == {"total": 10.0}


def test_side_outputs_are_inputs_like_others(runs: Runs) -> None:
    (runs.toys.folder / "d.txt").write_text("x")
    stage = runs.toys.arithmetic.with_name("config.py")
    stage.write_text(stage.read_text().replace('Input(("source",', 'Input(("source", "rollouts",'))
    result = runs(runs.toys.recipe("a: {stage: COUNT, total: 7}\nb: {stage: COUNT, inputs: {data: a/trail}}"))
    store = open_store(runs.toys.store)
    [found] = [found for found in results(store) if found.step == "b"]
    assert found.inputs == {"data": result.steps["a"].outputs["trail"]}


def test_what_is_written_down_of_a_run_is_whole(runs: Runs) -> None:
    result = runs(runs.toys.recipe(ONE, head="name: counting\nparameters: {x: 1}\n"), "a.total=5")
    store = open_store(runs.toys.store)
    document = read_run(store, "run-1")
    assert document is not None
    assert (document["state"], document["recipe"], document["overrides"]) == ("done", "counting", ["a.total=5"])
    assert document["parameters"] == {"x": 1}
    step = document["steps"]["a"]
    assert (step["status"], step["artifact"], step["attempts"]) == ("done", result.steps["a"].artifact, 1)
    assert step["key"] == result.steps["a"].key
    assert step["logs"] == "logs/run-1/a.jsonl"
    logged = list(read_log(store, "run-1", "a"))
    assert [event["done"] for event in logged if event["type"] == "progress"] == [1, 2, 3, 4, 5]
    assert {"a stray print"} == {event["text"] for event in logged if event.get("level") == "stderr"}
    [found] = results(store)
    assert found.record["recipe"]["text"].startswith("name: counting")
    assert found.code["files"].keys() == {
        f"{runs.toys.package}/{name}"
        for name in ("__init__.py", "count/__init__.py", "count/config.py", "count/stage.py", "count/arithmetic.py")
    }
    assert list((runs.toys.store / "scratch").iterdir()) == []


def test_independent_steps_run_together_and_as_many_as_allowed(runs: Runs) -> None:
    path = runs.toys.recipe("".join(f"{n}: {{stage: COUNT, beta: {i}.0, delay: 0.1}}\n" for i, n in enumerate("abc")))
    runs(path, workers=3)
    assert sorted(runs.states()[:3]) == ["a running", "b running", "c running"]
    runs(path, "a.beta=7", "b.beta=8", "c.beta=9", workers=1)
    assert runs.states() == ["a running", "a done", "b running", "b done", "c running", "c done"]


def test_two_steps_with_one_key_are_computed_once(runs: Runs) -> None:
    result = runs(runs.toys.recipe("a: {stage: COUNT, delay: 0.05}\nb: {stage: COUNT, delay: 0.05}"))
    assert sorted(step.status for step in result.steps.values()) == ["cached", "done"]
    assert result.steps["a"].artifact == result.steps["b"].artifact


def test_a_failed_step_skips_what_needs_it_and_the_rest_is_finished(runs: Runs) -> None:
    path = runs.toys.recipe("""
        bad: {stage: COUNT, beta: 1.0, trouble: refuse}
        next: {stage: COUNT, inputs: {data: bad}}
        last: {stage: COUNT, inputs: {data: next}}
        good: {stage: COUNT, beta: 2.0, delay: 0.05}
        better: {stage: COUNT, inputs: {data: good}}
    """)
    result = runs(path)
    assert result.state == "failed"
    assert {name: step.status for name, step in result.steps.items()} == {
        "bad": "failed",
        "next": "skipped",
        "last": "skipped",
        "good": "done",
        "better": "done",
    }
    assert (result.steps["bad"].code, result.steps["bad"].message) == (83, "data line 3: it is blank")
    assert result.steps["next"].message == "not run, for bad failed"
    document = read_run(open_store(runs.toys.store), "run-1")
    assert document is not None
    assert document["state"] == "failed"
    assert document["steps"]["bad"]["message"] == "data line 3: it is blank"


@pytest.mark.parametrize(
    ("trouble", "code", "attempts", "message"),
    [
        ("refuse", 83, 1, "data line 3: it is blank"),
        ("tripwire@3", 80, 1, "entropy fell to 0.08"),  # a verdict is never tried again
        ("crash@1", 1, 1, "RuntimeError: the disk of toys is on fire"),  # nothing was saved before it
        ("crash@3", 1, 2, "RuntimeError: the disk of toys is on fire"),  # progress, then none
        ("abort@1", -6, 1, "killed by SIGABRT"),  # by itself: a crash
        ("kill@1", -9, 3, "killed by SIGKILL (out of memory?)"),  # may be the machine's fault
    ],
)
def test_an_attempt_is_repeated_only_where_that_can_help(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, trouble: str, code: int, attempts: int, message: str
) -> None:
    monkeypatch.setattr("flows.execute._PAUSES", (0.01, 0.01))
    result = runs(runs.toys.recipe(ONE), f"a.trouble={trouble}").steps["a"]
    assert (result.status, result.code, result.attempts, result.message) == ("failed", code, attempts, message)


def test_a_halted_step_names_its_checkpoint_and_the_next_run_gives_another_result(
    runs: Runs, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, store_url = runs.toys.recipe(ONE), runs.toys.store
    halted = runs(path, "a.trouble=tripwire@3")
    step, store = halted.steps["a"], open_store(store_url)
    assert step.kept is not None
    assert step.artifact is None
    told = "\n".join(outcome_lines(make_plan(load_recipe(path), store), halted, Board([]), Request(path), 1.0))
    assert f"Its checkpoint is kept, apart from results: headrace lineage {step.kept}" in told
    listing.pull_to(str(store_url), step.kept, tmp_path / "kept", as_json=False)
    assert (tmp_path / "kept" / "step.txt").read_text() == "3"
    listing.status(str(store_url), "run-1", 1, as_json=False)
    verbs.lineage(
        str(store_url), step.kept, up=True, down=False, all_files=False, as_mermaid=False, limit=10, as_json=False
    )
    shown = capsys.readouterr().out
    assert f"(checkpoint kept: {step.kept})" in shown
    assert "stage halted, run run-1" in shown
    with pytest.raises(UnknownName):
        resolve(store, "a")
    with pytest.raises(UnknownName, match="kept from a halted run"):
        reproduce(str(store_url), step.kept, as_json=False)
    plan = make_plan(load_recipe(path), store)
    assert plan["a"].status == "miss"
    done = runs(path)
    assert (done.steps["a"].status, done.steps["a"].kept) == ("done", None)
    assert resolve(store, "a").digest == done.steps["a"].artifact != step.kept


def test_a_stage_of_the_users_own_is_reproduced_also_where_its_folder_is_gone(
    runner: ProcessRunner, tmp_path: Path
) -> None:
    toys = Toys(tmp_path / "here")
    Runs(toys, runner)(toys.recipe(ONE), store="../store")

    def reproduced() -> str:
        command = [sys.executable, "-m", "flows", "reproduce", "a", "--store", str(tmp_path / "store")]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "same bytes" in done.stdout
        return done.stdout

    assert "note" not in reproduced()
    toys.folder.rename(tmp_path / "elsewhere")
    assert f"note: {toys.folder} is not here" in reproduced()


@pytest.mark.parametrize("trouble", ["kill@4", "crash@4"])
def test_a_step_that_is_tried_again_goes_on_and_ends_with_the_same_bytes(runs: Runs, trouble: str) -> None:
    path = runs.toys.recipe(ONE)
    expected = runs(path, store="other").steps["a"].artifact
    result = runs(path, f"a.trouble={trouble}", f"a.marker={runs.toys.folder / 'marker'}")
    assert (result.steps["a"].status, result.steps["a"].attempts) == ("done", 2)
    assert [event["at"] for event in runs.events if event["type"] == "resumed"] == [3]
    assert result.steps["a"].artifact == expected
    [found] = results(open_store(runs.toys.store))
    assert found.attempts == 2


def test_a_stopped_run_saves_and_the_next_goes_on(runs: Runs) -> None:
    path = runs.toys.recipe("a: {stage: COUNT, total: 40}\nb: {stage: COUNT, inputs: {data: a}}")
    expected = runs(path, store="other").steps["a"].artifact
    plan = make_plan(load_recipe(path, ["a.delay=0.1"]), runs.toys.store)
    execution: Execution

    def stop_after_three(event: Event) -> None:
        if event["type"] == "saved" and event["at"] >= 3:
            execution.stop()

    execution = Execution(plan, runner=runs.runner, run_id="stopped", listener=stop_after_three, grace=60)
    execution.begin()
    stopped = execution.run_step("a")
    after = execution.run_step("b")
    result = execution.finish()
    assert (result.state, stopped.status, stopped.code, after.status) == ("stopped", "stopped", 75, "stopped")
    assert stopped.saved_step is not None
    assert 3 <= stopped.saved_step < 40
    assert stopped.message.startswith("stopped at step")
    assert make_plan(load_recipe(path), runs.toys.store)["a"].reason == f"saved progress at step {stopped.saved_step}"
    again = runs(path)
    assert [event["at"] for event in runs.events if event["type"] == "resumed"] == [stopped.saved_step]
    assert again.steps["a"].artifact == expected


def test_a_step_that_does_not_stop_in_time_is_killed(runs: Runs) -> None:
    path = runs.toys.recipe("a: {stage: COUNT, total: 2, delay: 60.0}")
    plan = make_plan(load_recipe(path), runs.toys.store)
    execution = Execution(plan, runner=runs.runner, run_id="killed", grace=0.2, listener=runs.hear)
    execution.begin()

    def stop_when_it_runs() -> None:
        until(lambda: any((Path(runs.toys.store) / "scratch").glob("killed@*/a-1/output")))
        execution.stop()

    import threading

    thread = threading.Thread(target=stop_when_it_runs)
    thread.start()
    result = execution.run_step("a")
    thread.join()
    assert (result.status, result.code) == ("stopped", -9)
    execution.finish()


def test_an_error_of_the_listener_leaves_no_stage_behind(runs: Runs) -> None:
    def fail(event: Event) -> None:
        if event["type"] == "saved":
            raise ZeroDivisionError("a defect of the display")

    runs.react = fail
    with pytest.raises(ZeroDivisionError):
        runs(runs.toys.recipe("a: {stage: COUNT, total: 10000, delay: 0.01}"))
    assert list((runs.toys.store / "scratch").iterdir()) == []
    [document] = list_runs(open_store(runs.toys.store))
    assert document["state"] == "stopped"


def test_a_file_that_changes_after_the_plan_fails_the_step_that_reads_it(runs: Runs) -> None:
    data = runs.toys.folder / "d.txt"
    data.write_text("before")
    plan = make_plan(
        load_recipe(runs.toys.recipe("a: {stage: COUNT, inputs: {data: d.txt}}\nb: {stage: COUNT}")), runs.toys.store
    )
    data.write_text("after")
    result = execute(plan, runner=runs.runner, run_id="run")
    assert (result.steps["a"].status, result.steps["b"].status) == ("failed", "done")
    assert "changed while the run was starting; run it again" in result.steps["a"].message


def test_steps_are_run_in_order(runs: Runs) -> None:
    plan = make_plan(
        load_recipe(runs.toys.recipe("a: {stage: COUNT}\nb: {stage: COUNT, inputs: {data: a}}")), runs.toys.store
    )
    execution = Execution(plan, runner=runs.runner, run_id="run")
    execution.begin()
    with pytest.raises(ValueError, match="step b needs a, which has not been run"):
        execution.run_step("b")


# The flow itself in a process of its own, to be interrupted and killed

FLOW = """
    import sys
    from flows.execute import execute
    from flows.plan import make_plan
    from flows.recipe import load_recipe
    from flows.runners.process import ProcessRunner

    if __name__ == "__main__":
        path, store, server = sys.argv[1], sys.argv[2], sys.argv[3] == "server"
        runner = ProcessRunner(fork_server=server, preload=False)
        result = execute(make_plan(load_recipe(path, sys.argv[4:]), store), runner=runner, run_id="flow")
        runner.close()
        print(result.state, result.steps["a"].status, result.steps["a"].saved_step)
"""


def start_flow(toys: Toys, path: str, *more: str) -> subprocess.Popen[str]:
    script = toys.folder / "flow.py"
    script.write_text(textwrap.dedent(FLOW))
    root = str(Path(__file__).parents[2])
    return subprocess.Popen(
        [sys.executable, str(script), path, str(toys.store), *more],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": root},
    )


def saves(toys: Toys) -> int:
    return len(list((toys.store / "work").glob("*/*.json")))


@pytest.mark.parametrize("how", ["server", "plain"])
def test_ctrl_c_saves_and_ends_the_run(runs: Runs, how: str) -> None:
    path = runs.toys.recipe("a: {stage: COUNT, total: 1000}")
    flow = start_flow(runs.toys, path, how, "a.delay=0.02")
    until(lambda: saves(runs.toys) >= 2)
    flow.send_signal(signal.SIGINT)
    said, _ = flow.communicate(timeout=60)
    state, status, saved = said.split()
    assert (flow.returncode, state, status) == (0, "stopped", "stopped")
    assert 2 <= int(saved) < 1000


def stages_of(toys: Toys) -> list[int]:
    """The processes that work in the store's scratch folder, by their open files."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            opened = [os.readlink(link) for link in (folder / "fd").iterdir()]
        except OSError:
            continue
        if any(name.startswith(str(toys.store / "scratch")) for name in opened):
            found.append(int(folder.name))
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
@pytest.mark.parametrize("how", ["server", "plain"])
def test_a_killed_flow_leaves_no_stage_and_the_next_run_ends_with_the_same_bytes(runs: Runs, how: str) -> None:
    path = runs.toys.recipe("a: {stage: COUNT, total: 40}")
    expected = runs(path, store="other").steps["a"].artifact
    flow = start_flow(runs.toys, path, how, "a.delay=0.2")
    until(lambda: saves(runs.toys) >= 2)
    assert len([pid for pid in stages_of(runs.toys) if pid != flow.pid]) == 1
    flow.kill()
    flow.wait()
    until(lambda: not stages_of(runs.toys))
    result = runs(path)
    [resumed] = [event["at"] for event in runs.events if event["type"] == "resumed"]
    assert resumed >= 2
    assert result.steps["a"].artifact == expected


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_a_fork_server_that_dies_costs_one_attempt(toys: Toys) -> None:
    own = Runs(toys, ProcessRunner(preload=False))
    path = toys.recipe("a: {stage: COUNT, total: 60, delay: 0.02}")

    def kill_the_server(event: Event) -> None:
        if event["type"] == "saved" and event["at"] == 3 and own.runner._server is not None:
            own.runner._server._process.kill()

    own.react = kill_the_server
    result = own(path)
    own.runner.close()
    assert (result.steps["a"].status, result.steps["a"].attempts) == ("done", 2)


def test_a_stage_that_holds_too_much_memory_is_killed_and_told(runs: Runs) -> None:
    path = runs.toys.recipe("a: {stage: COUNT, trouble: memory@1, resources: {memory: 200MB}}")
    result = runs(path).steps["a"]
    assert (result.status, result.attempts) == ("failed", 1)
    assert "over its resources.memory of 190.7 MiB; raise that" in result.message


def test_gpus_that_are_not_there_are_refused(runs: Runs) -> None:
    result = runs(runs.toys.recipe("a: {stage: COUNT, resources: {gpus: 2}}")).steps["a"]
    assert result.status == "failed"
    assert "step a asks for 2 GPUs (resources.gpus), and this machine has none; set resources.gpus: 0" in result.message


def test_code_that_breaks_while_it_is_edited_fails_the_step_with_its_place(runs: Runs) -> None:
    path = runs.toys.recipe("a: {stage: COUNT}")
    plan = make_plan(load_recipe(path), runs.toys.store)
    runs.toys.arithmetic.write_text("def add(a, b) return a\n")
    result = execute(plan, runner=runs.runner, run_id="run").steps["a"]
    assert result.status == "failed"
    assert "arithmetic.py:1: not valid Python" in result.message


def test_two_runs_of_one_recipe_compute_each_step_once(runs: Runs, runner: ProcessRunner) -> None:
    """The second run waits for the first, says so, and takes its results."""
    path = runs.toys.recipe("a: {stage: COUNT, total: 6, delay: 0.5}\nb: {stage: COUNT, inputs: {data: a}}")
    other = Runs(runs.toys, runner)
    other.count = 10
    ended: list[RunResult] = []
    thread = threading.Thread(target=lambda: ended.append(other(path)))
    started = threading.Event()
    runs.react = lambda event: started.set() if event["type"] == "progress" else None
    first = threading.Thread(target=lambda: ended.append(runs(path)))
    first.start()
    assert started.wait(60)
    thread.start()
    first.join()
    thread.join()
    assert [result.state for result in ended] == ["done", "done"]
    waited = [event["for"] for event in other.events if event["type"] == "waiting" and event["for"]]
    assert waited[0].startswith("step a of run run-1 (process ")
    assert "a cached" in other.states()
    store = open_store(runs.toys.store)
    assert {(result.step, len(result.history)) for result in results(store)} == {("a", 0), ("b", 0)}
    [told] = [event for event in other.events if event["type"] == "step" and event["state"] == "cached"][:1]
    assert told["message"] == "computed by run run-1"


def test_a_run_whose_fork_server_is_frozen_can_be_killed(toys: Toys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.runners.process._KILLED", 0.5)
    plan = make_plan(load_recipe(toys.recipe("a: {stage: COUNT, total: 900, delay: 0.1}")), toys.store)
    frozen: list[psutil.Process] = []

    def react(event: Event) -> None:
        if event["type"] == "saved" and not frozen:
            [server] = set(psutil.Process().children()) - before
            frozen.extend([server, *server.children()])
            server.suspend()
            threading.Thread(target=execution.stop, kwargs={"kill": True}).start()

    before = set(psutil.Process().children())
    runner = ProcessRunner(preload=False)
    try:
        execution = Execution(plan, runner=runner, run_id="frozen", listener=react)
        result = run_all(execution)
    finally:
        runner.close()
    assert (result.state, result.steps["a"].status) == ("stopped", "stopped")
    assert result.steps["a"].saved_step
    _, alive = psutil.wait_procs(frozen, timeout=60)
    assert not alive
    assert set(psutil.Process().children()) <= before
