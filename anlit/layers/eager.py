"""Where gradients written by hand pay: eager on CPU, where every pass that autograd takes goes through memory."""

import torch
from torch import Tensor


def is_trained_eagerly_on_cpu(x: Tensor) -> bool:
    """Whether x is computed with here and now, operation by operation, and its gradient is wanted.

    On other devices torch has fused kernels, and a compiler joins passes by itself: there the formula is enough.
    """
    return x.requires_grad and x.device.type == "cpu" and not torch.compiler.is_compiling()
