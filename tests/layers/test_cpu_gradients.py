"""Gradients written by hand, for eager CPU, against autograd's of the formulas that compilers and GPUs get."""

from collections.abc import Callable
from functools import partial
from types import ModuleType

import pytest
import torch
from torch import Tensor

from anlit.layers import norms, positions, swiglu
from anlit.layers.cpu_gradients import is_trained_eagerly_on_cpu
from tests.layers.test_positions import turned

FLAT, DEEP = (5, 8), (2, 3, 7, 8)
PLACES = torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]])
"""Positions that restart in each document."""


def rotated(kind: positions.Positions, index: Tensor | None) -> Callable[[Tensor], Tensor]:
    return lambda x: turned(kind, x.unflatten(-1, (3, 8)).transpose(1, 2)[:, :2], index)


CASES: list[tuple[ModuleType, Callable[..., Tensor], list[tuple[int, ...]]]] = [
    *((norms, partial(norms.rms, eps=eps), [DEEP]) for eps in (0.0, 0.3)),
    *((norms, lambda x, gain, eps=eps: norms.rms(x, eps, gain), [FLAT, (8,)]) for eps in (0.0, 0.3)),
    (norms, norms.unit, [FLAT]),
    # Parts of a larger tensor are taken as they are, as heads lie inside of a fused projection.
    (norms, lambda x: norms.unit(x.unflatten(-1, (6, 4)).transpose(1, 2)[:, 2:4]), [(2, 3, 24)]),
    (swiglu, swiglu.swiglu, [DEEP]),
    *((positions, rotated(kind, index), [(2, 5, 24)])
      for kind, index in ((positions.RoPE(0.5), None), (positions.RoPE(1.0), PLACES), (positions.PRoPE(), None))),
]  # fmt: skip


@pytest.mark.parametrize(("module", "compute", "shapes"), CASES)
def test_gradients_by_hand_are_autograds(module, compute, shapes, monkeypatch) -> None:
    """Values and gradients with and without the hand-written backward pass, in float64."""
    generator = torch.Generator().manual_seed(0)
    inputs = [2 * torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]
    results, kinds = [], set()
    for by_hand in (True, False):
        monkeypatch.setattr(module, "is_trained_eagerly_on_cpu", lambda _, by_hand=by_hand: by_hand)
        y = compute(*inputs)
        probe = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(1))
        kinds.add(type(y.grad_fn))
        results.append([y, *torch.autograd.grad(y, inputs, probe)])
    assert len(kinds) == 2, "the same way was taken twice"
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-14)


def test_a_zero_vector_stays_zero_and_half_precision_is_kept() -> None:
    assert torch.equal(norms.unit(torch.zeros(2, 4)), torch.zeros(2, 4))
    x = torch.full((2, 4), 3.0, dtype=torch.bfloat16, requires_grad=True)
    norms.rms(x, 1e-6, torch.ones(4)).sum().backward()
    assert x.grad.dtype == torch.bfloat16


def test_compilers_inference_and_other_devices_get_the_formula() -> None:
    seen = []
    x = torch.ones(2, requires_grad=True)
    torch.compile(lambda x: seen.append(is_trained_eagerly_on_cpu(x)) or x + 1, backend="eager")(x)
    assert seen == [False]
    assert is_trained_eagerly_on_cpu(x)
    with torch.no_grad():
        assert not is_trained_eagerly_on_cpu(x + 1)
    assert not is_trained_eagerly_on_cpu(torch.ones(2, device="meta", requires_grad=True))
