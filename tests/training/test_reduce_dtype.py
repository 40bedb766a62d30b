"""Gradients of several ranks are summed in float32, also where parameters are gathered in bfloat16."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from anlit.training.strategies import FullySharded
from tests.data.processes import training_context

RANKS, WIDTH = 2, 64


def gradient(layer: nn.Module, rank: int) -> Any:
    """dL/dW of one rank's batch."""
    x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(rank)).bfloat16()
    layer.zero_grad()
    layer(x).float().square().mean().backward()
    return next(layer.parameters()).grad


def one_rank(rank: int, folder: str) -> None:
    store = distributed.FileStore(f"{folder}/store", RANKS)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    for settings, least, most in (({}, 0, 1e-6), ({"reduce_dtype": "bfloat16"}, 1e-4, 1e-2)):
        layer = nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(2))
        alone, policy = (
            copy.deepcopy(layer).bfloat16(),
            FullySharded(gather_dtype="bfloat16", **settings).policy,
        )
        exact = torch.stack([gradient(alone, each).double() for each in range(RANKS)]).mean(0)
        fully_shard(layer, mesh=init_device_mesh("cpu", (RANKS,)), mp_policy=policy)
        error = (gradient(layer, rank).full_tensor().double() - exact).norm() / exact.norm()
        assert least <= error <= most, (settings, float(error))
    distributed.destroy_process_group()


def test_error_of_the_sum_over_ranks(tmp_path: Path) -> None:
    """Against the mean of what one process computes for each rank's batch."""
    training_context()
    multiprocessing.start_processes(
        one_rank, (str(tmp_path),), nprocs=RANKS, start_method="forkserver"
    )
