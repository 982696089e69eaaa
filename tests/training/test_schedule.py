"""Every schedule at its edges, worked out by hand from the formulas in the module's docstring."""

import math

import pytest

from stages.training.config import TrainingConfig
from stages.training.schedule import learning_rate_factor


def factors(steps, **settings):
    config = TrainingConfig(**settings)
    return lambda step: learning_rate_factor(config, step, steps)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "cosine_with_restarts", "wsd"])
def test_warmup_rises_from_a_first_step_that_learns_to_the_peak(kind):
    factor = factors(100, lr_scheduler_type=kind, warmup_steps=4)
    assert [factor(step) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_constant_stays():
    factor = factors(100, lr_scheduler_type="constant")
    assert {factor(0), factor(50), factor(99), factor(1000)} == {1.0}


def test_linear_at_start_middle_last_step_and_beyond():
    factor = factors(100, lr_scheduler_type="linear", warmup_ratio=0.2, min_lr_ratio=0.1)
    assert factor(20) == 1.0
    assert factor(60) == pytest.approx(0.55)
    assert factor(99) == pytest.approx(0.1 + 0.9 / 80)
    assert factor(100) == factor(500) == pytest.approx(0.1)


def test_cosine_at_start_middle_last_step_and_beyond():
    factor = factors(100, lr_scheduler_type="cosine", warmup_steps=20, min_lr_ratio=0.1)
    assert factor(20) == 1.0
    assert factor(60) == pytest.approx(0.55)
    assert factor(40) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.sqrt(0.5)))
    assert factor(99) == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi * 79 / 80)))
    assert factor(100) == factor(500) == pytest.approx(0.1)


def test_cosine_with_restarts_starts_anew_from_the_peak_at_equal_intervals():
    factor = factors(100, lr_scheduler_type="cosine_with_restarts", num_cycles=4, warmup_steps=20, min_lr_ratio=0.1)
    assert [factor(step) for step in (20, 40, 60, 80)] == [1.0] * 4
    assert [factor(step) for step in (30, 50, 70, 90)] == pytest.approx([0.55] * 4)
    for last in (39, 59, 79, 99):
        assert factor(last) == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi * 19 / 20)))
    assert factor(100) == factor(500) == pytest.approx(0.1)


def test_cosine_with_restarts_is_transformers_own_apart_from_its_warmup():
    import torch
    from transformers import get_cosine_with_hard_restarts_schedule_with_warmup

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = get_cosine_with_hard_restarts_schedule_with_warmup(optimizer, 0, 70, num_cycles=3)
    ours = factors(70, lr_scheduler_type="cosine_with_restarts", num_cycles=3)
    for step in range(70):
        assert ours(step) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        theirs.step()


def test_one_cycle_of_restarts_is_the_cosine():
    restarts, cosine = (factors(37, lr_scheduler_type=k, warmup_steps=3) for k in ("cosine_with_restarts", "cosine"))
    assert [restarts(step) for step in range(40)] == [cosine(step) for step in range(40)]


def test_wsd_is_flat_until_the_start_of_the_decay():
    factor = factors(100, lr_scheduler_type="wsd", warmup_steps=10, decay_ratio=0.25, min_lr_ratio=0.2)
    assert factor(10) == factor(74) == factor(75) == 1.0
    assert factor(76) == pytest.approx(1 - 0.8 / 25)
    assert factor(99) == pytest.approx(0.2 + 0.8 / 25)
    assert factor(100) == pytest.approx(0.2)


def test_the_horizon_is_apart_from_the_length_of_the_run():
    short = factors(10, lr_scheduler_type="cosine", schedule_steps=100)
    whole = factors(100, lr_scheduler_type="cosine")
    assert [short(step) for step in range(10)] == [whole(step) for step in range(10)]


def test_one_step_and_a_warmup_as_long_as_the_run_work():
    assert factors(1, lr_scheduler_type="cosine")(0) == 1.0
    factor = factors(4, lr_scheduler_type="linear", warmup_ratio=1.0)
    assert [factor(step) for step in range(4)] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert 0 <= factor(4) <= 1


def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match=r"per_device_train_batch_size \(8\) is larger"):
        TrainingConfig(train_batch_size=4, per_device_train_batch_size=8)
    with pytest.raises(ValueError, match=r"warmup_steps \(20\) exceeds schedule_steps"):
        TrainingConfig(warmup_steps=20, schedule_steps=10)


def test_where_and_how_often_to_save_is_no_identity():
    identity = TrainingConfig().identity()
    assert "learning_rate" in identity
    assert "schedule_steps" in identity
    assert not {"device", "save_steps", "save_seconds", "logging_steps", "max_seconds"} & identity.keys()
