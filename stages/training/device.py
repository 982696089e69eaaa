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


def prepare(resources: Resources, seed: int, device: Literal["auto", "cpu", "cuda"] = "auto") -> torch.device:
    """Fix threads and kernels, seed every random stream, and choose the device. Call it before any tensor work.

    Raises:
        Refused: a GPU is asked for and there is none, or more processes than this version can train with.
    """
    if resources.processes > 1:
        raise Refused(
            f"resources.processes is {resources.processes}: training runs in one process for now; set it to 1"
        )
    wants_gpu = device == "cuda" or (device == "auto" and resources.gpus > 0)
    if wants_gpu and not torch.cuda.is_available():
        asked = "device: cuda" if device == "cuda" else f"resources.gpus: {resources.gpus}"
        raise Refused(
            f"{asked}, but PyTorch sees no GPU here; set device: cpu and resources.gpus: 0 to train on the CPU"
        )
    # set_num_threads also turns off MKL's own choice of threads, which would vary with the load of the machine.
    torch.set_num_threads(resources.threads or len(os.sched_getaffinity(0)))
    if wants_gpu:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Some CUDA backward kernels have no deterministic form; PyTorch warns of them rather than refusing to train.
    torch.use_deterministic_algorithms(True, warn_only=wants_gpu)
    # Filling fresh memory finds reads of uninitialised memory but costs about 4% of a small model's step on a CPU.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return torch.device("cuda" if wants_gpu else "cpu")
