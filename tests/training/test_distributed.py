"""Two ranks as real processes: the same training as one, ended together, whatever happens to one of them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file
from small_runs import folder_bytes
from stage_server import Stages

BOTH = pytest.mark.parametrize("distribution", ["ddp", "fsdp2"])


def losses(records: list[dict]) -> list[float]:
    return [record["loss"] for record in records]


@pytest.fixture(scope="module")
def alone(stages):
    """The records and weights of runs with one rank, each run once: alone(optimizer)."""
    kept = {}

    def run(optimizer: str) -> tuple[list[dict], dict]:
        if optimizer not in kept:
            outcome = stages.run(f"{optimizer} alone".encode().hex(), 1, optimizer=optimizer, **TWO_PASSES)
            kept[optimizer] = stages.records(outcome), load_file(stages.output(outcome) / "model.safetensors")
        return kept[optimizer]

    return run


# Two forward passes a step: one after the other on one rank, side by side on two.
TWO_PASSES = {"max_steps": 6, "per_device_train_batch_size": 4, "weight_decay": 0.1}


@pytest.mark.parametrize(
    ("distribution", "optimizer"), [("ddp", "adamw"), ("fsdp2", "adamw"), ("ddp", "muon"), ("fsdp2", "muon")]
)
def test_two_ranks_train_as_one_that_accumulates(stages, alone, distribution, optimizer):
    expected, weights = alone(optimizer)
    key = f"{optimizer} {distribution}".encode().hex()
    two = stages.run(key, optimizer=optimizer, distribution=distribution, **TWO_PASSES)
    for ours, theirs in zip(stages.records(two), expected, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=2e-6)  # 5.6, at 24 bits 5e-7 a unit
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], abs=1e-5)
        assert ours["weight"] == theirs["weight"]
    ours = load_file(stages.output(two) / "model.safetensors")
    assert ours.keys() == weights.keys()
    for name, weight in weights.items():
        # AdamW divides a gradient by its size, which enlarges the rounding of one that is almost zero.
        assert (ours[name] - weight).abs().max() < 1e-4, name


def first_gradients(stages: Stages, key: str, processes: int, **config) -> dict:
    """Every gradient of the first step, read from saved progress: with beta1 = 0 the first moment is the gradient."""
    outcome = stages.run(
        key,
        processes,
        max_steps=2,
        adam_beta1=0.0,
        max_grad_norm=0.0,
        tripwire_grad_norm=1e-9,
        **config,
    )
    assert outcome["code"] == 80
    step, folder = stages.progress(key)
    assert step == 1
    tensors = load_file(folder / "optimizer.safetensors")
    return {name: tensor for name, tensor in tensors.items() if name.endswith("/exp_avg")}


@BOTH
@pytest.mark.parametrize("rows", [4, 3])
def test_gradients_of_two_ranks_are_those_of_one(stages, distribution, rows):
    # 3 rows a pass cut a step of 8 into three passes: the second rank has none in the second round.
    expected = first_gradients(stages, f"a{rows}" + "00" * 8, 1, per_device_train_batch_size=rows)
    key = f"gradients {distribution} {rows}".encode().hex()
    found = first_gradients(stages, key, 2, distribution=distribution, per_device_train_batch_size=rows)
    assert found.keys() == expected.keys()
    assert len(found) > 20
    for name, gradient in expected.items():
        assert gradient.abs().max() > 1e-4, name
        assert (found[name] - gradient).abs().max() < 1e-6, name


@BOTH
def test_micro_batches_of_1_and_9_targets_on_two_ranks_with_means_4_and_1_give_1_3(stages, distribution):
    key = f"1.3 {distribution}".encode().hex()
    two = stages.run(key, max_steps=1, distribution=distribution, batches=[(1, 4.0), (9, 9.0)])
    record = stages.records(two)[0]
    assert record["loss"] == pytest.approx(1.3, abs=1e-6)  # a mean over ranks of means would be 2.5
    assert record["grad_norm"] == pytest.approx(1.3 / 4, abs=1e-6)  # 16 gradients of 1.3 / 16
    assert record["hits"] == pytest.approx(1.3, abs=1e-6)
    assert record["weight"] == 10


def test_a_signal_to_one_rank_stops_both_at_one_step_and_another_number_of_ranks_goes_on(stages, alone):
    expected, _ = alone("adamw")
    key = "75" * 8
    name = stages.start(key, distribution="fsdp2", pause=0.3, logging_steps=1, **TWO_PASSES)
    _, second = stages.ranks(name, after_step=2)
    os.kill(second, signal.SIGTERM)
    outcome = stages.wait(name)
    assert (outcome["code"], outcome["state"]) == (75, "stopped")
    step, folder = stages.progress(key)
    assert outcome["message"] == f"saved at step {step} of 6"
    assert 2 <= step < 6
    assert stages.events(name, "saved")[-1]["at"] == step
    weights = load_file(folder / "model.safetensors")
    assert weights["model.embed_tokens.weight"].shape == (260, 16)  # whole, whatever it was sharded over
    resumed = stages.run(key, 1, **TWO_PASSES)
    assert stages.events(stages.name, "resumed")[0]["at"] == step
    for ours, theirs in zip(stages.records(resumed), expected, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)


@BOTH
def test_nan_on_one_rank_halts_both_with_81(stages, distribution):
    name = stages.start(f"81{distribution}".encode().hex(), distribution=distribution, max_steps=20, trouble="nan")
    outcome = stages.wait(name)
    assert (outcome["code"], outcome["state"]) == (81, "halted")
    assert "3 steps in a row (up to step 5)" in outcome["message"]
    assert not [event for event in stages.events(name, "log") if event["level"] == "error"]


def test_a_killed_rank_brings_the_others_down_and_the_run_resumes_to_the_right_end(stages, tmp_path):
    settings = {"max_steps": 6, "dropout": 0.2, "save_steps": 1}
    whole = stages.run("a9" * 8, **settings)
    expected = folder_bytes(stages.output(whole))
    begin = time.monotonic()
    outcome = stages.run("b9" * 8, trouble="kill", trouble_step=4, **settings)
    assert time.monotonic() - begin < 60
    assert (outcome["code"], outcome["state"]) == (1, "crashed")
    assert outcome["message"].startswith("rank 1 was killed by SIGKILL; the other ranks were stopped with it")
    step, _ = stages.progress("b9" * 8)
    assert 1 <= step <= 3
    again = stages.run("b9" * 8, **settings)
    assert {"type": "resumed", "at": step}.items() <= stages.events(stages.name, "resumed")[0].items()
    assert folder_bytes(stages.output(again)) == expected


def test_two_ranks_repeat_each_other_to_the_byte(stages):
    first, second = (stages.run(key, max_steps=3, distribution="fsdp2") for key in ("c1" * 8, "c2" * 8))
    assert first["artifact"] == second["artifact"]


def test_dropout_does_not_depend_on_the_number_of_ranks(stages):
    settings = {"max_steps": 3, "dropout": 0.3, "per_device_train_batch_size": 4}
    one, two = (stages.records(stages.run(f"d{n}" * 8, n, **settings)) for n in (1, 2))
    assert losses(two) == pytest.approx(losses(one), abs=1e-5)
    without = stages.records(stages.run("d3" * 8, 1, **settings | {"dropout": 0.0}))
    assert losses(without) != pytest.approx(losses(one), abs=1e-3)


def test_a_refusal_on_one_rank_is_the_sentence_of_the_step(stages):
    name = stages.start("83" * 8, max_steps=4, trouble="refuse", trouble_step=1)
    outcome = stages.wait(name)
    assert (outcome["code"], outcome["state"], outcome["message"]) == (83, "refused", "row 7 cannot be used; mend it")


def test_the_traceback_of_a_rank_that_crashes_is_in_the_log(stages):
    name = stages.start("01" * 8, max_steps=4, trouble="raise", trouble_step=2)
    outcome = stages.wait(name)
    assert outcome["code"] == 1
    assert any(
        event["text"].startswith("rank 1: Traceback") and "ZeroDivisionError: no way" in event["text"]
        for event in stages.events(name, "log")
    )


def test_a_rank_that_hangs_is_given_up_after_ddp_timeout(stages):
    outcome = stages.run("02" * 8, max_steps=4, trouble="hang", ddp_timeout=3)
    assert (outcome["code"], outcome["state"]) == (1, "crashed")
    assert outcome["message"].startswith("rank 0 crashed: ")


def test_no_rank_outlives_the_stage_process(stages):
    name = stages.start("09" * 8, max_steps=500, pause=0.1, logging_steps=1)
    ranks = stages.ranks(name, after_step=1)
    assert len(ranks) == 2
    os.kill(stages.pids[-1], signal.SIGKILL)
    assert stages.answer("exited")["signal"] == "SIGKILL"
    deadline = time.monotonic() + 30
    while any(running(pid) for pid in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def running(pid: int) -> bool:
    """Whether a process is there and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_signal_to_the_stage_process_stops_all_ranks(stages):
    name = stages.start("75" * 7, max_steps=500, pause=0.1, logging_steps=1)
    stages.ranks(name, after_step=1)
    os.kill(stages.pids[-1], signal.SIGTERM)
    outcome = stages.wait(name)
    assert outcome["code"] == 75
    assert outcome["message"] == f"saved at step {stages.progress('75' * 7)[0]} of 500"


def test_a_stage_that_cannot_use_ranks_refuses_them(stages):
    outcome = stages.run("77" * 8, 2, stage="evaluate", inputs={"nothing": stages.data})
    assert outcome["code"] == 83
