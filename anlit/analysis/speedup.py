"""Convergence speed-up of one configuration over another (arXiv 2505.22014).

    speed-up of B over A = (tokens A needs for its final validation loss) / (tokens B needs for it)

For the speed-up in wall-clock see `anlit.analysis.wall_clock`. The details:

- The tokens that a curve needs for a loss are those of its first validation point at or below it,
  interpolated linearly from the point before. The curve is not smoothed: a later rise does not undo
  a crossing, and a spike before it delays the crossing.
- Nothing is extrapolated. A run that never reaches the loss has no speed-up (None). For a run that
  has reached it at its first validation point the value is a lower bound.
- If every run of B has a run of A with the same seeds of model and data order, the two are compared,
  because both read the same data in the same order.
- Otherwise A's seeds are averaged into one curve, pointwise, and its last value is the target. A's
  own cost comes from the same mean curve, so that its speed-up over itself is exactly 1.
- B has one value per seed. Their mean exists only if every seed reaches the loss, because a mean over
  the others would be too good.
"""

from dataclasses import dataclass

import numpy as np

from anlit.runs.folders import Curve

FRACTIONS = (0.6, 0.7, 0.8, 0.9, 1.0)


@dataclass(frozen=True)
class Crossing:
    """Training tokens at which a curve first reaches a loss.

    `bound`: the curve starts at or below the loss, so the true cost may be smaller.
    """

    tokens: float
    bound: bool = False


@dataclass(frozen=True)
class Summary:
    """Values of the seeds, None for a seed without one; the mean needs all of them."""

    values: tuple[float | None, ...]

    @property
    def reached(self) -> int:
        return sum(value is not None for value in self.values)

    @property
    def mean(self) -> float | None:
        known = [value for value in self.values if value is not None]
        return float(np.mean(known)) if known and len(known) == len(self.values) else None

    @property
    def sd(self) -> float | None:
        """Sample standard deviation (n − 1) over seeds; None for one seed or without a mean."""
        known = [value for value in self.values if value is not None]
        return float(np.std(known, ddof=1)) if self.mean is not None and len(known) > 1 else None

    @property
    def words(self) -> str:
        """A speed-up as `1.40×`, or the number of seeds that have one."""
        if self.mean is not None:
            return f"{self.mean:.2f}×"
        return f"{self.reached} of {len(self.values)} seeds" if self.reached else "not reached"


@dataclass(frozen=True)
class SpeedUp:
    """Speed-up of one group over the baseline.

    `tokens` is at the baseline's final loss; `by_fraction[f]` at the loss that the baseline has after the
    fraction f of its tokens; `averaged_tokens` are per-seed means over those points. `bound`: a seed was there
    at its first validation point.
    """

    tokens: Summary
    by_fraction: dict[float, Summary]
    averaged_tokens: Summary
    bound: bool

    @property
    def tokens_share(self) -> float | None:
        """Per cent of the baseline's tokens that are needed: 100 / speed-up."""
        return None if self.tokens.mean is None else 100 / self.tokens.mean


def crossing(curve: Curve, target: float) -> Crossing | None:
    """Where `curve` (without NaN losses) first is at or below `target`; None if it never is."""
    below = np.flatnonzero(curve.loss <= target)
    if len(below) == 0:
        return None
    i = int(below[0])
    if i == 0:
        return Crossing(float(curve.tokens[0]), bound=bool(curve.loss[0] < target))
    part = (curve.loss[i - 1] - target) / (curve.loss[i - 1] - curve.loss[i])
    return Crossing(float(curve.tokens[i - 1] + part * (curve.tokens[i] - curve.tokens[i - 1])))


def targets(baseline: Curve, fractions: tuple[float, ...] = FRACTIONS) -> dict[float, float]:
    """The baseline's loss after each fraction of its tokens, in nats per token.

    Fractions before its first validation point are left out.
    """
    tokens = {fraction: fraction * baseline.tokens[-1] for fraction in fractions}
    return {
        fraction: float(np.interp(at, baseline.tokens, baseline.loss))
        for fraction, at in tokens.items()
        if at >= baseline.tokens[0]
    }


def speed_up(baseline: Curve | list[Curve], curves: list[Curve], fractions: tuple[float, ...] = FRACTIONS) -> SpeedUp:
    """Speed-up of a group with one curve per seed over one curve of the baseline, or over its curve of each seed."""
    baselines = baseline if isinstance(baseline, list) else [baseline] * len(curves)
    losses = [targets(own, fractions) for own in baselines]
    shared = [f for f in fractions if all(f in own for own in losses)]
    pairs = list(zip(baselines, curves, losses, strict=True))
    ratios = {f: [_ratio(crossing(a, loss[f]), crossing(b, loss[f])) for a, b, loss in pairs] for f in shared}
    reached = [crossing(b, float(a.loss[-1])) for a, b, _ in pairs]
    at_end = [_ratio(crossing(a, float(a.loss[-1])), cost) for (a, _, _), cost in zip(pairs, reached, strict=True)]
    return SpeedUp(
        tokens=Summary(tuple(at_end)),
        by_fraction={f: Summary(tuple(row)) for f, row in ratios.items()},
        averaged_tokens=_over_points(list(ratios.values())),
        bound=any(found is not None and found.bound for found in reached),
    )


def _ratio(baseline: Crossing | None, other: Crossing | None) -> float | None:
    """Speed-up in tokens, None where one of the two costs is missing or zero."""
    if baseline is None or other is None or other.tokens <= 0:
        return None
    return baseline.tokens / other.tokens


def _over_points(rows: list[list[float | None]]) -> Summary:
    """Per-seed means over the targets (rows); None for a seed that misses one of them."""
    return Summary(tuple(Summary(seed).mean for seed in zip(*rows, strict=True)))
