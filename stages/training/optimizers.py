"""Optimisers: AdamW, and Muon on the hidden matrices with AdamW on the rest.

Matrices decay; norms, biases and embeddings never do. Muon (Jordan et al., 2024) steps along the orthogonalised
momentum, found by a quintic Newton-Schulz iteration; its update is scaled by 0.2 * sqrt(max(rows, columns)), which
gives it the root mean square of AdamW's updates, so that both share one learning rate (Liu et al., "Muon is Scalable
for LLM Training", arXiv 2502.16982).

This Muon is ours because `torch.optim.Muon` works in bf16 and matrix by matrix: on CPUs without bf16 products it is
several times slower than fp32, and its updates carry bf16's rounding. Here matrices of one shape are orthogonalised in
one batched product, in fp32 on a CPU and bf16 on a GPU.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from stages.contract import Refused
from stages.training.config import TrainingConfig
from stages.training.distributed import placed_like, whole

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Jordan et al., 2024: the steepest slope at zero that still stays bounded
PARTS_8BIT = ("codes", "scale", "qmap")  # what an 8-bit moment of torchao is made of
BATCH_ELEMENTS = 2**26  # matrices of one shape are stacked up to this many elements (256 MiB in fp32)


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """Push the singular values of each matrix towards 1 (they end within about 0.7 to 1.2).

    Args:
        matrices: float [..., rows, columns].
        steps: Newton-Schulz iterations.

    Returns:
        A tensor like `matrices`; a zero matrix stays zero.
    """
    a, b, c = NEWTON_SCHULZ
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x.reshape(-1, *x.shape[-2:])
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.reshape(*matrices.shape[:-2], *x.shape[-2:])
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Muon for matrices (parameters of two dimensions, or stacks of matrices of three).

    The momentum is Nesterov's over an exponential average of the gradients; weight decay is decoupled. The momentum of
    a sharded matrix is sharded; its update is made whole to be orthogonalised, on every rank, a batch at a time.
    """

    def __init__(
        self, params: Any, lr: float, *, momentum: float = 0.95, weight_decay: float = 0.0, steps: int = 5
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "steps": steps})
        for group in self.param_groups:
            for param in group["params"]:
                if param.ndim not in (2, 3):
                    raise ValueError(f"Muon takes matrices, not a parameter of shape {tuple(param.shape)}")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One optimiser step; parameters without a gradient are left alone."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[Tensor]] = {}
            for param in group["params"]:
                if param.grad is not None:
                    by_shape.setdefault(tuple(param.shape), []).append(param)
            for params in by_shape.values():
                size = max(1, BATCH_ELEMENTS // params[0].numel())
                for start in range(0, len(params), size):
                    self._step_same_shape(params[start : start + size], group)
        return loss

    def _step_same_shape(self, params: list[Tensor], group: dict[str, Any]) -> None:
        momentum = group["momentum"]
        updates = []
        for param in params:
            state = self.state[param]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(param)
            buffer = state["momentum_buffer"]
            buffer.lerp_(param.grad, 1 - momentum)
            updates.append(param.grad.lerp(buffer, momentum))  # type: ignore[union-attr]
        stacked = torch.stack([whole(update) for update in updates])
        if stacked.is_cuda:
            stacked = stacked.bfloat16()
        stacked = orthogonalize(stacked, group["steps"])
        scale = 0.2 * max(params[0].shape[-2:]) ** 0.5
        decay = 1 - group["lr"] * group["weight_decay"]
        for param, update in zip(params, stacked, strict=True):
            if decay != 1:
                param.mul_(decay)
            param.add_(placed_like(update.to(param.dtype), param), alpha=-group["lr"] * scale)


def parameter_kinds(model: Any) -> dict[str, list[tuple[str, Tensor]]]:
    """The trained parameters by how they are optimised.

    Returns:
        "hidden": matrices between embedding and head (Muon's); "head": the output matrix where it is not the
        embedding; "embedding"; "vector": norms, biases and other parameters of one dimension.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    for layer in (model.get_input_embeddings(),):
        embeddings.add(id(layer.weight))
    output = model.get_output_embeddings()
    head = id(output.weight) if output is not None else None
    kinds: dict[str, list[tuple[str, Tensor]]] = {"hidden": [], "head": [], "embedding": [], "vector": []}
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        if id(param) in embeddings:
            kind = "embedding"
        elif id(param) == head:
            kind = "head"
        elif param.ndim in (2, 3):
            kind = "hidden"
        else:
            kind = "vector"
        kinds[kind].append((name, param))
    return kinds


def make_optimizers(model: Any, config: TrainingConfig) -> list[torch.optim.Optimizer]:
    """The optimisers of a run. Each group has `peak_lr`, which the loop multiplies by the schedule's factor.

    Fused AdamW is used on every device that has it: on a CPU with 0.66M parameters it measured 0.3 ms a step against
    1.4 ms for the other forms.
    """
    kinds = parameter_kinds(model)
    matrices = [param for _, param in kinds["head"]]
    hidden = [param for _, param in kinds["hidden"]]
    muon = config.optimizer == "muon" and bool(hidden)
    groups = [
        {"params": matrices if muon else hidden + matrices, "weight_decay": config.weight_decay},
        {"params": [param for kind in ("embedding", "vector") for _, param in kinds[kind]], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    optimizers: list[torch.optim.Optimizer] = []
    if muon:
        rate = config.learning_rate if config.muon_learning_rate is None else config.muon_learning_rate
        optimizers.append(
            Muon(
                hidden,
                lr=rate,
                momentum=config.muon_momentum,
                weight_decay=config.weight_decay,
                steps=config.muon_steps,
            )
        )
    if groups and config.optimizer == "adamw_8bit":
        optimizers.append(_adamw_8bit(groups, config))
    elif groups:
        optimizers.append(
            torch.optim.AdamW(
                groups,
                lr=config.learning_rate,
                betas=(config.adam_beta1, config.adam_beta2),
                eps=config.adam_epsilon,
                fused=True,
            )
        )
    if not optimizers:
        raise ValueError("the model has no parameter to train")
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = float(group["lr"])
    return optimizers


def _adamw_8bit(groups: list[dict[str, Any]], config: TrainingConfig) -> torch.optim.Optimizer:
    """AdamW whose moments are kept in 8 bits, in blocks of 256 (Dettmers et al., 2021, arXiv:2110.02861).

    Raises:
        Refused: torchao is not installed, or the model is sharded.
    """
    if importlib.util.find_spec("torchao") is None:
        raise Refused("optimizer: adamw_8bit needs the package torchao; pip install torchao, or use adamw")
    if any(isinstance(param, DTensor) for group in groups for param in group["params"]):
        raise Refused("optimizer: adamw_8bit does not go with distribution: fsdp2, which shards the state; use adamw")
    from torchao.optim import AdamW8bit

    optimizer: torch.optim.Optimizer = AdamW8bit(
        groups, lr=config.learning_rate, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_epsilon
    )
    return optimizer


def set_learning_rate(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    """Give every group its peak rate times `factor`."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            rate = group["peak_lr"] * factor
            if isinstance(group["lr"], Tensor):  # torchao's, whose step is compiled
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


def optimizer_tensors(
    parameters: dict[str, Tensor], optimizers: list[torch.optim.Optimizer]
) -> Iterator[tuple[str, Tensor]]:
    """The optimisers' state as ("parameter name/slot", tensor); a slot in 8 bits is three plain tensors."""
    for name, param in parameters.items():
        for optimizer in optimizers:
            for slot, value in optimizer.state.get(param, {}).items():
                if hasattr(value, "codes"):
                    yield from ((f"{name}/{slot}.{part}", getattr(value, part)) for part in PARTS_8BIT)
                else:
                    yield f"{name}/{slot}", value


def load_optimizer_tensors(
    parameters: dict[str, Tensor], optimizers: list[torch.optim.Optimizer], tensors: dict[str, Tensor]
) -> None:
    """Put back what `optimizer_tensors` gave, made whole: into freshly allocated memory on each parameter's device, and
    sharded as the parameter is.

    Raises:
        ValueError: a tensor belongs to no trained parameter.
    """
    tensors = dict(tensors)
    packed = {key.removesuffix(".codes") for key in tensors if key.endswith(".codes")}
    owners = {id(param): optimizer for optimizer in optimizers for g in optimizer.param_groups for param in g["params"]}
    for key in packed:
        from torchao.optim.subclass_8bit import OptimState8bit

        name, _, slot = key.rpartition("/")
        param = parameters.get(name)
        if param is None or id(param) not in owners:
            raise ValueError(f"saved optimiser state {key!r} belongs to no trained parameter")
        parts = [tensors.pop(f"{key}.{part}").clone().to(param.device) for part in PARTS_8BIT]
        # The first moment has a sign, and so its own table of values.
        owners[id(param)].state[param][slot] = OptimState8bit(*parts, slot == "exp_avg", param.dtype)
    for key, value in tensors.items():
        name, _, slot = key.rpartition("/")
        param = parameters.get(name)
        if param is None or id(param) not in owners:
            raise ValueError(f"saved optimiser state {key!r} belongs to no trained parameter")
        fresh = torch.empty(value.shape, dtype=value.dtype, device=param.device).copy_(value)
        owners[id(param)].state[param][slot] = placed_like(fresh, param) if value.shape == param.shape else fresh
