"""Options that several commands share."""

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
