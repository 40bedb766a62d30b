"""Norms and Muon where blocks are sharded (FSDP2): as on whole weights, and how often ranks meet for it.

Training of whole runs, with learned coefficients too, is in tests/integration/test_strategies.py.
"""

import copy
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from anlit import GPT, NGPT, AnGPT, MuonAdamW
from anlit.layers import norms
from anlit.models.decoder import Decoder
from anlit.models.runtime import Runtime
from anlit.optim.muon import Exchange
from anlit.optim.optimizers import parameter_groups
from tests.models.tiny import tiny

PROCESSES = 2


def sharded(decoder: Decoder, processes: int) -> Decoder:
    mesh = init_device_mesh("cpu", (processes,))
    for block in decoder.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    return fully_shard(decoder, mesh=mesh)


@pytest.fixture
def process_group(request: pytest.FixtureRequest) -> Iterator[None]:
    """One rank alone, or the first of two, which gets nothing from the other."""
    backend, store, size = ("gloo", distributed.HashStore(), 1) if request.param == 1 else ("fake", FakeStore(), 2)
    distributed.init_process_group(backend, store=store, rank=0, world_size=size)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("process_group", [1], indirect=True)
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(("architecture", "expected"), [(GPT, 0), (AnGPT, 0), (NGPT, 1)])
@pytest.mark.parametrize("n_layers", [1, 3])
def test_norms_take_one_meeting_however_many_weights_there_are(architecture, expected, n_layers) -> None:
    """The vectors of nGPT's W_o and W_d lie across ranks, all others on one rank each."""
    decoder = sharded(tiny(architecture, n_layers=n_layers).model, 1)
    with CommDebugMode() as meetings:
        decoder.restore_norms()
    assert meetings.get_total_counts() == expected


@pytest.mark.parametrize("process_group", [2], indirect=True)
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("n_layers", [1, 3])
def test_muon_takes_two_meetings_however_many_matrices_there_are(n_layers) -> None:
    """With torch's own step of the 7 matrices of a layer it is 102 times, in torch 2.13."""
    decoder = sharded(tiny(GPT, n_layers=n_layers).model, PROCESSES)
    optimizer = MuonAdamW(parameter_groups(decoder))
    for parameter in decoder.parameters():
        parameter.grad = torch.ones_like(parameter)
    with CommDebugMode() as meetings:
        optimizer.step()
    assert meetings.get_total_counts() == 2


@pytest.mark.parametrize("process_group", [1], indirect=True)
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(("architecture", "expected"), [(AnGPT, 1), (NGPT, 3)])
@pytest.mark.parametrize("n_layers", [1, 3])
def test_compiled_norms_are_as_few_calls_however_many_weights_there_are(architecture, expected, n_layers, monkeypatch):
    calls: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
        return lambda *arguments: calls.append(graph) or graph.forward(*arguments)

    compile_with(count, monkeypatch)
    whole = changed(tiny(architecture, n_layers=n_layers).model)
    parts = copy.deepcopy(whole)
    Runtime(compile=True).apply(parts, "cuda")
    sharded(parts, 1)
    for decoder in (whole, parts):
        decoder.restore_norms()
    assert len(calls) == expected
    assert_same(parts, whole)


def compile_with(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [torch.compile(function, dynamic=False, fullgraph=True, backend=backend) for function in norms.WORK]
    monkeypatch.setattr(norms, "_compiled", lambda: made)


def changed(decoder: Decoder) -> Decoder:
    """With vectors of other norms."""
    with torch.no_grad():
        for number, weight in enumerate(decoder.parameters()):
            weight.mul_(1.3 if number % 2 else 0.7).add_(0.01)
    return decoder


def assert_same(parts: Decoder, whole: Decoder) -> None:
    for (name, part), expected in zip(parts.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(part.full_tensor(), expected, rtol=1e-6, atol=1e-7, msg=name)


def one_process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = distributed.FileStore(f"{folder}/store", PROCESSES)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES)
    check_muon(rank)
    check_norms()
    distributed.destroy_process_group()


def check_norms() -> None:
    compile_with("aot_eager", pytest.MonkeyPatch())
    for architecture, constraint, compiled in itertools.product((AnGPT, NGPT), ("strict", "bounded"), (False, True)):
        whole = changed(tiny(architecture, norms=constraint, attention_gate="per_head").model)
        parts = sharded(copy.deepcopy(whole), PROCESSES)
        parts.compiles_norms = compiled
        whole.restore_norms()
        parts.restore_norms()
        assert_same(parts, whole)


def check_muon(rank: int) -> None:
    """Rows and matrices that two ranks share unevenly; of one matrix the second rank has none to orthogonalise."""
    whole = tiny(GPT, n_layers=1, d_model=24, d_ff=37).model
    parts = sharded(copy.deepcopy(whole), PROCESSES)
    settings = {"momentum": 0.9, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    optimizers = [MuonAdamW(parameter_groups(decoder), **settings) for decoder in (whole, parts)]
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for expected, part in zip(whole.parameters(), parts.parameters(), strict=True):
            expected.grad = torch.randn(expected.shape, generator=generator)
            part.grad = distribute_tensor(expected.grad, part.device_mesh, part.placements)
        for optimizer in optimizers:
            optimizer.step()
    assert_same(parts, whole)
    for part, expected in zip(parts.parameters(), whole.parameters(), strict=True):
        for name, value in optimizers[0].state[expected].items():
            kept = optimizers[1].state[part][name]
            torch.testing.assert_close(kept.full_tensor() if isinstance(kept, DTensor) else kept, value, msg=name)

    matrix = torch.arange(9.0).view(3, 3)
    exchange, own = Exchange([(3, 3)], distributed.group.WORLD), [part.clone() for part in matrix.chunk(PROCESSES)]
    whole_here = exchange.whole([own[rank]])
    assert [part.tolist() for part in whole_here] == [matrix.tolist()][rank:]
    (rows,) = exchange.rows([part.float() for part in whole_here], [own[rank]])
    assert torch.equal(rows, own[rank])


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    multiprocessing.spawn(one_process, (str(tmp_path),), nprocs=PROCESSES)
