"""`anlit diagnose`: how a trained model's attention spreads its weights, by layer, head and context length."""

import math
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import cycle, product
from typing import Any

import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from anlit.data.batch import Batch
from anlit.data.module import TokenShards
from anlit.errors import UserError
from anlit.evaluation.data import spread
from anlit.evaluation.runner import Evaluation, Report
from anlit.evaluation.settings import DiagnoseSettings
from anlit.nn.attention.observe import bin_edges, observed
from anlit.nn.attention.statistics import ranges
from anlit.nn.layers.cross_entropy import IGNORE_INDEX
from anlit.reporting.figure import (
    DASHES,
    MAP,
    MARKERS,
    SHADED,
    TEXT,
    heat_map,
    legend_below,
    panels,
    shade,
)
from anlit.reporting.table import NONE, Table, markdown_table
from anlit.reporting.text import literal, minus
from anlit.training.callbacks.dynamics import copying
from anlit.training.load_model import Checkpoint

BATCH_TOKENS = 4096  # enough short sequences for efficient matrix products
COPIES = 16  # sequences of random tokens and their copy
COLUMNS: dict[str, tuple[str, int, str]] = {
    "entropy": ("entropy (nats)", 2, "entropy (nats)"),
    "inverse_largest_weight": ("1/w_max", 1, "1/w_max (keys)"),
    "participation": ("Σw²", 4, "Σw²"),
    "attention_sink": ("first token", 3, "weight on the first token"),
    "weight_latest_100": ("last 100", 3, "weight on the last 100 tokens"),
    "squared_average": ("‖Σwv‖ /‖v‖", 3, "‖Σwv‖ / ‖v‖, root mean squares"),
    "orthogonal": ("√Σw²", 3, ""),
}
"""Statistic: title and decimals in the table, and the title of its panel, if it has one."""
PANELS = {name: panel for name, (_, _, panel) in COLUMNS.items() if panel}
NOT_PRINTED = "participation"  # the terminal's table has its root, and must fit into 80 columns
LOGARITHMIC = ("inverse_largest_weight", "participation", "squared_average")
HEADS = "line: mean over heads; band: from the smallest to the largest head"
MOST_NUMBERS = 12  # heat maps with more heads than this show none
MOST_TICKS = 5
DEFINITIONS = """\
Means over heads, with the smallest and the largest head in brackets, over queries at
positions {low:,} to {high:,} of their document (n).
Entropy is −Σw ln w in nats; *1/w_max* is about the number of keys that share the attention; *first token* is the weight
on the first token of the document, *last 100* that on the latest 100 tokens. *‖Σwv‖ /‖v‖* is the root mean square over
queries of the size of the attention average relative to its values (root mean square over visible keys), *√Σw²* what it
would be if values were orthogonal and equally long. In the figures, the visible part of a range [t, 10t) counts."""


class Diagnose(Evaluation):
    """How a trained model's attention spreads its weights, by layer, head and context length."""

    name, digits = "diagnose", 7
    settings: DiagnoseSettings

    def measure(self, checkpoint: Checkpoint, data: TokenShards) -> dict[str, Any]:
        """The statistics of each layer and head on validation text, by length of the sequences.

        Returns:
            `masking`; `copying`, the loss in nats per token on random tokens (`first`) and on the same tokens once more
            (`second`); by length in `lengths`: `length`, `tokens` read, `edges` of the bins of n, `queries` in each,
            `statistics` as {name: [layer][head][bin]}, NaN without any; `squared_average` is ‖Σ w v‖² / mean ‖v‖².

        Raises:
            UserError: The validation split is shorter than a sequence.
        """
        model, settings = checkpoint.model, self.settings
        if settings.masking is not None:
            model.model.document_masking = settings.masking
        by_length = {
            length: _at_length(checkpoint, data, length, settings.tokens) for length in self.lengths
        }
        with torch.no_grad():
            losses = copying(model, model.context_length, COPIES, checkpoint.device)
        copied = {name.removeprefix("copying/"): loss for name, loss in losses.items()}
        return {"masking": model.model.document_masking, "copying": copied, "lengths": by_length}

    def record(self, checkpoints: list[Checkpoint], measurements: list[Any]) -> dict[str, Any]:
        (record,) = measurements
        return dict(record)

    def report(self, record: dict[str, Any]) -> Report:
        (checkpoint,) = record["checkpoints"]
        lengths = sorted(record["lengths"].values(), key=lambda own: -own["length"])
        longest, masked, notes = lengths[0], "on" if record["masking"] else "off", []
        if copied := record["copying"]:  # a model may be too short for it
            first, again = round(copied["first"], 2), round(copied["second"], 2)
            saved = minus(f"{first - again:.2f}")
            notes = [
                f"Random tokens cost {first:.2f} nats each, the same once more {again:.2f}: a copy saves {saved}."
            ]
        parts = [
            f"# Attention statistics\n\n{literal(checkpoint['label'])}, document masking {masked}"
        ]
        for own in lengths:
            low, high = last_bin(own)
            parts += [
                f"## Sequences of {own['length']:,} tokens\n\n{own['tokens']:,} tokens read.",
                markdown_table(["layer", *(title for title, *_ in COLUMNS.values())], rows(own)),
                DEFINITIONS.format(low=low, high=high),
            ]
        parts += [
            *(f"## Copying\n\n{note}" for note in notes),
            f"## Figures, for sequences of {longest['length']:,} tokens",
            "![Statistics over the context length](statistics.png)",
            "![Weight and entropy in ranges of distances](ranges.png)",
            "![Each head](heads.png)",
        ]
        draws = {"statistics": statistics_figure, "ranges": ranges_figure, "heads": heads_figure}
        figures = {
            f"{name}.png": partial(draw, longest, checkpoint["training_length"])
            for name, draw in draws.items()
        }
        low, high = last_bin(longest)
        printed = {name: title for name, (title, *_) in COLUMNS.items() if name != NOT_PRINTED}
        body = [[cell.partition(" [")[0] for cell in row] for row in rows(longest, printed)]
        head = ["layer", *(title.replace(" ", "\n") for title in printed.values())]
        table = Table(
            f"{checkpoint['label']}: n = {low:,} to {high:,}, means over heads", head, body
        )
        return Report(table, parts, figures, notes)


@torch.no_grad()
def _at_length(
    checkpoint: Checkpoint, data: TokenShards, length: int, tokens: int
) -> dict[str, Any]:
    model, edges = checkpoint.model, bin_edges(length)
    read = 0
    with observed(model, edges, ranges(length - 1)) as layers:
        for batch in sequences(data, length, tokens):
            model(batch.tokens.to(checkpoint.device), batch.document_ids.to(checkpoint.device))
            read += batch.tokens.numel()
    if not read:
        raise UserError(
            f"{data.path}/val has no {length:,} tokens in a row: leave {length} out of --lengths, or set --data"
        )
    means = [layer.means() for layer in layers]
    return {
        "length": length,
        "tokens": read,
        "edges": edges,
        "queries": layers[0].counts()[0].long().tolist(),
        "statistics": {name: [layer[name].tolist() for layer in means] for name in means[0]},
    }


def sequences(data: TokenShards, length: int, tokens: int) -> Iterator[Batch]:
    """Complete sequences of `length` tokens, spread over the validation split, with `tokens` tokens if it has them."""
    if data.n_targets("val") >= length:
        spread(data, length, math.ceil(tokens / length) * length, BATCH_TOKENS)
        for batch in data.val_dataloader():
            complete = batch.targets[:, -1] != IGNORE_INDEX
            if complete.any():
                yield batch._replace(
                    tokens=batch.tokens[complete], document_ids=batch.document_ids[complete]
                )


def reliable(own: dict[str, Any]) -> int:
    """The number of bins to show: up to the last that has at least 1 % of the queries."""
    return int(np.flatnonzero(np.array(own["queries"]) >= 0.01 * sum(own["queries"]))[-1]) + 1


def last_bin(own: dict[str, Any]) -> tuple[int, int]:
    """The smallest and largest n of the last bin that is shown."""
    edge = own["edges"][reliable(own) - 1]
    return edge, own["length"] if edge == own["edges"][-1] else 2 * edge - 1


def values(own: dict[str, Any], name: str) -> np.ndarray:
    """A statistic as (layers, heads, bins); with square roots for the two sizes of the average."""
    table = np.array(
        own["statistics"]["participation" if name == "orthogonal" else name], dtype=float
    )
    return np.sqrt(table) if name in ("orthogonal", "squared_average") else table


def rows(own: dict[str, Any], names: Iterable[str] = COLUMNS) -> list[list[str]]:
    """The summary of one length, a row per layer: its number, and statistics of `COLUMNS` over the heads."""
    last = reliable(own) - 1
    columns = [
        [cell(heads[:, last], COLUMNS[name][1]) for heads in values(own, name)] for name in names
    ]
    return [[str(layer), *cells] for layer, cells in enumerate(zip(*columns, strict=True))]


def cell(heads: np.ndarray, digits: int) -> str:
    """`0.52 [0.31, 0.70]`: mean, smallest and largest."""
    heads = heads[np.isfinite(heads)]
    if not len(heads):
        return NONE
    mean, low, high = (f"{value:.{digits}f}" for value in (heads.mean(), heads.min(), heads.max()))
    return mean if low == high else f"{mean} [{low}, {high}]"


def statistics_figure(own: dict[str, Any], trained: int) -> Figure:
    """Each statistic over n: for each layer a line, the mean over heads, and a band over the range of the heads.

    All figures take one length of the record and the training length.
    """
    figure, axes = panels(len(PANELS), 3, TEXT / 3, 1.8)
    for ax, (name, title) in zip(axes, PANELS.items(), strict=True):
        _layers(ax, own, name)
        ax.set_title(title)
        if name in LOGARITHMIC:
            ax.set_yscale("log")
            is_narrow = np.divide(*ax.get_ylim()) > 1 / 30
            ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if is_narrow else (1,)))
            ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            ax.yaxis.set_minor_formatter(NullFormatter())
        elif name.startswith("weight"):
            ax.set_ylim(0, 1.05)
    _legend(figure, axes, 3, trained)
    return figure


def ranges_figure(own: dict[str, Any], trained: int) -> Figure:
    """Weight (top) and entropy (bottom) in ranges of distances over n, for the ranges that most long contexts reach."""
    spans = [
        span
        for span in map(str, ranges(own["length"] - 1))
        if int(span.split("_")[0]) < last_bin(own)[0]
    ]
    figure, axes = panels(2 * len(spans), len(spans), TEXT / len(spans), 1.7)
    for ax, (kind, span) in zip(axes, product(("weight", "entropy"), spans), strict=True):
        if f"{kind}_{span}" not in own["statistics"]:
            ax.set_axis_off()
            continue
        _layers(ax, own, f"{kind}_{span}")
        first, _, end = span.split("_")
        where = "own token" if end == "1" else f"[{int(first):,}, {int(end):,})"
        ax.set(title=f"{kind}, {where}", ylim=(0, 1 if kind == "weight" else None))
        ax.tick_params(labelleft=kind == "entropy" or span == spans[0])
    _legend(figure, axes, len(spans), trained)
    return figure


def heads_figure(own: dict[str, Any], trained: int) -> Figure:
    """Entropy (at most ln n) and weight on the first token of each head, at the longest context lengths."""
    low, high = last_bin(own)
    n_layers, n_heads, _ = values(own, "entropy").shape
    figure, axes = plt.subplots(1, 2, figsize=(TEXT, 0.9 + min(7.0, 0.22 * n_layers + 0.5)))
    for ax, name, top in zip(
        axes, ("entropy", "attention_sink"), (math.log(high), 1.0), strict=True
    ):
        picture = heat_map(
            ax, values(own, name)[..., reliable(own) - 1], top, n_heads <= MOST_NUMBERS
        )
        figure.colorbar(picture, ax=ax)
        ax.set(title=PANELS[name], ylabel="layer", xlabel=f"head (n = {low:,} to {high:,})")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(MaxNLocator(12, integer=True, min_n_ticks=1))
    return figure


def _layers(ax: Axes, own: dict[str, Any], name: str) -> None:
    """A line for each layer, the mean over its heads at each bin's mean n; a band over the range of the heads."""
    layers, n = values(own, name), values(own, "n")[0, 0]
    colours = plt.get_cmap(MAP)(np.linspace(0, 0.8, len(layers)))
    styles = zip(layers, colours, cycle(DASHES), cycle(MARKERS), strict=False)
    for layer, (heads, colour, dash, marker) in enumerate(styles):
        known = np.isfinite(heads).any(0) & (np.arange(len(n)) < reliable(own))
        x, heads = n[known], heads[:, known]
        ax.plot(
            x,
            np.nanmean(heads, 0),
            linestyle=dash,
            color=colour,
            marker=marker,
            label=f"layer {layer}",
        )
        ax.fill_between(
            x, np.nanmin(heads, 0), np.nanmax(heads, 0), color=colour, alpha=0.13, linewidth=0
        )
    edges = own["edges"][: reliable(own)]
    ticks = edges[::-1][:: math.ceil(len(edges) / MOST_TICKS)]
    ax.set(
        xscale="log",
        xlim=(0.9, 2.2 * edges[-1]),
        xticks=ticks,
        xticklabels=[f"{tick:,}" for tick in ticks],
    )
    ax.xaxis.set_minor_locator(NullLocator())


def _legend(figure: Figure, axes: list[Axes], columns: int, trained: int) -> None:
    """The layers in a legend below, and the name of x below the lowest row of panels."""
    for ax in axes[-columns:]:
        ax.set_xlabel("context length n (tokens)" if columns <= 3 else "n (tokens)")
    for ax in axes:
        shade(ax, trained)
    legend_below(figure, [*axes[0].get_lines(), SHADED], 6, HEADS)
