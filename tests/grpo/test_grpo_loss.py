"""Advantages, the clipped loss, the KL estimate and the averages against values worked out by hand and float64."""

import math

import pytest
import torch

from stages.grpo.loss import clipped_loss, group_advantages, k3_divergence, reduce_loss, step_weight


def test_advantages_are_rewards_less_their_groups_mean():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 4.0, 0.0, 2.0])
    plain = group_advantages(rewards, 3, scale_rewards=False)
    expected = [2 / 3, -1 / 3, -1 / 3, 0, 0, 0, 2, -2, 0]
    assert plain.values.tolist() == pytest.approx(expected, abs=1e-6)
    # Unbiased standard deviations: sqrt(1/3), 0 and 2, as in TRL, which adds 1e-4 to them.
    assert plain.group_std.tolist() == pytest.approx([math.sqrt(1 / 3), 0, 2], abs=1e-6)
    scaled = group_advantages(rewards, 3, scale_rewards=True)
    deviations = [math.sqrt(1 / 3) + 1e-4] * 3 + [1e-4] * 3 + [2 + 1e-4] * 3
    by_hand = [value / deviation for value, deviation in zip(expected, deviations, strict=True)]
    assert scaled.values.tolist() == pytest.approx(by_hand, abs=1e-6)


def test_equal_rewards_give_exactly_no_advantage():
    rewards = torch.full((7,), 0.1)  # the mean of seven 0.1 is not exactly 0.1
    result = group_advantages(rewards, 7, scale_rewards=True)
    assert result.values.tolist() == [0.0] * 7
    assert result.group_std.tolist() == [0.0]


def test_a_ratio_of_one_gives_minus_the_advantage_and_the_plain_policy_gradient():
    logprobs = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]], requires_grad=True)
    advantages = torch.tensor([2.0, -1.0])
    mask = torch.ones(2, 2, dtype=torch.bool)
    result = clipped_loss(logprobs, logprobs.detach(), advantages, mask, epsilon=0.2, epsilon_high=0.2)
    assert result.losses.tolist() == [[-2.0, -2.0], [1.0, 1.0]]
    assert not result.clipped_low.any()
    assert not result.clipped_high.any()
    result.losses.sum().backward()
    assert logprobs.grad.tolist() == [[-2.0, -2.0], [1.0, 1.0]]


def test_the_ratio_is_clipped_on_the_side_where_it_would_pay():
    # Ratios 1.5, 0.5 with epsilon 0.2, epsilon_high 0.3, by hand:
    # A = 1:  -min(1.5, 1.3) = -1.3 (clipped), -min(0.5, 0.8) = -0.5; A = -1: -min(-1.5, -1.3) = 1.5, -min(-.5, -.8) =
    # 0.8.
    logprobs = torch.log(torch.tensor([[1.5, 0.5], [1.5, 0.5]])).requires_grad_()
    mask = torch.ones(2, 2)
    result = clipped_loss(logprobs, torch.zeros(2, 2), torch.tensor([1.0, -1.0]), mask, epsilon=0.2, epsilon_high=0.3)
    torch.testing.assert_close(result.losses, torch.tensor([[-1.3, -0.5], [1.5, 0.8]]))
    assert result.clipped_high.tolist() == [[True, False], [False, False]]
    assert result.clipped_low.tolist() == [[False, False], [False, True]]
    result.losses.sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([[0.0, -0.5], [1.5, 0.0]]))


def test_k3_is_the_estimate_by_hand_and_never_negative():
    # d = log 2: 2 - log 2 - 1 = 0.3068528; d = -log 2: 1/2 + log 2 - 1 = 0.1931472.
    logprobs = torch.tensor([[0.0, math.log(2), 5.0]])
    reference = torch.tensor([[math.log(2), 0.0, 7.0]])
    result = k3_divergence(logprobs, reference, torch.tensor([[1, 1, 0]]))
    assert result[0].tolist() == pytest.approx([0.3068528, 0.1931472, 0.0], abs=1e-6)


def test_k3_averages_to_the_divergence():
    # Over tokens drawn from p, the mean of k3 is KL(p || q), exactly, when weighed with p.
    p, q = (torch.tensor(values, dtype=torch.float64) for values in ([0.5, 0.3, 0.2], [0.2, 0.2, 0.6]))
    k3 = k3_divergence(p.log()[None], q.log()[None], torch.ones(1, 3))[0]
    assert (p * k3).sum().item() == pytest.approx((p * (p / q).log()).sum().item(), abs=1e-12)


def test_the_averages_are_those_of_their_papers():
    losses = torch.tensor([[1.0, 2.0, 3.0, 9.0], [4.0, 9.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])

    def mean(kind):
        return reduce_loss(losses, mask, kind).item() / step_weight(mask, kind, 8)

    assert mean("dapo") == mean("bnpo") == 10 / 4  # all tokens alike
    assert mean("grpo") == (6 / 3 + 4) / 2  # a mean of the rows' means
    assert mean("dr_grpo") == 10 / (2 * 8)


def test_micro_batches_add_up_to_the_whole():
    torch.manual_seed(1)
    losses, mask = torch.randn(6, 5), torch.rand(6, 5) < 0.6
    for kind in ("dapo", "grpo", "dr_grpo"):
        whole = reduce_loss(losses, mask, kind) / step_weight(mask, kind, 5)
        parts = [slice(0, 1), slice(1, 4), slice(4, 6)]
        total = sum(reduce_loss(losses[p], mask[p], kind) for p in parts)
        torch.testing.assert_close(total / sum(step_weight(mask[p], kind, 5) for p in parts), whole)


def test_rows_without_tokens_and_values_outside_the_mask_change_nothing():
    logprobs = torch.tensor([[-1.0, -300.0], [-2.0, -2.0]], requires_grad=True)
    mask = torch.tensor([[1, 0], [0, 0]])
    result = clipped_loss(
        logprobs, torch.tensor([[-1.0, 300.0], [0, 0]]), torch.ones(2), mask, epsilon=0.2, epsilon_high=0.2
    )
    for kind, expected in (("dapo", -1.0), ("grpo", -0.5)):
        loss = reduce_loss(result.losses, mask, kind) / step_weight(mask, kind, 4)
        assert loss.item() == expected
    reduce_loss(result.losses, mask, "grpo").backward()
    assert logprobs.grad.tolist() == [[-1.0, 0.0], [0.0, 0.0]]


def test_the_whole_loss_agrees_with_float64():
    # TRL 0.2x: per_token_loss = -min(r A, clip(r) A) + beta * (exp(ref - logp) - (ref - logp) - 1), masked token mean.
    torch.manual_seed(0)
    logprobs, old, reference = (-torch.rand(5, 7) * 3 for _ in range(3))
    advantages, mask = torch.randn(5), torch.rand(5, 7) < 0.7
    ours = logprobs.clone().requires_grad_()
    token = clipped_loss(ours, old, advantages, mask, epsilon=0.2, epsilon_high=0.28)
    loss = reduce_loss(token.losses + 0.04 * k3_divergence(ours, reference, mask), mask, "dapo") / mask.sum()
    loss.backward()
    exact = logprobs.double().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for row in range(5):
        for place in range(7):
            if mask[row, place]:
                ratio = torch.exp(exact[row, place] - old[row, place].double())
                a = advantages[row].double()
                total = total - torch.min(ratio * a, torch.clamp(ratio, 0.8, 1.28) * a)
                d = reference[row, place].double() - exact[row, place]
                total = total + 0.04 * (torch.exp(d) - d - 1)
    (total / mask.sum()).backward()
    assert loss.item() == pytest.approx(total.item() / mask.sum().item(), rel=1e-5)
    torch.testing.assert_close(ours.grad.double(), exact.grad, atol=1e-6, rtol=1e-4)
