"""What each mechanism does to attention when the scores S are independent standard normal numbers.

By quadrature, no sampling. The weights are w_j = e^{L_j} / Σ e^L over the keys in question.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.special import log_ndtr
from scipy.stats import norm

from anlit import ALiBi, BetaScaling, ExpectedMaximum, LogBias, LogN, Plain, ScaleInvariant, SqrtLogN
from anlit.attention.mechanism import Mechanism

DECADES = [100, 1_000, 10_000, 100_000]
TAU = 10.0
LIMIT = math.sqrt(math.e) * TAU * math.log(10)
LOG_N = LogN(learned="never")


def functions(mechanism: Mechanism, n: float, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """a(t)·g(n) and m(t) of a query that sees n keys, at distances t."""
    distances = torch.from_numpy(t)
    g = mechanism.gain(torch.tensor([[[n]]], dtype=torch.float64))
    a, m = mechanism.distance_gain(distances), mechanism.distance_bias(distances)
    scale = (1.0 if g is None else g.item()) * (np.ones_like(t) if a is None else a.numpy())
    return scale, np.zeros_like(t) if m is None else m.numpy()


def in_decade(t: float, n_nodes: int = 24) -> tuple[np.ndarray, np.ndarray]:
    """Distances in [t, 10t) and their shares of the keys there: Gauss-Legendre nodes in ln t."""
    nodes, weights = np.polynomial.legendre.leggauss(n_nodes)
    distances = t * 10 ** ((nodes + 1) / 2)
    return distances, weights / 2 * math.log(10) * distances


def expected_weight(mechanism: Mechanism, t: float) -> float:
    """E Σ e^{L} over the distances in [t, 10t), for a query that sees just these and the nearer keys."""
    distances, keys = in_decade(t)
    scale, m = functions(mechanism, 10 * t, distances)
    return float((keys * np.exp(m + scale**2 / 2)).sum())


@pytest.mark.parametrize("t", DECADES)
@pytest.mark.parametrize("mechanism", [ScaleInvariant(TAU), LogBias(TAU)], ids=["scale-invariant", "log bias"])
def test_every_decade_of_distances_holds_the_same_weight(mechanism, t) -> None:
    """√e·τ·ln((1+10t/τ)/(1+t/τ)), within 5 % of its limit √e·τ·ln 10 from t = 100 on; summed key by key too."""
    exact = math.sqrt(math.e) * TAU * math.log((1 + 10 * t / TAU) / (1 + t / TAU))
    assert expected_weight(mechanism, t) == pytest.approx(exact, rel=1e-9)
    scale, m = functions(mechanism, 10 * t, np.arange(t, 10 * t, dtype=float))
    assert np.exp(m + scale**2 / 2).sum() == pytest.approx(exact, rel=1 / t)
    assert exact == pytest.approx(LIMIT, rel=0.05)


@pytest.mark.parametrize("mechanism", [Plain(), LOG_N, SqrtLogN()], ids=["plain", "log n", "sqrt log n"])
def test_without_a_bias_a_farther_decade_holds_more_weight(mechanism) -> None:
    weights = [expected_weight(mechanism, t) for t in DECADES]
    assert all(later > 9 * earlier for earlier, later in itertools.pairwise(weights))


def test_a_larger_c_favours_the_near_and_a_smaller_one_the_far() -> None:
    """Far beyond τ the weight of a decade goes as t^{2−c}."""
    for c, ratio in [(2.5, 10**-0.5), (1.5, 10**0.5)]:
        weights = [expected_weight(ScaleInvariant(TAU, c), t) for t in (1e4, 1e5)]
        assert weights[1] / weights[0] == pytest.approx(ratio, rel=0.01)


def test_alibi_forgets_what_is_far() -> None:
    """Head h of 8 has slope 2^{−h}: its expected weight beyond t is e^{−slope·t} of the whole."""
    alibi = ALiBi().for_layer(8, 16, 0)
    t = torch.arange(4000, dtype=torch.float64)
    slopes = -alibi.distance_bias(t)[:, 1]
    assert slopes.tolist() == pytest.approx([1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256])
    weights = alibi.distance_bias(t).exp()
    for head in range(8):
        share = weights[head, 64:].sum() / weights[head].sum()
        assert share.item() == pytest.approx(math.exp(-64 * slopes[head]), rel=1e-4)


def expected_entropy(mechanism: Mechanism, t: float) -> float:
    """E of the entropy of the weights within [t, 10t), −E Σ w ln w = E ln Z − E Σ w L, in nats.

    Both as integrals over ln s of products over the keys: E ln Z = ∫ (e^{−s} − E e^{−sZ}) ds/s and
    E Σ L e^L / Z = ∫ Σ_t E[L e^L e^{−s e^L}] Π_others E[e^{−s e^L}] ds.
    """
    distances, keys = in_decade(t)
    scale, m = functions(mechanism, 10 * t, distances)
    x = np.linspace(-9, 9, 181)
    density = norm.pdf(x) * (x[1] - x[0])
    logits = scale[:, None] * x + m[:, None]
    log_s, step = np.linspace(-30, 22, 521, retstep=True)
    log_z = mean_logit = 0.0
    for shift in log_s:
        z = np.exp(np.minimum(shift + logits, 6.6))  # e^{−z} is 0 beyond
        missed = (density * -np.expm1(-z)).sum(1)  # 1 − E e^{−s e^L}
        others = math.exp((keys * np.log1p(-missed)).sum())
        log_z += step * (math.exp(-math.exp(shift)) - others)
        mean_logit += step * others * (keys * (density * logits * z * np.exp(-z)).sum(1) / (1 - missed)).sum()
    return log_z - mean_logit


def test_entropy_in_a_decade_grows_as_the_root_of_log_t_when_scale_invariant() -> None:
    """The slope over √ln t barely changes and nears 2/√π; that over ln t falls."""
    entropies = np.array([expected_entropy(ScaleInvariant(TAU), t) for t in DECADES])
    over_root = np.diff(entropies) / np.diff(np.sqrt(np.log(DECADES)))
    over_log = np.diff(entropies) / np.diff(np.log(DECADES))
    assert over_root.max() / over_root.min() < 1.07
    assert over_log.max() / over_log.min() > 1.25
    assert over_root == pytest.approx([2 / math.sqrt(math.pi)] * 3, rel=0.15)
    assert (np.diff(over_root) > 0).all()


@pytest.mark.parametrize("mechanism", [Plain(), LogBias(TAU)], ids=["plain", "log bias"])
def test_entropy_in_a_decade_grows_as_log_t_without_a_gain_per_distance(mechanism) -> None:
    entropies = np.array([expected_entropy(mechanism, t) for t in DECADES])
    assert np.diff(entropies) / math.log(10) == pytest.approx([1.0] * 3, rel=0.02)
    if isinstance(mechanism, Plain):  # ln(9t) keys, less E[S e^S]/E[e^S] − ln E[e^S]
        assert entropies == pytest.approx(np.log(9 * np.array(DECADES)) - 0.5, abs=0.01)


def inverse_largest_weight(gain: float, n: int) -> float:
    """E[1/w_max] of n keys with logits g·S: 1 + n(n−1) ∫ φ(x) Φ(x)^{n−2} E[e^{g(S−x)}; S < x] dx."""
    x, step = np.linspace(-9, 9, 20_001, retstep=True)
    log_others = (n - 2) * log_ndtr(x) - gain * x + gain**2 / 2 + log_ndtr(x - gain)
    return 1 + n * (n - 1) * float((norm.pdf(x) * np.exp(log_others)).sum()) * step


def gain(mechanism: Mechanism, n: float) -> float:
    g = mechanism.gain(torch.tensor([[[float(n)]]], dtype=torch.float64))
    return 1.0 if g is None else g.item()


COUNTS = [2, 3, 5, 10, 30, 100, 1_000, 10_000, 100_000]


@pytest.mark.parametrize(("b", "c"), [(1.0, 0.0), (0.1, 1.9)])
@pytest.mark.parametrize("r", [1.5, 2.0])
def test_sqrt_log_n_keeps_the_largest_weight_from_vanishing(r, b, c) -> None:
    mechanism = SqrtLogN(r, b=b, c=c)
    values = [inverse_largest_weight(gain(mechanism, n), n) for n in COUNTS]
    assert max(values) < 1 + 1 / (r - 1)
    assert min(values) > 1.2, "nor does attention collapse to one key"


def test_the_largest_weight_of_plain_attention_vanishes() -> None:
    values = [inverse_largest_weight(gain(Plain(), n), n) for n in (10, 100, 1_000, 10_000, 100_000)]
    assert all(later > 4 * earlier for earlier, later in itertools.pairwise(values))


def test_the_largest_weight_by_enumeration() -> None:
    """The integral against n = 2, where 1/w_max = 1 + e^{−g|x − y|} and |x − y| is half-normal of variance 2."""
    for g in (0.3, 1.0, 2.5):
        exact = 1 + 2 * math.exp(g * g) * norm.cdf(-math.sqrt(2) * g)
        assert inverse_largest_weight(g, 2) == pytest.approx(exact, rel=1e-9)


def test_expected_maximum_is_that_of_normal_numbers() -> None:
    x, step = np.linspace(-9, 9, 20_001, retstep=True)
    for count, above in [(10, 0.060), (100, 0.020), (1_000, 0.010), (100_000, 0.004)]:
        exact = (x * count * norm.pdf(x) * np.exp((count - 1) * log_ndtr(x))).sum() * step
        assert gain(ExpectedMaximum(), count - 2) / exact - 1 == pytest.approx(above, abs=0.001)


def inverse_largest_weight_on_the_sphere(gain: float, n: int) -> float:
    """E[1/w_max] for q and k uniform on the sphere of 3 dimensions and of norm √3: S = √3·cos, cos uniform."""
    rate = gain * math.sqrt(3)
    edge = np.linspace(0, min(2.0, 60 / n), 20_001)  # 1 − largest cosine, of density (n/2)(1 − edge/2)^{n−1}
    below = (1 - edge / 2) ** (n - 2)
    nearer = (1 - np.exp(-rate * (2 - edge))) / (2 * rate)  # E[e^{g(S − S_max)}; S < S_max]
    return 1 + n * (n - 1) * float(np.trapezoid(below * nearer / 2, edge))


def test_beta_scaling_keeps_the_largest_weight_where_scores_are_bounded() -> None:
    """In 3 dimensions E[1/w_max] tends to 1 + 1/(2√3·s) with n^{2/(3−1)}; every logarithm of n lets it grow."""
    beta = BetaScaling(s=0.5).for_layer(1, 3, 0)
    values = [inverse_largest_weight_on_the_sphere(gain(beta, n), n) for n in (100, 1_000, 10_000, 100_000)]
    assert values == pytest.approx([1 + 1 / math.sqrt(3)] * 4, rel=0.02)
    for mechanism in (SqrtLogN(r=2.0), LOG_N):
        first, last = (inverse_largest_weight_on_the_sphere(gain(mechanism, n), n) for n in (1_000, 100_000))
        assert last > 20 * first


def test_beta_scaling_has_the_exponent_of_the_head_width() -> None:
    beta = BetaScaling(s=3.0).for_layer(2, 9, 0)
    assert [gain(beta, n) for n in (1, 16, 10_000)] == pytest.approx([3.0, 6.0, 30.0])
