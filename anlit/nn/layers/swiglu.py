"""The gated activation of the three MLPs (SwiGLU, arXiv 2002.05202)."""

from torch import Tensor
from torch.nn.functional import silu

from anlit.nn.layers.cpu_gradients import SwiGLU, is_trained_eagerly_on_cpu


def swiglu(uz: Tensor) -> Tensor:
    """u ∘ SiLU(z) = u ∘ z ∘ σ(z), (…, f), from uz (…, 2f), which holds u and then z."""
    if is_trained_eagerly_on_cpu(uz):  # the same numbers with fewer passes through memory
        return SwiGLU.apply(uz)
    u, z = uz.chunk(2, dim=-1)
    return u * silu(z)
