"""Tripwires, which save and end with 80; the loss scale; and room on disk and in memory."""

import json
import math

import pytest
import torch
from small_runs import folder_bytes, make_dataset, make_tokenizer, small_model
from test_loop import Given, records

from stages.contract import ExitCode, NonFinite, Refused, Resources, Tripwire
from stages.grpo.config import Config as GrpoConfig
from stages.modeling.checkpoint import load_model, load_tokenizer
from stages.pretrain.config import Config as PretrainConfig
from stages.pretrain.stage import run as pretrain
from stages.sft.config import Config as SftConfig
from stages.sft.stage import run as sft
from stages.training import preflight
from stages.training.causal_lm import CausalLM
from stages.training.config import TrainingConfig
from stages.training.device import prepare
from stages.training.loop import train
from stages.training.precision import GROWTH_STEPS, LossScale


def run_given(attempt, losses, config, figures=lambda step: {}, key="ab" * 32):
    """Train on given losses: one micro-batch of weight 1 a step."""
    trial = attempt(config, {}, key=key)
    steps = [[(1, loss, figures(step))] for step, loss in enumerate(losses)]
    train(trial.context, config, small_model(), make_tokenizer(), Given(steps), total_steps=len(steps))
    return trial


def settings(**more):
    return TrainingConfig(**{"learning_rate": 0.0, "save_seconds": 0} | more)


def test_a_loss_far_over_the_median_ends_with_80_and_says_what_to_do(attempt):
    losses = [4.0, 2.0] * 6 + [8.9, 12.5, 2.0]
    with pytest.raises(Tripwire) as caught:
        run_given(attempt, losses, settings(tripwire_loss_ratio=3))
    assert caught.value.code == ExitCode.TRIPWIRE == 80
    # The median of 4, 2, ... , 8.9 (13 losses) is 4; of the 12 before it is 3, and 8.9 is less than 9.
    assert str(caught.value) == (
        "the loss of step 14 is 12.5, more than tripwire_loss_ratio (3) times 4, the median of the 13 steps before; "
        "lower learning_rate, or look at the data of that step; progress is saved at step 14 of 15, and with another "
        "threshold the run goes on there"
    )


def test_the_first_steps_of_a_run_have_no_median_to_be_measured_against(attempt):
    run_given(attempt, [1.0] * 9 + [50.0], settings(tripwire_loss_ratio=2))
    with pytest.raises(Tripwire, match="the loss of step 11 is 50"):
        run_given(attempt, [1.0] * 10 + [50.0], settings(tripwire_loss_ratio=2), key="cd" * 32)


def test_only_the_latest_50_losses_count(attempt):
    losses = [10.0] * 50 + [1.0] * 26 + [10.0]
    with pytest.raises(Tripwire, match=r"the loss of step 77 is 10, more than tripwire_loss_ratio \(2\) times 1,"):
        run_given(attempt, losses, settings(tripwire_loss_ratio=2))


def test_a_gradient_norm_over_the_threshold_ends_with_80(attempt):
    with pytest.raises(Tripwire, match=r"the gradient norm of step 3 is 7, over tripwire_grad_norm \(5\)"):
        run_given(attempt, [1.0, 5.0, 7.0, 1.0], settings(tripwire_grad_norm=5))


def test_an_entropy_under_the_threshold_ends_with_80(attempt):
    config = GrpoConfig(reward_funcs=["a:b"], learning_rate=0.0, save_seconds=0, tripwire_entropy=0.5)

    def entropy(step):
        return {"entropy": [1.0, 0.5, 0.49][step]}

    with pytest.raises(Tripwire, match=r"the entropy of step 3 is 0\.49, under tripwire_entropy \(0\.5\)"):
        run_given(attempt, [1.0] * 3, config, entropy)


def test_a_skipped_step_is_no_spike(attempt):
    trial = run_given(
        attempt, [1.0] * 60 + [math.inf] + [1.0] * 9, settings(tripwire_loss_ratio=2, tripwire_grad_norm=9)
    )
    assert records(trial)[60]["skipped"]


def test_thresholds_that_can_mean_nothing_are_refused():
    with pytest.raises(ValueError, match="only grpo knows an entropy"):
        TrainingConfig(tripwire_entropy=0.1)
    with pytest.raises(ValueError, match="the loss of grpo is about zero by construction"):
        GrpoConfig(reward_funcs=["a:b"], tripwire_loss_ratio=2)


def test_a_tripped_run_trips_again_until_the_threshold_changes_and_then_ends_with_the_same_bytes(attempt, tmp_path):
    data = make_dataset(tmp_path / "data")
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    plain = size | {"train_batch_size": 4, "max_steps": 6, "learning_rate": 1e-2, "save_seconds": 0}
    whole = attempt(PretrainConfig(**plain), {"data": data}, key="aa" * 32)
    pretrain(whole.context)
    norms = [line["grad_norm"] for line in records(whole)]
    limit = sorted(norms)[-2]  # one step is over it
    step = norms.index(max(norms)) + 1
    tight = PretrainConfig(**plain, tripwire_grad_norm=limit)
    for _ in range(2):
        trial = attempt(tight, {"data": data}, key="bb" * 32)
        with pytest.raises(Tripwire, match=f"saved at step {step} of 6"):
            pretrain(trial.context)
    loose = attempt(PretrainConfig(**plain, tripwire_grad_norm=2 * max(norms)), {"data": data}, key="bb" * 32)
    pretrain(loose.context)
    assert {"type": "resumed", "at": step} in loose.events
    assert folder_bytes(loose.output) == folder_bytes(whole.output)
    assert tight.identity() == PretrainConfig(**plain).identity()


SIZE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
QUICK = {"train_batch_size": 4, "max_steps": 6, "learning_rate": 1e-2, "save_seconds": 0}


@pytest.mark.parametrize("lora", [None, {"r": 2}])
def test_a_tripped_run_leaves_its_weights_as_a_checkpoint_that_opens(attempt, tmp_path, lora):
    """Those of the step that tripped: the same as those of a run of so many steps (the schedule is constant)."""
    data = make_dataset(tmp_path / "data")
    inputs, stage, config = {"data": data}, pretrain, PretrainConfig
    more = QUICK | {"lr_scheduler_type": "constant"}
    if lora is not None:
        base = attempt(PretrainConfig(**SIZE, **more | {"max_steps": 1}), inputs, key="99" * 32)
        pretrain(base.context)
        chats = make_dataset(tmp_path / "chats", holds="chat")
        inputs, stage, config = {"data": chats, "model": base.output}, sft, SftConfig
        more |= {"lora": lora}
    else:
        more |= SIZE
    tripped = attempt(config(**more, tripwire_grad_norm=1e-9), inputs, key="aa" * 32)
    with pytest.raises(Tripwire, match="saved at step 1 of 6") as caught:
        stage(tripped.context)
    short = attempt(config(**more | {"max_steps": 1}), inputs, key="bb" * 32)
    short.context.side_outputs["adapter"] = tmp_path / "adapter"
    (tmp_path / "adapter").mkdir()
    stage(short.context)
    kept = caught.value.checkpoint
    assert load_tokenizer(kept).chat_template
    assert (kept / "training.jsonl").read_bytes() == (short.output / "training.jsonl").read_bytes()
    ours, theirs = load_model(kept).state_dict(), load_model(short.output).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_run_that_meets_no_finite_loss_leaves_the_weights_that_it_had(attempt, tmp_path, monkeypatch):
    data = make_dataset(tmp_path / "data")
    trial = attempt(PretrainConfig(**SIZE, **QUICK), {"data": data})
    real = CausalLM.loss
    monkeypatch.setattr(CausalLM, "loss", lambda *given: (real(*given)[0] * math.nan, {}))
    with pytest.raises(NonFinite) as caught:
        pretrain(trial.context)
    assert all(param.isfinite().all() for param in load_model(caught.value.checkpoint).parameters())


def test_the_loss_scale_halves_on_overflow_and_doubles_after_2000_steps_without():
    scale = LossScale.of("fp16")
    assert scale.scale == 65536
    assert scale.update(False)
    assert scale.scale == 32768
    for _ in range(GROWTH_STEPS - 1):
        assert not scale.update(True)
    assert scale.scale == 32768
    scale.update(True)
    assert scale.scale == 65536
    other = LossScale.of("fp16")
    scale.update(False)
    other.load_state(json.loads(json.dumps(scale.state())))
    assert other == scale


def test_an_overflow_at_a_scale_of_1_is_a_fault_of_the_run():
    scale = LossScale(True, 1.0)
    assert not scale.update(False)
    assert not LossScale.of("no").update(False)
    assert LossScale.of("bf16").scale == 1


def with_a_matrix_of(elements: int, *, trained: bool):
    """A small model whose head is larger than any machine, on no device."""
    model = small_model(tied=False)
    with torch.device("meta"):
        model.lm_head.weight = torch.nn.Parameter(torch.empty(elements, 1), requires_grad=trained)
    return model


def test_memory_that_is_too_small_is_refused_before_any_step(attempt):
    model = with_a_matrix_of(2**45, trained=True)  # 128 TiB, and thrice that for its gradient and AdamW's moments
    with pytest.raises(Refused, match=r"gradients and optimiser state take 393216\.0 GiB of memory.* free; train"):
        train(attempt(settings(), {}).context, settings(), model, None, Given([[(1, 1.0, {})]]), total_steps=1)


def test_a_disk_that_is_too_small_is_refused_before_any_step(attempt):
    model = with_a_matrix_of(2**45, trained=False)  # no gradient: only the snapshot and the checkpoint are too large
    with pytest.raises(Refused, match=r"a snapshot and the checkpoint take 262144\.0 GiB of disk.* free; free some"):
        train(attempt(settings(), {}).context, settings(), model, None, Given([[(1, 1.0, {})]]), total_steps=1)


def test_free_memory_is_read_where_the_system_says_it():
    available = preflight._available_memory()
    assert available is None or 2**20 < available < 2**50


def test_the_cores_are_shared_by_the_ranks(monkeypatch):
    import os

    monkeypatch.setenv("HEADRACE_WORLD_SIZE", "2")
    prepare(Resources(processes=2), 0)
    assert torch.get_num_threads() == max(1, len(os.sched_getaffinity(0)) // 2)
    prepare(Resources(processes=2, threads=3), 0)
    assert torch.get_num_threads() == 3
