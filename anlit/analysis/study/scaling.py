"""The section `scaling`: laws of the loss over parameters N and tokens D, and over compute C, for each architecture.

    L(N, D) = E + A/N^a + B/D^b

fitted as in Hoffmann et al. (arXiv 2203.15556, appendix D.2): Huber's loss (δ = 1e-3) between log L and the logarithm
of the law, in log A, log B, log E, a, b, from a grid of starting points. From it follows the best split of
a compute C = 6·N·D: with G = (a A / (b B))^{1/(a+b)},

    N*(C) = G (C/6)^{b/(a+b)},   D*(C) = (C/6)^{a/(a+b)} / G,   L(C) = L(N*, D*)

Intervals are percentiles over fits to runs that are drawn with replacement. With few runs they are wide.
"""

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from numpy.typing import NDArray
from scipy import optimize, special

from anlit.analysis.study.results import StudyResults
from anlit.reporting.figure import COLUMN, line_styles, save, style
from anlit.reporting.table import NONE, markdown_table

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
BEYOND = 10.0
"""The frontier is drawn, dotted, up to this multiple of the largest compute."""
EXPONENTS = {
    "a": "a (of N)", "b": "b (of D)", "parameters_exponent": "N* ∝ C^", "compute_exponent": "L(C) − E ∝ C^−", "E": "E",
}  # fmt: skip
Runs = dict[str, Array]
"""Architecture → parameters, tokens and final losses of its runs, (3, runs)."""


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


def scaling(results: StudyResults, options: dict[str, Any]) -> list[str]:
    """Option: `resamples` of the bootstrap (100). Every run of every seed counts; N is the number of all parameters."""
    rows: dict[str, list[tuple[float, float, float]]] = {}
    for point in results.points():
        for loss in point.losses if "parameters" in point.values else ():
            row = point.number("parameters"), point.number("tokens"), loss
            rows.setdefault(results.study.title_of(point.arm.base), []).append(row)
    runs = {title: np.array(of).T for title, of in rows.items()}
    fits, notes = {}, []
    for title, of in runs.items():
        try:
            fits[title] = fit(of[0], of[1], of[2], options.get("resamples", 100))
        except ValueError as error:
            notes.append(f"- {title}: no law, because {error}.")
    parts = [
        "## Scaling",
        "L(N, D) = E + A/N^a + B/D^b over parameters N and training tokens D, fitted to every finished run as in "
        "arXiv 2203.15556; L(C) is its lowest value with 6·N·D = C FLOPs. Intervals: 95 %, bootstrap over runs.",
        "\n".join(notes),
    ]
    if not fits:
        return parts
    path = results.output / "scaling.png"
    draw(runs, fits, path)
    largest = max(_flops(of).max() for of in runs.values())
    return [
        *parts,
        f"![loss over compute]({path.name})",
        "Dots are runs, lines the laws' compute-optimal loss; **dotted beyond the largest run: extrapolated**, as is "
        "where no run is near the best split of N and D.",
        markdown_table(["", *EXPONENTS.values(), "runs"], [
            [title, *(_exponent(law, name) for name in EXPONENTS), str(runs[title].shape[1])]
            for title, law in fits.items()
        ]),
        f"Compute-optimal predictions; those beyond {largest:.2g} FLOPs are extrapolated:",
        markdown_table(["", "FLOPs", "N*", "D*", "L(C)", "95 % interval", ""], [
            _prediction(title, law, flops, "extrapolated" if flops > largest else "")
            for flops in (largest / 10, largest, largest * BEYOND) for title, law in fits.items()
        ]),
    ]  # fmt: skip


def draw(runs: Runs, fits: dict[str, Fit], path: Path) -> None:
    """Writes loss over compute: runs as dots, L(C) as lines with bands, dotted where extrapolated."""
    styles = line_styles(list(runs))
    heights: list[float] = []
    with style(8):
        figure, ax = plt.subplots(figsize=(COLUMN, 2.9))
        for title, of in runs.items():
            colour, marker, _ = styles[title]
            flops, losses = _flops(of), of[2]
            heights += [*losses]
            ax.plot(flops, losses, marker, color=colour, markersize=3.5, alpha=0.6, linestyle="none", label=title)
            if title not in fits:
                continue
            for low, high, line in ((flops.min(), flops.max(), "-"), (flops.max(), BEYOND * flops.max(), ":")):
                fine = np.geomspace(low, high, 60)
                heights += [*(law := fits[title].law.loss_of_compute(fine))]
                ax.plot(fine, law, line, color=colour, linewidth=1.2)
                ax.fill_between(fine, *fits[title].band(fine), color=colour, alpha=0.13, linewidth=0)
        margin = 0.08 * (max(heights) - min(heights))
        ax.set(xscale="log", ylim=(min(heights) - margin, max(heights) + margin),
               xlabel="training compute (6 N D, FLOPs)", ylabel="validation loss (nats per token)")  # fmt: skip
        ax.grid()
        figure.legend(loc="outside lower center", ncols=3, title="marks: runs; lines: best split of N and D;\n"
                      "dotted: extrapolated; bands: 95 % of the bootstrap's laws")  # fmt: skip
        save(figure, path)


def _exponent(fit: Fit, name: str) -> str:
    interval = fit.interval(name)
    return f"{getattr(fit.law, name):.3f}" + (f" ({interval[0]:.3f} … {interval[1]:.3f})" if interval else "")


def _prediction(title: str, fit: Fit, flops: float, note: str) -> list[str]:
    n, d = fit.law.best_split(flops)
    interval = NONE
    if fit.resampled:
        (low,), (high,) = fit.band(np.array([flops]))
        interval = f"{low:.3f} … {high:.3f}"
    loss = f"{float(fit.law.loss_of_compute(flops)):.3f}"
    return [title, f"{flops:.2g}", f"{float(n):.2g}", f"{float(d):.2g}", loss, interval, note]


def _flops(of: Array) -> Array:
    return 6 * of[0] * of[1]
