"""Gradients written by hand, for eager CPU, against autograd's of the formulas that compilers and GPUs get."""

import pytest
import torch
from torch import Tensor

from anlit.layers import norms, positions, swiglu
from anlit.layers.cpu_gradients import is_trained_eagerly_on_cpu

SHAPES = [(5, 8), (2, 3, 7, 8)]


def both_ways(monkeypatch, module, compute, *inputs: Tensor) -> None:
    """Values and gradients with and without the hand-written backward pass, in float64."""
    results = []
    for by_hand in (True, False):
        monkeypatch.setattr(module, "is_trained_eagerly_on_cpu", lambda _, by_hand=by_hand: by_hand)
        own = [x.detach().clone().requires_grad_() for x in inputs]
        y = compute(*own)
        probe = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(1))
        (y * probe).sum().backward()
        kind = type(y.grad_fn).__name__
        results.append((y.detach(), [x.grad for x in own], kind))
    assert results[0][2] != results[1][2], "the same way was taken twice"
    for mine, theirs in zip([results[0][0], *results[0][1]], [results[1][0], *results[1][1]], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)


def normal(*shape: int) -> Tensor:
    return 2 * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("eps", [0.0, 0.3])
def test_rms(shape, eps, monkeypatch) -> None:
    both_ways(monkeypatch, norms, lambda x: norms.rms(x, eps), normal(*shape))
    both_ways(monkeypatch, norms, lambda x, gain: norms.rms(x, eps, gain), normal(*shape), normal(8))


@pytest.mark.parametrize("shape", SHAPES)
def test_unit(shape, monkeypatch) -> None:
    both_ways(monkeypatch, norms, norms.unit, normal(*shape))


@pytest.mark.parametrize("shape", SHAPES)
def test_swiglu(shape, monkeypatch) -> None:
    both_ways(monkeypatch, swiglu, swiglu.swiglu, normal(*shape))


@pytest.mark.parametrize("kind", [positions.RoPE(0.5), positions.RoPE(1.0), positions.PRoPE()])
@pytest.mark.parametrize("index", [None, torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]])], ids=["one", "documents"])
def test_rotation(kind, index, monkeypatch) -> None:
    heads = normal(2, 5, 3 * 8)
    both_ways(
        monkeypatch, positions, lambda x: kind(x.unflatten(-1, (3, 8)).transpose(1, 2)[:, :2], index=index)[0], heads
    )


def test_parts_of_a_larger_tensor_are_taken_as_they_are(monkeypatch) -> None:
    """As heads lie inside of a fused projection."""
    both_ways(
        monkeypatch, norms, lambda x: norms.unit(x.unflatten(-1, (6, 4)).transpose(1, 2)[:, 2:4]), normal(2, 3, 24)
    )


def test_a_zero_vector_stays_zero_and_half_precision_is_kept() -> None:
    assert torch.equal(norms.unit(torch.zeros(2, 4)), torch.zeros(2, 4))
    x = torch.full((2, 4), 3.0, dtype=torch.bfloat16, requires_grad=True)
    y = norms.rms(x, 1e-6, torch.ones(4))
    y.sum().backward()
    assert y.dtype == x.grad.dtype == torch.bfloat16


def test_compilers_inference_and_other_devices_get_the_formula() -> None:
    seen = []
    x = torch.ones(2, requires_grad=True)
    torch.compile(lambda x: seen.append(is_trained_eagerly_on_cpu(x)) or x + 1, backend="eager")(x)
    assert seen == [False]
    assert is_trained_eagerly_on_cpu(x)
    with torch.no_grad():
        assert not is_trained_eagerly_on_cpu(x + 1)
    assert not is_trained_eagerly_on_cpu(torch.ones(2, device="meta", requires_grad=True))
