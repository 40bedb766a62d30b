"""`anlit diagnose --gaussian`: attention mechanisms over independent standard normal scores, without any model.

One query sees n keys at distances t = 0 … n−1 with L = a(t)·g(n)·S_t + m(t), S_t ~ N(0, 1). Statistics are means over
draws of S, which are the same for every mechanism. Expected totals E Σ e^L = Σ e^{m + (a g)²/2} are computed exactly:
with [SI]'s a(t), e^L has such a heavy tail that a mean over draws would not converge.
"""

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from torch import Tensor

from anlit.config.labels import attention_label
from anlit.errors import UserError
from anlit.evaluation.runner import Evaluation, Report
from anlit.nn import mechanisms
from anlit.nn.attention.statistics import Range, log_total, ranges, statistics, within
from anlit.nn.kernels.formula import distance_tables
from anlit.nn.mechanisms.mechanism import Mechanism
from anlit.reporting.figure import TEXT, legend_below, line_styles, panels
from anlit.reporting.table import Table, markdown_table

SCORES = 1 << 22  # drawn at once: 16 MiB in float32, and a few copies exist
D_HEAD = 64  # our choice; BetaScaling's exponent depends on it
COLUMNS = {
    "entropy": ("entropy (nats)", ".2f"),
    "inverse_largest_weight": ("1/w_max", ".1f"),
    "participation": ("Σw²", ".3g"),
    "weight_latest_100": ("last 100", ".3f"),
}
PANELS = {
    "expected_total": "E Σ e^L in [t, 10t)",
    "weight": "share of the weights in [t, 10t)",
    "entropy": "entropy in [t, 10t) (nats)",
}


class Gaussian(Evaluation):
    """How the mechanisms `names` spread the weights of `draws` queries, for each of `lengths`, numbers of keys."""

    name, digits = "gaussian", 7

    def __init__(self, names: Iterable[str], lengths: Sequence[int], draws: int, seed: int) -> None:
        self.mechanisms, self.numbers, self.draws, self.seed = named(names), lengths, draws, seed

    def measured(self, paths: Sequence[str]) -> dict[str, Any]:
        by_name = {
            name: {n: at_length(mechanism, n, self.draws, self.seed) for n in self.numbers}
            for name, mechanism in self.mechanisms.items()
        }
        return {"draws": self.draws, "seed": self.seed, "mechanisms": by_name}

    def report(self, record: dict[str, Any]) -> Report:
        """Tables for each n, the largest first, and the figure of the largest."""
        by_name, head = (
            record["mechanisms"],
            ["mechanism", *(title for title, _ in COLUMNS.values())],
        )
        longest, *_ = lengths = sorted(next(iter(by_name.values())), key=int, reverse=True)
        parts = [
            "# Attention over independent normal scores",
            f"One query with n keys, {record['draws']:,} draws, seed {record['seed']}. Means ± standard errors. "
            "Where e^L has a heavy tail, as with a large a(t)·g(n), standard errors are too small.",
            *(f"n = {int(n):,}\n\n{markdown_table(head, _rows(by_name, n))}" for n in lengths),
            "## Ranges of distances\n\n![ranges of distances](ranges.png)",
        ]
        rows = [[cell.partition(" ±")[0] for cell in row] for row in _rows(by_name, longest)]
        title = f"Independent normal scores, n = {int(longest):,} keys"
        table = Table(title, [name.replace(" ", "\n") for name in head], rows)
        return Report(table, parts, {"ranges.png": lambda: ranges_figure(by_name, longest)})


def named(names: Iterable[str]) -> dict[str, Mechanism]:
    """The shipped mechanisms of these names, with default arguments, for one head.

    Raises UserError if a name is unknown or its class needs arguments.
    """
    made: dict[str, Mechanism] = {}
    for name in map(str.strip, names):
        try:
            made[name] = getattr(mechanisms, name)().for_layer(1, D_HEAD, 0)
        except (AttributeError, TypeError) as error:
            advice = f"choose among {', '.join(filter(_has_defaults, mechanisms.__all__))}"
            raise UserError(
                f"--mechanisms {name!r} is no mechanism with default arguments: {advice}"
            ) from error
    return made


def _has_defaults(name: str) -> bool:
    with suppress(TypeError):
        return getattr(mechanisms, name)() is not None
    return False


@torch.no_grad()
def at_length(mechanism: Mechanism, n: int, draws: int, seed: int) -> dict[str, Any]:
    """Statistics of one query with n keys, its own included.

    The `draws` depend on `seed` and n, but not on the mechanism, which `for_layer` made for one head.

    Returns:
        `mean` and `standard_error` of each entry of `anlit.nn.attention.statistics.statistics` and of `total_1_to_10`,
        the sum of e^L in [1, 10), by name; only ranges within the n keys. `expected_total_1_to_10` has a mean only.
    """
    spans = [span for span in ranges(n - 1) if span.end <= n]
    generator = torch.Generator().manual_seed(seed % (1 << 63))  # which takes no larger ones
    samples: dict[str, list[Tensor]] = {}
    scale, m = (each.flip(-1)[:, None] for each in distance_functions(mechanism, n, torch.float32))
    at_once = max(1, SCORES // n)
    for first in range(0, draws, at_once):
        scores = torch.randn(min(at_once, draws - first), 1, 1, n, generator=generator)
        logits = torch.addcmul(
            m, scores, scale
        )  # keys in the order of the text: the last is at distance 0
        values = statistics(logits, torch.zeros(1, 1, dtype=torch.long), spans)
        values |= {
            f"total_{span}": log_total(within(logits, span)).double().exp() for span in spans
        }
        for name, value in values.items():
            samples.setdefault(name, []).append(value.flatten().double())
    drawn = {name: torch.cat(parts) for name, parts in samples.items()}
    return {
        **{name: {"mean": own.mean().item(), "standard_error": (own.std() / draws**0.5).item()}
           for name, own in drawn.items()},
        **{f"expected_total_{span}": {"mean": expected_total(mechanism, n, span)} for span in spans},
    }  # fmt: skip


def distance_functions(mechanism: Mechanism, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """a(t)·g(n) and m(t) at the distances t = 0 … n − 1, each (H or 1, n); m is −∞ outside the window."""
    n_visible = n if mechanism.window is None else min(n, mechanism.window)
    like = torch.ones((1, n), dtype=dtype)
    a, m = distance_tables(mechanism, n, like)
    g = mechanism.gain(like.new_full((1, 1, 1), float(n_visible)))
    scale = like * (1 if a is None else a) * (1 if g is None else g[0])
    bias = torch.zeros_like(like) if m is None else m.reshape(-1, n)
    return scale, bias.masked_fill(torch.arange(n) >= n_visible, -math.inf)


def expected_total(mechanism: Mechanism, n: int, span: Range) -> float:
    """E Σ e^L over the distances in `span`, for a query with n keys: Σ e^{m + (a g)²/2}; NaN if it sees none."""
    scale, m = (
        part[0, span.first : span.end] for part in distance_functions(mechanism, n, torch.float64)
    )
    return log_total(m + scale.square() / 2).exp().item()


def ranges_figure(by_name: dict[str, Any], n: str) -> Figure:
    """[SI]'s figures 1 and 2: the expected total weight in [t, 10t), and the entropy there, for n keys."""
    names = {
        name: "sliding window" if name == "SlidingWindow" else attention_label(name)
        for name in by_name
    }
    styles = line_styles(list(names.values()))
    begins = [span.first for span in ranges(int(n) - 1)[1:] if span.end <= int(n)]
    figure, axes = panels(len(PANELS), len(PANELS), TEXT / len(PANELS), 2.0)
    for ax, (kind, title) in zip(axes, PANELS.items(), strict=True):
        for name, label in names.items():
            colour, marker, dash = styles[label]
            means = np.array(
                [by_name[name][n][f"{kind}_{t}_to_{10 * t}"]["mean"] for t in begins], dtype=float
            )
            ax.plot(begins, means, color=colour, marker=marker, linestyle=dash, label=label)
        ax.set(title=title, xlabel="t (tokens)", xscale="log")
        ax.xaxis.set_minor_locator(NullLocator())
        if kind == "expected_total":
            ax.set_yscale("log")
        else:
            ax.set_ylim(bottom=0)
    legend_below(
        figure, axes[0].get_lines(), 5, f"independent normal scores, a query with {int(n):,} keys"
    )
    return figure


def _rows(by_name: dict[str, Any], n: str) -> list[list[str]]:
    """A row for each mechanism, with `COLUMNS` after its name: mean ± standard error."""
    return [
        [name, *(" ± ".join(format(math.nan if number is None else number, form) for number in own[n][key].values())
                 for key, (_, form) in COLUMNS.items())]
        for name, own in by_name.items()
    ]  # fmt: skip
