"""Checks of the weights that a file holds, before a model takes them."""

from torch import Tensor

from anlit.errors import UserError


def refuse_other_architecture(saved: str, expected: str, source: str) -> None:
    """Raise UserError, which begins with `source`, if weights are of another class of model.

    The names are those of `recorded_name`. A class of a script or notebook, `__main__.Mine`, may
    be `mylab.Mine` elsewhere.
    """
    has_moved = "__main__" in (saved.rpartition(".")[0], expected.rpartition(".")[0])
    is_same = saved == expected
    if has_moved:
        is_same = saved.rpartition(".")[2] == expected.rpartition(".")[2]
    if not is_same:
        raise UserError(
            f"{source} holds {saved}, but the configuration's model is {expected}: set --model "
            f"{saved} or choose another checkpoint"
        )


def refuse_other_shapes(saved: dict[str, Tensor], expected: dict[str, Tensor], source: str) -> None:
    """Raise UserError if names or shapes of `saved` weights differ from the model's.

    Weights of whole numbers are refused too. The message begins with `source`.
    """
    for name in {**expected, **saved}:
        saved_form = _form(saved.get(name))
        expected_form = _form(expected.get(name))
        if saved_form != expected_form:
            raise UserError(
                f"{source} does not fit the model ({name} is {saved_form} in it and "
                f"{expected_form} in the model): give the settings of the run that it comes from, "
                "with --config RUN/config.yaml"
            )


def refuse_non_finite(weights: dict[str, Tensor], source: str) -> None:
    """Raise UserError, which begins with `source`, if a weight is NaN or infinite."""
    for name, weight in weights.items():
        if weight.is_floating_point() and not bool(weight.isfinite().all()):
            raise UserError(
                f"{source} holds weights that are NaN or infinite ({name}): choose another "
                "checkpoint"
            )


def _form(weight: Tensor | None) -> str:
    """The shape, with the dtype if it is not floating point; `missing` for None."""
    if weight is None:
        return "missing"
    shape = str(tuple(weight.shape))
    return shape if weight.is_floating_point() else f"{shape} of {weight.dtype}"
