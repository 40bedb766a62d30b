"""The precisions that anlit trains in; without torch, for --help."""

from typing import Any, Literal, get_args

from anlit.errors import UserError

Precision = Literal["32-true", "bf16-mixed", "bf16-true", "64-true"]
LONG_NAMES = {"None": "32-true", "32": "32-true", "64": "64-true", "16": "16-mixed", "bf16": "bf16-mixed"}
"""Lightning's short names of precisions → its long ones."""


def check_precision(given: Any) -> Any:
    """The long name of a Trainer's precision. Raises UserError if anlit does not train in it."""
    precision = LONG_NAMES.get(str(given), str(given))
    if precision in ("16-mixed", "16-true"):
        why = "is float16, in which the loss's gradients under 6e-8 become 0: set bf16-mixed or 32-true"
        raise UserError(f"trainer.precision={precision} {why}")
    if precision not in get_args(Precision):
        fix = f"set {', '.join(get_args(Precision))}; float8 is model.init_args.runtime.float8"
        raise UserError(f"trainer.precision={precision} is not one of anlit's: {fix}")
    return precision
