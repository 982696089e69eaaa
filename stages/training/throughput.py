"""How well a device is used: model flops utilisation, and memory. Shown while training, never published."""

from __future__ import annotations

import resource
import sys

import torch

# Dense bf16 (fp16 for V100 and T4) operations a second, from NVIDIA's and AMD's data sheets, without sparsity. The
# first name that occurs in the device's own counts.
PEAK_FLOPS = (
    ("B200", 2250e12),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("L4", 121e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("V100", 125e12),
    ("T4", 65e12),
    ("MI300X", 1307e12),
    ("MI250X", 383e12),
)


def peak_flops(device_name: str) -> float | None:
    """Half-precision operations a second that a GPU of this name can do; None where it is not known."""
    return next((peak for name, peak in PEAK_FLOPS if name in device_name), None)


def flops_per_token(model: torch.nn.Module) -> float:
    """Operations of a training step for each token: 6 for each weight that is multiplied with it.

    2 forward and 4 backward (Kaplan et al., 2020; PaLM's appendix B: Chowdhery et al., 2022). The lookup in the input
    embedding multiplies nothing, so its matrix counts only where it is the head as well. Attention's own products are
    left out, as is recomputation: the figure is the share of the peak that the weights' products alone reach.
    """
    embedding = model.get_input_embeddings().weight  # type: ignore[operator]
    output = model.get_output_embeddings()  # type: ignore[operator]
    weights = sum(param.numel() for param in model.parameters())
    if output is None or output.weight is not embedding:
        weights -= embedding.numel()
    return 6.0 * weights


def utilisation(flops: float, tokens_per_second: float, device: torch.device, ranks: int = 1) -> float | None:
    """Model flops utilisation, 0 to 1: operations a second over the devices' peak. None where the peak is not known.

    Args:
        flops: operations for each token.
        tokens_per_second: of all ranks together.
        device: what each rank trains on.
        ranks: how many there are.
    """
    if device.type != "cuda":
        return None
    peak = peak_flops(torch.cuda.get_device_name(device))
    return None if peak is None else flops * tokens_per_second / (peak * ranks)


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that PyTorch has held on a GPU, or that this process has held on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
