"""`anlit diagnose`: attention, scores and norms inside a trained model.

It shows how attention spreads its weights, by layer, head and context length. It has the norms of
the vectors by layer (`hidden_norms`). And it has the distribution of the attention scores
(`score_distribution`). Norms and scores are measured for the untrained model too.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from anlit.data.batch import Batch
from anlit.data.module import TokenShards
from anlit.errors import UserError
from anlit.evaluation.data import set_validation_pieces
from anlit.evaluation.diagnose_figures import (
    STATISTICS,
    draw_ranges,
    draw_statistics,
    last_bin,
    n_reliable_bins,
    statistic_values,
)
from anlit.evaluation.hidden_norms import (
    NORMS_NOTE,
    assumes_unit_norms,
    draw_norms,
    measure_norms,
    norms_table,
)
from anlit.evaluation.runner import Evaluation, Report
from anlit.evaluation.score_distribution import (
    SCORES_NOTE,
    draw_scores,
    measure_scores,
    scores_table,
)
from anlit.evaluation.settings import DiagnoseSettings
from anlit.nn.attention.observe import bin_edges, observed
from anlit.nn.attention.statistics import ranges
from anlit.nn.layers.cross_entropy import IGNORE_INDEX
from anlit.reporting.table import NONE, Table
from anlit.reporting.text import literal, minus, say
from anlit.training.callbacks.dynamics import copying
from anlit.training.load_model import Checkpoint, draw_anew

MAX_BATCH_TOKENS = 4096
"""Tokens in a batch of short sequences: enough for efficient matrix products."""
N_COPIES = 16
"""Sequences of random tokens and their copy."""
UNTRAINED_SEED = 1
"""Seed of the untrained model, which need not be the run's."""


STATISTICS_NOTE = """\
Means over heads, with the smallest and the largest head in brackets, over queries at
positions {low:,} to {high:,} of their document (n).
Entropy is −Σw ln w in nats. *1/w_max* is about the number of keys that share the attention.
*First token* is the weight on the first token of the document. *Last 100* is the weight on the
latest 100 tokens. *‖Σwv‖ /‖v‖* is the size of the attention average relative to its values: root
mean squares over visible keys and over queries. *√Σw²* would be this size if values were orthogonal
and equally long. In the figures, the visible part of a range [t, 10t) counts."""


class Diagnose(Evaluation):
    """Attention weights, scores and norms of a trained model, by layer and head."""

    name = "diagnose"
    digits = 7
    settings: DiagnoseSettings

    def measure(self, checkpoint: Checkpoint, data: TokenShards) -> dict[str, Any]:
        """Measure the statistics of each layer and head on validation text, by sequence length.

        Returns:
            {masking, copying, lengths, inside}. `copying` has losses in nats per token: `first` on
            random tokens, `second` on the same tokens once more. `lengths` has an entry for each
            length: `length`, `tokens` read, `edges` of the bins of n, `queries` in each bin. Its
            `statistics` are {name: [layer][head][bin]}, NaN in a bin without queries.
            `squared_average` is ‖Σ w v‖² / mean ‖v‖². `inside` is `_measure_inside`'s result.

        Raises:
            UserError: The validation split is shorter than a sequence.
        """
        model = checkpoint.model
        if self.settings.masking is not None:
            model.model.document_masking = self.settings.masking
        _refuse_long(data, self.lengths)
        by_length = {}
        for length in self.lengths:
            by_length[length] = _measure_length(checkpoint, data, length, self.settings.tokens)
            say(f"{checkpoint.file}: attention at {length:,}")
        with torch.no_grad():
            losses = copying(model, model.context_length, N_COPIES, checkpoint.device)
        return {
            "masking": model.model.document_masking,
            "copying": {name.removeprefix("copying/"): loss for name, loss in losses.items()},
            "lengths": by_length,
            # Last, because it draws the weights anew.
            "inside": self._measure_inside(checkpoint, data),
        }

    @torch.no_grad()
    def _measure_inside(self, checkpoint: Checkpoint, data: TokenShards) -> dict[str, Any]:
        """Measure norms and scores of the trained model, and then of the same model untrained.

        Afterwards the model has new random weights.

        Returns:
            {length, assumes_unit_norms, trained, untrained}; the last two have `norms`
            (`measure_norms`) and `scores` (`measure_scores`).
        """
        trained_lengths = [
            length for length in self.lengths if length <= checkpoint.training_length
        ]
        length = max(trained_lengths, default=self.lengths[0])
        decoder = checkpoint.model.model
        batches = list(complete_sequences(data, length, self.settings.tokens))
        trained = _norms_and_scores(checkpoint, batches, length)
        draw_anew(checkpoint, UNTRAINED_SEED)
        return {
            "length": length,
            "assumes_unit_norms": assumes_unit_norms(decoder),
            "trained": trained,
            "untrained": _norms_and_scores(checkpoint, batches, length),
        }

    def record(self, checkpoints: list[Checkpoint], measurements: list[Any]) -> dict[str, Any]:
        (record,) = measurements
        return dict(record)

    def report(self, record: dict[str, Any]) -> Report:
        (checkpoint,) = record["checkpoints"]
        label = checkpoint["label"]
        results = sorted(record["lengths"].values(), key=itemgetter("length"), reverse=True)
        longest = results[0]
        notes = _copying_notes(record["copying"])
        masking = "on" if record["masking"] else "off"
        paragraphs = [f"# Attention statistics\n\n{literal(label)}, document masking {masking}"]
        for result in results:
            paragraphs += _length_section(result)
        paragraphs += [
            *(f"## Copying\n\n{note}" for note in notes),
            f"## Figures, for sequences of {longest['length']:,} tokens",
            "![Statistics over the context length](statistics.png)",
            "![Weight and entropy in ranges of distances](ranges.png)",
        ]
        training_length = checkpoint["training_length"]
        inside = record["inside"]
        trained = inside["trained"]
        untrained = inside["untrained"]
        norms_title = f"{label}: norms by layer, trained (untrained)"
        norms = norms_table(trained["norms"], untrained["norms"], norms_title)
        scores = scores_table(trained["scores"], f"{label}: scores S = q·k/√D, trained")
        paragraphs += [
            f"## Norms by layer\n\nSequences of {inside['length']:,} tokens.",
            norms.markdown(),
            NORMS_NOTE,
            "![Norms by layer](norms.png)",
            f"## Attention scores\n\nSequences of {inside['length']:,} tokens, trained:",
            scores.markdown(),
            "Untrained:",
            scores_table(untrained["scores"], "").markdown(),
            SCORES_NOTE,
            "![Scores, trained](scores.png)",
            "![Scores, untrained](scores_untrained.png)",
        ]
        figures = {
            "statistics.png": partial(draw_statistics, longest, training_length),
            "ranges.png": partial(draw_ranges, longest, training_length),
            "norms.png": partial(
                draw_norms, trained["norms"], untrained["norms"], inside["assumes_unit_norms"]
            ),
            "scores.png": partial(draw_scores, trained["scores"]),
            "scores_untrained.png": partial(draw_scores, untrained["scores"]),
        }
        low, high = last_bin(longest)
        title = f"{label}: n = {low:,} to {high:,}, means over heads"
        summary = statistics_table(longest, title)
        tables = [_without_ranges(summary), norms, _without_ranges(scores)]
        return Report(tables, paragraphs, figures, notes)


def _norms_and_scores(checkpoint: Checkpoint, batches: list[Batch], length: int) -> dict[str, Any]:
    decoder = checkpoint.model.model
    return {
        "norms": measure_norms(decoder, batches, checkpoint.device),
        "scores": measure_scores(decoder, batches, checkpoint.device, length),
    }


def _length_section(result: dict[str, Any]) -> list[str]:
    low, high = last_bin(result)
    return [
        f"## Sequences of {result['length']:,} tokens\n\n{result['tokens']:,} tokens read.",
        statistics_table(result, "").markdown(),
        STATISTICS_NOTE.format(low=low, high=high),
    ]


def _copying_notes(losses: dict[str, float]) -> list[str]:
    """A sentence on the loss of a copy; nothing if the model was too short for a copy."""
    if not losses:
        return []
    first = round(losses["first"], 2)
    second = round(losses["second"], 2)
    saving = minus(f"{first - second:.2f}")
    return [
        f"Random tokens cost {first:.2f} nats each, the same once more {second:.2f}: "
        f"a copy saves {saving}."
    ]


def _without_ranges(table: Table) -> Table:
    """A table with the means alone, which fits into a terminal."""
    rows = []
    for row in table.rows:
        rows.append([cell.partition(" [")[0] for cell in row])
    return replace(table, rows=rows)


def _refuse_long(data: TokenShards, lengths: Sequence[int]) -> None:
    """Raise UserError if the validation split is shorter than a sequence of any length."""
    too_long = [
        length for length in lengths if next(complete_sequences(data, length, 1), None) is None
    ]
    if too_long:
        fitting = ",".join(str(length) for length in lengths if length not in too_long)
        remedy = f"give --lengths {fitting}" if fitting else "give shorter --lengths"
        raise UserError(
            f"{data.path}/val has no {too_long[0]:,} tokens in a row: {remedy}, or set --data"
        )


@torch.no_grad()
def _measure_length(
    checkpoint: Checkpoint, data: TokenShards, length: int, tokens: int
) -> dict[str, Any]:
    model = checkpoint.model
    edges = bin_edges(length)
    n_read = 0
    with observed(model, edges, ranges(length - 1)) as layers:
        for batch in complete_sequences(data, length, tokens):
            model(batch.tokens.to(checkpoint.device), batch.document_ids.to(checkpoint.device))
            n_read += batch.tokens.numel()
    means = [layer.means() for layer in layers]
    statistics = {}
    for name in means[0]:
        statistics[name] = [layer[name].tolist() for layer in means]
    return {
        "length": length,
        "tokens": n_read,
        "edges": edges,
        "queries": layers[0].counts()[0].long().tolist(),
        "statistics": statistics,
    }


def complete_sequences(data: TokenShards, length: int, tokens: int) -> Iterator[Batch]:
    """Yield complete sequences of `length` tokens, spread over the validation split.

    They have `tokens` tokens together, or as many as the split has.
    """
    if data.n_targets("val") < length:
        return
    set_validation_pieces(data, length, math.ceil(tokens / length) * length, MAX_BATCH_TOKENS)
    for batch in data.val_dataloader():
        is_complete = batch.targets[:, -1] != IGNORE_INDEX
        if is_complete.any():
            yield batch._replace(
                tokens=batch.tokens[is_complete], document_ids=batch.document_ids[is_complete]
            )


def statistics_table(result: dict[str, Any], title: str) -> Table:
    """The last shown bin of a length: a row for each layer, with the statistics over its heads."""
    last = n_reliable_bins(result) - 1
    columns = []
    for name, statistic in STATISTICS.items():
        values = statistic_values(result, name)  # (layers, heads, bins)
        cells = [_mean_and_range(heads, statistic.decimals) for heads in values[:, :, last]]
        columns.append(cells)
    rows = []
    for layer, row_cells in enumerate(zip(*columns, strict=True)):
        rows.append([str(layer), *row_cells])
    titles = [statistic.title.replace(" ", "\n") for statistic in STATISTICS.values()]
    return Table(title, ["layer", *titles], rows)


def _mean_and_range(heads: np.ndarray, decimals: int) -> str:
    """`0.52 [0.31, 0.70]`: mean, smallest and largest."""
    heads = heads[np.isfinite(heads)]
    if not len(heads):
        return NONE
    mean = f"{heads.mean():.{decimals}f}"
    low = f"{heads.min():.{decimals}f}"
    high = f"{heads.max():.{decimals}f}"
    return mean if low == high else f"{mean} [{low}, {high}]"
