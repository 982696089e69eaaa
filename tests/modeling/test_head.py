"""The fused head: float64 PyTorch on whole logits, hand-worked values, and no whole logits in memory."""

import math
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from stages.modeling import head
from stages.modeling.head import linear_cross_entropy, linear_logprobs


def example(rows=7, size=5, width=11, dtype=torch.float64, bias=True):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, size, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(width, size, generator=generator, dtype=dtype, requires_grad=True)
    offset = torch.randn(width, generator=generator, dtype=dtype, requires_grad=True) if bias else None
    return hidden, weight, offset, torch.randint(0, width, (rows,), generator=generator)


def gradients(result, *inputs):
    return torch.autograd.grad(result, [tensor for tensor in inputs if tensor is not None])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("chunk", [1, 33, 10_000])
def test_cross_entropy_and_its_gradients_equal_pytorchs_on_whole_logits(monkeypatch, bias, smoothing, z_loss, chunk):
    monkeypatch.setitem(head.CHUNK_LOGITS, "cpu", chunk)
    monkeypatch.setattr(head, "CHUNK_ROWS", 1)
    hidden, weight, offset, labels = example(bias=bias)
    loss, nll, extra = linear_cross_entropy(hidden, weight, labels, offset, label_smoothing=smoothing, z_loss=z_loss)
    logits = functional.linear(hidden, weight, offset)
    z = z_loss * logits.logsumexp(-1).square().sum()
    expected = functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing) + z
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(nll, functional.cross_entropy(logits, labels, reduction="sum"), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(extra, z, rtol=1e-12, atol=1e-12)
    assert not nll.requires_grad
    assert not extra.requires_grad
    # A mean over 3 targets, so that the gradient that comes in is not 1.
    ours = gradients(loss / 3, hidden, weight, offset)
    for one, other in zip(ours, gradients(expected / 3, hidden, weight, offset), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_a_z_loss_worked_out_by_hand():
    # Logits (ln 1, ln 3) have logsumexp ln 4; the label with logit ln 3 has probability 3/4.
    hidden, weight = torch.ones(1, 1, dtype=torch.float64), torch.tensor([[0.0], [math.log(3)]], dtype=torch.float64)
    loss, nll, extra = linear_cross_entropy(hidden, weight, torch.tensor([1]), z_loss=0.5)
    assert nll.item() == pytest.approx(math.log(4 / 3))
    assert extra.item() == pytest.approx(0.5 * math.log(4) ** 2)
    assert loss.item() == pytest.approx(math.log(4 / 3) + 0.5 * math.log(4) ** 2)


def test_label_smoothing_worked_out_by_hand():
    # The same distribution (1/4, 3/4): 0.8 * -ln(3/4) + 0.2 * (-ln(1/4) - ln(3/4)) / 2.
    hidden, weight = torch.ones(1, 1, dtype=torch.float64), torch.tensor([[0.0], [math.log(3)]], dtype=torch.float64)
    loss, _, _ = linear_cross_entropy(hidden, weight, torch.tensor([1]), label_smoothing=0.2)
    assert loss.item() == pytest.approx(0.8 * math.log(4 / 3) + 0.1 * (math.log(4) + math.log(4 / 3)))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 33, 10_000])
def test_log_probabilities_entropies_and_gradients_equal_pytorchs(monkeypatch, bias, temperature, chunk):
    monkeypatch.setitem(head.CHUNK_LOGITS, "cpu", chunk)
    monkeypatch.setattr(head, "CHUNK_ROWS", 1)
    hidden, weight, offset, labels = example(bias=bias)
    values, entropy = linear_logprobs(hidden, weight, labels, offset, temperature=temperature, return_entropy=True)
    distribution = torch.distributions.Categorical(logits=functional.linear(hidden, weight, offset) / temperature)
    expected = distribution.log_prob(labels)
    torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, distribution.entropy(), rtol=1e-12, atol=1e-12)
    upstream = torch.linspace(-1, 2, len(labels), dtype=torch.float64)
    ours = gradients((values * upstream).sum(), hidden, weight, offset)
    for one, other in zip(ours, gradients((expected * upstream).sum(), hidden, weight, offset), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_gradients_agree_with_finite_differences():
    hidden, weight, offset, labels = example(rows=3, size=2, width=4)
    assert torch.autograd.gradcheck(lambda h, w, b: linear_logprobs(h, w, labels, b)[0], (hidden, weight, offset))


def test_only_what_is_asked_for_has_a_gradient():
    hidden, weight, _, labels = example(bias=False)
    loss, _, _ = linear_cross_entropy(hidden, weight.detach(), labels)
    loss.backward()
    assert hidden.grad is not None
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, weight, labels)[0].requires_grad
        assert not linear_logprobs(hidden, weight, labels)[0].requires_grad


def test_a_second_backward_pass_of_one_loss_is_an_error_not_a_wrong_gradient():
    hidden, weight, _, labels = example(bias=False)
    loss, _, _ = linear_cross_entropy(hidden, weight, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="can run only once"):
        loss.backward()


def test_no_targets_give_a_zero_loss_and_zero_gradients():
    hidden, weight, _, _ = example(bias=False)
    none = torch.zeros(0, dtype=torch.int64)
    loss, _, _ = linear_cross_entropy(hidden[:0], weight, none)
    assert loss.item() == 0
    assert (gradients(loss, weight)[0] == 0).all()
    values, _ = linear_logprobs(hidden[:0], weight, none)
    assert (gradients(values.sum(), weight)[0] == 0).all()


def test_bf16_products_give_fp32_sums_near_the_exact_ones():
    hidden, weight, _, labels = example(rows=64, size=32, width=50, dtype=torch.float32, bias=False)
    exact, _, _ = linear_cross_entropy(hidden, weight, labels)
    exact_grads = gradients(exact, hidden, weight)
    with torch.autocast("cpu", torch.bfloat16):
        rough, _, _ = linear_cross_entropy(hidden, weight, labels)
        values, _ = linear_logprobs(hidden, weight, labels)
    assert rough.dtype == values.dtype == torch.float32
    assert rough.item() == pytest.approx(exact.item(), rel=1e-2)
    assert -values.sum().item() == pytest.approx(exact.item(), rel=1e-2)
    for one, other in zip(gradients(rough, hidden, weight), exact_grads, strict=True):
        assert one.dtype == torch.float32
        assert (one - other).norm() < 0.02 * other.norm()


def test_a_logit_of_minus_infinity_has_no_share_in_the_entropy():
    weight = torch.tensor([[0.0], [0.0], [-math.inf]])
    values, entropy = linear_logprobs(torch.ones(1, 1), weight, torch.tensor([0]), return_entropy=True)
    assert values.item() == pytest.approx(-math.log(2))
    assert entropy.item() == pytest.approx(math.log(2))


def peak_growth(work) -> int:
    """Bytes by which the resident memory of this process grows while `work` runs."""
    field = next(i for i, line in enumerate(Path("/proc/self/status").read_text().splitlines()) if "VmRSS" in line)

    def resident():
        return int(Path("/proc/self/status").read_text().splitlines()[field].split()[1]) * 1024

    done, peak, start = threading.Event(), 0, resident()

    def watch():
        nonlocal peak
        while not done.is_set():
            peak = max(peak, resident())
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    work()
    done.set()
    thread.join()
    return peak - start


@pytest.mark.parametrize("kind", ["cross_entropy", "logprobs"])
def test_the_logits_of_a_whole_batch_are_never_held(kind):
    rows, size, width = 3000, 8, 60_000
    hidden = torch.randn(rows, size, requires_grad=True)
    weight = torch.randn(width, size, requires_grad=True)
    labels = torch.randint(0, width, (rows,))

    def ours():
        if kind == "cross_entropy":
            linear_cross_entropy(hidden, weight, labels)[0].backward()
        else:
            linear_logprobs(hidden, weight, labels)[0].sum().backward()

    whole_logits = rows * width * 4  # 720 MB, of which plain PyTorch holds at least three
    assert peak_growth(ours) < whole_logits / 2
