"""Norms of sharded weights (FSDP2): as those of whole ones, by one meeting of the ranks."""

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
from torch.distributed.tensor.debug import CommDebugMode

from anlit import GPT, NGPT, AnGPT
from anlit.layers import norms
from anlit.models.decoder import Decoder
from anlit.models.runtime import Runtime
from tests.models.tiny import tiny

PROCESSES = 2


def sharded(decoder: Decoder, processes: int) -> Decoder:
    mesh = init_device_mesh("cpu", (processes,))
    for block in decoder.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(decoder, mesh=mesh)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("architecture", "expected"), [(GPT, 0), (AnGPT, 0), (NGPT, 1)])
@pytest.mark.parametrize("n_layers", [1, 3])
def test_ranks_meet_once_however_many_weights_there_are(architecture, expected, n_layers) -> None:
    """The vectors of nGPT's W_o and W_d lie across ranks, all others on one rank each."""
    decoder = sharded(tiny(architecture, n_layers=n_layers).model, 1)
    with CommDebugMode() as meetings:
        decoder.restore_norms()
    assert meetings.get_total_counts() == expected


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("architecture", "expected"), [(AnGPT, 1), (NGPT, 3)])
@pytest.mark.parametrize("n_layers", [1, 3])
def test_compiled_it_is_as_few_calls_however_many_weights_there_are(architecture, expected, n_layers, monkeypatch):
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
    for (name, part), weight in zip(parts.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(part.full_tensor(), weight, rtol=1e-6, atol=1e-7, msg=name)


def compile_with(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [torch.compile(function, dynamic=False, fullgraph=True, backend=backend) for function in norms.WORK]
    monkeypatch.setattr(norms, "_compiled", lambda: made)


def changed(decoder: Decoder) -> Decoder:
    """With vectors of other norms."""
    with torch.no_grad():
        for number, weight in enumerate(decoder.parameters()):
            weight.mul_(1.3 if number % 2 else 0.7).add_(0.01)
    return decoder


def one_process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = distributed.FileStore(f"{folder}/store", PROCESSES)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES)
    compile_with("aot_eager", pytest.MonkeyPatch())
    for architecture, constraint, compiled in itertools.product((AnGPT, NGPT), ("strict", "bounded"), (False, True)):
        whole = changed(tiny(architecture, norms=constraint, attention_gate="per_head").model)
        parts = sharded(copy.deepcopy(whole), PROCESSES)
        parts.compiles_norms = compiled
        whole.restore_norms()
        parts.restore_norms()
        for (name, part), expected in zip(parts.named_parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(part.full_tensor(), expected, rtol=1e-6, atol=1e-7, msg=name)
    distributed.destroy_process_group()


@pytest.mark.slow
def test_norms_are_those_of_the_whole_weights(tmp_path: Path) -> None:
    multiprocessing.spawn(one_process, (str(tmp_path),), nprocs=PROCESSES)
