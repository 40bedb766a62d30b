"""Norms, and the constants of approximate normalisation: with each, the output's mean norm is within 3 % of 1."""

import math

import pytest
import torch
from torch import Tensor

from anlit.layers import norms

D, HEADS, SAMPLES = 512, 8, 300
D_HEAD = D // HEADS
WIDTHS = [2048, 1536, 512]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def unit_rows(rows: int, width: int) -> Tensor:
    x = torch.randn(rows, width)
    return x / x.norm(dim=-1, keepdim=True)


def mean_norm(x: Tensor) -> float:
    return x.norm(dim=-1).mean().item()


def near_one(value: float) -> bool:
    return abs(value - 1) < 0.03


@pytest.mark.parametrize("d_head", [D_HEAD // 2, 3 * D_HEAD // 2])
@pytest.mark.parametrize("groups", [1, 2, HEADS])
def test_factors_do_not_change_with_groups_and_hold_at_any_width_of_the_heads(d_head, groups) -> None:
    """Heads that see the same key and share values have the same average: √H is the norm of all in any case."""
    keys, x = unit_rows(groups * d_head, D), unit_rows(SAMPLES, D)
    values = (norms.nu_linear(D, d_head) * x @ keys.T).unflatten(-1, (groups, d_head))
    assert all(near_one(mean_norm(values[:, group])) for group in range(groups))
    averages = values.repeat_interleave(HEADS // groups, 1).flatten(1)
    weight = unit_rows(D, HEADS * d_head)
    assert near_one(mean_norm(norms.nu_concatenated_heads(HEADS, HEADS * d_head, D) * averages @ weight.T))


@pytest.mark.parametrize("d_ff", WIDTHS)
def test_factors_of_the_maps_into_and_out_of_the_mlp(d_ff) -> None:
    up, down = unit_rows(d_ff, D), unit_rows(D, d_ff)
    assert near_one(mean_norm(norms.nu_linear(D, d_ff) * unit_rows(SAMPLES, D) @ up.T))
    assert near_one(mean_norm(norms.nu_linear(d_ff, D) * unit_rows(SAMPLES, d_ff) @ down.T))


def test_factor_of_the_residual() -> None:
    """For orthogonal h and h', with one α and with one per dimension."""
    h, other = unit_rows(SAMPLES, D), torch.randn(SAMPLES, D)
    other = other - (other * h).sum(-1, keepdim=True) * h
    other = other / other.norm(dim=-1, keepdim=True)
    for alpha in (torch.tensor(0.05), torch.tensor(0.5), torch.tensor(-0.3), torch.rand(D)):
        mixed = norms.nu_residual(alpha) * (h + alpha * (other - h))
        assert near_one(mean_norm(mixed))
    exact = norms.nu_residual(torch.tensor(0.25)) * (h + 0.25 * (other - h))
    torch.testing.assert_close(exact.norm(dim=-1), torch.ones(SAMPLES))


def test_values_at_the_usual_widths() -> None:
    assert norms.nu_linear(512, 2048) == 0.5
    assert norms.nu_linear(2048, 512) == 2.0
    assert norms.nu_linear(D, D_HEAD) == pytest.approx(math.sqrt(8))
    assert norms.nu_concatenated_heads(HEADS, D, D) == pytest.approx(math.sqrt(1 / 8))
    assert norms.nu_activation(0.5) == pytest.approx(3.72, abs=0.01)
    assert norms.nu_activation(1.0) == pytest.approx(1.677, abs=0.001)


@pytest.mark.parametrize("ratio", [4.0, 3.0, 1.0, 8 / 3, 0.25, 64.0])
def test_factor_of_the_activation_is_the_monte_carlo_estimate(ratio) -> None:
    squares = torch.nn.functional.silu(torch.randn(1_000_000, dtype=torch.float64) / math.sqrt(ratio)).square()
    error = squares.std().item() / math.sqrt(len(squares))
    mean_square = norms.nu_activation(1 / math.sqrt(ratio)) ** -2
    assert abs(mean_square - squares.mean().item()) < 4 * error
    assert error < 0.01 * mean_square


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_of_half_precision_are_rounded_once(dtype) -> None:
    """The sum, the root and the quotient are taken in float32: the result is the exact one, rounded."""
    x = torch.randn(50, 100).to(dtype)
    exact = x.double()
    length, gain = exact.norm(dim=-1, keepdim=True), torch.linspace(0.5, 2, 100)
    layer = norms.RMSNorm(100, 0.0)
    with torch.no_grad():
        layer.gain.copy_(gain)
    for output, expected in [
        (norms.unit(x), exact / length),
        (norms.rms(x, 0.0), exact / length * 10),
        (layer(x), exact / length * 10 * gain),
    ]:
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
