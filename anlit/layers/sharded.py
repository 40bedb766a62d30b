"""What elementwise work on weights needs to know where they are sharded over ranks."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor


def replicated_like(tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor`, which is the same on every rank, in a form that multiplies `like`: itself unless `like` is sharded."""
    if not isinstance(like, DTensor):
        return tensor
    return DTensor.from_local(tensor, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be sharded, on every rank: every one must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def fill(weight: Tensor, draw: Callable[[Tensor], None]) -> None:
    """Let `draw` fill a weight: on the host and as a whole, so that its values depend neither on device nor ranks.

    Ranks whose random generators agree keep their own part of the same matrix; nothing is sent.
    """
    if weight.device.type == "cpu" and not isinstance(weight, DTensor):
        draw(weight)
        return
    drawn = torch.empty(weight.shape, dtype=weight.dtype, device="cpu")
    draw(drawn)
    drawn = drawn.to(weight.device)
    if isinstance(weight, DTensor):
        drawn = distribute_tensor(drawn, weight.device_mesh, weight.placements, src_data_rank=None)
    weight.copy_(drawn)
