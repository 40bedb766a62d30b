"""Gradients of ranks are summed in float32, also if parameters are gathered in bfloat16."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from anlit.training.strategies import FullySharded
from tests.data.processes import training_context

N_RANKS = 2
WIDTH = 64


def gradient(layer: nn.Module, rank: int) -> Any:
    """dL/dW for the batch of a rank."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(32, WIDTH, generator=generator).bfloat16()
    layer.zero_grad()
    loss = layer(x).float().square().mean()
    loss.backward()
    (weight,) = layer.parameters()
    return weight.grad


def relative_error(strategy: FullySharded, rank: int) -> float:
    """The error of the sharded gradient, relative to the mean of each rank's gradient."""
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    generator = torch.Generator().manual_seed(2)
    nn.init.normal_(layer.weight, generator=generator)
    unsharded = copy.deepcopy(layer).bfloat16()
    gradients = []
    for number in range(N_RANKS):
        gradients.append(gradient(unsharded, number).double())
    exact = torch.stack(gradients).mean(0)
    mesh = init_device_mesh("cpu", (N_RANKS,))

    fully_shard(layer, mesh=mesh, mp_policy=strategy.policy)
    sharded = gradient(layer, rank).full_tensor().double()

    error = sharded - exact
    return float(error.norm() / exact.norm())


def run_rank(rank: int, folder: str) -> None:
    store = distributed.FileStore(f"{folder}/store", N_RANKS)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=N_RANKS)
    in_float32 = FullySharded(gather_dtype="bfloat16")
    in_bfloat16 = FullySharded(gather_dtype="bfloat16", reduce_dtype="bfloat16")

    assert relative_error(in_float32, rank) <= 1e-6
    assert 1e-4 <= relative_error(in_bfloat16, rank) <= 1e-2

    distributed.destroy_process_group()


def test_error_of_the_sum_over_ranks(tmp_path: Path) -> None:
    training_context()
    multiprocessing.start_processes(
        run_rank, (str(tmp_path),), nprocs=N_RANKS, start_method="forkserver"
    )
