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

from anlit.nn.layers.sharded import local_shard


@torch.no_grad()
def muon_step(muon: torch.optim.Muon) -> None:
    """`muon.step()`; if its matrices are sharded, all ranks must call it."""
    if any(
        isinstance(weight, DTensor) for group in muon.param_groups for weight in group["params"]
    ):
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
    parts, groups = zip(*(local_shard(weight, 0) for weight in weights), strict=True)
    gradients = [local_shard(weight.grad, 0)[0] for weight in weights if weight.grad is not None]
    momenta = [local_shard(state[weight]["momentum_buffer"], 0)[0] for weight in weights]
    torch._foreach_lerp_(momenta, gradients, 1 - settings["momentum"])
    updates = (
        torch._foreach_lerp(gradients, momenta, settings["momentum"])
        if settings["nesterov"]
        else momenta
    )
    exchange = Exchange([tuple(weight.shape) for weight in weights], groups[0])
    changes = [_change(update, settings, parts[0].dtype) for update in exchange.whole(updates)]
    torch._foreach_mul_(parts, 1 - settings["lr"] * settings["weight_decay"])
    torch._foreach_add_(parts, exchange.rows(changes, parts))


def _change(update: Tensor, settings: dict[str, Any], dtype: torch.dtype) -> Tensor:
    """What torch's Muon adds to a matrix for this update."""
    matrix = torch.zeros(update.shape, dtype=dtype, device=update.device)
    matrix.grad = update.to(dtype)
    formula = {
        name: settings[name] for name in ("ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
    }
    torch.optim.Muon(
        [matrix], lr=settings["lr"], weight_decay=0.0, momentum=0.0, nesterov=False, **formula
    ).step()
    return matrix


class Exchange:
    """Brings each matrix of these shapes together on one rank of `group`, which all have rows of it, and back.

    Every rank has as many rows of a matrix as the first one, as torch.chunk divides them; missing ones are padded.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], group: ProcessGroup | None) -> None:
        rank, self.n_ranks = distributed.get_rank(group), distributed.get_world_size(group)
        by_size = sorted(range(len(shapes)), key=lambda number: -math.prod(shapes[number]))
        of_rank = [
            by_size[each :: self.n_ranks] for each in range(self.n_ranks)
        ]  # those of one size in turn
        self.shapes, self.group, self.own, self.order = (
            shapes,
            group,
            of_rank[rank],
            [*chain(*of_rank)],
        )
        self.sizes = [math.ceil(rows / self.n_ranks) * width for rows, width in shapes]
        """By matrix, the entries in a rank's rows."""
        self.lengths = [sum(self.sizes[number] for number in numbers) for numbers in of_rank]
        self.equal = [self.lengths[rank]] * self.n_ranks

    def whole(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """This rank's rows of every matrix → the matrices that it has whole, in bfloat16."""
        sent = torch.cat(
            [_padded(parts[number].bfloat16(), self.sizes[number]) for number in self.order]
        )
        received = sent.new_empty(sum(self.equal))
        distributed.all_to_all_single(received, sent, self.equal, self.lengths, self.group)
        by_rank = received.view(self.n_ranks, self.equal[0]).split(
            [self.sizes[number] for number in self.own], dim=1
        )
        shapes = [self.shapes[number] for number in self.own]
        return [
            rows.flatten()[: math.prod(shape)].view(shape)
            for rows, shape in zip(by_rank, shapes, strict=True)
        ]

    def rows(self, matrices: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        """The matrices that this rank has whole → its rows of every matrix, each like the tensor in `like`."""
        sizes = [self.n_ranks * self.sizes[number] for number in self.own]
        padded = [
            _padded(*each).view(self.n_ranks, -1) for each in zip(matrices, sizes, strict=True)
        ]
        sent = torch.cat([like[0].new_empty(self.n_ranks, 0), *padded], dim=1).flatten()
        received = sent.new_empty(sum(self.lengths))
        distributed.all_to_all_single(received, sent, self.lengths, self.equal, self.group)
        pieces = received.split([self.sizes[number] for number in self.order])
        by_number = dict(zip(self.order, pieces, strict=True))
        return [by_number[number][: part.numel()].view_as(part) for number, part in enumerate(like)]


def _padded(x: Tensor, size: int) -> Tensor:
    """x flat, with zeros up to `size` entries."""
    return torch.nn.functional.pad(x.flatten(), (0, size - x.numel()))
