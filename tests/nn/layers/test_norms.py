"""Norms, and the constants of approximate normalisation: the output's mean norm is near 1."""

import math

import pytest
import torch
from scipy import integrate
from torch import Tensor

from anlit.nn.layers import norms

D = 512
HEADS = 8
SAMPLES = 300


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def unit_rows(rows: int, width: int) -> Tensor:
    x = torch.randn(rows, width)
    return x / x.norm(dim=-1, keepdim=True)


def near_one(x: Tensor) -> bool:
    mean_norm = x.norm(dim=-1).mean().item()
    return abs(mean_norm - 1) < 0.03


@pytest.mark.parametrize(
    ("d_in", "d_out"),
    [
        (D, 32),
        (D, 96),
        (D, 2048),
        (2048, D),
        (1536, D),
        (D, D),
    ],
)
def test_a_map_of_unit_rows_times_its_factor_keeps_norms(d_in, d_out) -> None:
    x = unit_rows(SAMPLES, d_in)
    weight = unit_rows(d_out, d_in)

    y = norms.nu_linear(d_in, d_out) * x @ weight.T

    assert near_one(y)


@pytest.mark.parametrize("d_head", [32, 96])
@pytest.mark.parametrize("groups", [1, 2, HEADS])
def test_the_factor_of_concatenated_heads_does_not_change_with_groups(d_head, groups) -> None:
    """Heads that see the same key and share values have the same average."""
    values = unit_rows(SAMPLES * groups, d_head).view(SAMPLES, groups, d_head)
    averages = values.repeat_interleave(HEADS // groups, 1).flatten(1)
    weight = unit_rows(D, HEADS * d_head)

    y = norms.nu_linear(d_head, D) * averages @ weight.T

    assert near_one(y)


def test_the_factor_of_the_residual_keeps_the_norm_for_orthogonal_vectors() -> None:
    h = unit_rows(SAMPLES, D)
    random = torch.randn(SAMPLES, D)
    components = (random * h).sum(-1, keepdim=True)
    orthogonal = norms.unit(random - components * h)
    alphas = [torch.tensor(value) for value in (0.05, 0.5, -0.3)]

    for alpha in [*alphas, torch.rand(D)]:
        new_h = h + alpha * (orthogonal - h)
        assert near_one(norms.nu_residual(alpha) * new_h)


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (4.0, 3.72),
        (1.0, 1.677),
        (8 / 3, None),
        (0.25, None),
        (64.0, None),
    ],
)
def test_factor_of_the_activation_is_the_monte_carlo_estimate(ratio, expected) -> None:
    std = 1 / math.sqrt(ratio)
    z = std * torch.randn(1_000_000, dtype=torch.float64)
    squares = torch.nn.functional.silu(z).square()
    estimate = squares.mean().item()
    standard_error = squares.std().item() / math.sqrt(len(squares))

    factor = norms.nu_activation(std)

    mean_square = factor**-2
    assert mean_square == pytest.approx(estimate, abs=4 * standard_error)
    assert standard_error < 0.01 * mean_square
    if expected is not None:
        assert factor == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("std", [0.1, 0.5, 1.0, 4.0])
def test_factor_of_the_activation_has_all_its_digits(std) -> None:
    def density(x: float) -> float:
        return (std * x / (1 + math.exp(-std * x))) ** 2 * math.exp(-x * x / 2)

    integral, _ = integrate.quad(density, -40, 40, points=[0.0], limit=200, epsabs=0, epsrel=1e-12)

    mean_square = integral / math.sqrt(2 * math.pi)
    assert norms.nu_activation(std) == pytest.approx(1 / math.sqrt(mean_square), rel=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_of_half_precision_are_rounded_once(dtype) -> None:
    """Sum, root and quotient are taken in float32: the result is the exact result, rounded."""
    x = torch.randn(50, 100).to(dtype)
    wide = x.double()
    exact = wide / wide.norm(dim=-1, keepdim=True)
    layer = norms.RMSNorm(100, 0.0)
    gain = torch.linspace(0.5, 2, 100)
    with torch.no_grad():
        layer.gain.copy_(gain)

    assert_is_rounded(norms.unit(x), exact, dtype)
    assert_is_rounded(norms.rms(x, 0.0), 10 * exact, dtype)
    assert_is_rounded(layer(x), 10 * exact * gain, dtype)


def assert_is_rounded(output: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    is_equal = output == exact.to(dtype)
    assert output.dtype == dtype
    assert is_equal.float().mean() > 0.99


@pytest.mark.parametrize("shape", [(2, 5, 3, 16), (16,)])
def test_compiled_rms_has_the_gradients_of_its_formula(shape) -> None:
    """They are written by hand."""
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    gain = torch.randn(16, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(shape, dtype=torch.float64)
    expected = x / (x.square().mean(-1, keepdim=True) + 0.3).sqrt() * gain
    expected_gradients = torch.autograd.grad(expected, (x, gain), upstream)

    compiled = torch.compile(norms.rms, backend="aot_eager", fullgraph=True)
    y = compiled(x, 0.3, gain)
    gradients = torch.autograd.grad(y, (x, gain), upstream)

    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-12, atol=1e-12)
