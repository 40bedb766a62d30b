"""`anlit diagnose --gaussian`: attention mechanisms over independent standard normal scores.

It needs no model. One query sees n keys at distances t = 0 … n−1. The logits are

    L = a(t)·g(n)·S_t + m(t),    S_t ~ N(0, 1)

Statistics are means over draws of S, the same for every mechanism. Expected totals
E Σ e^L = Σ e^{m + (a g)²/2} are exact. A mean over draws would not converge, because e^L has a
heavy tail with [SI]'s a(t).

[SI] is scale-invariant attention, arXiv 2505.17083. Distances t are in tokens, entropies in nats.
"""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from torch import Tensor

from anlit.config.labels import attention_label
from anlit.errors import UserError
from anlit.evaluation.runner import Evaluation, Report
from anlit.nn import mechanisms
from anlit.nn.attention.statistics import Range, log_total, ranges, statistics
from anlit.nn.kernels.formula import distance_tables
from anlit.nn.mechanisms.mechanism import Mechanism
from anlit.reporting.figure import TEXT_WIDTH, legend_below, line_styles, panels
from anlit.reporting.table import Table, markdown_table

SCORES_AT_ONCE = 1 << 22
"""Scores drawn at once: 16 MiB in float32, and a few copies exist."""
D_HEAD = 64
"""Our choice. Only BetaScaling's exponent depends on it: the scores are drawn, not q·k/√D."""


class NumberColumn(NamedTuple):
    """A column of the table, and the format of its numbers."""

    title: str
    number_format: str


NUMBER_COLUMNS = {
    "entropy": NumberColumn("entropy (nats)", ".2f"),
    "inverse_largest_weight": NumberColumn("1/w_max", ".1f"),
    "participation": NumberColumn("Σw²", ".3g"),
    "weight_latest_100": NumberColumn("last 100", ".3f"),
}
"""The statistics in the table, by their names in `anlit.nn.attention.statistics.statistics`."""
DELTAS = (2, 10, 100)
"""The Δ of the ranges of distances [t, Δt). [SI] makes the same claim for all Δ."""
DISTANCE_PANELS = {
    "expected_total": "E Σ e^L in [t, {delta}t)",
    "weight": "share of the weights in [t, {delta}t)",
    "entropy": "entropy in [t, {delta}t) (nats)",
}
"""The panels of the figure: the start of a statistic's name, before `_1_to_10` → the title."""


class Gaussian(Evaluation):
    """How mechanisms spread the weights of a query over keys with independent scores."""

    name = "gaussian"
    digits = 7

    def __init__(self, names: Iterable[str], lengths: Sequence[int], draws: int, seed: int) -> None:
        """Choose the mechanisms by name, the numbers of keys `lengths`, and the number of draws.

        Without checkpoints there are no settings of an evaluation, so `super` is not called.
        """
        self.mechanisms = build_mechanisms(names)
        self.numbers_of_keys = lengths
        self.draws = draws
        self.seed = seed

    def measure_all(self, paths: Sequence[str]) -> dict[str, Any]:
        """Measure every mechanism at every number of keys. There are no checkpoints in `paths`."""
        by_name: dict[str, Any] = {}
        for name, mechanism in self.mechanisms.items():
            by_name[name] = {}
            for n_keys in self.numbers_of_keys:
                result = measure_mechanism(mechanism, n_keys, self.draws, self.seed)
                by_name[name][n_keys] = result
        return {"draws": self.draws, "seed": self.seed, "mechanisms": by_name}

    def report(self, record: dict[str, Any]) -> Report:
        """Make a table for each number of keys, the largest first, and a figure of the largest."""
        by_name = record["mechanisms"]
        titles = ["mechanism", *(column.title for column in NUMBER_COLUMNS.values())]
        # JSON has turned the numbers of keys into strings.
        numbers_of_keys = sorted(next(iter(by_name.values())), key=int, reverse=True)
        largest = numbers_of_keys[0]
        paragraphs = [
            "# Attention over independent normal scores",
            f"One query with n keys, {record['draws']:,} draws, seed {record['seed']}. "
            "Means ± standard errors. Where e^L has a heavy tail, as with a large a(t)·g(n), "
            "standard errors are too small.",
        ]
        for n_keys in numbers_of_keys:
            markdown = markdown_table(titles, _mechanism_rows(by_name, n_keys))
            paragraphs.append(f"n = {int(n_keys):,}\n\n{markdown}")
        deltas = ", ".join(map(str, DELTAS))
        paragraphs.append(
            f"## Ranges of distances\n\n[t, Δt) for Δ = {deltas}, a row each. Scale-invariant "
            "attention has the same total weight in all ranges of a row far beyond τ.\n\n"
            "![ranges of distances](ranges.png)"
        )
        rows = []
        for row in _mechanism_rows(by_name, largest):
            # The terminal's table has the means alone, so that it is narrow.
            rows.append([cell.partition(" ±")[0] for cell in row])
        head = [title.replace(" ", "\n") for title in titles]
        table = Table(f"Independent normal scores, n = {int(largest):,} keys", head, rows)
        return Report(
            [table], paragraphs, {"ranges.png": partial(draw_distances, by_name, largest)}
        )


def build_mechanisms(names: Iterable[str]) -> dict[str, Mechanism]:
    """Build shipped mechanisms by name, with default arguments, for one head.

    Raises:
        UserError: A name is unknown, or its class needs arguments.
    """
    built: dict[str, Mechanism] = {}
    for name in map(str.strip, names):
        try:
            built[name] = getattr(mechanisms, name)().for_layer(1, D_HEAD, 0)
        except (AttributeError, TypeError) as error:
            raise UserError(
                f"--mechanisms {name!r} is not a mechanism with default arguments: "
                "choose others, such as Plain,SqrtLogN,ScaleInvariant"
            ) from error
    return built


@torch.no_grad()
def measure_mechanism(mechanism: Mechanism, n_keys: int, draws: int, seed: int) -> dict[str, Any]:
    """Measure the statistics of a query with `n_keys` keys, including its own.

    The `draws` depend on `seed` and `n_keys`, but not on the mechanism. `for_layer` has made the
    mechanism for one head.

    Returns:
        `mean` and `standard_error` by name. `anlit.nn.attention.statistics.statistics` gives the
        names. The ranges are the query's token, and `distance_ranges` of all `DELTAS`.
        `expected_total_1_to_10` has only a mean.
    """
    spans = ranges(0)
    for delta in DELTAS:
        spans += distance_ranges(n_keys, delta)
    # torch refuses seeds of 65 bits and more.
    generator = torch.Generator().manual_seed(seed % (1 << 63))
    scale, m = distance_functions(mechanism, n_keys, torch.float32)
    # Keys in the order of the text: the last is at distance 0.
    scale = scale.flip(-1)[:, None]  # (1, 1, n)
    m = m.flip(-1)[:, None]  # (1, 1, n)
    first_key = torch.zeros(1, 1, dtype=torch.long)  # the query's document begins at key 0
    samples: dict[str, list[Tensor]] = {}
    at_once = max(1, SCORES_AT_ONCE // n_keys)
    for first in range(0, draws, at_once):
        n_draws = min(at_once, draws - first)
        scores = torch.randn(n_draws, 1, 1, n_keys, generator=generator)
        logits = torch.addcmul(m, scores, scale)  # (draws, 1 head, 1 query, n keys)
        for name, value in statistics(logits, first_key, spans).items():
            samples.setdefault(name, []).append(value.flatten().double())
    result: dict[str, Any] = {}
    for name, tensors in samples.items():
        values_of_draws = torch.cat(tensors)
        error = values_of_draws.std() / draws**0.5
        result[name] = {"mean": values_of_draws.mean().item(), "standard_error": error.item()}
    for span in spans:
        result[f"expected_total_{span}"] = {"mean": expected_total(mechanism, n_keys, span)}
    return result


def distance_ranges(n_keys: int, delta: int) -> list[Range]:
    """[t, Δt) for t = 1, 10, 100 …, as far as the keys reach."""
    spans = []
    t = 1
    while delta * t <= n_keys:
        spans.append(Range(t, delta * t))
        t *= 10
    return spans


def distance_functions(
    mechanism: Mechanism, n_keys: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """a(t)·g(n) and m(t) at t = 0 … n − 1, each (H or 1, n); m is −∞ outside the window."""
    n_visible = n_keys if mechanism.window is None else min(n_keys, mechanism.window)
    ones = torch.ones((1, n_keys), dtype=dtype)
    a, m = distance_tables(mechanism, n_keys, ones)
    g = mechanism.gain(ones.new_full((1, 1, 1), float(n_visible)))
    scale = ones * (1 if a is None else a) * (1 if g is None else g[0])
    bias = torch.zeros_like(ones) if m is None else m.reshape(-1, n_keys)
    return scale, bias.masked_fill(torch.arange(n_keys) >= n_visible, -math.inf)


def expected_total(mechanism: Mechanism, n_keys: int, span: Range) -> float:
    """E Σ e^L = Σ e^{m + (a g)²/2} over the distances in `span`; NaN if the query sees none."""
    scale, m = distance_functions(mechanism, n_keys, torch.float64)
    scale = scale[0, span.first : span.end]
    m = m[0, span.first : span.end]
    return log_total(m + scale.square() / 2).exp().item()


def draw_distances(by_name: dict[str, Any], n_keys: str) -> Figure:
    """Draw [SI]'s figures 1 and 2 for each Δ: the expected total weight in [t, Δt), its entropy."""
    labels = {name: attention_label(name) for name in by_name}
    if "SlidingWindow" in labels:
        labels["SlidingWindow"] = "sliding window"
    styles = line_styles(list(labels.values()))
    rows = list(product(DELTAS, DISTANCE_PANELS.items()))
    n_columns = len(DISTANCE_PANELS)
    figure, all_axes = panels(len(rows), n_columns, TEXT_WIDTH / n_columns, 1.8)
    for axes, (delta, (kind, title)) in zip(all_axes, rows, strict=True):
        spans = distance_ranges(int(n_keys), delta)
        if kind == "entropy":
            spans = [span for span in spans if span.end - span.first > 1]
        starts = [span.first for span in spans]
        for name, label in labels.items():
            colour, marker, dash = styles[label]
            result = by_name[name][n_keys]
            means = [result[f"{kind}_{span}"]["mean"] for span in spans]
            line: dict[str, Any] = {"color": colour, "marker": marker, "linestyle": dash}
            axes.plot(starts, np.array(means, dtype=float), label=label, **line)
        axes.set(title=title.format(delta=delta), xscale="log", xlim=(0.7, int(n_keys)))
        axes.xaxis.set_minor_locator(NullLocator())
        if kind == "expected_total":
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
    for axes in all_axes[-n_columns:]:
        axes.set_xlabel("t (tokens)")
    legend_title = f"independent normal scores, a query with {int(n_keys):,} keys"
    legend_below(figure, all_axes[0].get_lines(), 5, legend_title)
    return figure


def _mechanism_rows(by_name: dict[str, Any], n_keys: str) -> list[list[str]]:
    """A row for each mechanism: its name and `NUMBER_COLUMNS`, mean ± standard error."""
    rows = []
    for name, results in by_name.items():
        row = [name]
        for statistic, column in NUMBER_COLUMNS.items():
            numbers = results[n_keys][statistic].values()
            row.append(" ± ".join(_format(number, column.number_format) for number in numbers))
        rows.append(row)
    return rows


def _format(number: float | None, number_format: str) -> str:
    """Format a number; JSON has null for NaN."""
    return format(math.nan if number is None else number, number_format)
