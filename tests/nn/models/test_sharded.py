"""Norms, QK-clip and Muon on sharded blocks (FSDP2): ranks rarely meet.

Compiled norms give the same numbers.

Training on several ranks, compared with a single rank, is in tests/integration/test_strategies.py.
"""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from anlit import GPT, NGPT, AnGPT, MuonAdamW, Runtime
from anlit.nn.layers import norms
from anlit.nn.models.decoder import Decoder
from anlit.training.optim.optimizers import parameter_groups
from tests.nn.models.tiny import prepare_to_train, random_tokens, tiny

layers = pytest.mark.parametrize("n_layers", [1, 3])


def sharded(decoder: Decoder) -> Decoder:
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for block in decoder.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    return fully_shard(decoder, mesh=mesh)


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[None]:
    """A single rank, or the first of two, which gets nothing from the other."""
    n_ranks = request.param
    if n_ranks == 1:
        distributed.init_process_group(
            "gloo", store=distributed.HashStore(), rank=0, world_size=n_ranks
        )
    else:
        distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=n_ranks)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("ranks", [1], indirect=True)
@pytest.mark.parametrize(("architecture", "expected"), [(GPT, 0), (AnGPT, 0), (NGPT, 1)])
@layers
def test_norms_and_clip_take_one_meeting_each_however_many_weights_there_are(
    architecture, expected, n_layers, ranks
):
    """The vectors of nGPT's W_o and W_d lie across ranks. Others are each on a single rank."""
    whole = tiny(architecture, n_layers=n_layers, qk_clip=1e-3, qk_norm_gain=True).model
    decoder = sharded(whole)
    decoder(random_tokens(1, 8))

    with CommDebugMode() as meetings_for_norms:
        decoder.restore_norms()
    with CommDebugMode() as meetings_for_clip:
        decoder.clip_qk()

    assert meetings_for_norms.get_total_counts() == expected
    assert meetings_for_clip.get_total_counts() == 1


@pytest.mark.parametrize("ranks", [2], indirect=True)
@layers
def test_muon_takes_two_meetings_however_many_matrices_there_are(n_layers, ranks) -> None:
    """torch 2.13's own step of the 7 matrices of a layer takes 102."""
    decoder = sharded(tiny(GPT, n_layers=n_layers).model)
    optimizer = MuonAdamW(parameter_groups(decoder))
    for parameter in decoder.parameters():
        parameter.grad = torch.ones_like(parameter)

    with CommDebugMode() as meetings:
        optimizer.step()

    assert meetings.get_total_counts() == 2


@pytest.mark.parametrize("ranks", [1], indirect=True)
@pytest.mark.parametrize("constraint", ["strict", "bounded"])
@pytest.mark.parametrize(("architecture", "expected"), [(AnGPT, 1), (NGPT, 3)])
@layers
def test_compiled_norms_are_as_few_calls_however_many_weights_there_are(
    architecture, expected, n_layers, constraint, ranks, monkeypatch
) -> None:
    n_calls = 0

    def count_calls(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            nonlocal n_calls
            n_calls += 1
            return graph.forward(*arguments)

        return run

    compile_counted = partial(torch.compile, dynamic=False, fullgraph=True, backend=count_calls)
    monkeypatch.setattr(norms, "_compiled", compile_counted)
    settings = {"norms": constraint, "attention_gate": "per_head"}
    whole = tiny(architecture, n_layers=n_layers, **settings).model
    with torch.no_grad():
        for number, weight in enumerate(whole.parameters()):
            factor = 1.3 if number % 2 else 0.7
            weight.mul_(factor).add_(0.01)
    shards = copy.deepcopy(whole)
    prepare_to_train(shards, Runtime(compile=True), "cuda")
    sharded(shards)

    whole.restore_norms()
    shards.restore_norms()

    assert n_calls == expected
    for name, shard in shards.named_parameters():
        actual = shard.full_tensor()
        expected_weight = whole.get_parameter(name)
        torch.testing.assert_close(actual, expected_weight, rtol=1e-6, atol=1e-7, msg=name)
