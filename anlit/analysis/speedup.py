"""The convergence speed-up of one configuration over another (arXiv 2505.22014), as every report defines it.

    speed-up of B over A = tokens at which A first has its own final validation loss / tokens at which B first has it

- A curve first has a loss where it first is at or below it, linear between two validation points. It is not smoothed: a
  later rise does not undo a crossing.
- Nothing is extrapolated. A run that never gets there has no speed-up. One that was there at its first validation has
  at least the speed-up that is given.
- Runs are paired on the seeds (of initial weights and data order) that both configurations have. Each pair has one
  value, with the final loss of its own run of A.
- The speed-up is the geometric mean of the pairs, with the 95 % t-interval of the logarithm. If a pair has no value,
  there is no mean: a mean over the others would be too good. The report then says "k of n seeds".
- Without a common seed each run of B is compared with A's mean curve, and the report notes it.

In wall-clock it is the same times the paired ratio of steps, see `anlit.analysis.wall_clock`.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from anlit.analysis.significance import Test, ratio
from anlit.runs.folders import Curve
from anlit.runs.groups import mean_curve

SeededCurves = Sequence[tuple[Hashable, Curve]]
"""Seeds and validation curve (without NaN) of each run of a configuration."""


@dataclass(frozen=True)
class SpeedUp:
    """A speed-up in tokens.

    Args:
        values: One for each pair of seeds, None where the run never has the loss.
        bound: A run had the loss at its first validation, so the speed-up is at least this.
        paired: The seeds were compared in pairs, not with the baseline's mean curve.
    """

    values: tuple[float | None, ...]
    bound: bool = False
    paired: bool = True

    @property
    def mean(self) -> float | None:
        """The geometric mean; None unless every pair has a value."""
        known = [math.log(value) for value in self.values if value is not None]
        return math.exp(sum(known) / len(known)) if known and len(known) == len(self.values) else None

    @property
    def test(self) -> Test | None:
        """The t-test of the logarithm against 0 with its interval; None without a mean or with fewer than two pairs."""
        return ratio([value for value in self.values if value is not None]) if self.mean is not None else None

    @property
    def words(self) -> str:
        """`1.40 (1.31 … 1.50)`, `1.40` for one pair, `2 of 3 seeds` or `not reached`."""
        if self.mean is None:
            reached = sum(value is not None for value in self.values)
            return f"{reached} of {len(self.values)} seeds" if reached else "not reached"
        interval = f" ({self.test.low:.2f} … {self.test.high:.2f})" if self.test else ""
        return f"{'≥ ' if self.bound else ''}{self.mean:.2f}{interval}"


def tokens_to_loss(curve: Curve, loss: float) -> float | None:
    """Training tokens at which `curve` first is at or below `loss`; None if it never is."""
    below = np.flatnonzero(curve.loss <= loss)
    if len(below) == 0:
        return None
    i = int(below[0])
    if i == 0:
        return float(curve.tokens[0])
    part = (curve.loss[i - 1] - loss) / (curve.loss[i - 1] - curve.loss[i])
    return float(curve.tokens[i - 1] + part * (curve.tokens[i] - curve.tokens[i - 1]))


def speed_up(baseline: SeededCurves, others: SeededCurves) -> SpeedUp:
    """The speed-up of the runs `others` over those of `baseline`."""
    partners = dict(baseline)
    pairs = [(partners[seeds], curve) for seeds, curve in others if seeds in partners]
    paired = bool(pairs)
    if not pairs:
        mean = mean_curve([curve for _, curve in baseline])[0]
        pairs = [(mean, curve) for _, curve in others]
    values, bound = [], False
    for ours, theirs in pairs:
        target = float(ours.loss[-1])
        cost, own = tokens_to_loss(theirs, target), tokens_to_loss(ours, target)
        values.append(own / cost if own and cost else None)
        bound |= bool(theirs.loss[0] < target)
    return SpeedUp(tuple(values), bound, paired)
