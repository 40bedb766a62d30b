"""The section `scaling`: a law for each architecture, its compute-optimal frontier, exponents side by side."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt

from anlit.analysis.scaling import Array, Fit, fit
from anlit.analysis.study.results import StudyResults
from anlit.reporting.figure import COLUMN, line_styles, save, style
from anlit.reporting.table import NONE, markdown_table

BEYOND = 10.0
"""The frontier is drawn, dotted, up to this multiple of the largest compute."""
EXPONENTS = {
    "a": "a (of N)", "b": "b (of D)", "parameters_exponent": "N* ∝ C^", "compute_exponent": "L(C) − E ∝ C^−", "E": "E",
}  # fmt: skip
Runs = dict[str, Array]
"""Architecture → parameters, tokens and final losses of its runs, (3, runs)."""


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
