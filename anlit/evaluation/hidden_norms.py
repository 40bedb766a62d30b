"""Norms of the vectors inside a model by layer, against the 1 that anGPT assumes.

anGPT has no norm layers. Its constants assume norm 1 for h, the heads' averages, h_A, h_M, and the
MLP's hidden vector with its factor ν_acf. nGPT sets h, h_A and h_M to norm 1. Here h_A and h_M are
measured before. GPT+ assumes nothing about its norms.

Norms are Euclidean, along the last axis, and averaged over tokens.
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
from matplotlib.ticker import MaxNLocator
from torch import Tensor, nn

from anlit.data.batch import Batch
from anlit.evaluation.diagnose_figures import set_log_axis
from anlit.nn.layers.precision import wide_dtype
from anlit.nn.models.angpt import AnGPTBlock
from anlit.nn.models.decoder import Decoder, NormalisedDecoder
from anlit.reporting.figure import (
    BASELINE_LINE,
    BLUE,
    INK,
    RED,
    TEXT_WIDTH,
    legend_below,
    panels,
)
from anlit.reporting.table import NONE, Table

VECTORS = {
    "h": "‖h‖",
    "attention_average": "‖y‖/√H",
    "h_A": "‖h_A‖",
    "mlp_hidden": "‖u∘SiLU(z)‖",
    "h_M": "‖h_M‖",
}
"""What is measured in each layer: name in the record → title."""
NORMS_NOTE = """\
Means over tokens; an untrained model of the same settings in brackets. *h* enters the layer, and
in the last row the head. *y* are the averages of the H heads side by side, as they enter W_o. *h_A*
and *h_M* leave W_o and W_d, before a norm that may follow. anGPT's *u∘SiLU(z)* has the factor
ν_acf. anGPT assumes that all are 1, and nGPT sets h to 1. The figure's bands are one standard
deviation over tokens."""


class NormSums:
    """The number of norms by vector and layer, and the sums of their first and second powers."""

    def __init__(self) -> None:
        self._sums: dict[str, list[Tensor]] = {}

    def add(self, vector: str, layer: int, x: Tensor, factor: float) -> None:
        """Add factor·‖x‖ of each token, x (B, T, d)."""
        norms = factor * torch.linalg.vector_norm(x, dim=-1, dtype=wide_dtype(x)).double()
        powers = torch.stack([torch.ones_like(norms), norms, norms.square()])
        sums = self._sums.setdefault(vector, [])
        if len(sums) == layer:
            sums.append(torch.zeros(3, dtype=torch.float64, device=x.device))
        sums[layer] += powers.flatten(1).sum(1)

    def read_input(
        self,
        vector: str,
        layer: int,
        factor: float,
        module: nn.Module,
        arguments: tuple[Any, ...],
        result: Tensor,
    ) -> None:
        """Add the norms of a module's first argument: a forward hook."""
        self.add(vector, layer, arguments[0], factor)

    def read_result(
        self, vector: str, layer: int, module: nn.Module, arguments: Any, result: Tensor
    ) -> None:
        """Add the norms of a module's result: a forward hook."""
        self.add(vector, layer, result, 1.0)

    def results(self) -> dict[str, dict[str, list[float]]]:
        """{vector: {mean, standard_deviation}}, a list over layers each."""
        results = {}
        for vector in filter(self._sums.get, VECTORS):
            count, total, squares = torch.stack(self._sums[vector]).T
            mean = total / count
            variance = (squares / count - mean.square()).clamp_min(0)
            results[vector] = {
                "mean": mean.tolist(),
                "standard_deviation": variance.sqrt().tolist(),
            }
        return results


@torch.no_grad()
def measure_norms(
    model: Decoder, batches: Iterable[Batch], device: torch.device
) -> dict[str, dict[str, list[float]]]:
    """Measure the norms of `VECTORS` by layer; `h` has one layer more, the head's.

    A block without W_o or W_d, in an architecture from elsewhere, lacks the vectors around it.
    """
    sums = NormSums()
    watched: list[tuple[nn.Module, Any]] = []
    for layer, block in enumerate(model.blocks):
        watched.append((block, partial(sums.read_input, "h", layer, 1.0)))
        maps = dict(block.named_children())
        if "W_o" in maps:
            per_head = 1 / math.sqrt(block.n_heads)
            read_average = partial(sums.read_input, "attention_average", layer, per_head)
            watched.append((maps["W_o"], read_average))
            watched.append((maps["W_o"], partial(sums.read_result, "h_A", layer)))
        if "W_d" in maps:
            factor = block.nu_acf if isinstance(block, AnGPTBlock) else 1.0
            watched.append((maps["W_d"], partial(sums.read_input, "mlp_hidden", layer, factor)))
            watched.append((maps["W_d"], partial(sums.read_result, "h_M", layer)))
    n_layers = len(model.blocks)
    watched.append((model.blocks[-1], partial(sums.read_result, "h", n_layers)))
    with ExitStack() as hooks, torch.compiler.set_stance("force_eager"):
        for module, hook in watched:
            hooks.enter_context(module.register_forward_hook(hook))
        for batch in batches:
            model(batch.tokens.to(device), batch.document_ids.to(device), n_logits=1)
    return sums.results()


def assumes_unit_norms(model: Decoder) -> bool:
    """Whether the architecture is made for vectors of norm 1, as nGPT and anGPT are."""
    return isinstance(model, NormalisedDecoder)


def norms_table(trained: dict[str, Any], untrained: dict[str, Any], title: str) -> Table:
    """A row for each layer, and one for the head: the norm when trained (untrained)."""
    vectors = [vector for vector in VECTORS if vector in trained]
    n_layers = len(trained["h"]["mean"]) - 1
    rows = []
    for layer in range(n_layers + 1):
        row = [str(layer) if layer < n_layers else "head"]
        for vector in vectors:
            row.append(_norm_cell(trained[vector]["mean"], untrained[vector]["mean"], layer))
        rows.append(row)
    titles = [VECTORS[vector] for vector in vectors]
    return Table(title, ["layer", *titles], rows)


def _norm_cell(trained: list[float], untrained: list[float], layer: int) -> str:
    """`0.98 (1.00)`, or – where a vector has no such layer."""
    if layer >= len(trained):
        return NONE
    return f"{trained[layer]:.3g} ({untrained[layer]:.3g})"


def draw_norms(trained: dict[str, Any], untrained: dict[str, Any], has_unit_norms: bool) -> Figure:
    """Draw each vector's norm over the layers, with a band of one standard deviation."""
    vectors = [vector for vector in VECTORS if vector in trained]
    figure, all_axes = panels(len(vectors), 3, TEXT_WIDTH / 3, 1.7)
    for axes, vector in zip(all_axes, vectors, strict=True):
        _draw_norm(axes, trained[vector], "trained", BLUE, "o-")
        _draw_norm(axes, untrained[vector], "untrained", RED, "^--")
        if has_unit_norms:
            axes.axhline(1, color=INK, linewidth=0.8, linestyle=BASELINE_LINE, label="assumed")
        axes.set(title=VECTORS[vector], xlabel="layer", yscale="log")  # before its limits are read
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, 0.45), max(high, 2.2))  # so that an axis has several ticks
        set_log_axis(axes)
    legend_below(figure, all_axes[0].get_lines(), 3)
    return figure


def _draw_norm(axes: Axes, norms: dict[str, Any], label: str, colour: str, style: str) -> None:
    mean = np.array(norms["mean"])
    deviation = np.array(norms["standard_deviation"])
    layers = np.arange(len(mean))
    axes.plot(layers, mean, style, label=label, color=colour)
    lowest = np.maximum(mean - deviation, mean / 100)  # a logarithmic axis has no zero
    axes.fill_between(layers, lowest, mean + deviation, color=colour, alpha=0.15, linewidth=0)
