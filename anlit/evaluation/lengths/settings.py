"""The settings of `anlit lengths`."""

import math
from dataclasses import dataclass

from anlit.errors import UserError
from anlit.evaluation.sequence_lengths import require_at_least

MOST_TOKENS = 1 << 20
BATCH_TOKENS = 1 << 14


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Raises:
        UserError: A number is not positive.
    """

    lengths: tuple[int, ...] | None = None
    """Tokens per sequence; by default 1, 4 and 16 times each model's training length."""
    tokens: int | None = None
    """The number of targets, in pieces spread over the validation split, rounded down to a multiple of every length. By
    default all, but at most 1,048,576 or one sequence of the longest length."""
    batch_tokens: int = BATCH_TOKENS
    """Tokens per batch, which has at least one sequence."""
    masking: tuple[bool, ...] = (True, False)
    """Values of document masking to measure with."""
    data: str | None = None
    """A prepared folder instead of the runs' own."""
    device: str = "auto"

    def __post_init__(self) -> None:
        require_at_least(1, tokens=self.tokens, batch_tokens=self.batch_tokens)

    def tokens_for(self, lengths: list[int], available: int, where: str) -> int:
        """The number of targets to measure on: a multiple of every length.

        Args:
            lengths: The lengths to measure, ascending.
            available: Targets in the validation split.
            where: The split's folder.

        Raises:
            UserError: There are too few for the longest length, or for the least common multiple of the lengths.
        """
        block, listed = math.lcm(*lengths), ",".join(map(str, lengths))
        wanted = self.tokens if self.tokens is not None else max(MOST_TOKENS, block)
        if available < block:
            reason = "" if block == lengths[-1] else f", the least common multiple of {listed}"
            raise UserError(
                f"{where} has {available:,} tokens to predict and this needs {block:,}{reason}: set --lengths to "
                "shorter ones, or --data to a folder with a longer validation split"
            )
        if wanted < block:
            raise UserError(f"--tokens is {wanted:,} and --lengths {listed} need {block:,} at least: raise it")
        return min(wanted, available) // block * block


def parse_masking(text: str) -> tuple[bool, ...]:
    """`on,off` → (True, False)."""
    parts = text.split(",")
    if not set(parts) <= {"on", "off"}:
        raise UserError(f"--masking {text!r} is unknown: choose on, off or on,off")
    return tuple(value for name, value in (("on", True), ("off", False)) if name in parts)
