"""Compiled blocks under packed documents that change with every batch: no graph breaks, and nothing compiled again."""

from collections.abc import Iterator

import pytest
import torch
from torch import distributed
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

import anlit
from anlit import GPT, AnGPT, AttentionPattern, LogN, ScaleInvariant, SlidingWindow
from anlit.data.batch import Batch, batch_from_blocks
from anlit.models.language_model import LanguageModel
from anlit.models.runtime import Runtime
from tests.models.tiny import ARCHITECTURES, SIZE, random_tokens, tiny


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.fx.GraphModule]]:
    """The graphs that torch.compile made, which run as they are: what a backend would do with them is left out."""
    made: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        made.append(graph)
        return graph

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda forward, dynamic: compile_(forward, dynamic=dynamic, backend=keep))
    torch.compiler.reset()
    counters.clear()
    yield made
    torch.compiler.reset()


def compiled(architecture: type[LanguageModel], n_layers: int = 3, **settings: object) -> LanguageModel:
    model = tiny(architecture, n_layers=n_layers, **settings)
    model.runtime = Runtime(compile=True)
    model.runtime.apply(model.model, "cpu")
    return model


def changing_documents(step: int) -> Batch:
    """From one document to one per token, in turn: their number, their places and the longest change every time."""
    blocks = random_tokens(2, SIZE["context_length"] + 1, seed=step, vocab_size=1 + step % 8)
    blocks = blocks if step % 8 else blocks + 1
    return batch_from_blocks(blocks, end_of_document=0)


def train(model: LanguageModel, steps: range) -> None:
    for step in steps:
        model.logits_of(changing_documents(step)).square().mean().backward()


KINDS: dict[str, tuple[int, dict[str, object]]] = {
    **{architecture.__name__: (1, {"architecture": architecture}) for architecture in ARCHITECTURES},
    "eager": (1, {"backend": "eager"}),
    "scale-invariant": (1, {"attention": ScaleInvariant(), "positions": anlit.PRoPE()}),
    "c per layer": (1, {"attention": ScaleInvariant(learned="per_layer"), "positions": anlit.DynamicNTK()}),
    "log n": (1, {"attention": LogN(), "positions": anlit.NoPE()}),
    "alibi": (1, {"attention": anlit.ALiBi(), "positions": anlit.RoPE(1.0)}),
    "window": (1, {"attention": SlidingWindow(5)}),
    "not masked": (1, {"document_masking": False}),
    "shared keys": (1, {"attention": LogN(), "n_heads": 4, "n_kv_heads": 2, "d_head": 12}),
    "threads": (1, {"attention": ScaleInvariant(), "backend": "blockwise"}),
    "our own kernels": (1, {
        "architecture": AnGPT, "attention": ScaleInvariant(learned="per_layer"), "backend": "triton", "n_layers": 2,
    }),
    "patterns": (2, {
        "attention": AttentionPattern([SlidingWindow(4, ScaleInvariant()), LogN()]), "n_layers": 4,
        "positions": anlit.PositionsPattern([anlit.RoPE(), anlit.NoPE()]),
    }),
    "many kinds": (9, {
        "attention": AttentionPattern([SlidingWindow(width, anlit.Plain()) for width in range(1, 10)]), "n_layers": 9,
    }),
}  # fmt: skip
"""How many kinds of layers there are, each of which has one graph."""


@pytest.mark.parametrize(("n_graphs", "settings"), KINDS.values(), ids=KINDS.keys())
def test_one_graph_serves_all_layers_of_a_kind_and_all_batches(n_graphs, settings, graphs, monkeypatch) -> None:
    """Eight kinds of packing, of which the first comes back; two where a step takes long."""
    slow = n_graphs > 2 or settings.get("backend") == "triton"
    if settings.get("backend") == "triton":
        pytest.importorskip("triton")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    train(compiled(**{"architecture": GPT, **settings}), range(2 if slow else 9))
    assert len(graphs) == n_graphs
    assert not counters["graph_break"]


def test_validation_adds_one_graph_and_training_goes_on_with_its_own(graphs) -> None:
    model = compiled(GPT)
    for _ in range(2):
        train(model.train(), range(3))
        with torch.no_grad():
            model.eval().logits_of(changing_documents(3))
    assert len(graphs) == 2
    assert not counters["graph_break"]


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_ddp_leaves_each_block_whole(one_rank, graphs) -> None:
    model = compiled(GPT, n_layers=2)
    replica = DistributedDataParallel(model.model, bucket_cap_mb=0.001)
    replica(changing_documents(1).tokens).square().mean().backward()
    assert len(graphs) == 1
    assert all(parameter.grad is not None for parameter in model.parameters())
