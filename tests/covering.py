"""A part of a product of parameters that still has every value, or every pair of values.

https://en.wikipedia.org/wiki/Covering_array
"""

import itertools
from collections.abc import Hashable, Sequence


def covering(rows: Sequence[Sequence[Hashable]], strength: int) -> set[int]:
    """Indices of rows that have every combination of values of `strength` columns which `rows` have.

    The next row is always the one with most combinations that are missing, the first among equals.
    """
    strength = min(strength, len(rows[0]))
    combinations = [set(itertools.combinations(enumerate(row), strength)) for row in rows]
    missing = set().union(*combinations)
    chosen: set[int] = set()
    while missing:
        best = max(range(len(rows)), key=lambda index: len(combinations[index] & missing))
        chosen.add(best)
        missing -= combinations[best]
    return chosen
