"""Checks of the weights that a file holds, before a model takes them."""

from torch import Tensor

from anlit.errors import UserError


def refuse_other_shapes(saved: dict[str, Tensor], expected: dict[str, Tensor], source: str) -> None:
    """UserError, which begins with `source`, if a checkpoint's weights do not have the names and shapes of `expected`,
    the model's, or one is of whole numbers.
    """
    for name in [*expected, *(name for name in saved if name not in expected)]:
        then, now = (
            _form(weights[name]) if name in weights else "missing" for weights in (saved, expected)
        )
        if then != now:
            raise UserError(
                f"{source} does not fit the model ({name} is {then} in it and {now} in the model): give the settings "
                "of the run that it comes from, with --config RUN/config.yaml"
            )


def refuse_non_finite(weights: dict[str, Tensor], source: str) -> None:
    """UserError, which begins with `source`, if a weight is NaN or infinite."""
    for name, weight in weights.items():
        if weight.is_floating_point() and not bool(weight.isfinite().all()):
            raise UserError(
                f"{source} holds weights that are NaN or infinite ({name}): choose another checkpoint"
            )


def _form(weight: Tensor) -> str:
    """The shape, and the dtype if it is not one of weights."""
    shape = str(tuple(weight.shape))
    return shape if weight.is_floating_point() else f"{shape} of {weight.dtype}"
