"""Ranks that train one model together: who is who, how the model is wrapped, and what the ranks tell each other.

A rank is a process of the stage (`stages.ranks` starts them and says in the environment which one each is). Every rank
runs the same code on the same inputs; they differ in which micro-batches of a step they compute.

Invariants:
- With one rank there is no process group, no wrapper and no communication: every function here is the identity.
- `wrap` is the one place that decides how a model is distributed. CPU ranks (gloo) run the code that GPU ranks (NCCL)
  run. accelerate is not asked to: on a CPU it leaves out FSDP without a word, and sets the number of threads.
- The data of a step does not depend on the number of ranks: all ranks cut the same global step into micro-batches, and
  `my_share` deals them out.
- What ranks exchange beside tensors is JSON, never a pickle.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from stages.modeling.logprobs import has_plain_head
from stages.training.config import TrainingConfig

Item = TypeVar("Item")


def rank() -> int:
    """Which rank this process is; 0 where there is one."""
    return int(os.environ.get("HEADRACE_RANK", "0"))


def world_size() -> int:
    """How many ranks train together."""
    return int(os.environ.get("HEADRACE_WORLD_SIZE", "1"))


def connect(device: torch.device, timeout: float) -> None:
    """Join the other ranks; returns once all are there. Does nothing with one rank, or the second time.

    Args:
        device: where this rank trains.
        timeout: seconds after which a rank that waits for another one gives up with an error.
    """
    if world_size() == 1 or dist.is_initialized():
        return
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are here, and a host's name may not resolve
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        # Not by a file:// URL, whose escapes of characters in the path would not be undone.
        store=dist.FileStore(os.environ["HEADRACE_RENDEZVOUS"], world_size()),
        rank=rank(),
        world_size=world_size(),
        timeout=timedelta(seconds=timeout),
        device_id=device if device.type == "cuda" else None,
    )


def maximum(values: Sequence[bool]) -> list[bool]:
    """Each value's logical or over all ranks, in one reduction: how ranks decide together."""
    if world_size() == 1:
        return list(values)
    tensor = torch.tensor(values, dtype=torch.uint8)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return [bool(value) for value in tensor.tolist()]


def total(values: Tensor) -> Tensor:
    """The sum over all ranks of a tensor on the CPU, of one shape on every rank; equal on all of them to the bit."""
    if world_size() > 1:
        dist.all_reduce(values, dist.ReduceOp.SUM)
    return values


def from_main(make: Callable[[], Item]) -> Item:
    """What `make` gives on rank 0, which alone calls it, on every rank. It must be JSON."""
    if world_size() == 1:
        return make()
    data = json.dumps(make()).encode() if rank() == 0 else b""
    size = torch.tensor([len(data)])
    dist.broadcast(size, 0)
    buffer = _bytes_tensor(data) if rank() == 0 else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(buffer, 0)
    value: Item = json.loads(buffer.numpy().tobytes())
    return value


def all_gather(value: Item) -> list[Item]:
    """Every rank's value, by rank. Values must be JSON; floats arrive as they were."""
    if world_size() == 1:
        return [value]
    data = _bytes_tensor(json.dumps(value).encode())
    sizes = [torch.empty(1, dtype=torch.int64) for _ in range(world_size())]
    dist.all_gather(sizes, torch.tensor([len(data)]))
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(data)] = data
    parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(world_size())]
    dist.all_gather(parts, padded)
    return [json.loads(part[: int(size)].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]


def _bytes_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def my_part(count: int) -> range:
    """The rows that this rank takes of `count` rows: side by side, as equal as can be."""
    return range(count * rank() // world_size(), count * (rank() + 1) // world_size())


def rows_per_pass(config: TrainingConfig, rows: int) -> int:
    """Rows of one forward pass when a step has `rows` rows: as configured, but so few that every rank has a pass."""
    return max(1, min(config.micro_batch_size(), -(-rows // world_size())))


def my_share(batches: Sequence[Item]) -> list[tuple[int, Item, bool]]:
    """The micro-batches of a step that this rank computes: (number in the step, micro-batch, whether it counts).

    Every rank gets as many, for a forward or backward pass of a sharded model needs all ranks: one that has run out
    repeats the last micro-batch, and the repetition does not count.
    """
    ranks, me = world_size(), rank()
    share = []
    for first in range(0, len(batches), ranks):
        number = min(first + me, len(batches) - 1)
        share.append((number, batches[number], number == first + me))
    return share


@dataclass
class Trained:
    """A model as this rank trains it.

    Attributes:
        model: what the stage was given. Under fsdp2 its weights are there between `gather` and `release` only.
        module: what losses are computed with: the model itself, or its twin of the same structure with sharded weights.
        parameters: the trained module's parameters by name, tied ones once; DTensors under fsdp2.
    """

    model: Any
    module: Any
    parameters: dict[str, Tensor]
    _wrapper: Any = None
    _shards: list[Any] = field(default_factory=list)

    @property
    def sharded(self) -> bool:
        return bool(self._shards)

    def run(self, function: Callable[[Any, Any], Any], batch: Any) -> Any:
        """`function(module, batch)`, through whatever wraps the module. Under fsdp2, on all ranks at once."""
        return function(self.module, batch) if self._wrapper is None else self._wrapper(function, batch)

    def accumulating(self, more: bool) -> contextlib.AbstractContextManager[Any]:
        """Around forward and backward pass: with `more` passes to come in the step, DDP keeps its gradients local.

        FSDP2 reduces the gradients of every pass: keeping them would take the memory that it is there to save.
        """
        if more and isinstance(self._wrapper, torch.nn.parallel.DistributedDataParallel):
            return self._wrapper.no_sync()
        return contextlib.nullcontext()

    def gradients(self) -> list[Tensor]:
        """The gradients that there are; complete after the last pass of a step."""
        return [param.grad for param in self.parameters.values() if param.grad is not None]

    def gather(self) -> None:
        """Give `model` its whole weights, on every rank. All ranks call it."""
        for shard in self._shards:
            shard.reshard()  # a pass without gradient leaves the outermost weights whole, and no parameter
        if self.sharded:
            for name, param in self.model.named_parameters():
                param.data = whole(self.parameters[name]).detach().clone()

    def finish(self) -> None:
        """Training is over: `model` has the whole trained weights and is an ordinary model again."""
        for layer in decoder_layers(self.model):
            layer._compiled_call_impl = None  # what compiling a module in place sets, and all that it sets
        self.gather()

    def release(self) -> None:
        """Let go of the weights that `gather` collected."""
        if self.sharded:
            for param in self.model.parameters():
                param.data = torch.empty(0, dtype=param.dtype, device=param.device)


class _Wrapped(torch.nn.Module):
    """Runs a function of the model as a forward pass, for DDP and FSDP2 act on forward passes."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[Any, Any], Any], batch: Any) -> Any:
        return function(self.model, batch)


def decoder_layers(model: torch.nn.Module) -> list[Any]:
    """The blocks that a transformers model says are not to be split over devices: its decoder layers."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def wrap(model: Any, distribution: Literal["ddp", "fsdp2"], *, compiled: bool = False) -> Trained:
    """Distribute a model over the ranks; with one rank it stays as it is.

    - ddp: every rank holds the whole model; gradients are averaged while the last backward pass of a step runs.
    - fsdp2: parameters, gradients and optimiser state are sharded, each decoder layer is gathered when it is used, and
      embedding, head and final norm for the length of a pass (Zhao et al. 2023, arXiv:2304.11277).

    Both average gradients over ranks: the loop makes the sum of it by multiplying its loss by the number of ranks.

    Args:
        model: a transformers causal LM on this rank's device, with the same weights on every rank.
        distribution: how; of no effect with one rank.
        compiled: compile the decoder layers, one by one: they are alike, and so compiled once.
    """
    if world_size() == 1 or distribution == "ddp":
        has_plain_head(model)  # compared now: later, this forward pass would run inside another one
        if compiled:
            for layer in decoder_layers(model):
                layer.compile()
    if world_size() == 1:
        return Trained(model, model, dict(model.named_parameters()))
    if distribution == "ddp":
        wrapper = torch.nn.parallel.DistributedDataParallel(
            _Wrapped(model), broadcast_buffers=False, gradient_as_bucket_view=True
        )
        return Trained(model, model, dict(model.named_parameters()), wrapper)
    # A twin with the same tensors: sharding replaces them in the twin, and the model stays one that can be saved.
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    has_plain_head(twin)
    mesh = init_device_mesh(model.device.type, (world_size(),))
    for layer in decoder_layers(twin):
        if compiled:
            layer.compile()
        fully_shard(layer, mesh=mesh)
    sharded: Any = fully_shard(_Wrapped(twin), mesh=mesh)
    shards = [module for module in sharded.modules() if isinstance(module, FSDPModule)]
    trained = Trained(model, twin, dict(twin.named_parameters()), sharded, shards)
    trained.release()
    return trained


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor. All ranks call it for a sharded one."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def placed_like(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's shard of a whole tensor, sharded as `like` is; the tensor itself where `like` is not sharded."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


@contextlib.contextmanager
def evaluating(trained: Trained) -> Iterator[None]:
    """Around passes without gradient or dropout; restores the modes of the modules."""
    modes = [(module, module.training) for module in trained.module.modules()]
    trained.module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        for shard in trained._shards:
            shard.reshard()
