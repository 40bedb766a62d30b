"""A step of torch's Muon on matrices that are sharded over ranks by rows (FSDP2).

torch computes Newton-Schulz on a sharded matrix as it stands, so ranks meet for almost every product. Here each rank
orthogonalises some of the matrices, whole. Ranks meet twice in a step, however many matrices there are: updates go to
their rank, in bfloat16, in which torch computes, and changes come back.
"""

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from anlit.layers.sharded import local_part

FORMULA = ("ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
"""The settings of torch's Muon that say what becomes of an update."""


@torch.no_grad()
def muon_step(muon: torch.optim.Muon) -> None:
    """`muon.step()`; if its matrices are sharded, all ranks must call it."""
    if any(isinstance(weight, DTensor) for group in muon.param_groups for weight in group["params"]):
        for group in muon.param_groups:
            _sharded_step(group, muon.state)
    else:
        muon.step()


def _sharded_step(settings: dict[str, Any], state: dict[Tensor, dict[str, Tensor]]) -> None:
    """A step of one group of parameters, as in torch.optim.Muon."""
    weights: list[Tensor] = [weight for weight in settings["params"] if weight.grad is not None]
    if not weights:
        return
    for weight in weights:
        if "momentum_buffer" not in state[weight]:
            state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    parts, groups = zip(*(local_part(weight, 0) for weight in weights), strict=True)
    gradients = [local_part(weight.grad, 0)[0] for weight in weights if weight.grad is not None]
    momenta = [local_part(state[weight]["momentum_buffer"], 0)[0] for weight in weights]
    torch._foreach_lerp_(momenta, gradients, 1 - settings["momentum"])
    updates = torch._foreach_lerp(gradients, momenta, settings["momentum"]) if settings["nesterov"] else momenta
    exchange = Exchange([tuple(weight.shape) for weight in weights], groups[0])
    changes = [_change(update, settings, parts[0].dtype) for update in exchange.whole(updates)]
    torch._foreach_mul_(parts, 1 - settings["lr"] * settings["weight_decay"])
    torch._foreach_add_(parts, exchange.rows(changes, parts))


def _change(update: Tensor, settings: dict[str, Any], dtype: torch.dtype) -> Tensor:
    """What torch's Muon adds to a matrix for this update."""
    matrix = torch.zeros(update.shape, dtype=dtype, device=update.device)
    matrix.grad = update.to(dtype)
    formula = {name: settings[name] for name in FORMULA}
    torch.optim.Muon([matrix], lr=settings["lr"], weight_decay=0.0, momentum=0.0, nesterov=False, **formula).step()
    return matrix


class Exchange:
    """Brings each matrix of these shapes together on one rank of `group`, which all have rows of it, and back."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], group: ProcessGroup | None) -> None:
        self.shapes, self.group = shapes, group
        self.rank, n_ranks = distributed.get_rank(group), distributed.get_world_size(group)
        by_size = sorted(range(len(shapes)), key=lambda number: -shapes[number][0] * shapes[number][1])
        self.of_rank = [by_size[rank::n_ranks] for rank in range(n_ranks)]
        """The numbers of the matrices that each rank has whole; those of one size are dealt out in turn."""
        self.sizes = [[_n_rows(shape[0], rank, n_ranks) * shape[1] for rank in range(n_ranks)] for shape in shapes]
        """By matrix and rank, the entries in the rank's rows."""

    def whole(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """This rank's rows of every matrix → the matrices that it has whole, in bfloat16."""
        own = self.of_rank[self.rank]
        sent = [[parts[number].bfloat16().flatten() for number in numbers] for numbers in self.of_rank]
        sizes = [[self.sizes[number][rank] for number in own] for rank in range(len(self.of_rank))]
        by_matrix = zip(*self._send(sent, sizes, parts[0].bfloat16()), strict=True)
        return [torch.cat(rows).view(self.shapes[number]) for number, rows in zip(own, by_matrix, strict=True)]

    def rows(self, matrices: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        """The matrices that this rank has whole → its rows of every matrix, each like the tensor in `like`."""
        own = self.of_rank[self.rank]
        split = [matrix.flatten().split(self.sizes[number]) for number, matrix in zip(own, matrices, strict=True)]
        sent = [[rows[rank] for rows in split] for rank in range(len(self.of_rank))]
        sizes = [[self.sizes[number][self.rank] for number in numbers] for numbers in self.of_rank]
        received = chain(*self._send(sent, sizes, like[0]))
        by_number = dict(zip(chain(*self.of_rank), received, strict=True))
        return [by_number[number].view_as(part) for number, part in enumerate(like)]

    def _send(self, pieces: list[list[Tensor]], sizes: list[list[int]], like: Tensor) -> list[list[Tensor]]:
        """Flat pieces for each rank → those from each rank, of these sizes; all in the precision of `like`."""
        lengths = [[sum(map(len, of_rank)) for of_rank in pieces], [sum(of_rank) for of_rank in sizes]]
        sent = torch.cat([like.new_empty(0), *(piece for of_rank in pieces for piece in of_rank)])
        received = like.new_empty(sum(lengths[1]))
        distributed.all_to_all_single(received, sent, lengths[1], lengths[0], self.group)
        return [list(part.split(own)) for part, own in zip(received.split(lengths[1]), sizes, strict=True)]


def _n_rows(n_rows: int, rank: int, n_ranks: int) -> int:
    """How many of a matrix's rows a rank has: as torch.chunk divides them."""
    each = math.ceil(n_rows / n_ranks)
    return max(0, min(each, n_rows - rank * each))
