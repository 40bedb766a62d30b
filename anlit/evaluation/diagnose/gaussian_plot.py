"""The figure of attention over independent normal scores."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import NullFormatter

from anlit.configuration import attention_label
from anlit.evaluation.diagnose.plot import SMALL
from anlit.reporting.figure import DASHES, line_styles, panels, plt, save, style

KINDS = {
    "expected_total": "expected total weight E Σ e^L in [t, 10t)",
    "weight": "share of the weights w in [t, 10t)",
    "entropy": "entropy in [t, 10t) (nats)",
}


def draw_ranges(found: dict[str, Any], file: Path) -> None:
    """[SI]'s figures 1 and 2: the expected total weight in [t, 10t), and the entropy there, at the largest n."""
    longest = max(next(iter(found.values())))
    drawn = line_styles([shown(name) for name in found])
    with style(), plt.rc_context(SMALL):
        figure, axes = panels(len(KINDS), len(KINDS), 3.8, 3.2)
        for number, (name, lengths) in enumerate(found.items()):
            at, (colour, marker, _) = lengths[longest], drawn[shown(name)]
            begins = [t for t in (10**power for power in range(20)) if f"entropy_{t}_to_{10 * t}" in at]
            for ax, kind in zip(axes, KINDS, strict=True):
                means = np.array([at[f"{kind}_{t}_to_{10 * t}"]["mean"] for t in begins], dtype=float)
                # The dashes differ too, because some curves coincide.
                ax.plot(begins, means, linestyle=DASHES[number % len(DASHES)], color=colour, linewidth=1.6,
                        marker=marker, markersize=4, label=shown(name))  # fmt: skip
        for ax, (kind, title) in zip(axes, KINDS.items(), strict=True):
            ax.set_xscale("log")
            ax.xaxis.set_minor_formatter(NullFormatter())
            ax.set_title(title)
            ax.set_xlabel("t (tokens)")
            if kind == "expected_total":
                ax.set_yscale("log")
            else:
                ax.set_ylim(bottom=0)
        figure.suptitle(f"A query with {longest:,} keys: independent normal scores", x=0.01, ha="left")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(6, len(labels)))
        save(figure, file)


def shown(name: str) -> str:
    """A mechanism's name in a legend: `scale-invariant` for ScaleInvariant."""
    return "sliding window" if name == "SlidingWindow" else attention_label(name)
