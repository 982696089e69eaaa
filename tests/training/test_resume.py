"""Kill it anywhere: the run that goes on ends with the same bytes."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_runs import folder_bytes, make_dataset

from stages.contract import Stopped
from stages.pretrain.config import Config as PretrainConfig
from stages.pretrain.stage import run as pretrain
from stages.sft.config import Config as SftConfig
from stages.sft.stage import run as sft

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def settings(**more):
    return {"train_batch_size": 5, "learning_rate": 1e-2, "warmup_steps": 2, "save_seconds": 0} | more


def once(attempt, run, config, inputs, key):
    trial = attempt(config, inputs, key=key)
    run(trial.context)
    return trial


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_stopped_at_every_step_ends_with_the_bytes_of_one_that_was_not(attempt, tmp_path, optimizer):
    data = make_dataset(tmp_path / "data")
    config = PretrainConfig(**SIZES, **settings(max_steps=7, optimizer=optimizer, per_device_train_batch_size=2))
    whole = once(attempt, pretrain, config, {"data": data}, "aa" * 32)
    for step in range(7):
        checks = iter([False, True])  # one step an attempt, then stop
        trial = attempt(config, {"data": data}, key="bb" * 32, stop=lambda checks=checks: next(checks, False))
        if step < 6:
            with pytest.raises(Stopped, match=f"saved at step {step + 1} of 7"):
                pretrain(trial.context)
        else:
            pretrain(trial.context)
        if step:
            assert {"type": "resumed", "at": step} in trial.events
    assert folder_bytes(trial.output) == folder_bytes(whole.output)


def test_dropout_goes_on_from_the_saved_random_stream(attempt, tmp_path):
    data = make_dataset(tmp_path / "data", holds="chat")
    base = once(attempt, pretrain, PretrainConfig(**SIZES, **settings(max_steps=1)), {"data": data}, "aa" * 32)
    config_file = base.output / "config.json"
    content = json.loads(config_file.read_text()) | {"attention_dropout": 0.3}
    config_file.write_text(json.dumps(content))
    inputs = {"model": base.output, "data": data}
    config = SftConfig(**settings(max_steps=6))
    whole = once(attempt, sft, config, inputs, "cc" * 32)
    checks = iter([False] * 3 + [True])
    stopped = attempt(config, inputs, key="dd" * 32, stop=lambda: next(checks))
    with pytest.raises(Stopped):
        sft(stopped.context)
    resumed = once(attempt, sft, config, inputs, "dd" * 32)
    assert folder_bytes(resumed.output) == folder_bytes(whole.output)
    content["attention_dropout"] = 0.0
    config_file.write_text(json.dumps(content))
    without = once(attempt, sft, config, inputs, "ee" * 32)
    assert folder_bytes(without.output)["model.safetensors"] != folder_bytes(whole.output)["model.safetensors"]


def test_how_often_progress_is_saved_changes_no_byte(attempt, tmp_path):
    data = make_dataset(tmp_path / "data")
    outputs = []
    for i, every in enumerate((None, 1, 3)):
        config = PretrainConfig(**SIZES, **settings(max_steps=7, save_steps=every))
        outputs.append(folder_bytes(once(attempt, pretrain, config, {"data": data}, f"{i:08x}").output))
    assert outputs[0] == outputs[1] == outputs[2]


def test_another_seed_gives_another_checkpoint(attempt, tmp_path):
    data = make_dataset(tmp_path / "data")
    outputs = [
        folder_bytes(
            once(
                attempt,
                pretrain,
                PretrainConfig(**SIZES, **settings(max_steps=2, seed=seed)),
                {"data": data},
                f"{seed:08x}",
            ).output
        )
        for seed in (0, 1)
    ]
    assert outputs[0]["model.safetensors"] != outputs[1]["model.safetensors"]


def test_a_run_that_had_taken_all_its_steps_only_exports_again(attempt, tmp_path):
    data = make_dataset(tmp_path / "data")
    config = PretrainConfig(**SIZES, **settings(max_steps=4, save_steps=1))
    first = once(attempt, pretrain, config, {"data": data}, "aa" * 32)
    second = once(attempt, pretrain, config, {"data": data}, "aa" * 32)
    assert {"type": "resumed", "at": 4} in second.events
    assert not [event for event in second.events if event["type"] == "metric"]
    assert folder_bytes(first.output) == folder_bytes(second.output)
    assert second.context.final_metrics["loss"] == first.context.final_metrics["loss"]


# Forks an attempt per line of standard input, and answers with its process id and then its exit status. Imports once.
SERVER = """
import os, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from small_runs import make_attempt
from stages.pretrain.config import Config
from stages.pretrain.stage import run
base, config = Path({base!r}), Config.model_validate_json({config!r})
print("ready", flush=True)
for line in sys.stdin:
    name, key = line.split()
    pid = os.fork()
    if pid == 0:
        try:
            run(make_attempt(base / name, base / "store", config, {{"data": base / "data"}}, key=key).context)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.mark.parametrize("wanted", [5, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_random_moments_it_still_ends_with_the_same_bytes(tmp_path, wanted):
    make_dataset(tmp_path / "data")
    # A save after each of the steps, so that most of the time something is being saved when the kill comes.
    config = PretrainConfig(**SIZES, **settings(max_steps=60, save_steps=1, optimizer="muon"))
    program = SERVER.format(tests=str(Path(__file__).parent), base=str(tmp_path), config=config.model_dump_json())
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env={"OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        assert server.stdout.readline().strip() == "ready"

        def start(name: str, key: str) -> int:
            server.stdin.write(f"{name} {key}\n")
            server.stdin.flush()
            return int(server.stdout.readline())

        start("whole", "aa" * 32)
        assert int(server.stdout.readline()) == 0

        expected = folder_bytes(tmp_path / "whole" / "output")
        generator, kills, attempts, finished = random.Random(0), 0, 0, 0
        while kills < wanted or not finished:
            attempts += 1
            pid = start(f"killed-{attempts}", f"{finished:064x}")
            if kills < wanted:
                time.sleep(generator.uniform(0.0, 0.2))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            status = int(server.stdout.readline())
            if status == 0:  # it got through between two kills: compare, and start another run
                assert folder_bytes(tmp_path / f"killed-{attempts}" / "output") == expected
                finished += 1
            else:
                assert status == -signal.SIGKILL
                kills += 1
        server.stdin.close()


def test_progress_in_a_format_of_another_version_is_passed_over_with_a_warning(attempt, tmp_path):
    data = make_dataset(tmp_path / "data")
    config = PretrainConfig(**SIZES, **settings(max_steps=3))
    whole = once(attempt, pretrain, config, {"data": data}, "aa" * 32)
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "state.json").write_text(json.dumps({"format": 0}))
    trial = attempt(config, {"data": data}, key="bb" * 32)
    trial.context.work.save(2, folder)
    pretrain(trial.context)
    assert [event for event in trial.events if event["type"] == "log" and "format 0" in event["text"]]
    assert folder_bytes(trial.output) == folder_bytes(whole.output)
