"""The measured peak rate of a device, and the compiler's state at the start of a benchmark."""

import torch

from anlit.benchmarks.peers.clock import seconds_of

PEAK_SIZE = {"cuda": 8192, "cpu": 1024}
TRIALS = 10


def matrix_peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a product of square matrices, the best of ten."""
    size = PEAK_SIZE[device.type]
    one, other = torch.randn(2, size, size, device=device).to(dtype)
    best = min(seconds_of(lambda: one @ other, device) for _ in range(TRIALS))
    return float(2 * size**3 / best)


def prepare_compiler() -> None:
    """Raise the limits of compilations, once before a benchmark begins.

    Blocks of several models share their code, and each model, shape and kind of pass is a separate compilation. Beyond
    the limit code would run uncompiled and be timed, so it fails instead.
    """
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 256
    torch._dynamo.config.accumulated_recompile_limit = 1024
    torch._dynamo.config.fail_on_recompile_limit_hit = True
