"""Where a validation curve crosses a loss. Curves are linear between two validations."""

import numpy as np

from anlit.runs.folders import Curve


def tokens_to_loss(curve: Curve, loss: float) -> float | None:
    """Training tokens at which `curve` first is at or below `loss`. None if it never is."""
    below = np.flatnonzero(curve.loss <= loss)
    if len(below) == 0:
        return None
    return _interpolate(curve, loss, max(0, below[0] - 1), below[0])


def tokens_to_stay(curve: Curve, loss: float) -> float | None:
    """Training tokens from which `curve` stays at or below `loss`. None if it ends above."""
    above = np.flatnonzero(curve.loss > loss)
    if len(above) == 0:
        return float(curve.tokens[0])
    last_above = above[-1]
    if last_above + 1 == len(curve):
        return None
    return _interpolate(curve, loss, last_above, last_above + 1)


def validations_around(curve: Curve, loss: float) -> tuple[float, float] | None:
    """Tokens of the two validations between which `curve` first is at `loss`. None if it never is.

    The same tokens twice if a validation has this loss, or if the first is below it.
    """
    below = np.flatnonzero(curve.loss <= loss)
    if len(below) == 0:
        return None
    later = below[0]
    is_between = later > 0 and curve.loss[later] < loss
    earlier = later - 1 if is_between else later
    return float(curve.tokens[earlier]), float(curve.tokens[later])


def _interpolate(curve: Curve, loss: float, earlier: int, later: int) -> float:
    """Tokens at which the line between two validations, given by number, has the loss."""
    ends = [earlier, later]
    return float(np.interp(-loss, -curve.loss[ends], curve.tokens[ends]))
