"""Query heads that share keys and values, on every back end: the same as with a copy of them for each head."""

import pytest
import torch

from anlit.attention import backends
from anlit.attention.attention import Attention
from anlit.attention.backends import blockwise, eager, flex, sdpa
from anlit.attention.groups import repeat_kv
from anlit.attention.observation import BinnedMeans, bin_edges, observe
from anlit.attention.statistics import Range
from tests.attention.kernels import MECHANISMS, assert_same, gradients, inputs, kinds, packed, repeated

H, T, D = 4, 33, 8
each_number = pytest.mark.parametrize("n_kv_heads", [1, 2])


@each_number
@kinds
@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("backend", [eager, sdpa, blockwise], ids=["eager", "sdpa", "blockwise"])
@pytest.mark.covering(2)
def test_shared_keys_are_copied_keys(backend, name, kind, n_kv_heads, monkeypatch) -> None:
    """Output and gradients; the gradient of a key is the sum over its copies. Blocks are small here."""
    monkeypatch.setattr(eager, "QUERIES_PER_BLOCK", 16)
    monkeypatch.setattr(sdpa, "SHORTEST_MEAN", 4)
    assert backend.SUPPORTS_GQA
    mechanism = MECHANISMS[name].for_layer(H, D, 0).double()
    if backend.unsupported_reason(mechanism) is not None:
        return
    tensors = inputs(2, H, T, D, dtype=torch.float64, n_heads_kv=n_kv_heads)
    expected = gradients(repeated(eager.attend), mechanism, tensors, packed(2, T, kind))
    found = gradients(backend.attend, mechanism, tensors, packed(2, T, kind))
    assert found["k"].shape == (2, n_kv_heads, T, D)
    assert_same(found, expected)


@pytest.mark.parametrize("name", ["scale-invariant", "of one's own"])
def test_flex_reads_shared_keys(name, monkeypatch) -> None:
    """The score of head h has the slope of head h. On CPU there is the forward pass alone."""
    monkeypatch.setattr(flex, "_compiled", lambda: flex._run)
    mechanism = MECHANISMS[name].for_layer(H, 16, 0)
    q, k, v, _ = inputs(2, H, T, 16, dtype=torch.float32, n_heads_kv=2)
    with torch.no_grad():
        found, expected = (attend(q, k, v, mechanism, packed(2, T, "documents"), 0.0)
                           for attend in (flex.attend, repeated(eager.attend)))  # fmt: skip
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_back_end_that_needs_a_key_for_every_head_gets_copies(monkeypatch) -> None:
    mechanism = MECHANISMS["plain"].for_layer(H, D, 0)
    seen = []
    monkeypatch.delattr(backends.sdpa, "SUPPORTS_GQA")
    monkeypatch.setattr(backends.sdpa, "attend", lambda q, k, v, *rest: seen.append((k, v)) or q)
    q, k, v, _ = inputs(1, H, T, D, dtype=torch.float32, n_heads_kv=2)
    Attention(mechanism, "sdpa")(q, k, v, packed(1, T, "dense"))
    ((copied_k, copied_v),) = seen
    for copied, own in ((copied_k, k), (copied_v, v)):
        assert torch.equal(copied, own[:, [0, 0, 1, 1]])


def test_statistics_of_shared_keys_are_those_of_copies() -> None:
    mechanism = MECHANISMS["log n"].for_layer(H, D, 0)
    q, k, v, _ = inputs(2, H, T, D, dtype=torch.float32, n_heads_kv=2)
    found = []
    for keys, values in ((k, v), (repeat_kv(k, H), repeat_kv(v, H))):
        record = BinnedMeans(bin_edges(T))
        observe(record, Attention(mechanism, "eager"), q, keys, values, packed(2, T, "documents"), [Range(1, 10)])
        found.append(record.means())
    for name, means in found[1].items():
        torch.testing.assert_close(found[0][name], means, equal_nan=True)
