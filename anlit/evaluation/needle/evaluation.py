"""`anlit needle`: checkpoints scored on the same needles, averages over seeds, and their tables."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from anlit.analysis.statistics import Summary
from anlit.checkpoints.loading import Checkpoint
from anlit.data.module import TokenShards
from anlit.data.needle import Haystack
from anlit.evaluation.arms import Candidate, group_by_seed
from anlit.evaluation.needle.measure import measure
from anlit.evaluation.needle.plot import length_name, plot
from anlit.evaluation.runner import Evaluation, Report, Tell
from anlit.evaluation.settings import NeedleSettings, lengths_for
from anlit.reporting.table import Table, markdown_table
from anlit.reporting.text import literal, minus

Z = 1.959964
"""Quantile of the normal distribution for 95 %."""
DEFINITION = """\
Accuracy is the share of samples whose 7 digits greedy decoding gives exactly, averaged over {n_depths} depths with
{n_samples} samples each. Brackets have the 95 % interval (Wilson) for {n} samples. All seeds and all configurations
with one tokenizer get the same samples. ± is the standard deviation over seeds. The log-likelihood is that of the
answer's tokens given all tokens before them: 0 is certainty, −ln V is guessing among all V tokens. It differs between
configurations even if their accuracy is 0."""


class Needle(Evaluation):
    """How often a number is found in a long text, by depth and length.

    Args:
        settings: How to measure.
    """

    name = page = "needle"
    settings: NeedleSettings

    def plan(self, candidates: list[Candidate]) -> dict[str, Any]:
        """The lengths and depths; raises UserError if such samples cannot be made of the validation split."""
        self.haystack = Haystack.of(candidates[0].data, "val")
        training_lengths = sorted({candidate.description["training_length"] for candidate in candidates})
        self.lengths = lengths_for(self.settings.lengths, training_lengths)
        for length in self.lengths:
            self.haystack.check(length)
        return {"lengths": self.lengths, "depths": self.settings.depths}

    def measure(self, checkpoint: Checkpoint, data: TokenShards, tell: Tell) -> list[dict[str, Any]]:
        settings = self.settings
        scores = []
        for length in self.lengths:
            # The cost of a sample grows with its length, or faster if attention dominates.
            share = length / sum(self.lengths) / (settings.n_depths * settings.n_samples)

            def advance(n: int, share: float = share) -> None:
                tell(n * share, "")

            how = (settings.depths, settings.n_samples, settings.seed, advance)
            scores.append(measure(checkpoint.model, self.haystack, length, *how))
        return scores

    def record(self, candidates: list[Candidate], measurements: list[Any]) -> dict[str, Any]:
        n = self.settings.n_depths * self.settings.n_samples
        arms = group_by_seed(candidates)
        for arm in arms:
            seeds = [measurements[member] for member in arm["checkpoints"]]
            arm["lengths"] = [over_seeds(each, n) for each in zip(*seeds, strict=True)]
        return {"arms": arms, "measurements": measurements}

    def report(self, record: dict[str, Any]) -> Report:
        arms, settings = record["arms"], record["settings"]
        names = [length_name(record, length) for length in settings["lengths"]]
        n_depths, n_samples = len(settings["depths"]), settings["n_samples"]
        head = ["configuration", "seeds", *(f"{name} tokens" for name in names)]
        parts = [
            "# Needle in a haystack",
            "![accuracy by depth and length](needle.png)",
            "Exact-match accuracy:",
            markdown_table(head, _rows(arms, _accuracy)),
            "Log-likelihood of the answer, nats per token:",
            markdown_table(head, _rows(arms, _nats)),
            DEFINITION.format(n_depths=n_depths, n_samples=n_samples, n=n_depths * n_samples),
        ]
        title = "Exact match, its 95 % interval, and nats per token of the answer"
        printed = _rows(arms, lambda own: f"{_accuracy(own)}\n{_nats(own)}".replace(" [", "\n["), str)
        head = ["configuration", "seeds", *(f"{name}\ntokens" for name in names)]
        return Report(Table(title, head, printed), parts, {"needle.png": lambda: plot(record)})


def over_seeds(seeds: tuple[dict[str, Any], ...], n: int) -> dict[str, Any]:
    """An arm's means at one length, from the scores of each seed on the same `n` samples."""
    accuracy = Summary(tuple(own["accuracy"] for own in seeds))
    assert accuracy.mean is not None
    return {
        "length": seeds[0]["length"],
        "accuracy": accuracy.mean,
        "accuracy_sd": accuracy.sd,
        "interval_95": wilson(accuracy.mean, n),
        "nats_per_token": float(np.mean([own["nats_per_token"] for own in seeds])),
    }


def wilson(share: float, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a binomial share in n trials (Wilson 1927)."""
    centre = share + Z**2 / (2 * n)
    half = Z * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    scale = 1 + Z**2 / n
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def _rows(
    arms: list[dict[str, Any]], cell: Callable[[dict[str, Any]], str], shown: Callable[[str], str] = literal
) -> list[list[str]]:
    """A row for each arm, a cell for each length."""
    return [[shown(arm["label"]), str(len(arm["checkpoints"])), *(cell(own) for own in arm["lengths"])] for arm in arms]


def _accuracy(own: dict[str, Any]) -> str:
    sd, (low, high) = own["accuracy_sd"], own["interval_95"]
    spread = f" ± {sd:.3f}" if sd is not None else ""
    return f"{own['accuracy']:.3f}{spread} [{low:.3f}, {high:.3f}]"


def _nats(own: dict[str, Any]) -> str:
    return minus(f"{own['nats_per_token']:.3f}".replace("-0.000", "0.000"))
