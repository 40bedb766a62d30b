"""Where gradients written by hand pay: eager on CPU, where every pass that autograd takes goes through memory."""

import torch
from torch import Tensor


def is_eager_on_cpu(x: Tensor) -> bool:
    """Whether x is computed with here and now, operation by operation.

    On other devices torch has fused kernels, and a compiler joins passes by itself: there the formula is enough.
    """
    return x.device.type == "cpu" and not torch.compiler.is_compiling()
