"""Learned coefficients where the model is sharded block by block (FSDP2), on two processes: as on one."""

import copy
from pathlib import Path

import pytest
import torch
from torch import distributed, multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from anlit import AdamW, AnGPT
from anlit.optim.optimizers import parameter_groups
from tests.attention.examples import SHIPPED
from tests.models.tiny import jolt, random_tokens, tiny

PROCESSES, EACH = 2, 2
NAMES = ["sqrt log n, r global", "log bias, r global", "scale-invariant, c per layer", "log n"]


def train(model: torch.nn.Module, tokens: torch.Tensor) -> None:
    optimizer = AdamW(parameter_groups(model), lr=0.01, fused=False)
    for _ in range(3):
        optimizer.zero_grad()
        model(tokens).square().mean().backward()
        optimizer.step()
        model.restore_norms()


def one_process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = distributed.FileStore(f"{folder}/store", PROCESSES)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES)
    tokens = random_tokens(PROCESSES * EACH, 12)
    for name in NAMES:
        whole = jolt(tiny(AnGPT, attention=SHIPPED[name])).model
        sharded, before = copy.deepcopy(whole), copy.deepcopy(whole)
        mesh = init_device_mesh("cpu", (PROCESSES,))
        for block in sharded.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=True)
        fully_shard(sharded, mesh=mesh)
        train(whole, tokens)
        train(sharded, tokens[rank * EACH : (rank + 1) * EACH])
        start = dict(before.named_parameters())
        for (key, shard), expected in zip(sharded.named_parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(
                shard.full_tensor(), expected, rtol=0, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}"
            )
            assert (expected - start[key]).abs().max() > 1e-3
    distributed.destroy_process_group()


@pytest.mark.slow
def test_coefficients_train_alike_when_every_block_is_sharded(tmp_path: Path) -> None:
    multiprocessing.spawn(one_process, (str(tmp_path),), nprocs=PROCESSES)
