"""The annealed speed-up: both sides are annealed, at several lengths of training.

    speed-up of B over A at a length = tokens that A needs for B's final loss / B's tokens

The rate of each run has fallen to 0 at its final loss. So no schedule of another length bends the
curves, as it does in `statistics.speed_up`. A's curve is its final losses over its tokens. It is a
line between two lengths, in the logarithms of both. Nothing is extrapolated. Beyond A's lengths
the speed-up has a bound in place of a value.

A line lies above a convex curve. So a speed-up between two lengths is a little too large. With
L = E + B/D^β, lengths that double and β = 0.3, this is at most 2 %.
"""

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from anlit.compare.crossings import tokens_to_loss
from anlit.compare.statistics import Interval, SpeedUp, of_seeds, slope_over_seeds
from anlit.reporting.table import NONE
from anlit.runs.folders import Curve


class End(NamedTuple):
    """The end of an annealed run."""

    tokens: float
    loss: float


Ends = Mapping[Hashable, Mapping[int, End | None]]
"""Seeds → length in steps → the end. None for a run that failed. Runs under way are left out."""


@dataclass(frozen=True)
class AnnealedSpeedUp:
    """The speed-up at one length.

    Args:
        tokens: The arm's training tokens.
        ratios: Seeds → speed-up or its bound. None if a run of the pair failed.
        bounds: `>` if a seed has a lower bound, `<` if a seed has an upper bound.
        obstacle: Why the losses cannot be compared, in two words. "" if they can.
    """

    tokens: float
    ratios: Mapping[Hashable, float | None]
    bounds: frozenset[str] = frozenset()
    obstacle: str = ""

    @property
    def speedup(self) -> SpeedUp:
        """The ratios as a speed-up, with mean and t-test. A bound has no test."""
        return SpeedUp(tuple(self.ratios.values()), bool(self.bounds), obstacle=self.obstacle)

    @property
    def is_exact(self) -> bool:
        """Whether it has a mean, and no seed has a bound in place of a value."""
        return self.speedup.mean is not None and not self.bounds

    @property
    def words(self) -> str:
        """The speed-up for a table.

        `1.40 (1.31 … 1.50)`, `> 1.20` and `< 0.90` for a bound, `2 of 3 seeds` if a run failed.
        """
        mean = self.speedup.mean
        if mean is None and not self.obstacle:
            return of_seeds(self.speedup.values)
        if mean is None or not self.bounds:
            return self.speedup.words
        if len(self.bounds) > 1:
            return f"{NONE} (out of range)"
        (bound,) = self.bounds
        return f"{bound} {mean:.2f}"


def annealed_speed_up(baseline: Ends, arm: Ends, length: int) -> AnnealedSpeedUp:
    """The speed-up of an arm at a length, over the seeds that both have."""
    ratios: dict[Hashable, float | None] = {}
    bounds = set()
    tokens = math.nan
    for seed, ends in arm.items():
        if length not in ends or not baseline.get(seed):
            continue
        end = ends[length]
        baseline_ends = [other for other in baseline[seed].values() if other is not None]
        if end is None or len(baseline_ends) < len(baseline[seed]):
            ratios[seed] = None
            continue
        tokens = end.tokens
        baseline_tokens, bound = tokens_for_loss(baseline_ends, end.loss)
        ratios[seed] = baseline_tokens / end.tokens
        bounds |= {bound} - {""}
    return AnnealedSpeedUp(tokens, ratios, frozenset(bounds))


def tokens_for_loss(ends: list[End], loss: float) -> tuple[float, str]:
    """Tokens after which annealed runs with these ends have a final loss, and `>`, `<` or "".

    `>`: they need more than these tokens; `<`: they need fewer; "": a line between two ends.
    """
    tokens, losses = np.array(sorted(ends)).T
    log_tokens = tokens_to_loss(Curve(np.log(tokens), tokens, np.log(losses)), math.log(loss))
    if log_tokens is None:
        return float(tokens[-1]), ">"
    if losses[0] < loss:
        return float(tokens[0]), "<"
    return math.exp(log_tokens), ""


class Trend(NamedTuple):
    """How a speed-up changes with the length of training."""

    lengths: int
    """The number of lengths at which every seed has a value."""
    per_doubling: Interval
    """The factor of the speed-up for twice the tokens; one seed has no interval."""

    @property
    def words(self) -> str:
        """What the interval shows, and no more."""
        if math.isnan(self.per_doubling.low):
            return "without an interval no trend is shown"
        if self.per_doubling.low > 1:
            return "the speed-up rises"
        if self.per_doubling.high < 1:
            return "the speed-up falls"
        return "no change is shown"


def trend(speedups: list[AnnealedSpeedUp]) -> Trend | None:
    """The change over the lengths at which every seed has a value. None for fewer than two.

    Each seed has a line by least squares, log speed-up over log tokens. The interval is a
    t-interval of the lines' slopes. The lengths of a seed share a stable run, so they are not
    independent.
    """
    exact = [speedup for speedup in speedups if speedup.is_exact]
    if len(exact) < 2 or any(speedup.ratios.keys() != exact[0].ratios.keys() for speedup in exact):
        return None
    doublings = np.log2([speedup.tokens for speedup in exact])
    logarithms = np.log(np.array([list(speedup.ratios.values()) for speedup in exact], float))
    return Trend(len(exact), slope_over_seeds(doublings, logarithms))
