"""What attention from libraries needs of queries: each function says why they cannot be taken, None if they can."""

import torch
from torch import Tensor


def reason_against_precision(library: str, q: Tensor, needs_nvidia: bool = False) -> str | None:
    """Their device and precision: 16 bits on a GPU."""
    if q.device.type != "cuda" or (needs_nvidia and torch.version.hip is not None):
        gpu = "an NVIDIA GPU" if needs_nvidia else "a CUDA device"
        return f"{library} needs {gpu}, and the model is on {q.device.type}"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"{library} computes in bfloat16 or float16, not {str(q.dtype).removeprefix('torch.')}"
    return None


def reason_against_width(library: str, q: Tensor, widest: int) -> str | None:
    """Their head width: a multiple of 8."""
    if q.shape[-1] > widest or q.shape[-1] % 8:
        return f"{library} needs a head width of 8, 16 … {widest} here, not {q.shape[-1]}"
    return None


def reason_against_age(library: str, q: Tensor) -> str | None:
    """Their GPU: one with bfloat16 in its matrix units."""
    if torch.cuda.get_device_capability(q.device) < (8, 0):
        return f"{library} needs a GPU of compute capability 8.0 (A100) or above"
    return None
