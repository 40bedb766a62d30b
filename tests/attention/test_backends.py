"""Blocks of queries, the logits that others ask the readable back end for, dropout.

Its formulas are in tests/parity, what the other back ends make of them in test_cpu_kernels.py.
"""

import pytest
import torch

from anlit import Plain, ScaleInvariant
from anlit.attention.backends import eager, sdpa
from tests.attention.kernels import MECHANISMS, assert_same, gradients, inputs, packed, packings

HEADS, WIDTH = 3, 8


@packings
@pytest.mark.parametrize("backend", [eager, sdpa], ids=["eager", "sdpa"])
@pytest.mark.parametrize("name", MECHANISMS)
def test_blocks_of_queries_change_nothing(name, backend, kind, monkeypatch) -> None:
    """Blocks leave out keys ahead of their queries and before their windows."""
    mechanism = MECHANISMS[name].for_layer(HEADS, WIDTH, 0).double()
    if backend.unsupported_reason(mechanism) is not None:
        return
    given = mechanism, inputs(2, HEADS, 40, WIDTH, dtype=torch.float64), packed(2, 40, kind)
    whole = gradients(eager.attend, *given)
    monkeypatch.setattr(eager, "QUERIES_PER_BLOCK", 16)
    monkeypatch.setattr(sdpa, "SHORTEST_MEAN", 1000)  # not document by document
    assert_same(gradients(backend.attend, *given), whole)


@pytest.mark.parametrize(("length", "n_blocks"), [(512, 0), (513, 2), (1030, 3)])
def test_long_sequences_take_blocks(length, n_blocks, monkeypatch) -> None:
    calls = []
    real = eager.checkpoint
    monkeypatch.setattr(eager, "checkpoint", lambda *args, **kwargs: calls.append(1) or real(*args, **kwargs))
    q, k, v, _ = (x.requires_grad_() for x in inputs(1, 1, length, WIDTH, dtype=torch.float32))
    eager.attend(q, k, v, ScaleInvariant(), packed(1, length, "dense"), 0.0)
    assert len(calls) == n_blocks


@pytest.mark.parametrize("name", MECHANISMS)
def test_logits_are_those_that_attention_takes_the_softmax_of(name) -> None:
    q, k, v, _ = inputs(2, HEADS, 13, WIDTH, dtype=torch.float64)
    documents, mechanism = packed(2, 13, "documents"), MECHANISMS[name].for_layer(HEADS, WIDTH, 0).double()
    logits = eager.logits(q, k, mechanism, documents, 3, 11)
    assert logits.shape == (2, HEADS, 8, 11)
    expected = eager.attend(q, k, v, mechanism, documents, 0.0)[..., 3:11, :]
    torch.testing.assert_close(logits.softmax(-1) @ v[..., :11, :], expected, rtol=1e-12, atol=1e-12)


def test_the_order_of_pytorchs_kernels_can_be_compiled(monkeypatch) -> None:
    """As on Hopper, where cuDNN's is asked for first; on a CPU it is passed over."""
    q, k, v, _ = inputs(1, HEADS, 13, WIDTH, dtype=torch.float32)
    expected = sdpa.fused(q, k, v, is_causal=True)
    monkeypatch.setattr(sdpa, "prefers_cudnn", lambda q, mask: True)
    compiled = torch.compile(sdpa.fused, fullgraph=True, dynamic=False, backend="eager")
    for fused in (sdpa.fused, compiled):
        assert torch.equal(fused(q, k, v, is_causal=True), expected)


@pytest.mark.parametrize("backend", [eager, sdpa], ids=["eager", "sdpa"])
def test_dropout_drops_weights_and_keeps_the_mean(backend) -> None:
    q, k, v, _ = inputs(2, HEADS, 6, WIDTH, dtype=torch.float32)
    torch.manual_seed(0)
    given = q, k, torch.ones_like(v), Plain(), packed(2, 6, "dense"), 0.5
    outputs = torch.stack([backend.attend(*given) for _ in range(400)])
    assert outputs.std(0).max() > 0.3
    assert outputs.mean() == pytest.approx(1, abs=0.03)
