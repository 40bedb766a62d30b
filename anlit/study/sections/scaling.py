"""The section `scaling`: each arm's law of the loss over parameters N and tokens D, or compute C.

    L(N, D) = E + A/N^a + B/D^b

fitted as in Hoffmann et al. (arXiv 2203.15556, appendix D.2): Huber's loss (δ = 1e-3) between log L
and the logarithm of the law, in log A, log B, log E, a, b, from a grid of starting points. The law
gives the best split of a compute C = 6·N·D: with G = (a A / (b B))^{1/(a+b)},

    N*(C) = G (C/6)^{b/(a+b)},   D*(C) = (C/6)^{a/(a+b)} / G,   L(C) = L(N*, D*)

Intervals are percentiles over fits to runs that are drawn with replacement. With few runs they are
wide. If an interval ends at a limit of the fit, the exponent and its consequences are not
determined.
"""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from numpy.typing import NDArray
from scipy import optimize, special

from anlit.reporting.figure import COLUMN_WIDTH, legend_below, line_styles, save, style
from anlit.reporting.table import markdown_table
from anlit.reporting.text import minus
from anlit.study.results import StudyResults

Array = NDArray[np.float64]
HUBER_DELTA = 1e-3
MIN_RUNS = 6
"""One more than the law has parameters."""
MIN_DISTINCT = 3
"""Distinct sizes, and distinct lengths, that determine both exponents."""
STARTS = np.array([*itertools.product((2.0, 8.0), (2.0, 8.0), (-0.5, 0.5), (0.2, 0.6), (0.2, 0.6))])
"""log A, log B, log E, a, b. Fewer than the paper's 4,500: with centred data most starts agree."""
BOUNDS = ((-30.0, -30.0, -10.0, 0.01, 0.01), (10.0, 10.0, 5.0, 3.0, 3.0))
"""Low and high limits of log(A/N^a) and log(B/D^b) at the middle run, log E, a, b."""
MIN_EXPONENT = BOUNDS[0][3]
MAX_EXPONENT = BOUNDS[1][3]
UNDETERMINED = "not determined"
EXTRAPOLATION = 10.0
"""The frontier is drawn, dotted, up to this multiple of the largest compute."""


def exponents(laws: Array) -> dict[str, Array]:
    """The columns of the table, of laws E, A, B, a, b, (5, laws)."""
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
    g = (a * scale_n / (b * scale_d)) ** (1 / (a + b))
    product = np.asarray(flops) / 6
    return g * product ** (b / (a + b)), product ** (a / (a + b)) / g


def loss_of_compute(laws: Array, flops: Array | float) -> Array:
    """L(C): the loss of the laws at the best split."""
    return predicted_loss(laws, *best_split(laws, flops))


def interval(values: Array) -> Array:
    """The 95 % percentile interval of values (…, laws).

    The first law is fitted to all runs and does not count.
    """
    return np.quantile(values[..., 1:], (0.025, 0.975), axis=-1)


def is_free(exponent: Array) -> bool:
    """Whether the interval of an exponent, (laws,), ends within the limits of the fit."""
    low, high = interval(exponent)
    return bool(low > 1.01 * MIN_EXPONENT and high < 0.99 * MAX_EXPONENT)


def fit_law(runs: Array, starts: Array = STARTS) -> Array:
    """Fit the law of the lowest Huber loss, (5,), to parameters, tokens and losses, (3, runs).

    Raises:
        ValueError: There are fewer than six runs, or fewer than three sizes or lengths, which leave
            an exponent undetermined.
    """
    if runs.shape[1] < MIN_RUNS or not _is_determined(runs):
        raise ValueError(
            "a law of five numbers needs six runs or more, of three sizes and three lengths or more"
        )
    log_n, log_d, log_l = np.log(runs)
    # With centred data the five numbers hardly depend on each other.
    middle_n = log_n.mean()
    middle_d = log_d.mean()
    n = log_n - middle_n
    d = log_d - middle_d

    def terms(x: Array) -> Array:
        return np.stack([x[0] - x[3] * n, x[1] - x[4] * d, np.full_like(log_l, x[2])])

    def error(x: Array) -> Array:
        return np.asarray(special.logsumexp(terms(x), axis=0) - log_l)

    def slopes(x: Array) -> Array:
        share_n, share_d, share_e = special.softmax(terms(x), axis=0)
        return np.stack([share_n, share_d, share_e, -share_n * n, -share_d * d], axis=1)

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


def fit_with_bootstrap(runs: Array, resamples: int) -> Array:
    """Fit the law, and `resamples` laws of its bootstrap that start from it; (5, laws).

    Draws that do not determine a law are repeated, at most four times each on average.
    """
    law = fit_law(runs)
    n_runs = runs.shape[1]
    start = np.array([[np.log(law[1]), np.log(law[2]), np.log(law[0]), law[3], law[4]]])
    random = np.random.default_rng(0)
    laws = [law]
    for _ in range(5 * resamples):
        if len(laws) > resamples:
            break
        resampled_runs = runs[:, random.integers(n_runs, size=n_runs)]
        if _is_determined(resampled_runs):
            laws.append(fit_law(resampled_runs, start))
    return np.stack(laws, axis=1)


def _is_determined(runs: Array) -> bool:
    parameters, tokens, _ = runs
    return min(len(np.unique(parameters)), len(np.unique(tokens))) >= MIN_DISTINCT


def scaling(results: StudyResults, options: dict[str, Any]) -> list[str]:
    """A figure and a table of the laws. Every run of every seed counts.

    N is the number of all parameters. Option: `resamples` of the bootstrap (100).
    """
    runs = _runs_by_title(results)
    failed = sum(measured.failed for measured in results.measured_arms())
    notes = [f"- {failed} runs failed and are in no law."] if failed else []
    fitted: dict[str, Array] = {}
    for title, runs_of_arm in runs.items():
        try:
            fitted[title] = fit_with_bootstrap(runs_of_arm, options.get("resamples", 100))
        except ValueError as error:
            notes.append(f"- {title}: no law, because {error}.")
    paragraphs = [
        "## Scaling",
        "L(N, D) = E + A/N^a + B/D^b over all parameters N, embeddings too, and training tokens D, "
        "fitted to every "
        "finished run as in arXiv 2203.15556; L(C) is its lowest value with 6·N·D = C FLOPs. "
        "Intervals: 95 %, bootstrap over runs.",
        "\n".join(notes),
    ]
    if not fitted:
        return paragraphs
    _draw_laws(runs, fitted, results.output / "scaling.png")
    head = ["", *exponents(next(iter(fitted.values()))), "runs"]
    rows = []
    for title, laws in fitted.items():
        rows.append([title, *_cells(laws), str(runs[title].shape[1])])
    return [
        *paragraphs,
        "![loss over compute](scaling.png)",
        "Dots are runs, lines the laws' compute-optimal loss; **dotted beyond the largest run: "
        "extrapolated**, as it is where no run is near the best split of N and D. "
        f"*{UNDETERMINED.capitalize()}*: an interval of a or b ends at a limit of "
        f"the fit, {MIN_EXPONENT:g} or {MAX_EXPONENT:g}.",
        markdown_table(head, rows),
    ]


def _runs_by_title(results: StudyResults) -> dict[str, Array]:
    """Parameters, tokens and losses of the runs, (3, runs), by the arm's title."""
    runs: dict[str, list[tuple[float, float, float]]] = {}
    for measured in results.measured_arms():
        if "parameters" not in measured.values:
            continue
        title = results.study.title_of(measured.arm.base)
        for loss in measured.losses:
            run = (measured.number("parameters"), measured.number("tokens"), loss)
            runs.setdefault(title, []).append(run)
    return {title: np.array(rows).T for title, rows in runs.items()}


def _draw_laws(runs: dict[str, Array], fitted: dict[str, Array], path: Path) -> None:
    """Draw loss over compute: runs as dots, L(C) as lines with bands, dotted if extrapolated."""
    styles = line_styles(list(runs))
    heights: list[float] = []
    with style():
        figure, axes = plt.subplots(figsize=(COLUMN_WIDTH, 2.9))
        for title, (parameters, tokens, losses) in runs.items():
            colour, marker, _ = styles[title]
            flops = 6 * parameters * tokens
            dots: dict[str, Any] = {"color": colour, "markersize": 3.5, "alpha": 0.6}
            axes.plot(flops, losses, marker, linestyle="none", label=title, **dots)
            heights += [*losses]
            if title in fitted:
                largest = flops.max()
                laws = fitted[title]
                heights += _draw_frontier(axes, laws, flops.min(), largest, "-", colour)
                end = EXTRAPOLATION * largest
                heights += _draw_frontier(axes, laws, largest, end, ":", colour)
        margin = 0.08 * (max(heights) - min(heights))
        axes.set_xscale("log")
        axes.set_ylim(min(heights) - margin, max(heights) + margin)
        axes.set_xlabel("training compute (6 N D, FLOPs)")
        axes.set_ylabel("validation loss (nats per token)")
        axes.grid()
        legend_title = (
            "marks: runs; lines: best split of N and D;\n"
            "dotted: extrapolated; bands: 95 % of the bootstrap's laws"
        )
        handles, _ = axes.get_legend_handles_labels()
        legend_below(figure, handles, columns=3, title=legend_title)
        save(figure, path)


def _draw_frontier(
    axes: Axes, laws: Array, low: float, high: float, dash: str, colour: str
) -> list[float]:
    """Draw L(C) from `low` to `high` FLOPs with its band; returns the losses of the line."""
    flops = np.geomspace(low, high, 60)
    losses = loss_of_compute(laws, flops[:, None])  # (flops, laws)
    low_losses, high_losses = interval(losses)
    axes.plot(flops, losses[:, 0], dash, color=colour, linewidth=1.2)
    axes.fill_between(flops, low_losses, high_losses, color=colour, alpha=0.13, linewidth=0)
    return list(losses[:, 0])


def _cells(laws: Array) -> list[str]:
    """The cells of `exponents`, each with its interval, or `UNDETERMINED`.

    The first depends on a, the second on b, the next two on both, and E on neither.
    """
    has_intervals = laws.shape[1] > 1
    a_is_known = not has_intervals or is_free(laws[3])
    b_is_known = not has_intervals or is_free(laws[4])
    both_known = a_is_known and b_is_known
    is_known = (a_is_known, b_is_known, both_known, both_known, True)
    cells = []
    for values, is_determined in zip(exponents(laws).values(), is_known, strict=True):
        cells.append(_with_interval(values) if is_determined else UNDETERMINED)
    return cells


def _with_interval(values: Array) -> str:
    """`0.340 (0.312 … 0.371)`; only the value if there is a single law."""
    if len(values) == 1:
        return minus(f"{values[0]:.3f}")
    low, high = interval(values)
    return minus(f"{values[0]:.3f} ({low:.3f} … {high:.3f})")
