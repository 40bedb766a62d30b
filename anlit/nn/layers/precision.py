"""The precision of measurements, whatever the precision of the model."""

import torch
from torch import Tensor


def wide_dtype(x: Tensor) -> torch.dtype:
    """The type of `x`, but float32 for narrower numbers."""
    return torch.promote_types(x.dtype, torch.float32)
