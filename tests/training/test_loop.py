"""The loop: exact means, skipped and halted steps, budgets, and three steps equal to plain float64 PyTorch."""

import json
import math

import pytest
import torch
from small_runs import make_dataset, make_tokenizer, small_model

from stages.contract import BudgetSpent, ExitCode, NonFinite, Refused, Stopped
from stages.tokenize.dataset import read_packed
from stages.training.causal_lm import CausalLM
from stages.training.config import TrainingConfig
from stages.training.loop import MicroBatch, train


class Given:
    """An objective whose summed losses are multiples of one weight that starts at 1 (the first of the last norm)."""

    def __init__(self, steps):
        self.steps = steps  # a step is a list of (weight, factor, figures)

    def micro_batches(self, step):
        return [
            MicroBatch({"factor": torch.tensor(factor), "index": torch.tensor([step, i])}, weight=weight)
            for i, (weight, factor, _) in enumerate(self.steps[step])
        ]

    def loss(self, model, batch):
        step, i = batch.tensors["index"].tolist()
        return model.model.norm.weight[0] * batch.tensors["factor"], self.steps[step][i][2]

    def state(self):
        return {}

    def load_state(self, state):
        pass

    def metrics(self):
        return {}


def run_given(attempt, steps, **settings):
    config = TrainingConfig(**{"learning_rate": 0.0, "save_seconds": 0} | settings)
    trial = attempt(config, {})
    model = small_model()
    metrics = train(trial.context, config, model, make_tokenizer(), Given(steps), total_steps=len(steps))
    return model, metrics, records(trial)


def records(trial):
    return [json.loads(line) for line in (trial.output / "training.jsonl").read_text().splitlines()]


def test_micro_batches_of_1_and_9_targets_with_means_4_and_1_give_1_3(attempt):
    _, metrics, lines = run_given(attempt, [[(1, 4.0, {}), (9, 9.0, {})]])
    assert lines[0]["loss"] == pytest.approx(1.3)  # a mean of means would be 2.5
    assert lines[0]["grad_norm"] == pytest.approx(1.3)
    assert lines[0]["weight"] == 10
    assert metrics["loss"] == pytest.approx(1.3)


def test_figures_are_divided_by_the_steps_weight_or_by_their_own_count(attempt):
    steps = [[(1, 1.0, {"hits": 1.0, "length": (6.0, 2)}), (9, 1.0, {"hits": torch.tensor(4.0), "length": (3.0, 1)})]]
    _, _, lines = run_given(attempt, steps)
    assert lines[0]["hits"] == pytest.approx(0.5)
    assert lines[0]["length"] == pytest.approx(3.0)


def test_gradients_are_clipped_to_the_norm_asked_for(attempt):
    steps = [[(1, 8.0, {})]]
    for limit, moved in ((2.0, 2.0), (0.0, 8.0), (100.0, 8.0)):
        config = TrainingConfig(learning_rate=1e-3, max_grad_norm=limit, save_seconds=0)
        trial = attempt(config, {}, key=f"{int(limit):08x}")
        model = small_model()
        seen = []
        model.model.norm.weight.register_post_accumulate_grad_hook(lambda param, seen=seen: seen.append(param.grad))
        train(trial.context, config, model, None, Given(steps), total_steps=1)
        assert records(trial)[0]["grad_norm"] == pytest.approx(8.0)
        assert seen[0][0].item() == pytest.approx(moved, rel=1e-5)


def test_a_step_that_is_not_finite_changes_no_weight_and_is_counted(attempt):
    bad = [[(1, math.nan, {})], [(1, math.inf, {})]]
    model, metrics, lines = run_given(attempt, [*bad, *[[(1, 1.0, {})]] * 58], learning_rate=1e-3)
    before = small_model().state_dict()
    assert metrics["skipped_steps"] == 2
    assert [line.get("skipped", False) for line in lines[:3]] == [True, True, False]
    assert lines[0]["loss"] is None
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"model.norm.weight"}
    assert torch.isfinite(model.model.norm.weight).all()


def test_three_steps_in_a_row_that_are_not_finite_halt_with_81(attempt):
    steps = [[(1, 1.0, {})]] * 5 + [[(1, math.nan, {})]] * 3 + [[(1, 1.0, {})]] * 92
    with pytest.raises(NonFinite, match=r"3 steps in a row \(up to step 8\)") as caught:
        run_given(attempt, steps)
    assert caught.value.code == ExitCode.NONFINITE == 81


def test_more_than_5_percent_of_skipped_steps_halt(attempt):
    steps = [[(1, math.nan if step % 3 == 0 else 1.0, {})] for step in range(100)]
    with pytest.raises(NonFinite, match=r"6 of 100 steps \(up to step 16\)"):
        run_given(attempt, steps)


def test_a_step_without_targets_is_an_error_not_a_silent_zero(attempt):
    with pytest.raises(ValueError, match="step 2 has no targets"):
        run_given(attempt, [[(1, 1.0, {})], []])


def test_a_spent_budget_ends_with_82_after_saving_and_a_larger_one_goes_on(attempt):
    steps = [[(1, 1.0, {})]] * 4
    config = TrainingConfig(learning_rate=0.0, max_seconds=1e-9)
    first = attempt(config, {})
    with pytest.raises(BudgetSpent, match=r"max_seconds \(1e-09\) is spent at step 0 of 4") as caught:
        train(first.context, config, small_model(), None, Given(steps), total_steps=4)
    assert caught.value.code == 82
    config = TrainingConfig(learning_rate=0.0, max_seconds=1e6)
    second = attempt(config, {})
    train(second.context, config, small_model(), None, Given(steps), total_steps=4)
    assert {"type": "resumed", "at": 0} in second.events
    assert len(records(second)) == 4


def test_a_request_to_stop_saves_and_ends_with_75(attempt):
    steps = [[(1, 1.0, {})]] * 9
    config = TrainingConfig(learning_rate=0.0)
    asked = iter([False, False, False, True])
    trial = attempt(config, {}, stop=lambda: next(asked))
    with pytest.raises(Stopped, match="saved at step 3 of 9") as caught:
        train(trial.context, config, small_model(), None, Given(steps), total_steps=9)
    assert caught.value.code == 75
    assert [event["at"] for event in trial.events if event["type"] == "saved"] == [3]
    assert attempt(config, {}).context.work.latest()[0] == 3


@pytest.mark.parametrize("tied", [True, False])
def test_three_steps_on_packed_rows_equal_plain_float64_pytorch(attempt, tmp_path, tied):
    data = make_dataset(tmp_path / "data", rows=9, length=12)
    config = TrainingConfig(
        max_steps=3,
        train_batch_size=4,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        lr_scheduler_type="linear",
        weight_decay=0.1,
        max_grad_norm=0.5,
        save_seconds=0,
    )
    rows = read_packed(data)
    objective = CausalLM(rows.input_ids, rows.segment_ids, rows.loss_mask, config)
    model = small_model(tied).double()
    trial = attempt(config, {})
    train(trial.context, config, model, None, objective, total_steps=3)

    plain = small_model(tied).double()
    matrices = [param for name, param in plain.named_parameters() if "proj" in name or "head" in name]
    others = [param for name, param in plain.named_parameters() if "norm" in name or "embed" in name]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, foreach=False)
    order = torch.as_tensor([int(i) for step in range(3) for i in _rows(config, 9, step)]).view(3, 4)
    losses = []
    for step in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 - step / 3)
        total, count = 0.0, 0
        for row in order[step].tolist():
            for document in range(1, rows.segment_ids[row].max() + 1):
                ids = torch.as_tensor(rows.input_ids[row][rows.segment_ids[row] == document]).long()[None]
                logs = torch.log_softmax(plain(input_ids=ids).logits, -1)[0, :-1]
                total = total - logs.gather(-1, ids[0, 1:, None]).sum()
                count += ids.shape[1] - 1
        optimizer.zero_grad()
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        losses.append(total.item() / count)
    assert [line["loss"] for line in records(trial)] == pytest.approx(losses, rel=1e-9)
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8, msg=name)


def _rows(config, rows, step):
    from stages.training.order import batch_rows

    return batch_rows(rows, config.train_batch_size, config.seed, step)


def test_micro_batches_and_one_batch_train_alike(attempt, tmp_path):
    rows = read_packed(make_dataset(tmp_path / "data", rows=8))
    results = []
    for i, micro in enumerate((None, 1, 3)):
        config = TrainingConfig(max_steps=3, train_batch_size=7, per_device_train_batch_size=micro, learning_rate=1e-2)
        trial = attempt(config, {}, key=f"{i:08x}")
        model = small_model().double()
        objective = CausalLM(rows.input_ids, rows.segment_ids, rows.loss_mask, config)
        train(trial.context, config, model, None, objective, total_steps=3)
        results.append([line["loss"] for line in records(trial)])
    assert results[1] == pytest.approx(results[0], rel=1e-9)
    assert results[2] == pytest.approx(results[0], rel=1e-9)


def test_training_jsonl_holds_every_step_whatever_the_logging(attempt, tmp_path):
    rows = read_packed(make_dataset(tmp_path / "data"))
    written = []
    for i, every in enumerate((1, 7)):
        config = TrainingConfig(max_steps=9, train_batch_size=4, logging_steps=every)
        trial = attempt(config, {}, key=f"{i:08x}")
        objective = CausalLM(rows.input_ids, rows.segment_ids, rows.loss_mask, config)
        train(trial.context, config, small_model(), None, objective, total_steps=9)
        written.append((trial.output / "training.jsonl").read_bytes())
        metrics = [event["at"] for event in trial.events if event["type"] == "metric"]
        assert metrics == (list(range(1, 10)) if every == 1 else [7, 9])
        last = [event for event in trial.events if event["type"] == "progress"][-1]
        assert (last["done"], last["total"]) == (9, 9)
        assert last["figures"]["tokens_per_second"] > 0
    assert written[0] == written[1]
    assert b"second" not in written[0]


def test_fp16_on_a_cpu_is_refused(attempt):
    config = TrainingConfig(mixed_precision="fp16")
    with pytest.raises(Refused, match="fp16 needs a GPU"):
        train(attempt(config, {}).context, config, small_model(), None, Given([[(1, 1.0, {})]]), total_steps=1)


def test_bf16_products_follow_fp32_and_keep_fp32_weights(attempt, tmp_path):
    rows = read_packed(make_dataset(tmp_path / "data"))
    losses = []
    for i, precision in enumerate(("no", "bf16")):
        config = TrainingConfig(max_steps=4, train_batch_size=6, learning_rate=1e-2, mixed_precision=precision)
        trial = attempt(config, {}, key=f"{i:08x}")
        model = small_model()
        objective = CausalLM(rows.input_ids, rows.segment_ids, rows.loss_mask, config)
        train(trial.context, config, model, None, objective, total_steps=4)
        assert {param.dtype for param in model.parameters()} == {torch.float32}
        losses.append([line["loss"] for line in records(trial)])
    assert losses[1] == pytest.approx(losses[0], abs=0.02)
    assert losses[1] != losses[0]


def test_recomputed_activations_give_the_same_checkpoint(attempt, tmp_path):
    rows = read_packed(make_dataset(tmp_path / "data"))
    weights = []
    for i, recompute in enumerate((False, True)):
        config = TrainingConfig(max_steps=3, train_batch_size=6, learning_rate=1e-2, gradient_checkpointing=recompute)
        model = small_model()
        objective = CausalLM(rows.input_ids, rows.segment_ids, rows.loss_mask, config)
        trial = attempt(config, {}, key=f"{i:08x}")
        train(trial.context, config, model, None, objective, total_steps=3)
        assert any(getattr(part, "gradient_checkpointing", False) for part in model.modules()) == recompute
        weights.append(torch.cat([param.detach().flatten() for param in model.parameters()]))
    assert torch.equal(weights[0], weights[1])


@pytest.mark.slow
def test_compiled_layers_train_alike_and_leave_an_ordinary_model(attempt, tmp_path):
    rows = read_packed(make_dataset(tmp_path / "data"))
    losses = []
    for i, compiled in enumerate((False, True)):
        config = TrainingConfig(max_steps=3, train_batch_size=6, learning_rate=1e-2, torch_compile=compiled)
        model = small_model()
        objective = CausalLM(rows.input_ids, rows.segment_ids, rows.loss_mask, config)
        trial = attempt(config, {}, key=f"{i:08x}")
        train(trial.context, config, model, None, objective, total_steps=3)
        losses.append([line["loss"] for line in records(trial)])
        assert all(module._compiled_call_impl is None for module in model.modules())
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
