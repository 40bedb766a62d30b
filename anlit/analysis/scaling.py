"""Scaling laws: the loss over parameters N and tokens D, and over compute C, with bootstrap intervals.

    L(N, D) = E + A/N^a + B/D^b

fitted as in Hoffmann et al. (arXiv 2203.15556, appendix D.2): Huber's loss (δ = 1e-3) between log L and the logarithm
of the law, in log A, log B, log E, a, b, from a grid of starting points. From it follows the best split of
a compute C = 6·N·D: with G = (a A / (b B))^{1/(a+b)},

    N*(C) = G (C/6)^{b/(a+b)},   D*(C) = (C/6)^{a/(a+b)} / G,   L(C) = L(N*, D*)

Intervals are percentiles over fits to runs that are drawn with replacement. With few runs they are wide.
"""

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special

Array = NDArray[np.float64]
HUBER_DELTA = 1e-3
LEAST_RUNS = 6
"""One more than the law has parameters."""
LEAST_RESAMPLES = 20
STARTS = tuple(itertools.product((2.0, 8.0), (2.0, 8.0), (-0.5, 0.5), (0.2, 0.6), (0.2, 0.6)))
"""log A, log B, log E, a, b. Fewer than the paper's 4,500: with centred data most starts agree."""
BOUNDS = ((-30.0, -30.0, -10.0, 0.01, 0.01), (10.0, 10.0, 5.0, 3.0, 3.0))
"""Of the loss's parts at the middle run, log E, a, b."""
QUANTILES = (0.025, 0.975)


@dataclass(frozen=True)
class Law:
    """L(N, D) in nats per token, N in parameters and D in training tokens."""

    E: float
    A: float
    B: float
    a: float
    b: float

    def loss(self, parameters: Array | float, tokens: Array | float) -> Array:
        """L(N, D)."""
        return np.asarray(self.E + self.A / np.asarray(parameters) ** self.a + self.B / np.asarray(tokens) ** self.b)

    @property
    def parameters_exponent(self) -> float:
        """N* grows as C to this power; D* as C to 1 minus it."""
        return self.b / (self.a + self.b)

    @property
    def compute_exponent(self) -> float:
        """L(C) − E falls as C to minus this power: a·b/(a+b)."""
        return self.a * self.b / (self.a + self.b)

    def best_split(self, flops: Array | float) -> tuple[Array, Array]:
        """The N and D of lowest loss with 6·N·D = flops."""
        g = (self.a * self.A / (self.b * self.B)) ** (1 / (self.a + self.b))
        nd = np.asarray(flops, dtype=np.float64) / 6
        return g * nd**self.parameters_exponent, nd ** (1 - self.parameters_exponent) / g

    def loss_of_compute(self, flops: Array | float) -> Array:
        """L(C): the law's loss at the best split."""
        return self.loss(*self.best_split(flops))


@dataclass(frozen=True)
class Fit:
    """A law, and the laws fitted to resampled runs."""

    law: Law
    resampled: tuple[Law, ...]

    def interval(self, name: str) -> tuple[float, float] | None:
        """95 % percentile interval of an attribute of the law; None where too few resamples could be fitted."""
        if len(self.resampled) < LEAST_RESAMPLES:
            return None
        low, high = np.quantile([getattr(law, name) for law in self.resampled], QUANTILES)
        return float(low), float(high)

    def band(self, flops: Array) -> tuple[Array, Array]:
        """Pointwise 95 % percentile interval of L(C)."""
        low, high = np.quantile([law.loss_of_compute(flops) for law in self.resampled], QUANTILES, axis=0)
        return low, high


def fit_law(parameters: Array, tokens: Array, losses: Array, starts: tuple[tuple[float, ...], ...] = STARTS) -> Law:
    """The law of the lowest Huber loss on the runs, arrays of one length.

    Raises:
        ValueError: Fewer than six runs, or all of one size or of one length, which leave an exponent undetermined.
    """
    if len(losses) < LEAST_RUNS or not _is_determined(parameters, tokens):
        raise ValueError("a law of five numbers needs six runs or more, of three sizes and three lengths at least")
    log_n, log_d, log_l = np.log(parameters), np.log(tokens), np.log(losses)
    n, d = log_n - log_n.mean(), log_d - log_d.mean()  # centred, the five numbers hardly depend on one another

    def terms(x: Array) -> Array:
        return np.stack([x[0] - x[3] * n, x[1] - x[4] * d, np.full_like(log_l, x[2])])

    def error(x: Array) -> Array:
        return np.asarray(special.logsumexp(terms(x), axis=0) - log_l)

    def slopes(x: Array) -> Array:
        of_n, of_d, of_e = special.softmax(terms(x), axis=0)
        return np.stack([of_n, of_d, of_e, -of_n * n, -of_d * d], axis=1)

    fits = []
    for log_a, log_b, log_e, a, b in starts:
        x = np.clip([log_a - a * log_n.mean(), log_b - b * log_d.mean(), log_e, a, b], *BOUNDS)
        fits.append(optimize.least_squares(error, x, slopes, BOUNDS, loss="huber", f_scale=HUBER_DELTA, max_nfev=2000))
    log_a, log_b, log_e, a, b = min(fits, key=lambda fit: float(fit.cost)).x
    scale_a, scale_b = np.exp(log_a + a * log_n.mean()), np.exp(log_b + b * log_d.mean())
    return Law(float(np.exp(log_e)), float(scale_a), float(scale_b), float(a), float(b))


def fit(parameters: Array, tokens: Array, losses: Array, resamples: int = 200, seed: int = 0) -> Fit:
    """The law and its bootstrap: `resamples` fits to as many runs drawn with replacement.

    These fits start from the law itself. Draws that leave an exponent undetermined are repeated.

    Raises:
        ValueError: See `fit_law`.
    """
    law = fit_law(parameters, tokens, losses)
    starts = ((np.log(law.A), np.log(law.B), np.log(law.E), law.a, law.b),)
    random = np.random.default_rng(seed)
    draws = (random.integers(len(losses), size=len(losses)) for _ in range(5 * resamples))
    usable = (rows for rows in draws if _is_determined(parameters[rows], tokens[rows]))
    return Fit(law, tuple(fit_law(parameters[rows], tokens[rows], losses[rows], starts)
                          for rows in itertools.islice(usable, resamples)))  # fmt: skip


def _is_determined(parameters: Array, tokens: Array) -> bool:
    return len(np.unique(parameters)) >= 3 and len(np.unique(tokens)) >= 3
