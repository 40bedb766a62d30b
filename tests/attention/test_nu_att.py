"""ν_att and the participation behind it, against sampling, against integrals of another kind and at the limits."""

import math

import pytest
import torch
from scipy import integrate
from scipy.stats import norm
from torch import Tensor, nn

from anlit import LogN, Plain, ScaleInvariant, SqrtLogN
from anlit.attention import gaussian_tables
from anlit.attention.gaussian import nu_att, participation
from anlit.attention.mechanism import Mechanism
from tests.attention.examples import LEARNED, SHIPPED, LogNWithSlopes

N_HEADS, D_HEAD = 2, 16
COUNTS = [2, 3, 17, 200]
EVERY = {**SHIPPED, "a user's, all per head": LogNWithSlopes()}
BETWEEN = torch.tensor([1, 2, 9, 12, 17, 18, 25, 53, 77, 150, 222, 333, 700, 1500, 2222, 3500, 4095, 4096])


class Scaled(Mechanism):
    """g(n) = g, any constant."""

    def __init__(self, g: float) -> None:
        super().__init__()
        self.g = g

    def gain(self, n: Tensor) -> Tensor:
        return torch.full_like(n, self.g)


class Steepened(Mechanism):
    """a(t) = 1 + s·t/100 with s learned: no gain depends on n, no bias on distance."""

    def __init__(self) -> None:
        super().__init__()
        self.s = nn.Parameter(torch.tensor([0.3]))

    def distance_gain(self, t: Tensor) -> Tensor:
        return 1 + self.s * t / 100


def layer(mechanism: Mechanism) -> Mechanism:
    return mechanism.for_layer(N_HEADS, D_HEAD, 0)


@pytest.fixture(scope="module")
def scores() -> Tensor:
    return torch.randn(8_000, max(COUNTS), generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def sampled(mechanism: Mechanism, scores: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Σ w² over the samples, its mean and its standard error: each (H or 1,)."""
    t = torch.arange(n, dtype=torch.float64)
    g, a, m = mechanism.gain(torch.full((1, 1, 1), float(n))), mechanism.distance_gain(t), mechanism.distance_bias(t)
    logits = scores[:, None, :n] * (1 if a is None else a) * (1 if g is None else g) + (0 if m is None else m)
    squares = logits.detach().softmax(-1).square().sum(-1)
    return squares.mean(0), squares.std(0) / math.sqrt(len(scores))


@pytest.mark.parametrize("mechanism", [*EVERY.values(), Steepened()], ids=[*EVERY, "a user's a"])
def test_participation_is_the_mean_over_samples(mechanism, scores) -> None:
    mechanism = layer(mechanism)
    P = participation(mechanism, torch.tensor(COUNTS))
    for n, column in zip(COUNTS, P.T, strict=True):
        mean, error = sampled(mechanism, scores, n)
        assert ((column - mean).abs() < 4 * error + 1e-12).all(), n


@pytest.mark.parametrize("g", [0.3, 1.0, 3.0, 20.0])
def test_two_keys_are_an_integral_over_their_difference(g) -> None:
    """w₁ = σ(d), d ~ N(0, 2g²): E[w₁² + w₂²] = E[(1 + e^{−2|d|})/(1 + e^{−|d|})²]."""

    def density(z: float) -> float:
        small = math.exp(-g * math.sqrt(2) * z)
        return 2 * float(norm.pdf(z)) * (1 + small**2) / (1 + small) ** 2

    exact = integrate.quad(density, 0, 1 / g, epsabs=1e-12)[0] + integrate.quad(density, 1 / g, 40, epsabs=1e-12)[0]
    assert participation(Scaled(g), torch.tensor([2])).item() == pytest.approx(exact, rel=1e-7)


def test_three_unequal_keys_are_a_double_integral() -> None:
    """Only differences of logits matter: one of three is held at 0, the correlated other two are integrated over."""
    mechanism = ScaleInvariant(tau=1.0)
    a, m = (f(torch.arange(3.0, dtype=torch.float64)) for f in (mechanism.distance_gain, mechanism.distance_bias))
    x = torch.linspace(-8, 8, 81, dtype=torch.float64)
    density = (-(x**2) / 2).softmax(0)
    grids = torch.meshgrid(x, x, x, indexing="ij")
    weights = torch.stack([a[t] * grids[t] + m[t] for t in range(3)], -1).softmax(-1)
    exact = torch.einsum("ijk,i,j,k", weights.square().sum(-1), density, density, density)
    assert participation(mechanism, torch.tensor([3])).item() == pytest.approx(exact.item(), rel=1e-6)


@pytest.mark.parametrize("mechanism", EVERY.values(), ids=EVERY)
def test_a_single_key_has_the_whole_weight(mechanism) -> None:
    one = torch.ones(1, 1, 1)
    assert (participation(layer(mechanism), one) == 1).all()
    assert (nu_att(layer(mechanism), one) - 1).abs().max() < 1e-6


def test_weights_are_equal_without_a_gain_and_one_without_bound() -> None:
    n = torch.tensor([1, 2, 30, 5000, 2**20])
    assert participation(Scaled(0.0), n)[0].tolist() == pytest.approx((1 / n).tolist(), rel=1e-7)
    rest = [1 - participation(Scaled(g), n)[0, 1:] for g in (1e3, 1e4)]
    assert (rest[0] < 0.01).all()
    assert (rest[0] / rest[1]).tolist() == pytest.approx([10] * 4)
    strong = layer(LogN(s=1e6, learned="per_layer"))
    torch.testing.assert_close(nu_att(strong, n[None, None, 1:], 2**20), torch.ones(1, 1, 4))


def test_beyond_the_largest_b_the_rest_is_inversely_proportional(monkeypatch) -> None:
    n = torch.tensor([2, 100, 2**20])
    near = participation(Scaled(60.0), n)
    monkeypatch.setattr("anlit.attention.gaussian_quadrature.LARGEST_B", 80.0)
    torch.testing.assert_close(near, participation(Scaled(60.0), n), rtol=2e-4, atol=0)


def test_keys_taken_in_pieces_weigh_as_every_key_by_itself(monkeypatch) -> None:
    for mechanism in (layer(SHIPPED["scale-invariant"]), layer(SHIPPED["alibi"]), layer(SHIPPED["log bias"])):
        n = torch.tensor([300])
        in_pieces = participation(mechanism, n)
        with monkeypatch.context() as patch:
            patch.setattr("anlit.attention.gaussian.grid", lambda largest: list(range(1, largest + 1)))
            torch.testing.assert_close(in_pieces, participation(mechanism, n), rtol=1e-5, atol=0)


@pytest.mark.parametrize("mechanism", EVERY.values(), ids=EVERY)
def test_interpolation_is_right_to_one_part_in_a_thousand(mechanism) -> None:
    mechanism = layer(mechanism)
    nu = nu_att(mechanism, BETWEEN[None, None].double(), 4096)[0]
    exact = participation(mechanism, BETWEEN).rsqrt()
    torch.testing.assert_close(nu, exact.expand_as(nu), rtol=3e-4, atol=0)


@pytest.mark.parametrize("mechanism", [*LEARNED.values(), LogNWithSlopes(), Steepened()])
def test_nu_follows_what_is_learned(mechanism) -> None:
    """A table made before a step of training serves the values after it too, gains that changed sign included."""
    first = 0.7 if isinstance(mechanism, LogNWithSlopes) else -1.2  # steep biases towards what is far are left out
    mechanism = layer(mechanism)
    n = torch.tensor([[[2.0, 17.0, 200.0]]])
    before = nu_att(mechanism, n, 256)
    parts = [mechanism, *(part.coefficient for part in mechanism.modules() if hasattr(part, "coefficient"))]
    with torch.no_grad():
        for parameter in {p for part in parts for p in part.parameters()}:
            parameter.mul_(torch.linspace(first, 1.7, len(parameter)) if len(parameter) > 1 else 1.6)
    after = nu_att(mechanism, n, 256)
    exact = participation(mechanism, n.flatten()).rsqrt()
    assert (after / before - 1).abs().max() > 0.01
    torch.testing.assert_close(after[0].double(), exact.expand_as(after[0]), rtol=1e-3, atol=0)


@pytest.mark.parametrize("mechanism", LEARNED.values(), ids=LEARNED)
def test_no_gradient_flows(mechanism) -> None:
    mechanism, n = layer(mechanism), torch.tensor([[[2.0, 17.0]]])
    assert not nu_att(mechanism, n).requires_grad
    assert not participation(mechanism, n).requires_grad
    with torch.inference_mode():  # makes the table that training then uses
        nu_att(mechanism, n, 128)
    x = torch.ones(1, N_HEADS, 2, requires_grad=True)
    (x * nu_att(mechanism, n, 128)).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.float32, torch.float64])
def test_shapes_and_dtypes(dtype) -> None:
    n = torch.tensor([[1, 2, 3, 1, 2], [1, 2, 3, 4, 5]]).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for name, heads in {"plain": 1, "alibi": N_HEADS, "sqrt log n, r per head": N_HEADS, "log n, fixed": 1}.items():
        nu = nu_att(layer(SHIPPED[name]), n[:, None])
        assert nu.shape == (2, heads, 5)
        assert nu.dtype == wide
        torch.testing.assert_close(nu[0, :, 3:], nu[1, :, :2])
        torch.testing.assert_close(nu_att(layer(SHIPPED[name]), n[:1]), nu[0])
        assert participation(layer(SHIPPED[name]), n).shape == (heads, 2, 5)


def test_layers_of_equal_settings_share_a_table() -> None:
    gaussian_tables.over_n.cache_clear()
    for mechanism in (Plain(), Plain(), ScaleInvariant(tau=3.0), ScaleInvariant(tau=3.0), ScaleInvariant(tau=4.0)):
        nu_att(layer(mechanism), torch.ones(1, 1, 100))
    assert gaussian_tables.over_n.cache_info().misses == 3


def test_longer_sequences_get_a_longer_table() -> None:
    mechanism = layer(SqrtLogN(learned="per_head"))
    nu_att(mechanism, torch.arange(1.0, 65)[None, None])
    n = torch.tensor([3000])
    nu = nu_att(mechanism, n[None, None], longest=3000)[0]
    torch.testing.assert_close(nu.double(), participation(mechanism, n).rsqrt(), rtol=1e-3, atol=0)
