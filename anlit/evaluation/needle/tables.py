"""The needle task's results: averages over seeds, and the tables."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console

from anlit.evaluation.needle.score import Scores
from anlit.evaluation.record import provenance
from anlit.reporting.table import TerminalTable, markdown_table
from anlit.reporting.text import literal, minus

Z = 1.959964
"""Quantile of the normal distribution for 95 %."""
PLOT = "needle.png"
DEFINITION = """\
Accuracy is the share of samples whose 7 digits greedy decoding gives exactly, averaged over {n_depths} depths with
{n_samples} samples each. Brackets have the 95 % interval (Wilson) for {n} samples. All seeds and all configurations
with one tokenizer get the same samples. ± is the standard deviation over seeds. The log-likelihood is that of the
answer's tokens given all tokens before them: 0 is certainty, −ln V is guessing among all V tokens. It differs between
configurations even if their accuracy is 0."""


@dataclass(frozen=True, eq=False)
class ArmScores:
    """The scores of one arm."""

    label: str
    members: tuple[int, ...]
    """Indices of its checkpoints in the record."""
    scores: tuple[dict[int, Scores], ...]
    """The scores of each member, by length."""

    @property
    def n_seeds(self) -> int:
        return len(self.members)

    def of(self, length: int) -> list[Scores]:
        """The scores of every seed."""
        return [by_length[length] for by_length in self.scores]

    def accuracy(self, length: int) -> float:
        """Mean over seeds, depths and samples."""
        return float(np.mean([one.accuracy for one in self.of(length)]))

    def accuracy_sd(self, length: int) -> float | None:
        """Standard deviation over seeds; None for one seed."""
        values = [one.accuracy for one in self.of(length)]
        return float(np.std(values, ddof=1)) if len(values) > 1 else None

    def interval(self, length: int) -> tuple[float, float]:
        """95 % interval of `accuracy` from the number of samples, which all seeds share."""
        return wilson(self.accuracy(length), self.of(length)[0].match.size)

    def nats_per_token(self, length: int) -> float:
        """Log-likelihood per token of the answers, mean over seeds."""
        return float(np.mean([one.nats_per_token for one in self.of(length)]))

    def by_depth(self, length: int) -> np.ndarray:
        """(depths,) accuracy at each depth, mean over seeds and samples."""
        return np.mean([one.match.mean(axis=1) for one in self.of(length)], axis=0)


def wilson(share: float, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a binomial share in n trials (Wilson 1927)."""
    centre = share + Z**2 / (2 * n)
    half = Z * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    scale = 1 + Z**2 / n
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


@dataclass(frozen=True, eq=False)
class Results:
    """All measurements."""

    arms: list[ArmScores]
    lengths: list[int]
    depths: list[float]
    n_samples: int
    """Samples at each depth and length."""
    training_lengths: list[int]

    def name(self, length: int) -> str:
        """`1,024 (4×)`; without the multiple if the models were trained at different lengths."""
        times = f" ({length / self.training_lengths[0]:g}×)" if len(self.training_lengths) == 1 else ""
        return f"{length:,}{times}"


def markdown(results: Results, record: dict[str, Any]) -> str:
    """The page needle.md; `record` is the content of needle.json."""
    n_depths = len(results.depths)
    definition = DEFINITION.format(n_depths=n_depths, n_samples=results.n_samples, n=n_depths * results.n_samples)
    head = ["configuration", "seeds", *(f"{results.name(length)} tokens" for length in results.lengths)]
    parts = [
        "# Needle in a haystack",
        f"![accuracy by depth and length]({PLOT})",
        "Exact-match accuracy:",
        markdown_table(head, _literal(_rows(results, _accuracy))),
        "Log-likelihood of the answer, nats per token:",
        markdown_table(head, _literal(_rows(results, _nats))),
        definition,
        "## Where the numbers come from",
        provenance(record),
    ]
    return "\n\n".join(parts) + "\n"


def show(results: Results, console: Console) -> None:
    """Print both numbers of every length."""
    rows = []
    for accuracy, nats in zip(_rows(results, _accuracy), _rows(results, _nats), strict=True):
        cells = [f"{a}\n{b}".replace(" [", "\n[") for a, b in zip(accuracy[2:], nats[2:], strict=True)]
        rows.append([*accuracy[:2], *cells])
    head = ["configuration", "seeds", *(f"{results.name(length)}\ntokens" for length in results.lengths)]
    console.print(TerminalTable("Exact match, its 95 % interval, and nats per token of the answer", head, rows))


def _rows(results: Results, cell: Callable[[ArmScores, int], str]) -> list[list[str]]:
    return [[arm.label, str(arm.n_seeds), *(cell(arm, length) for length in results.lengths)] for arm in results.arms]


def _literal(rows: list[list[str]]) -> list[list[str]]:
    return [[literal(label), *cells] for label, *cells in rows]


def _accuracy(arm: ArmScores, length: int) -> str:
    sd, (low, high) = arm.accuracy_sd(length), arm.interval(length)
    spread = f" ± {sd:.3f}" if sd is not None else ""
    return f"{arm.accuracy(length):.3f}{spread} [{low:.3f}, {high:.3f}]"


def _nats(arm: ArmScores, length: int) -> str:
    return minus(f"{arm.nats_per_token(length):.3f}".replace("-0.000", "0.000"))
