"""The GRPO stage: it learns, keeps its rollouts, resumes to the same bytes, and stops when rewards are no numbers."""

import json

import pyarrow.parquet as pq
import pytest
import torch
from tiny_alignment import folder_bytes, prompt_rows

from stages.contract import NonFinite, Refused, Stopped
from stages.grpo.config import Config
from stages.grpo.objective import GroupObjective
from stages.grpo.stage import run
from stages.modeling.checkpoint import load_model, load_tokenizer
from stages.modeling.logprobs import token_logprobs
from stages.sampling.groups import Sampler
from stages.sampling.rewards import load_rewards
from stages.tokenize.dataset import read_prompts

SETTINGS = {
    "train_batch_size": 16,
    "num_generations": 4,
    "max_completion_length": 6,
    "reward_funcs": ["tiny_rewards:low_bytes"],
    "learning_rate": 3e-3,
    "max_steps": 4,
    "save_seconds": 0,
    "scale_rewards": False,
}


@pytest.fixture
def inputs(dataset, checkpoint):
    return {"model": checkpoint, "prompts": dataset(prompt_rows(9), checkpoint, format="prompt")}


def records(folder):
    return [json.loads(line) for line in (folder / "training.jsonl").read_text().splitlines()]


def objective(inputs, **settings):
    config = Config(**SETTINGS | settings)
    model, tokenizer = load_model(inputs["model"]), load_tokenizer(inputs["model"])
    reference = load_model(inputs["model"]).eval() if config.beta else None
    sampler = Sampler(
        model, tokenizer, config.max_completion_length, config.temperature, config.top_p, config.generation_batch_size
    )
    warned: list[str] = []
    rewards = load_rewards(config.reward_funcs, config.reward_weights)
    one = GroupObjective(config, model, reference, sampler, read_prompts(inputs["prompts"]), rewards, warned.append)
    return one, model, warned


def gradient_of(one, model, step=0):
    batches = one.micro_batches(step)
    total = sum(batch.weight for batch in batches)
    model.zero_grad()
    loss = 0.0
    for batch in batches:
        part, _ = one.loss(model, batch)
        (part / total).backward()
        loss += part.item() / total
    return loss, model.get_input_embeddings().weight.grad.clone(), total


def test_the_reward_rises(attempt, inputs):
    one = attempt(Config(**SETTINGS | {"max_steps": 25, "learning_rate": 1e-2}), inputs)
    run(one.context)
    lines = records(one.output)
    first, last = (sum(line["reward"] for line in part) / 5 for part in (lines[:5], lines[-5:]))
    assert first < 0.75
    assert last > first + 0.15
    assert one.context.final_metrics["reward"] == lines[-1]["reward"]


def test_every_rollout_of_every_step_is_kept(attempt, inputs):
    one = attempt(Config(**SETTINGS), inputs)
    run(one.context)
    rows = pq.read_table(one.sides["rollouts"] / "rollouts.parquet").to_pylist()
    lines = records(one.output)
    assert len(rows) == 4 * 16
    for step in range(4):
        group = [row for row in rows if row["step"] == step]
        assert all(len({row["id"] for row in group[start : start + 4]}) == 1 for start in range(0, 16, 4))
        assert lines[step]["reward"] == pytest.approx(sum(row["reward"] for row in group) / 16)
        assert lines[step]["rewards/low_bytes/mean"] == lines[step]["reward"]
        tokens = [len(row["completion_ids"]) for row in group]
        assert lines[step]["completions/mean_length"] == sum(tokens) / 16
        assert lines[step]["weight"] == sum(tokens)
        logprobs = [value for row in group for value in row["logprobs"]]
        assert lines[step]["entropy"] == pytest.approx(-sum(logprobs) / len(logprobs), rel=1e-6)
        assert lines[step]["sampling/sampling_logp_difference/mean"] < 1e-4


@pytest.mark.parametrize("extra", [{}, {"num_iterations": 3, "beta": 0.05, "max_steps": 7, "epsilon_high": 0.3}])
def test_a_stopped_run_goes_on_and_ends_with_the_same_bytes(attempt, inputs, extra):
    config = Config(**SETTINGS | {"save_steps": 2, "logging_steps": 1} | extra)
    whole = attempt(config, inputs, key="cd" * 32)
    run(whole.context)

    def after(step):
        return lambda events: any(event["type"] == "metric" and event["at"] == step for event in events)

    for step in (1, 2):
        with pytest.raises(Stopped):
            run(attempt(config, inputs, stop_when=after(step)).context)
    last = attempt(config, inputs)
    run(last.context)
    assert {"type": "resumed", "at": 2} in last.events
    assert folder_bytes(last.output) == folder_bytes(whole.output)
    assert folder_bytes(last.sides["rollouts"]) == folder_bytes(whole.sides["rollouts"])


def test_the_first_iteration_has_ratio_one_and_the_next_moves_off(inputs):
    one, model, _ = objective(inputs, num_iterations=2)
    (batch,) = one.micro_batches(0)
    tensors = batch.tensors
    now = token_logprobs(model, tensors["input_ids"], tensors["target_mask"], attention_mask=tensors["attention_mask"])
    torch.testing.assert_close(now.detach(), tensors["old_logprobs"], atol=0, rtol=0)
    torch.testing.assert_close(now.detach(), tensors["sampled_logprobs"], atol=1e-4, rtol=1e-4)
    loss, figures = one.loss(model, batch)
    expected = -(tensors["advantages"][:, None] * tensors["target_mask"]).sum()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-4)
    assert figures["clip_ratio/region_mean"][0] == 0
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.3)
    (again,) = one.micro_batches(1)
    torch.testing.assert_close(again.tensors["input_ids"], tensors["input_ids"])
    assert one.loss(model, again)[1]["clip_ratio/region_mean"][0] > 0
    assert len(one.tables) == 1


def test_gradient_agrees_with_a_plain_computation_in_float64(inputs):
    one, model, _ = objective(inputs, temperature=0.7, scale_rewards=True)
    loss, gradient, total = gradient_of(one, model)
    rows = one.tables[0].to_pylist()
    exact = load_model(inputs["model"]).double()
    rewards = torch.tensor([row["reward"] for row in rows], dtype=torch.float64).view(4, 4)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
    tokens = sum(len(row["completion_ids"]) for row in rows)
    value = torch.zeros((), dtype=torch.float64)
    for row, advantage in zip(rows, advantages, strict=True):
        prompt, completion = row["prompt_ids"], row["completion_ids"]
        logs = torch.log_softmax(exact(torch.tensor([prompt + completion])).logits[0] / 0.7, dim=-1)
        for place, token in enumerate(completion):
            logp = logs[len(prompt) + place - 1, token]
            value = value - advantage * torch.exp(logp - logp.detach()) / tokens
    value.backward()
    assert total == tokens
    assert loss == pytest.approx(value.item(), abs=1e-5)
    torch.testing.assert_close(gradient.double(), exact.get_input_embeddings().weight.grad, atol=1e-5, rtol=1e-3)


def test_cutting_a_step_into_forward_passes_leaves_loss_and_gradient_alone(inputs):
    for loss_type in ("dapo", "grpo", "dr_grpo"):
        found = [
            gradient_of(*objective(inputs, per_device_train_batch_size=size, loss_type=loss_type, beta=0.1)[:2])
            for size in (None, 3)
        ]
        assert found[0][2] == pytest.approx(found[1][2])
        assert found[0][0] == pytest.approx(found[1][0], abs=1e-5)
        torch.testing.assert_close(found[0][1], found[1][1], atol=1e-5, rtol=1e-3)


def test_completions_without_advantage_are_counted_but_not_computed(inputs):
    # A tiny KL weight makes the objective compute every row; without it, rows of advantage 0 are left out.
    settings = {"reward_funcs": ["tiny_rewards:ended"], "temperature": 0.4}
    one, model, _ = objective(inputs, **settings)
    every, other, _ = objective(inputs, beta=1e-12, **settings)
    loss, gradient, weight = gradient_of(one, model)
    loss_every, gradient_every, weight_every = gradient_of(every, other)
    assert (
        sum(len(b.tensors["input_ids"]) for b in one._open)
        < 16
        == sum(len(b.tensors["input_ids"]) for b in every._open)
    )
    assert weight == weight_every
    assert loss == pytest.approx(loss_every, abs=1e-6)
    torch.testing.assert_close(gradient, gradient_every, atol=1e-6, rtol=1e-4)


def test_truncated_completions_can_be_left_out_of_the_loss(inputs):
    one, _, _ = objective(inputs, mask_truncated_completions=True, temperature=2.0, beta=0.1)
    batches = one.micro_batches(0)
    rows = one.tables[0].to_pylist()
    finished = [row for row in rows if row["finished"]]
    assert sum(int(batch.tensors["target_mask"].sum()) for batch in batches) == sum(
        len(row["completion_ids"]) for row in finished
    )
    assert sum(batch.weight for batch in batches) == max(1, sum(len(row["completion_ids"]) for row in finished))


def test_equal_rewards_give_steps_without_gradient_that_are_counted_and_warned_of(attempt, inputs):
    one = attempt(Config(**SETTINGS | {"reward_funcs": ["tiny_rewards:constant"], "max_steps": 10}), inputs)
    run(one.context)
    lines = records(one.output)
    assert [line["frac_reward_zero_std"] for line in lines] == [1.0] * 10
    assert [line["grad_norm"] for line in lines] == [0.0] * 10
    assert any("10 batches in a row (up to 10)" in text for text in one.logs())
    before, after = load_model(inputs["model"]), load_model(one.output)
    for (name, a), (_, b) in zip(before.named_parameters(), after.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_a_reward_that_is_not_a_number_ends_the_run_with_its_row(attempt, inputs):
    one = attempt(Config(**SETTINGS | {"reward_funcs": ["tiny_rewards:not_a_number"]}), inputs)
    with pytest.raises(NonFinite, match=r"tiny_rewards:not_a_number gave nan for row 1 \(prompt \w+, completion"):
        run(one.context)


def test_a_sampler_that_disagrees_with_the_trainer_is_noticed(inputs):
    one, model, _ = objective(inputs)
    (batch,) = one.micro_batches(0)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(3)
    with pytest.raises(RuntimeError, match="sampler and trainer disagree at step 1"):
        one.loss(model, batch)


def test_settings_that_do_not_fit_are_refused(attempt, inputs):
    with pytest.raises(ValueError, match="must be a multiple of num_generations"):
        Config(**SETTINGS | {"train_batch_size": 18})
    with pytest.raises(ValueError, match="reward_weights has 2 values for 1 reward_funcs"):
        Config(**SETTINGS | {"reward_weights": [1, 2]})
    with pytest.raises(Refused, match=r"a step takes 16 prompts .* and input prompts has 9; lower train_batch_size"):
        run(attempt(Config(**SETTINGS | {"train_batch_size": 64}), inputs).context)
    with pytest.raises(Refused, match="needs a column 'solution'; the prompts have answer"):
        run(attempt(Config(**SETTINGS | {"reward_funcs": ["tiny_rewards:needs_solution"]}), inputs).context)


def test_epochs_take_every_prompt_as_often_as_asked():
    config = Config(**SETTINGS | {"max_steps": None, "num_train_epochs": 2, "num_iterations": 2})
    assert config.total_steps(9) == 10  # 18 prompts, 4 a batch: 5 batches of 2 iterations


def test_a_model_that_does_not_change_has_ratio_one_and_no_divergence_at_low_precision(attempt, inputs):
    settings = {"mixed_precision": "bf16", "num_iterations": 2, "beta": 0.1, "epsilon": 0.001, "learning_rate": 0.0}
    one = attempt(Config(**SETTINGS | settings), inputs)
    run(one.context)
    for record in records(one.output):
        assert record["clip_ratio/region_mean"] == 0.0
        assert record["kl"] == 0.0


def test_completions_that_are_all_cut_off_and_left_out_are_told_of(inputs, monkeypatch):
    monkeypatch.setattr("stages.grpo.objective.WARN_EVERY", 2)
    one, _, warned = objective(inputs, mask_truncated_completions=True, max_completion_length=1, scale_rewards=True)
    one.sampler.eos_ids = []  # so that nothing ends by itself
    for step in range(2):
        one.micro_batches(step)
    again, _, told = objective(inputs, mask_truncated_completions=True, max_completion_length=1)
    again.sampler.eos_ids = []
    again.load_state(one.state())
    again.micro_batches(2)
    again.micro_batches(3)
    for messages, count in ((warned, 2), (told, 4)):
        assert any(f"{count} batches in a row (up to {count}) in which every completion was cut" in m for m in messages)
