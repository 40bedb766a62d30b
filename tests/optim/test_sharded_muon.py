"""Muon on sharded matrices (FSDP2): as on whole ones, by two meetings of the ranks."""

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed, multiprocessing
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from anlit import GPT, MuonAdamW
from anlit.models.decoder import Decoder
from anlit.optim.muon import Exchange
from anlit.optim.optimizers import parameter_groups
from tests.models.test_sharded_norms import PROCESSES, sharded
from tests.models.tiny import tiny

SETTINGS = {"momentum": 0.9, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}


def draw_gradients(decoder: Decoder, seed: int) -> None:
    """The same on every rank, of which each keeps its rows."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in decoder.parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        if isinstance(parameter, DTensor):
            drawn = distributed.tensor.distribute_tensor(drawn, parameter.device_mesh, parameter.placements)
        parameter.grad = drawn


@pytest.fixture
def pretended_ranks() -> Iterator[None]:
    """The first of two ranks; what it would get from the other is not there."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=PROCESSES)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("pretended_ranks")
@pytest.mark.parametrize("n_layers", [1, 3])
def test_ranks_meet_twice_however_many_matrices_there_are(n_layers) -> None:
    """With torch's own step of the 7 matrices of a layer it is 102 times, in torch 2.13."""
    decoder = sharded(tiny(GPT, n_layers=n_layers).model, PROCESSES)
    optimizer = MuonAdamW(parameter_groups(decoder))
    for parameter in decoder.parameters():
        parameter.grad = torch.ones_like(parameter)
    with CommDebugMode() as meetings:
        optimizer.step()
    assert meetings.get_total_counts() == 2


def compare_with_one_process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = distributed.FileStore(f"{folder}/store", PROCESSES)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES)
    whole = tiny(GPT, n_layers=1, d_model=24, d_ff=37).model  # rows and matrices that two ranks share unevenly
    parts = sharded(copy.deepcopy(whole), PROCESSES)
    optimizers = [MuonAdamW(parameter_groups(decoder), **SETTINGS) for decoder in (whole, parts)]
    for step in range(3):
        for decoder, optimizer in zip((whole, parts), optimizers, strict=True):
            draw_gradients(decoder, step)
            optimizer.step()
    for (name, part), expected in zip(parts.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(part.full_tensor(), expected, rtol=1e-6, atol=1e-7, msg=name)
    for part, expected in zip(parts.parameters(), whole.parameters(), strict=True):
        for name, value in optimizers[0].state[expected].items():
            kept = optimizers[1].state[part][name]
            torch.testing.assert_close(kept.full_tensor() if isinstance(kept, DTensor) else kept, value, msg=name)
    exchange_one_matrix(rank)
    distributed.destroy_process_group()


def exchange_one_matrix(rank: int) -> None:
    """The second rank has none of its own."""
    matrix = torch.arange(9.0).view(3, 3)
    exchange = Exchange([(3, 3)], distributed.group.WORLD)
    own = [part.clone() for part in matrix.chunk(PROCESSES)]
    whole = exchange.whole([own[rank]])
    assert [part.tolist() for part in whole] == [matrix.tolist()][rank:]
    (rows,) = exchange.rows([part.float() for part in whole], [own[rank]])
    assert torch.equal(rows, own[rank])


@pytest.mark.slow
def test_steps_are_those_of_one_process(tmp_path: Path) -> None:
    multiprocessing.spawn(compare_with_one_process, (str(tmp_path),), nprocs=PROCESSES)
