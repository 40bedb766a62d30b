"""`anlit diagnose` on a checkpoint: the summary per layer, and the page."""

from functools import partial
from typing import Any

import numpy as np

from anlit.checkpoints.loading import Checkpoint
from anlit.data.module import TokenShards
from anlit.evaluation.arms import Candidate
from anlit.evaluation.diagnose.measure import diagnose
from anlit.evaluation.diagnose.plot import heads_figure, last_bin, ranges_figure, reliable, statistics_figure, values
from anlit.evaluation.runner import Evaluation, Report, Tell
from anlit.evaluation.settings import DIAGNOSED_LENGTHS, DiagnoseSettings
from anlit.reporting.table import NONE, Table, markdown_table
from anlit.reporting.text import literal, minus

COLUMNS = {
    "entropy": ("entropy (nats)", 2),
    "inverse_largest_weight": ("1/w_max", 1),
    "participation": ("Σw²", 4),
    "attention_sink": ("first token", 3),
    "weight_latest_100": ("last 100", 3),
    "squared_average": ("‖Σwv‖ /‖v‖", 3),
    "orthogonal": ("√Σw²", 3),
}
PRINTED = [name for name in COLUMNS if name != "participation"]  # the table has its root, and must fit into 80 columns
FIGURES = {
    "statistics.png": ("Statistics over the context length", statistics_figure),
    "ranges.png": ("Weight and entropy in ranges of distances", ranges_figure),
    "heads.png": ("Each head", heads_figure),
}
DEFINITIONS = """\
Means over heads, with the smallest and the largest head in brackets, over queries at
positions {low:,} to {high:,} of their document (n).
Entropy is −Σw ln w in nats; *1/w_max* is about the number of keys that share the attention; *first token* is the weight
on the first token of the document, *last 100* that on the latest 100 tokens. *‖Σwv‖ /‖v‖* is the root mean square over
queries of the size of the attention average relative to its values (root mean square over visible keys), *√Σw²* what it
would be if values were orthogonal and equally long. In the figures, the visible part of a range [t, 10t) counts."""


class Diagnose(Evaluation):
    """How a trained model's attention spreads its weights, by layer, head and context length.

    Args:
        settings: How to measure.
    """

    name, digits = "diagnose", 7
    settings: DiagnoseSettings

    def measure(self, checkpoint: Checkpoint, data: TokenShards, tell: Tell) -> dict[str, Any]:
        settings = self.settings
        return diagnose(
            checkpoint, data, list(settings.lengths or DIAGNOSED_LENGTHS), settings.tokens, settings.masking
        )

    def record(self, candidates: list[Candidate], measurements: list[Any]) -> dict[str, Any]:
        (record,) = measurements
        return dict(record)

    def report(self, record: dict[str, Any]) -> Report:
        label = record["checkpoints"][0]["label"]
        lengths = sorted(record["lengths"].values(), key=lambda own: -own["length"])
        masked, copied = "on" if record["masking"] else "off", copying_sentence(record["copying"])
        parts = [f"# Attention statistics\n\n{literal(label)}, document masking {masked}"]
        for own in lengths:
            low, high = last_bin(own)
            parts += [
                f"## Sequences of {own['length']:,} tokens\n\n{own['tokens']:,} tokens read.",
                markdown_table(["layer", *(title for title, _ in COLUMNS.values())], rows(own)),
                DEFINITIONS.format(low=low, high=high),
            ]
        parts += [f"## Copying\n\n{line}" for line in copied]
        parts += [f"## Figures, for sequences of {lengths[0]['length']:,} tokens"]
        parts += [f"![{title}]({file})" for file, (title, _) in FIGURES.items()]
        low, high = last_bin(lengths[0])
        shown = [0, *(1 + list(COLUMNS).index(name) for name in PRINTED)]
        body = [[row[index].partition(" [")[0] for index in shown] for row in rows(lengths[0])]
        head = ["layer", *(COLUMNS[name][0].replace(" ", "\n") for name in PRINTED)]
        table = Table(f"{label}: n = {low:,} to {high:,}, means over heads", head, body)
        figures = {
            file: partial(draw, lengths[0], record["checkpoints"][0]["training_length"])
            for file, (_, draw) in FIGURES.items()
        }
        return Report(table, parts, figures, copied)


def rows(own: dict[str, Any]) -> list[list[str]]:
    """The summary of one length: a row per layer, with `COLUMNS` after its number."""
    last = reliable(own) - 1
    columns = [(values(own, name), digits) for name, (_, digits) in COLUMNS.items()]
    return [
        [str(layer), *(cell(column[layer, :, last], digits) for column, digits in columns)]
        for layer in range(len(own["statistics"]["entropy"]))
    ]


def cell(heads: np.ndarray, digits: int) -> str:
    """`0.52 [0.31, 0.70]`: mean, smallest and largest."""
    heads = heads[np.isfinite(heads)]
    if not len(heads):
        return NONE
    mean, low, high = (f"{value:.{digits}f}" for value in (heads.mean(), heads.min(), heads.max()))
    return mean if low == high else f"{mean} [{low}, {high}]"


def copying_sentence(losses: dict[str, float]) -> list[str]:
    """Whether the model copies, as a sentence; none for a model too short for it."""
    if not losses:
        return []
    first, second = losses["first"], losses["second"]
    saved = minus(f"{first - second:.2f}")
    return [f"Random tokens cost {first:.2f} nats each, the same tokens once more {second:.2f}: a copy saves {saved}."]
