"""The section `scaling`: a law for each architecture, its compute-optimal frontier, exponents side by side."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt

from anlit.analysis.scaling import Fit, fit
from anlit.analysis.study.results import Point, StudyResults
from anlit.reporting.figure import COLUMN, line_styles, save, style
from anlit.reporting.table import NONE, markdown_table

BEYOND = 10.0
"""The frontier is drawn, dotted, up to this multiple of the largest compute."""
EXPONENTS = {
    "a": "a (of N)", "b": "b (of D)", "parameters_exponent": "N* ∝ C^", "compute_exponent": "L(C) − E ∝ C^−", "E": "E",
}  # fmt: skip


def scaling(results: StudyResults, options: dict[str, Any]) -> list[str]:
    """Option: `resamples` of the bootstrap (100). Every run of every seed counts; N is the number of all parameters."""
    arms: dict[str, list[Point]] = {}
    for point in results.points():
        if point.losses and "parameters" in point.values:
            arms.setdefault(results.study.title_of(point.arm.base), []).append(point)
    fits, notes = {}, []
    for title, points in arms.items():
        try:
            fits[title] = fit(*_arrays(points), resamples=options.get("resamples", 100))
        except ValueError as error:
            notes.append(f"- {title}: no law, because {error}.")
    parts = [
        "## Scaling",
        "L(N, D) = E + A/N^a + B/D^b over parameters N and training tokens D, fitted to every finished run as in "
        "arXiv 2203.15556; L(C) is its lowest value with 6·N·D = C FLOPs. Intervals: 95 %, bootstrap over runs.",
        *(["\n".join(notes)] if notes else []),
    ]
    if not fits:
        return parts
    path = results.output / "scaling.png"
    plot(arms, fits, path)
    largest = max(_flops(points).max() for points in arms.values())
    parts += [
        f"![loss over compute]({path.name})",
        "Dots are runs, lines the laws' compute-optimal loss; **dotted beyond the largest run: extrapolated**, as is "
        "where no run is near the best split of N and D.",
        markdown_table(
            ["", *EXPONENTS.values(), "runs"], [_row(title, found, arms[title]) for title, found in fits.items()]
        ),
        f"Compute-optimal predictions; those beyond {largest:.2g} FLOPs are extrapolated:",
        markdown_table(["", "FLOPs", "N*", "D*", "L(C)", "95 % interval", ""], _predictions(fits, largest)),
    ]
    return parts


def plot(arms: dict[str, list[Point]], fits: dict[str, Fit], path: Path) -> None:
    """Writes loss over compute: runs as dots, L(C) as lines with bands, dotted where extrapolated."""
    drawn = line_styles(list(arms))
    heights: list[float] = []
    with style(8):
        figure, ax = plt.subplots(figsize=(COLUMN, 2.9))
        for title, points in arms.items():
            colour, marker, _ = drawn[title]
            flops, losses = _flops(points), _arrays(points)[2]
            heights += [*losses]
            ax.plot(flops, losses, marker, color=colour, markersize=3.5, alpha=0.6, linestyle="none", label=title)
            if title not in fits:
                continue
            for low, high, line in ((flops.min(), flops.max(), "-"), (flops.max(), BEYOND * flops.max(), ":")):
                fine = np.geomspace(low, high, 60)
                heights += [*(law := fits[title].law.loss_of_compute(fine))]
                ax.plot(fine, law, line, color=colour, linewidth=1.2)
                ax.fill_between(fine, *fits[title].band(fine), color=colour, alpha=0.13, linewidth=0)
        ax.set_xscale("log")
        ax.set_ylim(min(heights) - (margin := 0.08 * (max(heights) - min(heights))), max(heights) + margin)
        ax.set_xlabel("training compute (6 N D, FLOPs)")
        ax.set_ylabel("validation loss (nats per token)")
        ax.grid()
        figure.legend(loc="outside lower center", ncols=3, title="marks: runs; lines: best split of N and D;\n"
                      "dotted: extrapolated; bands: 95 % of the bootstrap's laws")  # fmt: skip
        save(figure, path)


def _row(title: str, found: Fit, points: list[Point]) -> list[str]:
    cells = []
    for name in EXPONENTS:
        low, high = found.interval(name)
        interval = f" ({low:.3f} … {high:.3f})" if np.isfinite(low) else ""
        cells.append(f"{getattr(found.law, name):.3f}{interval}")
    return [title, *cells, str(sum(len(point.losses) for point in points))]


def _predictions(fits: dict[str, Fit], largest: float) -> list[list[str]]:
    rows = []
    for flops in (largest / 10, largest, largest * BEYOND):
        for title, found in fits.items():
            n, d = found.law.best_split(flops)
            low, high = found.band(np.array([flops])) if found.resampled else (None, None)
            interval = f"{low[0]:.3f} … {high[0]:.3f}" if low is not None and high is not None else NONE
            loss = f"{float(found.law.loss_of_compute(flops)):.3f}"
            note = "extrapolated" if flops > largest else ""
            rows.append([title, f"{flops:.2g}", f"{float(n):.2g}", f"{float(d):.2g}", loss, interval, note])
    return rows


def _arrays(points: list[Point]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Parameters, tokens and losses of every run."""
    rows = [(point.number("parameters"), point.number("tokens"), loss) for point in points for loss in point.losses]
    parameters, tokens, losses = np.array(rows, dtype=np.float64).T
    return parameters, tokens, losses


def _flops(points: list[Point]) -> np.ndarray:
    parameters, tokens, _ = _arrays(points)
    return 6 * parameters * tokens
