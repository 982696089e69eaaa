"""Muon against float64 algebra and PyTorch's own; which parameters decay; state that comes back exactly."""

import importlib.util
import math

import pytest
import torch
from small_runs import small_model

from stages.contract import Refused
from stages.training.config import TrainingConfig
from stages.training.optimizers import (
    Muon,
    load_optimizer_tensors,
    make_optimizers,
    optimizer_tensors,
    orthogonalize,
    parameter_kinds,
    set_learning_rate,
)


def newton_schulz_float64(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """The quintic of Jordan et al. (2024) on the singular values, by SVD: no product of matrices at all."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / matrix.double().norm()
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ v


@pytest.mark.parametrize("shape", [(8, 8), (5, 12), (12, 5), (1, 7)])
def test_newton_schulz_acts_on_the_singular_values_alone(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected = newton_schulz_float64(matrix, 5)
    torch.testing.assert_close(orthogonalize(matrix).double(), expected, rtol=1e-4, atol=1e-4)
    batch = torch.stack([matrix, 3 * matrix, torch.zeros(shape)])
    result = orthogonalize(batch)
    torch.testing.assert_close(result[1].double(), expected, rtol=1e-4, atol=1e-4)
    assert (result[2] == 0).all()


def test_three_steps_equal_muon_written_out_in_float64():
    generator = torch.Generator().manual_seed(1)
    start = [torch.randn(6, 10, generator=generator), torch.randn(10, 6, generator=generator)]
    grads = [[torch.randn(p.shape, generator=generator) for p in start] for _ in range(3)]
    params = [torch.nn.Parameter(p.clone()) for p in start]
    optimizer = Muon(params, lr=0.02, momentum=0.9, weight_decay=0.1)
    expected = [p.double() for p in start]
    momenta = [torch.zeros_like(p) for p in expected]
    for step_grads in grads:
        for param, grad in zip(params, step_grads, strict=True):
            param.grad = grad.clone()
        optimizer.step()
        for i, grad in enumerate(step_grads):
            momenta[i] = 0.9 * momenta[i] + 0.1 * grad.double()
            update = newton_schulz_float64(0.1 * grad.double() + 0.9 * momenta[i], 5)
            expected[i] = expected[i] * (1 - 0.02 * 0.1) - 0.02 * 0.2 * math.sqrt(10) * update
    for param, value in zip(params, expected, strict=True):
        torch.testing.assert_close(param.detach().double(), value, rtol=1e-4, atol=1e-4)


def test_a_step_equals_pytorchs_muon_to_the_rounding_of_its_bf16():
    start = torch.randn(16, 24, generator=torch.Generator().manual_seed(2))
    grad = torch.randn(16, 24, generator=torch.Generator().manual_seed(3))
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    ours.grad, theirs.grad = grad.clone(), grad.clone()
    Muon([ours], lr=0.1, momentum=0.95, weight_decay=0.0).step()
    torch.optim.Muon([theirs], lr=0.1, momentum=0.95, weight_decay=0.0, adjust_lr_fn="match_rms_adamw").step()
    moved, expected = (ours - start).detach(), (theirs - start).detach()
    assert (moved - expected).norm() / expected.norm() < 0.02


def test_muon_takes_stacks_of_matrices_and_refuses_vectors():
    stack = torch.nn.Parameter(torch.randn(3, 4, 6))
    single = torch.nn.Parameter(stack.detach()[1].clone())
    stack.grad = torch.randn(3, 4, 6)
    single.grad = stack.grad[1].clone()
    Muon([stack], lr=0.1).step()
    Muon([single], lr=0.1).step()
    torch.testing.assert_close(stack.detach()[1], single.detach())
    with pytest.raises(ValueError, match="takes matrices"):
        Muon([torch.nn.Parameter(torch.zeros(4))], lr=0.1)


def test_embeddings_norms_and_biases_never_decay_and_muon_gets_the_hidden_matrices():
    for tied in (True, False):
        model = small_model(tied=tied)
        kinds = parameter_kinds(model)
        assert [name for name, _ in kinds["embedding"]] == ["model.embed_tokens.weight"]
        assert [name for name, _ in kinds["head"]] == ([] if tied else ["lm_head.weight"])
        assert all("proj" in name for name, _ in kinds["hidden"])
        assert all("norm" in name for name, _ in kinds["vector"])
        muon, adamw = make_optimizers(model, TrainingConfig(optimizer="muon", weight_decay=0.1))
        assert {id(p) for g in muon.param_groups for p in g["params"]} == {id(p) for _, p in kinds["hidden"]}
        never = {id(p) for kind in ("embedding", "vector") for _, p in kinds[kind]}
        assert {id(p) for g in adamw.param_groups if g["weight_decay"] == 0 for p in g["params"]} == never
        grouped = [id(p) for o in (muon, adamw) for g in o.param_groups for p in g["params"]]
        assert sorted(grouped) == sorted(id(p) for p in model.parameters())


def test_the_two_optimisers_have_their_own_peak_rates():
    model = small_model()
    optimizers = make_optimizers(model, TrainingConfig(optimizer="muon", learning_rate=1e-3, muon_learning_rate=2e-2))
    set_learning_rate(optimizers, 0.5)
    assert [group["lr"] for optimizer in optimizers for group in optimizer.param_groups] == [1e-2, 5e-4]


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_state_put_back_continues_to_the_bit(kind):
    config = TrainingConfig(optimizer=kind, weight_decay=0.01)

    def steps(model, optimizers, seeds):
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            for param in model.parameters():
                param.grad = torch.randn(param.shape, generator=generator)
            for optimizer in optimizers:
                optimizer.step()

    whole = small_model()
    steps(whole, make_optimizers(whole, config), range(6))
    first = small_model()
    optimizers = make_optimizers(first, config)
    steps(first, optimizers, range(3))
    kept = {name: tensor.clone() for name, tensor in optimizer_tensors(dict(first.named_parameters()), optimizers)}
    second = small_model()
    second.load_state_dict(first.state_dict())
    optimizers = make_optimizers(second, config)
    load_optimizer_tensors(dict(second.named_parameters()), optimizers, kept)
    steps(second, optimizers, range(3, 6))
    for a, b in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def test_state_of_another_model_is_refused():
    model = small_model()
    with pytest.raises(ValueError, match=r"'nowhere/exp_avg' belongs to no trained parameter"):
        load_optimizer_tensors(
            dict(model.named_parameters()),
            make_optimizers(model, TrainingConfig()),
            {"nowhere/exp_avg": torch.zeros(1)},
        )


def test_8_bits_without_torchao_are_refused_with_its_name(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "torchao" else find(name, *more)
    )
    with pytest.raises(Refused, match="adamw_8bit needs the package torchao; pip install torchao, or use adamw"):
        make_optimizers(small_model(), TrainingConfig(optimizer="adamw_8bit"))


@pytest.mark.slow  # torchao compiles its step
def test_moments_in_8_bits_follow_adamw_and_come_back_exactly():
    pytest.importorskip("torchao")
    config = TrainingConfig(optimizer="adamw_8bit", weight_decay=0.01, learning_rate=1e-2)

    def model():
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        sizes = {"vocab_size": 128, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 64}
        return LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes))  # matrices of blocks of 256, as torchao asks

    def trained(network, optimizers, steps):
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            for param in network.parameters():
                param.grad = torch.randn(param.shape, generator=generator)
            set_learning_rate(optimizers, 1 / (1 + step))
            for optimizer in optimizers:
                optimizer.step()

    whole = model()
    trained(whole, make_optimizers(whole, config), range(6))
    first = model()
    optimizers = make_optimizers(first, config)
    trained(first, optimizers, range(3))
    kept = {name: tensor.clone() for name, tensor in optimizer_tensors(dict(first.named_parameters()), optimizers)}
    assert kept["model.embed_tokens.weight/exp_avg_sq.codes"].dtype == torch.uint8
    second = model()
    second.load_state_dict(first.state_dict())
    optimizers = make_optimizers(second, config)
    load_optimizer_tensors(dict(second.named_parameters()), optimizers, kept)
    trained(second, optimizers, range(3, 6))
    exact = model()
    trained(exact, make_optimizers(exact, TrainingConfig(weight_decay=0.01, learning_rate=1e-2)), range(6))
    for a, b, c in zip(whole.parameters(), second.parameters(), exact.parameters(), strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c, rtol=0.05, atol=2e-3)
