"""Compiled blocks with packed documents that change from batch to batch: a graph without breaks."""

import gc
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import distributed
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

from anlit import (
    GPT,
    NGPT,
    ALiBi,
    AnGPT,
    AttentionPattern,
    DynamicNTK,
    LogN,
    NoPE,
    PositionsPattern,
    PRoPE,
    RoPE,
    Runtime,
    ScaleInvariant,
    SlidingWindow,
)
from anlit.data.batch import batch_from_blocks
from anlit.nn import kernels
from anlit.nn.kernels import flash, flex, launch_limits
from anlit.training.language_model import LanguageModel
from tests.nn.attention import test_flash
from tests.nn.attention.interpreter import use_interpreter
from tests.nn.models.tiny import SIZE, prepare_to_train, random_tokens, tiny


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.fx.GraphModule]]:
    """The graphs that torch.compile makes; they run uncompiled."""
    graphs: list[torch.fx.GraphModule] = []

    def record_graph(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=record_graph))
    torch.compiler.reset()
    counters.clear()
    fewer_than_kinds_of_layers = 2
    with torch._dynamo.config.patch(recompile_limit=fewer_than_kinds_of_layers):
        yield graphs
    torch.compiler.reset()
    assert not counters["graph_break"]


def compiled(
    architecture: type[LanguageModel], n_layers: int = 3, **settings: object
) -> LanguageModel:
    model = tiny(architecture, n_layers=n_layers, **settings)
    prepare_to_train(model.model, Runtime(compile=True), "cpu")
    return model


def logits(model: LanguageModel, step: int) -> torch.Tensor:
    """Logits of a batch. The packing changes from a single document to a document per token."""
    kind = step % 8
    blocks = random_tokens(2, SIZE["context_length"] + 1, seed=step, vocab_size=1 + kind)
    if kind == 0:
        blocks += 1  # no token ends a document
    batch = batch_from_blocks(blocks, end_of_document=0)
    return model(batch.tokens, batch.document_ids, batch.cu_seqlens, batch.longest)


def train(model: LanguageModel, steps: int) -> None:
    for step in range(steps):
        objective = logits(model, step).square().mean()
        objective.backward()


C_PER_LAYER = ScaleInvariant(learned="per_layer")
SHARED_KEYS = {"n_heads": 4, "n_kv_heads": 2, "d_head": 12}
SETTINGS: dict[str, dict[str, object]] = {
    "GPT": {},
    "NGPT": {"architecture": NGPT},
    "AnGPT": {"architecture": AnGPT},
    "c per layer": {"attention": C_PER_LAYER, "positions": DynamicNTK()},
    "alibi": {"attention": ALiBi(), "positions": PRoPE()},
    "eager": {"kernel": "eager"},
    "window": {"attention": SlidingWindow(5)},
    "not masked": {"document_masking": False},
    "shared keys": {"attention": LogN(), "positions": NoPE(), **SHARED_KEYS},
    "blockwise": {"attention": ScaleInvariant(), "kernel": "blockwise"},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_one_graph_serves_all_layers_and_all_batches(settings, graphs) -> None:
    """The batches have eight kinds of packing, and the first once more."""
    model = compiled(**{"architecture": GPT, **settings})

    train(model, 9)

    assert len(graphs) == 1


def test_one_graph_of_our_own_kernels_serves_all_batches(graphs, monkeypatch) -> None:
    use_interpreter(monkeypatch)
    model = compiled(AnGPT, 1, attention=C_PER_LAYER, kernel="triton")

    train(model, 2)

    assert len(graphs) == 1


def test_one_graph_of_flash_serves_all_batches(graphs, monkeypatch) -> None:
    """On a CPU the operator has a slow kernel."""
    assert test_flash.flash is flash, "its module registers the kernel"
    monkeypatch.setattr(flash, "unsupported_reason", lambda mechanism, q=None: None)
    model = compiled(GPT, kernel="flash")

    train(model, 4)

    assert len(graphs) == 1


def test_batches_with_too_many_documents_for_flash_have_a_graph_of_their_own(
    graphs, monkeypatch
) -> None:
    monkeypatch.setattr(flash, "unsupported_reason", lambda mechanism, q=None: None)
    monkeypatch.setattr(kernels, "_cpu_kernels", lambda *_: ("flash", "eager"))
    monkeypatch.setattr(launch_limits, "MOST_SEQUENCES", 8)
    model = compiled(GPT)

    train(model, 9)

    assert len(graphs) == 2


@torch.no_grad()
def test_one_graph_of_flex_serves_all_batches(graphs, monkeypatch) -> None:
    """On a CPU it has no backward pass, and is not compiled itself."""
    monkeypatch.setattr(flex, "_compiled", lambda: flex._run)
    model = compiled(AnGPT, attention=C_PER_LAYER, kernel="flex")

    for step in range(4):
        logits(model, step)

    assert len(graphs) == 1


def test_each_kind_of_layers_in_a_pattern_has_a_graph(graphs) -> None:
    pattern = AttentionPattern([SlidingWindow(4, ScaleInvariant()), SlidingWindow(4), LogN()])
    positions = PositionsPattern([RoPE(), NoPE()])
    model = compiled(GPT, 6, attention=pattern, positions=positions)

    train(model, 2)

    assert len(graphs) == 6


def test_validation_adds_one_graph_and_training_goes_on_with_its_own(graphs) -> None:
    model = compiled(GPT)

    for _ in range(2):
        train(model.train(), 3)
        with torch.no_grad():
            logits(model.eval(), 3)

    assert len(graphs) == 2


def test_ddp_leaves_each_block_whole(graphs) -> None:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    model = compiled(GPT, n_layers=2)
    wrapped = DistributedDataParallel(model.model, bucket_cap_mb=0.001)

    objective = wrapped(random_tokens(2, 16)).square().mean()
    objective.backward()

    # DDP that outlives its group may wait for a thread that waits for Python's lock.
    del objective, wrapped
    gc.collect()
    distributed.destroy_process_group()
    assert len(graphs) == 1
    for parameter in model.parameters():
        assert parameter.grad is not None
