"""Elementwise work on weights that may be sharded over ranks."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor


def replicated_like(tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor`, which is the same on every rank, as a factor for `like`: a replicated DTensor if `like` is sharded."""
    if not isinstance(like, DTensor):
        return tensor
    return DTensor.from_local(
        tensor, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False
    )


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a tensor that may be sharded on every rank; all ranks must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_part(weight: Tensor, dim: int) -> tuple[Tensor, ProcessGroup | None]:
    """What this rank holds of a weight, in the same memory, and the ranks among which vectors along `dim` are split."""
    if not isinstance(weight, DTensor):
        return weight, None
    axes = [axis for axis, placement in enumerate(weight.placements) if placement.is_shard(dim)]
    return weight.to_local(), weight.device_mesh.get_group(axes[0]) if axes else None


@torch.no_grad()
def fill(weight: Tensor, draw: Callable[[Tensor], None]) -> None:
    """Fill a weight by `draw`, on the host, so that its values do not depend on the device or the number of ranks.

    Every rank draws the whole matrix from the same random state and keeps its part. Nothing is sent.
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
