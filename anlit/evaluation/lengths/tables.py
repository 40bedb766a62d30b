"""The tables of `anlit lengths`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from anlit.evaluation.arms import Arm
from anlit.evaluation.lengths.measure import Measurement
from anlit.evaluation.lengths.tally import Estimate
from anlit.evaluation.record import provenance
from anlit.reporting.intervals import Summary, mean_sd
from anlit.reporting.table import NONE, TerminalTable, markdown_table
from anlit.reporting.text import literal

PLOT = "lengths.png"
HEAD = (
    "configuration", "documents masked", "length", "seeds", "loss", "standard error", "change", "its standard error",
    "bits per byte", "tokens", "sequences",
)  # fmt: skip
DEFINITION = """\
Loss is the mean in nats per token over the same {tokens:,} validation tokens at every length; only the cuts into
sequences differ. With more than one seed a value is the mean ± the standard deviation over seeds. *Standard
error* is that of one run's mean over its sequences (the mean of the runs' errors if there are several). *Change* is the
loss minus that at the training length. Both are on the same tokens, so its standard error, over blocks of {block:,}
tokens, is smaller than that of the losses."""
RANGES = """\
Mean loss by position in sequences of {length:,} tokens. At position p the model sees p tokens before the present one:
those of the document if documents are masked, else those of the sequence. The standard error (s.e.) is over sequences.
Different ranges have different tokens, and only long documents reach the late positions with masking. So compare along
a row, where all configurations read the same tokens."""


@dataclass(frozen=True, eq=False)
class Results:
    """All measurements: `of_checkpoint[i]` has those of checkpoint i, with the same settings for each checkpoint."""

    arms: list[Arm]
    of_checkpoint: list[list[Measurement]]
    lengths: list[int]
    masking: list[bool]
    tokens: int
    block: int

    def of_arm(self, arm: Arm, length: int, masked: bool) -> list[Measurement]:
        """The measurement of each seed."""
        return [
            one
            for member in arm.members
            for one in self.of_checkpoint[member]
            if (one.length, one.masking) == (length, masked)
        ]


def rows(results: Results) -> list[list[str]]:
    """One row for each arm, masking and length, in the columns of HEAD."""
    return [
        _row(arm, masked, length, results.of_arm(arm, length, masked))
        for arm in results.arms
        for masked in results.masking
        for length in results.lengths
    ]


def _row(arm: Arm, masked: bool, length: int, seeds: list[Measurement]) -> list[str]:
    changes = [one.change for one in seeds]
    return [
        literal(arm.label),
        "yes" if masked else "no",
        f"{length:,}",
        str(len(seeds)),
        _mean([one.total.loss for one in seeds]),
        _error([one.total for one in seeds]),
        _mean([change.loss if change else None for change in changes]),
        _error(changes),
        _mean([one.bits_per_byte for one in seeds]),
        f"{seeds[0].total.tokens:,}",
        f"{seeds[0].sequences:,}",
    ]


def _mean(values: Iterable[float | None]) -> str:
    return mean_sd(Summary(tuple(values)), 4)


def _error(estimates: Sequence[Estimate | None]) -> str:
    """The mean of the seeds' standard errors."""
    return _mean([Summary(tuple(one.standard_error if one else None for one in estimates)).mean])


def show(results: Results, console: Console) -> None:
    """Print the losses, a column for each length."""
    lines = []
    for arm in results.arms:
        for masked in results.masking:
            seeds = [results.of_arm(arm, length, masked) for length in results.lengths]
            losses = [_mean([one.total.loss for one in of_seeds]) for of_seeds in seeds]
            lines.append([arm.label, "yes" if masked else "no", *losses])
    head = ["configuration", "documents\nmasked", *(f"{length:,}" for length in results.lengths)]
    title = f"Loss in nats per token, by length, on {results.tokens:,} tokens"
    console.print(TerminalTable(title, head, lines))


def markdown(results: Results, record: dict[str, Any], notes: Sequence[str]) -> str:
    """The report: both tables, their definitions and the provenance of the numbers."""
    parts = [
        "# Loss by length",
        f"![loss over length and position]({PLOT})",
        markdown_table(HEAD, rows(results)),
        DEFINITION.format(tokens=results.tokens, block=results.block),
        "## By position",
        RANGES.format(length=results.lengths[-1]),
        *_range_tables(results),
        *(["## Notes\n\n" + "\n".join(f"- {literal(note)}" for note in notes)] if notes else []),
        "## Where the numbers come from\n\n" + provenance(record),
    ]
    return "\n\n".join(parts) + "\n"


def _range_tables(results: Results) -> list[str]:
    parts = []
    for masked in results.masking:
        where = "the document, documents masked" if masked else "the sequence, documents not masked"
        parts += [f"### Position in {where}", _range_table(results, masked)]
    return parts


def _range_table(results: Results, masked: bool) -> str:
    columns = [results.of_arm(arm, results.lengths[-1], masked) for arm in results.arms]
    lines = []
    for k, part in enumerate(columns[0][0].by_position):
        cells = []
        for seeds in columns:
            estimates = [one.by_position[k].estimate for one in seeds]
            error = _error(estimates)
            loss = _mean([one.loss for one in estimates])
            cells.append(loss + (f" (s.e. {error})" if error != NONE else ""))
        lines.append([f"{part.first:,} – {part.end - 1:,}", f"{part.estimate.tokens:,}", *cells])
    return markdown_table(["positions", "tokens", *(literal(arm.label) for arm in results.arms)], lines)
