"""Where and how exactly tensors are computed: device, threads, determinism, seeds.

A resumed run must end with the same bytes as one that was never interrupted, so everything that can change a sum is
fixed here: the number of threads (which fixes how MKL splits a product), and PyTorch's deterministic kernels. PyTorch
allocates tensors on 64-byte boundaries; whatever comes from a file is copied into such tensors before it is used.
"""

from __future__ import annotations

import os
import random
from typing import Literal

import numpy as np
import torch

from stages.contract import Refused, Resources
from stages.training.distributed import rank, world_size


def prepare(resources: Resources, seed: int, device: Literal["auto", "cpu", "cuda"] = "auto") -> torch.device:
    """Fix threads and kernels, seed every random stream, and choose the device. Call it before any tensor work.

    Ranks share the CPU's cores evenly where resources.threads (threads of one rank) is empty; rank n takes the nth GPU.

    Raises:
        Refused: a GPU is asked for and there is none, or there are fewer than ranks.
    """
    wants_gpu = device == "cuda" or (device == "auto" and resources.gpus > 0)
    if wants_gpu and not torch.cuda.is_available():
        asked = "device: cuda" if device == "cuda" else f"resources.gpus: {resources.gpus}"
        raise Refused(
            f"{asked}, but PyTorch sees no GPU here; set device: cpu and resources.gpus: 0 to train on the CPU"
        )
    if wants_gpu and torch.cuda.device_count() < world_size():
        raise Refused(
            f"resources.processes is {world_size()}, and the step has {torch.cuda.device_count()} GPUs; each rank "
            "needs one, so set resources.gpus to the same number"
        )
    # set_num_threads also turns off MKL's own choice of threads, which would vary with the load of the machine.
    torch.set_num_threads(resources.threads or max(1, len(os.sched_getaffinity(0)) // world_size()))
    if wants_gpu:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Some CUDA backward kernels have no deterministic form; PyTorch warns of them rather than refusing to train.
    torch.use_deterministic_algorithms(True, warn_only=wants_gpu)
    # Filling fresh memory finds reads of uninitialised memory but costs about 4% of a small model's step on a CPU.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if not wants_gpu:
        return torch.device("cpu")
    torch.cuda.set_device(rank())
    return torch.device("cuda", rank())
