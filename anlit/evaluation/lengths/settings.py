"""The settings of `anlit lengths`."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from anlit.errors import UserError
from anlit.evaluation.sequence_lengths import MULTIPLES

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
        for length in self.lengths if self.lengths is not None else ():
            if length < 1:
                raise UserError(f"--lengths has {length}: give lengths of one token or more, such as 256,1024,4096")
        for name, value in (("--tokens", self.tokens), ("--batch_tokens", self.batch_tokens)):
            if value is not None and value < 1:
                raise UserError(f"{name} is {value}: set it to a positive number")
        assert self.masking
        assert self.lengths != ()

    def lengths_for(self, training_lengths: Iterable[int]) -> list[int]:
        """The lengths to measure, ascending."""
        return sorted(set(self.lengths or [k * length for length in training_lengths for k in MULTIPLES]))

    def tokens_for(self, lengths: list[int], available: int, where: str) -> int:
        """The number of targets to measure on: a multiple of every length.

        Args:
            lengths: The result of `lengths_for`.
            available: Targets in the validation split.
            where: The split's folder.

        Raises:
            UserError: There are too few for the longest length, or for the least common multiple of the lengths.
        """
        block = math.lcm(*lengths)
        wanted = self.tokens if self.tokens is not None else max(MOST_TOKENS, block)
        if available < block:
            reason = "" if block == lengths[-1] else f", the least common multiple of {_listed(lengths)}"
            raise UserError(
                f"{where} has {available:,} tokens to predict and this needs {block:,}{reason}: set --lengths to "
                "shorter ones, or --data to a folder with a longer validation split"
            )
        if wanted < block:
            raise UserError(
                f"--tokens is {wanted:,} and --lengths {_listed(lengths)} need {block:,} at least: raise it"
            )
        return min(wanted, available) // block * block


def parse_masking(text: str) -> tuple[bool, ...]:
    """`on,off` → (True, False)."""
    parts = text.split(",")
    if not set(parts) <= {"on", "off"}:
        raise UserError(f"--masking {text!r} is unknown: choose on, off or on,off")
    return tuple(value for name, value in (("on", True), ("off", False)) if name in parts)


def _listed(lengths: list[int]) -> str:
    return ",".join(str(length) for length in lengths)
