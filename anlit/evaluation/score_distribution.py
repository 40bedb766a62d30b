"""The distribution of attention scores, against the normal law of scale-invariant attention.

Scores are S = q·k/√D, before the mechanism's a(t), g(n) and m(t). [SI], arXiv 2505.17083, assumes
that they are independent and standard normal at every distance t. The distribution here is over all
pairs of a query and a visible key.
"""

import math
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from torch import Tensor

from anlit.data.batch import Batch
from anlit.evaluation.diagnose_figures import layer_lines
from anlit.nn.attention.attention import attention_layers
from anlit.nn.attention.observe import queries_at_a_time
from anlit.nn.attention.statistics import Range, ranges, within
from anlit.nn.kernels.eager import logits_of_scaled_queries
from anlit.nn.layers.precision import wide_dtype
from anlit.nn.models.decoder import Decoder
from anlit.reporting.figure import (
    BASELINE_LINE,
    INK,
    TEXT_WIDTH,
    legend_below,
    panels,
)
from anlit.reporting.table import Table
from anlit.reporting.text import minus

LARGEST_SCORE = 8.0
"""The histogram ends at this score on both sides."""
BIN_WIDTH = 0.25
N_BINS = round(2 * LARGEST_SCORE / BIN_WIDTH)
N_POWERS = 5
"""The powers of S that are summed, 0 to 4."""
MOMENTS = {
    "mean": "mean",
    "standard_deviation": "standard\ndeviation",
    "deviation_within_query": "within\na query",
    "skewness": "skewness",
    "excess_kurtosis": "excess\nkurtosis",
}
"""Columns of the table: name in the record → title. The normal law has 0, 1, 1, 0, 0."""
SCORES_NOTE = """\
Moments of S = q·k/√D over all pairs of a query and a visible key: the mean over heads, and the
smallest and largest head in brackets. The standard normal law, which scale-invariant attention
assumes, has 0, 1, 1, 0 and 0. *Within a query* is the standard deviation over the keys of the same
query, as the root mean square over queries: a shift that all keys share changes no softmax."""


class ScoreSums:
    """Sums over the scores of a layer: powers by head and range of distances, and a histogram."""

    def __init__(self, n_heads: int, spans: list[Range], device: torch.device) -> None:
        self.spans = spans
        self._powers = torch.zeros(
            len(spans), n_heads, N_POWERS, dtype=torch.float64, device=device
        )
        self._histogram = torch.zeros(N_BINS, dtype=torch.float64, device=device)
        self._query_variances = torch.zeros(n_heads, dtype=torch.float64, device=device)
        self._n_queries = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, scores: Tensor) -> None:
        """Add scores (B, H, Q, K), −∞ for a key that is not visible. The last key is the last
        query's.
        """
        for index, span in enumerate(self.spans):
            self._powers[index] += _power_sums(within(scores, span)).sum((0, 2))
        count, total, squares, *_ = _power_sums(scores).unbind(-1)  # each (B, H, Q)
        has_variance = count > 1
        variance = (squares - total.square() / count) / (count - 1)
        self._query_variances += variance.where(has_variance, 0.0).sum((0, 2))
        self._n_queries += has_variance[:, 0].sum()
        # Scores outside of the bins and −∞ are not counted.
        histogram = torch.histc(scores.float(), N_BINS, -LARGEST_SCORE, LARGEST_SCORE)
        self._histogram += histogram.double()

    def results(self) -> dict[str, Any]:
        """The layer's entry in the record, see `measure_scores`."""
        results = _moments(self._powers.sum(0))
        within_query = (self._query_variances / self._n_queries).sqrt()
        by_range = _moments(self._powers)
        n_scores = self._powers[..., 0].sum()
        return {
            **{name: values.tolist() for name, values in results.items()},
            "deviation_within_query": within_query.tolist(),
            "density": (self._histogram / n_scores / BIN_WIDTH).tolist(),
            "share_outside": (1 - self._histogram.sum() / n_scores).item(),
            "ranges": {
                str(span): {
                    "mean": by_range["mean"][index].tolist(),
                    "standard_deviation": by_range["standard_deviation"][index].tolist(),
                }
                for index, span in enumerate(self.spans)
            },
        }


def _power_sums(scores: Tensor) -> Tensor:
    """Sums of S⁰, S¹ … S⁴ over the visible keys: (B, H, Q, K) → (B, H, Q, 5)."""
    is_visible = scores > -math.inf
    powers = is_visible.double()
    visible_scores = scores.double().where(is_visible, 0.0)
    sums = []
    for _ in range(N_POWERS):
        sums.append(powers.sum(-1))
        powers = powers * visible_scores
    return torch.stack(sums, -1)


def _moments(power_sums: Tensor) -> dict[str, Tensor]:
    """Moments from sums of powers (…, 5), each (…); NaN without scores."""
    count, *totals = power_sums.unbind(-1)
    mean, second, third, fourth = [total / count for total in totals]
    variance = (second - mean.square()).clamp_min(0)
    third_central = third - 3 * mean * second + 2 * mean**3
    fourth_central = fourth - 4 * mean * third + 6 * mean.square() * second - 3 * mean**4
    return {
        "mean": mean,
        "standard_deviation": variance.sqrt(),
        "skewness": third_central / variance**1.5,
        "excess_kurtosis": fourth_central / variance.square() - 3,
    }


@torch.no_grad()
def measure_scores(
    model: Decoder, batches: Iterable[Batch], device: torch.device, length: int
) -> list[dict[str, Any]]:
    """Measure the scores of each layer.

    Returns:
        For each layer: lists over heads of `mean`, `standard_deviation`, `skewness`,
        `excess_kurtosis` and `deviation_within_query`. `density` is the histogram over all heads,
        in bins of `BIN_WIDTH` from −`LARGEST_SCORE`. `share_outside` lies outside of these bins.
        `ranges` is {range of distances: {mean, standard_deviation}}, each a list over heads.
    """
    spans = ranges(length - 1)
    sums = {}
    for layer in attention_layers(model):
        sums[layer] = ScoreSums(layer.mechanism.n_heads, spans, device)
    with ExitStack() as hooks, torch.compiler.set_stance("force_eager"):
        for layer, layer_sums in sums.items():
            observe = partial(_add_scores, layer_sums)
            hooks.enter_context(layer.register_forward_pre_hook(observe))
        for batch in batches:
            model(batch.tokens.to(device), batch.document_ids.to(device), n_logits=1)
    return [layer_sums.results() for layer_sums in sums.values()]


def _add_scores(sums: ScoreSums, layer: Any, arguments: tuple[Any, ...]) -> None:
    """Add S = q·k/√D of all queries; the hook gets the arguments of `Attention.forward`."""
    q, k, _, documents = arguments
    length = q.shape[-2]
    with torch.autocast(q.device.type, enabled=False):
        q = q.to(wide_dtype(q)) * q.shape[-1] ** -0.5
        k = k.to(wide_dtype(k))
        step = queries_at_a_time(q)
        for first in range(0, length, step):
            end = min(first + step, length)
            window = layer.mechanism.window
            queries = q[..., first:end, :]
            keys = k[..., :end, :]
            sums.add(logits_of_scaled_queries(queries, keys, None, None, documents, window, first))


def scores_table(layers: list[dict[str, Any]], title: str) -> Table:
    """A row for each layer: moments, as the mean over heads with the smallest and largest."""
    rows = []
    for number, layer in enumerate(layers):
        row = [str(number)]
        for name in MOMENTS:
            row.append(_moment_cell(layer[name]))
        rows.append(row)
    return Table(title, ["layer", *MOMENTS.values()], rows)


def _moment_cell(heads: list[float | None]) -> str:
    """`0.52 [0.31, 0.70]`: mean, smallest and largest head."""
    values = np.array(heads, dtype=float)
    mean, low, high = (
        minus(f"{value:.2f}") for value in (values.mean(), values.min(), values.max())
    )
    return mean if low == high else f"{mean} [{low}, {high}]"


def draw_scores(layers: list[dict[str, Any]]) -> Figure:
    """Draw the density of scores, and their mean and deviation by distance, a line per layer."""
    figure, (density_axes, mean_axes, deviation_axes) = panels(3, 3, TEXT_WIDTH / 3, 2.0)
    edges = np.linspace(-LARGEST_SCORE, LARGEST_SCORE, N_BINS + 1)
    centres = (edges[:-1] + edges[1:]) / 2
    normal = np.exp(-(centres**2) / 2) / math.sqrt(2 * math.pi)
    for layer, line in zip(layers, layer_lines(len(layers)), strict=True):
        density = np.array(layer["density"])
        density_line = line | {"marker": ""}
        density_axes.plot(centres, np.where(density > 0, density, np.nan), **density_line)
        _draw_over_distances(mean_axes, layer["ranges"], "mean", line)
        _draw_over_distances(deviation_axes, layer["ranges"], "standard_deviation", line)
    normal_line: Any = {"color": INK, "linestyle": BASELINE_LINE, "label": "standard normal"}
    density_axes.plot(centres, normal, **normal_line)
    mean_axes.axhline(0, **normal_line)
    deviation_axes.axhline(1, **normal_line)
    highest = max(max(layer["density"]) for layer in layers)
    density_axes.set(title="density of S = q·k/√D", xlabel="S", yscale="log")
    density_axes.set_ylim(1e-6, 2 * max(highest, normal.max()))
    mean_axes.set(title="mean of S at distances [t, 10t)", xlabel="t (tokens)")
    deviation_axes.set(title="standard deviation of S", xlabel="t (tokens)", ylim=(0, None))
    legend_below(figure, density_axes.get_lines(), 6)
    return figure


def _draw_over_distances(
    axes: Axes, by_range: dict[str, Any], name: str, line: dict[str, Any]
) -> None:
    """Draw the mean over heads by range of distances; the query's token stands at t = 0.1."""
    starts = []
    means = []
    for span, moments in by_range.items():
        first = int(span.partition("_")[0])
        values = np.array(moments[name], dtype=float)
        if np.isfinite(values).all():
            starts.append(max(first, 0.1))
            means.append(values.mean())
    axes.plot(starts, means, **line)
    axes.set_xscale("log")
    axes.set_xticks(starts, ["own" if start < 1 else f"{start:,.0f}" for start in starts])
    axes.xaxis.set_minor_locator(NullLocator())
