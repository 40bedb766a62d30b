"""Convergence speed-up of one configuration over another (arXiv 2505.22014).

    speed-up of B over A = (tokens A needs for its final validation loss) / (tokens B needs for it)

and the same over seconds of training. What the definition leaves open is decided so:

- *Needing* a loss: the first validation point at or below it, interpolated linearly from the point
  before on the measured curve. The curve is not smoothed and no running minimum is taken: a later
  rise does not undo a crossing, and a spike before it delays the crossing.
- Nothing is extrapolated. A run that never gets there has no speed-up (None). One that is there at
  its first validation point is credited that point's tokens, so its value is a lower bound.
- Where every run of B has a run of A with the same seeds, of the model and of the data order, each is
  measured against that run: both read the same data in the same order, and what a seed makes harder
  it makes harder for both.
- Else A's seeds are averaged into one curve, pointwise; its last value is the target, which is the
  mean final loss where the seeds ran equally long. A's own cost comes from the same mean curve, so
  that A's speed-up over itself is exactly 1.
- B has one value per seed. Their mean exists only if every seed gets there: a mean over the lucky
  ones would be too good.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anlit.analysis.runs import Curve

FRACTIONS = (0.6, 0.7, 0.8, 0.9, 1.0)


@dataclass(frozen=True)
class Crossing:
    """Cost at which a curve first reaches a loss; `seconds` is None where time was not logged.

    `bound`: the curve starts at or below the loss, so the true cost may be smaller.
    """

    tokens: float
    seconds: float | None
    bound: bool = False


@dataclass(frozen=True)
class Summary:
    """Values of the seeds, None for a seed that has none; the mean needs all of them."""

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


@dataclass(frozen=True)
class SpeedUp:
    """Speed-up of one group over the baseline.

    `tokens` and `seconds` are at the baseline's final loss; `by_fraction[f]` is the one in tokens
    at the loss that the baseline has after the fraction f of its tokens; the `averaged` ones are
    per-seed means over those points. `bound`: a seed was there at its first validation point.
    """

    tokens: Summary
    seconds: Summary
    by_fraction: dict[float, Summary]
    averaged_tokens: Summary
    averaged_seconds: Summary
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
        return Crossing(float(curve.tokens[0]), _known(curve.seconds[0]), bound=bool(curve.loss[0] < target))
    part = (curve.loss[i - 1] - target) / (curve.loss[i - 1] - curve.loss[i])
    tokens, seconds = (x[i - 1] + part * (x[i] - x[i - 1]) for x in (curve.tokens, curve.seconds))
    return Crossing(float(tokens), _known(seconds))


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
        tokens=Summary(tuple(tokens for tokens, _ in at_end)),
        seconds=Summary(tuple(seconds for _, seconds in at_end)),
        by_fraction={f: Summary(tuple(tokens for tokens, _ in row)) for f, row in ratios.items()},
        averaged_tokens=_over_points([[tokens for tokens, _ in row] for row in ratios.values()]),
        averaged_seconds=_over_points([[seconds for _, seconds in row] for row in ratios.values()]),
        bound=any(found is not None and found.bound for found in reached),
    )


def _ratio(baseline: Crossing | None, other: Crossing | None) -> tuple[float | None, float | None]:
    """Speed-up in tokens and in seconds, None where one of the two costs is missing or zero."""
    if baseline is None or other is None:
        return None, None
    tokens = baseline.tokens / other.tokens if other.tokens > 0 else None
    timed = baseline.seconds is not None and bool(other.seconds)
    return tokens, baseline.seconds / other.seconds if timed else None  # type: ignore[operator]


def _over_points(rows: list[list[float | None]]) -> Summary:
    """Per-seed means over the targets (rows); None for a seed that misses one of them."""
    return Summary(tuple(Summary(seed).mean for seed in zip(*rows, strict=True)))


def _known(seconds: float) -> float | None:
    return float(seconds) if np.isfinite(seconds) else None
