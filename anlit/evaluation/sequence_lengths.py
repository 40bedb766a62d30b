"""The sequence lengths that evaluations measure at."""

from collections.abc import Iterable

from anlit.errors import UserError

MULTIPLES = (1, 4, 16)
"""The default lengths, as multiples of the training length."""


def parse_lengths(text: str) -> tuple[int, ...]:
    """`256,1024` → (256, 1024), ascending.

    Raises:
        UserError: It is no list of positive whole numbers.
    """
    parts = [part.strip().replace("_", "") for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UserError(f"--lengths {text!r} is no list of positive whole numbers: write it as 256,1024,4096")
    return tuple(sorted({int(part) for part in parts}))


def lengths_for(given: tuple[int, ...] | None, training_lengths: Iterable[int]) -> list[int]:
    """The given lengths, else the default multiples of every training length; ascending."""
    return sorted(set(given or [k * length for length in training_lengths for k in MULTIPLES]))


def require_at_least(least: int, **options: int | None) -> None:
    """Raise UserError for an option whose number is too small; None is not checked."""
    for name, value in options.items():
        if value is not None and value < least:
            raise UserError(f"--{name} is {value}: set it to {least} or more")
