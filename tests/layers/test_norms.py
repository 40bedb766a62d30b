"""Norms, and the constants of approximate normalisation: with each, the output's mean norm is within 3 % of 1."""

import math

import pytest
import torch
from torch import Tensor

from anlit.layers import norms

D, HEADS, SAMPLES = 512, 8, 300


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def unit_rows(rows: int, width: int) -> Tensor:
    x = torch.randn(rows, width)
    return x / x.norm(dim=-1, keepdim=True)


def near_one(x: Tensor) -> bool:
    return abs(x.norm(dim=-1).mean().item() - 1) < 0.03


@pytest.mark.parametrize("d_head", [32, 96])
@pytest.mark.parametrize("groups", [1, 2, HEADS])
def test_factors_do_not_change_with_groups_and_hold_at_any_width_of_the_heads(d_head, groups) -> None:
    """Heads that see the same key and share values have the same average: √H is the norm of all in any case."""
    values = norms.nu_linear(D, d_head) * unit_rows(SAMPLES, D) @ unit_rows(groups * d_head, D).T
    values = values.unflatten(-1, (groups, d_head))
    assert all(near_one(values[:, group]) for group in range(groups))
    averages = values.repeat_interleave(HEADS // groups, 1).flatten(1)
    weight = unit_rows(D, HEADS * d_head)
    assert near_one(norms.nu_linear(d_head, D) * averages @ weight.T)


@pytest.mark.parametrize("d_ff", [2048, 1536, 512])
def test_factors_of_the_maps_into_and_out_of_the_mlp(d_ff) -> None:
    for d_in, d_out in ((D, d_ff), (d_ff, D)):
        assert near_one(norms.nu_linear(d_in, d_out) * unit_rows(SAMPLES, d_in) @ unit_rows(d_out, d_in).T)


def test_factor_of_the_residual() -> None:
    """For orthogonal h and h', with one α and with one per dimension."""
    h, other = unit_rows(SAMPLES, D), torch.randn(SAMPLES, D)
    other = norms.unit(other - (other * h).sum(-1, keepdim=True) * h)
    for alpha in (torch.tensor(0.05), torch.tensor(0.5), torch.tensor(-0.3), torch.rand(D)):
        assert near_one(norms.nu_residual(alpha) * (h + alpha * (other - h)))
    exact = norms.nu_residual(torch.tensor(0.25)) * (h + 0.25 * (other - h))
    torch.testing.assert_close(exact.norm(dim=-1), torch.ones(SAMPLES))


@pytest.mark.parametrize("ratio", [4.0, 3.0, 1.0, 8 / 3, 0.25, 64.0])
def test_factor_of_the_activation_is_the_monte_carlo_estimate(ratio) -> None:
    squares = torch.nn.functional.silu(torch.randn(1_000_000, dtype=torch.float64) / math.sqrt(ratio)).square()
    error = squares.std().item() / math.sqrt(len(squares))
    mean_square = norms.nu_activation(1 / math.sqrt(ratio)) ** -2
    assert abs(mean_square - squares.mean().item()) < 4 * error
    assert error < 0.01 * mean_square
    papers = {4.0: 3.72, 1.0: 1.677}
    assert 1 / math.sqrt(mean_square) == pytest.approx(papers.get(ratio, 1 / math.sqrt(mean_square)), abs=0.01)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_of_half_precision_are_rounded_once(dtype) -> None:
    """The sum, the root and the quotient are taken in float32: the result is the exact one, rounded."""
    x, gain = torch.randn(50, 100).to(dtype), torch.linspace(0.5, 2, 100)
    exact = x.double() / x.double().norm(dim=-1, keepdim=True)
    layer = norms.RMSNorm(100, 0.0)
    with torch.no_grad():
        layer.gain.copy_(gain)
    for output, expected in ((norms.unit(x), exact), (norms.rms(x, 0.0), exact * 10), (layer(x), exact * 10 * gain)):
        assert output.dtype == dtype
        assert (output == expected.to(dtype)).float().mean() > 0.99


@pytest.mark.parametrize("dim", [0, 1])
def test_constraints_act_along_the_given_axis(dim) -> None:
    weight = torch.diag(torch.tensor([0.5, 2.0, 3.0])) + 0.1
    along = weight.norm(dim=dim, keepdim=True)
    fixed, bounded = weight.clone(), weight.clone()
    norms.restore_norms([(fixed, dim, "strict"), (bounded, dim, "bounded")])
    torch.testing.assert_close(fixed, weight / along)
    torch.testing.assert_close(bounded, weight / along.clamp_min(1))
    assert bounded.norm(dim=dim)[0] < 0.7
