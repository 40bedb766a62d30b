"""Gradients of several ranks are summed in float32, also where parameters are gathered in bfloat16."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from anlit.training.strategies import FullySharded

PROCESSES, WIDTH = 2, 64
SETTINGS: list[tuple[dict[str, Any], float, float]] = [
    ({"gather_dtype": "bfloat16"}, 0, 1e-6),
    ({"gather_dtype": "bfloat16", "reduce_dtype": "bfloat16"}, 1e-4, 1e-2),
]
"""Of the strategy, with the least and the largest relative error of the sum."""


def gradient(layer: nn.Module, rank: int) -> torch.Tensor:
    """dL/dW of one rank's batch."""
    x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(rank)).bfloat16()
    layer.zero_grad()
    layer(x).float().square().mean().backward()
    return next(layer.parameters()).grad


def one_rank(rank: int, folder: str) -> None:
    store = distributed.FileStore(f"{folder}/store", PROCESSES)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES)
    mesh = init_device_mesh("cpu", (PROCESSES,))
    for settings, least, most in SETTINGS:
        layer = nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(PROCESSES))
        alone = copy.deepcopy(layer).bfloat16()
        exact = torch.stack([gradient(alone, each).double() for each in range(PROCESSES)]).mean(0)
        fully_shard(layer, mesh=mesh, mp_policy=FullySharded(**settings).policy)
        error = (gradient(layer, rank).full_tensor().double() - exact).norm() / exact.norm()
        assert least <= error <= most, (settings, float(error))
    distributed.destroy_process_group()


def test_error_of_the_sum_over_ranks(tmp_path: Path) -> None:
    """Against the mean of what one process computes for each rank's batch."""
    multiprocessing.start_processes(one_rank, (str(tmp_path),), nprocs=PROCESSES, start_method="fork")
