"""A step of torch's Muon on matrices that are sharded over ranks by rows (FSDP2).

torch computes Newton-Schulz on the shards, so ranks meet for almost every product. Here each rank
orthogonalises some whole matrices. Ranks meet twice in a step, for any number of matrices. Updates
go to the matrix's rank in bfloat16, the dtype of torch's computation. Changes come back.
"""

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from anlit.nn.layers.sharded import local_shard


@torch.no_grad()
def muon_step(muon: torch.optim.Muon) -> None:
    """Take `muon.step()`; if its matrices are sharded, all ranks must call this."""
    weights = chain.from_iterable(group["params"] for group in muon.param_groups)
    if not any(isinstance(weight, DTensor) for weight in weights):
        muon.step()
        return
    for group in muon.param_groups:
        _sharded_step(group, muon.state)


def _sharded_step(settings: dict[str, Any], state: dict[Tensor, dict[str, Tensor]]) -> None:
    """A step of a group of parameters, as in torch.optim.Muon."""
    shards: list[Tensor] = []
    gradients: list[Tensor] = []
    momenta: list[Tensor] = []
    shapes: list[tuple[int, ...]] = []
    process_group: ProcessGroup | None = None
    for weight in settings["params"]:
        if weight.grad is None:
            continue
        if "momentum_buffer" not in state[weight]:
            state[weight]["momentum_buffer"] = torch.zeros_like(weight)
        shard, process_group = local_shard(weight, 0)
        shards.append(shard)
        gradients.append(local_shard(weight.grad, 0)[0])
        momenta.append(local_shard(state[weight]["momentum_buffer"], 0)[0])
        shapes.append(tuple(weight.shape))
    if not shards:
        return
    torch._foreach_lerp_(momenta, gradients, 1 - settings["momentum"])
    updates: Sequence[Tensor] = momenta
    if settings["nesterov"]:
        updates = torch._foreach_lerp(gradients, momenta, settings["momentum"])
    exchange = Exchange(shapes, process_group)
    dtype = shards[0].dtype
    changes = [_change(update, settings, dtype) for update in exchange.gather(updates)]
    torch._foreach_mul_(shards, 1 - settings["lr"] * settings["weight_decay"])
    torch._foreach_add_(shards, exchange.scatter(changes, shards))


def _change(update: Tensor, settings: dict[str, Any], dtype: torch.dtype) -> Tensor:
    """The change that torch's Muon adds to a matrix for this update."""
    matrix = torch.zeros(update.shape, dtype=dtype, device=update.device)
    matrix.grad = update.to(dtype)
    muon = torch.optim.Muon(
        [matrix],
        lr=settings["lr"],
        weight_decay=0.0,
        momentum=0.0,
        nesterov=False,
        ns_coefficients=settings["ns_coefficients"],
        eps=settings["eps"],
        ns_steps=settings["ns_steps"],
        adjust_lr_fn=settings["adjust_lr_fn"],
    )
    muon.step()
    return matrix


class Exchange:
    """Gathers each matrix of these shapes, sharded over the ranks of `group`, on one rank.

    Every rank has the same number of rows of a matrix, by torch.chunk. Missing rows are padded. A
    matrix is named by its number in `shapes`.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], group: ProcessGroup | None) -> None:
        rank = distributed.get_rank(group)
        self.n_ranks = distributed.get_world_size(group)
        self.shapes = shapes
        self.group = group
        # Ranks take the matrices in turn, the largest first.
        by_size = sorted(range(len(shapes)), key=lambda number: -math.prod(shapes[number]))
        numbers_by_rank = [by_size[first :: self.n_ranks] for first in range(self.n_ranks)]
        self.local_numbers = numbers_by_rank[rank]
        """The matrices that this rank gathers."""
        self.order = list(chain.from_iterable(numbers_by_rank))
        """All matrices, in the order in which they are sent."""
        self.sizes: list[int] = []
        """By matrix, the entries in a rank's rows."""
        for rows, width in shapes:
            self.sizes.append(math.ceil(rows / self.n_ranks) * width)
        self.lengths = []
        """By rank, the entries that this rank sends."""
        for numbers in numbers_by_rank:
            self.lengths.append(sum(self.sizes[number] for number in numbers))
        self.local_lengths = [self.lengths[rank]] * self.n_ranks
        """By rank, the entries that this rank receives."""

    def gather(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """This rank's rows of every matrix → the matrices that it gathers, in bfloat16."""
        padded = []
        for number in self.order:
            padded.append(_padded(shards[number].bfloat16(), self.sizes[number]))
        sent = torch.cat(padded)
        received = sent.new_empty(sum(self.local_lengths))
        distributed.all_to_all_single(received, sent, self.local_lengths, self.lengths, self.group)
        rows_by_rank = received.view(self.n_ranks, self.local_lengths[0])
        local_sizes = [self.sizes[number] for number in self.local_numbers]
        matrices = []
        rows_by_matrix = rows_by_rank.split(local_sizes, dim=1)
        for number, rows in zip(self.local_numbers, rows_by_matrix, strict=True):
            shape = self.shapes[number]
            matrices.append(rows.flatten()[: math.prod(shape)].view(shape))
        return matrices

    def scatter(self, matrices: Sequence[Tensor], shards: Sequence[Tensor]) -> list[Tensor]:
        """The matrices that this rank gathers → its rows of every matrix, shaped like `shards`."""
        padded = [shards[0].new_empty(self.n_ranks, 0)]
        for number, matrix in zip(self.local_numbers, matrices, strict=True):
            size = self.n_ranks * self.sizes[number]
            padded.append(_padded(matrix, size).view(self.n_ranks, -1))
        sent = torch.cat(padded, dim=1).flatten()
        received = sent.new_empty(sum(self.lengths))
        distributed.all_to_all_single(received, sent, self.lengths, self.local_lengths, self.group)
        pieces = received.split([self.sizes[number] for number in self.order])
        piece_by_number = dict(zip(self.order, pieces, strict=True))
        rows = []
        for number, shard in enumerate(shards):
            rows.append(piece_by_number[number][: shard.numel()].view_as(shard))
        return rows


def _padded(x: Tensor, size: int) -> Tensor:
    """x flat, with zeros up to `size` entries."""
    return torch.nn.functional.pad(x.flatten(), (0, size - x.numel()))
