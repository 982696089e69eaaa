"""The DPO loss against values worked out by hand and an independent computation in float64."""

import math

import pytest
import torch

from stages.dpo.loss import completion_sums, sigmoid_loss


def test_equal_models_give_ln_2_and_margin_0():
    logps = torch.tensor([-3.0, -40.0])
    for smoothing in (0.0, 0.3):
        result = sigmoid_loss(logps, logps - 1, logps, logps - 1, beta=0.1, label_smoothing=smoothing)
        torch.testing.assert_close(result.losses, torch.full((2,), math.log(2)))
        assert (result.chosen_rewards - result.rejected_rewards).tolist() == [0, 0]


def test_the_loss_of_one_pair_is_the_value_worked_out_by_hand():
    # beta 0.5; chosen rose by 2, rejected fell by 1: rewards 1 and -0.5, margin 1.5.
    # -log sigmoid(1.5) = log(1 + e^-1.5) = 0.2014132780; -log sigmoid(-1.5) = 1.7014132780.
    args = [torch.tensor([value]) for value in (-8.0, -11.0, -10.0, -10.0)]
    result = sigmoid_loss(*args, beta=0.5)
    assert result.losses.item() == pytest.approx(0.2014132780, abs=1e-6)
    assert result.chosen_rewards.item() == 1.0
    assert result.rejected_rewards.item() == -0.5
    smoothed = sigmoid_loss(*args, beta=0.5, label_smoothing=0.1)
    assert smoothed.losses.item() == pytest.approx(0.9 * 0.2014132780 + 0.1 * 1.7014132780, abs=1e-6)


def test_loss_and_gradient_agree_with_float64():
    # TRL: -F.logsigmoid(beta * logits) * (1 - s) - F.logsigmoid(-beta * logits) * s, logits = pi_ratio - ref_ratio.
    torch.manual_seed(0)
    values = [torch.randn(16) * 20 - 40 for _ in range(4)]
    chosen, rejected = (value.clone().requires_grad_() for value in values[:2])
    ours = sigmoid_loss(chosen, rejected, *values[2:], beta=0.3, label_smoothing=0.2).losses
    ours.sum().backward()
    c, r, rc, rr = (value.double().requires_grad_() for value in values)
    logits = (c - r) - (rc - rr)
    expected = torch.log1p(torch.exp(-0.3 * logits)) * 0.8 + torch.log1p(torch.exp(0.3 * logits)) * 0.2
    expected.sum().backward()
    torch.testing.assert_close(ours.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(chosen.grad.double(), c.grad, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(rejected.grad.double(), r.grad, atol=1e-6, rtol=1e-5)


def test_great_margins_stay_finite():
    big = torch.tensor([1e4, -1e4])
    result = sigmoid_loss(big, -big, torch.zeros(2), torch.zeros(2), beta=1.0)
    assert result.losses.tolist() == [0.0, 2e4]


def test_sums_leave_out_what_is_no_target():
    logprobs = torch.tensor([[-1.0, float("nan"), -2.0], [float("-inf"), -0.5, -0.25]])
    mask = torch.tensor([[1, 0, 1], [0, 1, 1]])
    assert completion_sums(logprobs, mask).tolist() == [-3.0, -0.75]
