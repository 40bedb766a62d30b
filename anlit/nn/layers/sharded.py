"""Elementwise work on weights that may be sharded over ranks."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn.utils import get_total_norm

from anlit.nn.layers.precision import wide_dtype


def replicated_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Turn a tensor that all ranks have into a factor for `like`, which may be sharded."""
    if not isinstance(like, DTensor):
        return tensor
    return DTensor.from_local(
        tensor, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False
    )


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a tensor that may be sharded on all ranks. All ranks must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor that may be sharded, a view."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def reshard(model: nn.Module) -> None:
    """Let parameters be shards, between steps: FSDP2 keeps some gathered after a forward pass.

    Until the next backward pass a module would have other parameters than the optimizer. If the
    shards changed, it would go on with the gathered weights.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local_shard(weight: Tensor, dim: int) -> tuple[Tensor, ProcessGroup | None]:
    """Return this rank's shard of a weight, a view, and the ranks that share vectors along `dim`.

    The ranks are None if each vector is on one rank.
    """
    if not isinstance(weight, DTensor):
        return weight, None
    for axis, placement in enumerate(weight.placements):
        if placement.is_shard(dim):
            return weight.to_local(), weight.device_mesh.get_group(axis)
    return weight.to_local(), None


def total_norm(tensors: list[Tensor]) -> Tensor:
    """The norm of all tensors together, 0-d, in float32 at least.

    It is a DTensor if the tensors are sharded. Then all ranks must call this.
    """
    if all(tensor.dtype == wide_dtype(tensor) for tensor in tensors):
        return get_total_norm(tensors)
    norms = [torch.linalg.vector_norm(tensor, dtype=wide_dtype(tensor)) for tensor in tensors]
    return get_total_norm(norms)


@torch.no_grad()
def fill(weight: Tensor, draw: Callable[[Tensor], None]) -> None:
    """Fill a weight by `draw` on the host. So values do not depend on devices and ranks.

    All ranks draw the whole matrix from the same random state and store their shard. Nothing is
    sent.
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
