"""The section `scaling`: laws of the loss over parameters N and tokens D, and over compute C, for each architecture.

    L(N, D) = E + A/N^a + B/D^b

fitted as in Hoffmann et al. (arXiv 2203.15556, appendix D.2): Huber's loss (δ = 1e-3) between log L and the logarithm
of the law, in log A, log B, log E, a, b, from a grid of starting points. From it follows the best split of
a compute C = 6·N·D: with G = (a A / (b B))^{1/(a+b)},

    N*(C) = G (C/6)^{b/(a+b)},   D*(C) = (C/6)^{a/(a+b)} / G,   L(C) = L(N*, D*)

Intervals are percentiles over fits to runs that are drawn with replacement. With few runs they are wide. One that
ends at a limit of the fit is none: the exponent, and what follows from it, is not determined.
"""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from numpy.typing import NDArray
from scipy import optimize, special

from anlit.reporting.figure import COLUMN, line_styles, save, style
from anlit.reporting.table import markdown_table
from anlit.study.results import StudyResults

Array = NDArray[np.float64]
HUBER_DELTA = 1e-3
LEAST_RUNS = 6
"""One more than the law has parameters."""
STARTS = np.array([*itertools.product((2.0, 8.0), (2.0, 8.0), (-0.5, 0.5), (0.2, 0.6), (0.2, 0.6))])
"""log A, log B, log E, a, b. Fewer than the paper's 4,500: with centred data most starts agree."""
BOUNDS = ((-30.0, -30.0, -10.0, 0.01, 0.01), (10.0, 10.0, 5.0, 3.0, 3.0))
"""Of the loss's parts at the middle run, log E, a, b."""
UNDETERMINED = "not determined"
BEYOND = 10.0
"""The frontier is drawn, dotted, up to this multiple of the largest compute."""


def exponents(laws: Array) -> dict[str, Array]:
    """What tables show of laws, arrays of E, A, B, a, b: (5, laws)."""
    e, _, _, a, b = laws
    return {
        "a (of N)": a,
        "b (of D)": b,
        "N* ∝ C^": b / (a + b),
        "L(C) − E ∝ C^−": a * b / (a + b),
        "E": e,
    }


def predicted_loss(laws: Array, parameters: Array | float, tokens: Array | float) -> Array:
    """L(N, D) in nats per token."""
    e, scale_n, scale_d, a, b = laws
    return np.asarray(e + scale_n / parameters**a + scale_d / tokens**b)


def best_split(laws: Array, flops: Array | float) -> tuple[Array, Array]:
    """The N and D of lowest loss with 6·N·D = flops."""
    _, scale_n, scale_d, a, b = laws
    g, nd = (a * scale_n / (b * scale_d)) ** (1 / (a + b)), np.asarray(flops) / 6
    return g * nd ** (b / (a + b)), nd ** (a / (a + b)) / g


def loss_of_compute(laws: Array, flops: Array | float) -> Array:
    """L(C): the laws' loss at the best split."""
    return predicted_loss(laws, *best_split(laws, flops))


def interval(values: Array) -> Array:
    """The 95 % percentile interval of values (…, laws) over all laws but the first, which is fitted to all runs."""
    return np.quantile(values[..., 1:], (0.025, 0.975), axis=-1)


def is_free(exponent: Array) -> bool:
    """Whether the interval of an exponent, (laws,), ends within the limits of the fit."""
    low, high = interval(exponent)
    return bool(low > 1.01 * BOUNDS[0][3] and high < 0.99 * BOUNDS[1][3])


def fit_law(runs: Array, starts: Array = STARTS) -> Array:
    """The law of the lowest Huber loss, (5,), on parameters, tokens and losses of runs, (3, runs).

    ValueError with fewer than six runs, or with less than three sizes or lengths, which leave an exponent undetermined.
    """
    if runs.shape[1] < LEAST_RUNS or not _is_determined(runs):
        raise ValueError(
            "a law of five numbers needs six runs or more, of three sizes and three lengths at least"
        )
    log_n, log_d, log_l = np.log(runs)
    middle_n, middle_d = (
        log_n.mean(),
        log_d.mean(),
    )  # centred, the five numbers hardly depend on one another
    n, d = log_n - middle_n, log_d - middle_d

    def terms(x: Array) -> Array:
        return np.stack([x[0] - x[3] * n, x[1] - x[4] * d, np.full_like(log_l, x[2])])

    def error(x: Array) -> Array:
        return np.asarray(special.logsumexp(terms(x), axis=0) - log_l)

    def slopes(x: Array) -> Array:
        of_n, of_d, of_e = special.softmax(terms(x), axis=0)
        return np.stack([of_n, of_d, of_e, -of_n * n, -of_d * d], axis=1)

    fits = []
    for log_a, log_b, log_e, a, b in starts:
        x = np.clip([log_a - a * middle_n, log_b - b * middle_d, log_e, a, b], *BOUNDS)
        fits.append(
            optimize.least_squares(
                error, x, slopes, BOUNDS, loss="huber", f_scale=HUBER_DELTA, max_nfev=2000
            )
        )
    log_a, log_b, log_e, a, b = min(fits, key=lambda fit: float(fit.cost)).x
    return np.array(
        [np.exp(log_e), np.exp(log_a + a * middle_n), np.exp(log_b + b * middle_d), a, b]
    )


def fit(runs: Array, resamples: int) -> Array:
    """The law, and after it `resamples` laws of its bootstrap, which start from it; undetermined draws are repeated."""
    law, n_runs = fit_law(runs), runs.shape[1]
    start = np.array([[np.log(law[1]), np.log(law[2]), np.log(law[0]), law[3], law[4]]])
    random = np.random.default_rng(0)
    draws = filter(
        _is_determined,
        (runs[:, random.integers(n_runs, size=n_runs)] for _ in range(5 * resamples)),
    )
    return np.stack(
        [law, *(fit_law(drawn, start) for drawn in itertools.islice(draws, resamples))], axis=1
    )


def _is_determined(runs: Array) -> bool:
    return all(len(np.unique(values)) >= 3 for values in runs[:2])


def scaling(results: StudyResults, options: dict[str, Any]) -> list[str]:
    """Option: `resamples` of the bootstrap (100). Every run of every seed counts; N is the number of all parameters."""
    rows: dict[str, list[tuple[float, float, float]]] = {}
    for point in results.points():
        for loss in point.losses if "parameters" in point.values else ():
            row = point.number("parameters"), point.number("tokens"), loss
            rows.setdefault(results.study.title_of(point.arm.base), []).append(row)
    failed = sum(point.failed for point in results.points())
    runs = {title: np.array(own).T for title, own in rows.items()}
    fitted, notes = {}, [f"- {failed} runs failed and are in no law."] * bool(failed)
    for title, own in runs.items():
        try:
            fitted[title] = fit(own, options.get("resamples", 100))
        except ValueError as error:
            notes.append(f"- {title}: no law, because {error}.")
    parts = [
        "## Scaling",
        "L(N, D) = E + A/N^a + B/D^b over parameters N and training tokens D, fitted to every finished run as in "
        "arXiv 2203.15556; L(C) is its lowest value with 6·N·D = C FLOPs. Intervals: 95 %, bootstrap over runs.",
        "\n".join(notes),
    ]
    if not fitted:
        return parts
    _draw(runs, fitted, results.output / "scaling.png")
    return [
        *parts,
        "![loss over compute](scaling.png)",
        "Dots are runs, lines the laws' compute-optimal loss; **dotted beyond the largest run: extrapolated**, as is "
        f"where no run is near the best split of N and D. *{UNDETERMINED.capitalize()}*: an interval of a or b ends at "
        f"a limit of the fit, {BOUNDS[0][3]:g} or {BOUNDS[1][3]:g}.",
        markdown_table(["", *exponents(next(iter(fitted.values()))), "runs"], [
            [title, *_cells(laws), str(runs[title].shape[1])] for title, laws in fitted.items()
        ]),
    ]  # fmt: skip


def _draw(runs: dict[str, Array], fitted: dict[str, Array], path: Path) -> None:
    """Writes loss over compute: runs as dots, L(C) as lines with bands, dotted where extrapolated."""
    styles = line_styles(list(runs))
    heights: list[float] = []
    with style(8):
        figure, ax = plt.subplots(figsize=(COLUMN, 2.9))
        for title, own in runs.items():
            (colour, marker, _), flops, losses = styles[title], 6 * own[0] * own[1], own[2]
            heights += [*losses]
            ax.plot(
                flops,
                losses,
                marker,
                color=colour,
                markersize=3.5,
                alpha=0.6,
                linestyle="none",
                label=title,
            )
            ends = ((flops.min(), flops.max(), "-"), (flops.max(), BEYOND * flops.max(), ":"))
            for low, high, line in ends if title in fitted else ():
                fine = np.geomspace(low, high, 60)
                frontier = loss_of_compute(fitted[title], fine[:, None])
                heights += [*frontier[:, 0]]
                ax.plot(fine, frontier[:, 0], line, color=colour, linewidth=1.2)
                ax.fill_between(fine, *interval(frontier), color=colour, alpha=0.13, linewidth=0)
        margin = 0.08 * (max(heights) - min(heights))
        ax.set(xscale="log", ylim=(min(heights) - margin, max(heights) + margin),
               xlabel="training compute (6 N D, FLOPs)", ylabel="validation loss (nats per token)")  # fmt: skip
        ax.grid()
        figure.legend(loc="outside lower center", ncols=3, title="marks: runs; lines: best split of N and D;\n"
                      "dotted: extrapolated; bands: 95 % of the bootstrap's laws")  # fmt: skip
        save(figure, path)


def _cells(laws: Array) -> list[str]:
    """What `exponents` has, each with its interval: the first is of a, the second of b, two of both, E of none."""
    of_a, of_b = (laws.shape[1] < 2 or is_free(values) for values in laws[3:])
    known = (of_a, of_b, of_a and of_b, of_a and of_b, True)
    return [_with_interval(own) if is_known else UNDETERMINED
            for own, is_known in zip(exponents(laws).values(), known, strict=True)]  # fmt: skip


def _with_interval(values: Array) -> str:
    return f"{values[0]:.3f}" + (
        " ({:.3f} … {:.3f})".format(*interval(values)) if len(values) > 1 else ""
    )
