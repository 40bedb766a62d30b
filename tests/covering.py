"""A part of a product of parameters that still has every value, or every pair of values.

https://en.wikipedia.org/wiki/Covering_array
"""

import itertools
from collections import Counter
from collections.abc import Hashable, Sequence


def covering(rows: Sequence[Sequence[Hashable]], strength: int) -> set[int]:
    """Indices of rows that have every combination of values of `strength` columns which `rows` have.

    The next row is always one with most combinations that are missing; of these, one whose others were taken least.
    """
    strength = min(strength, len(rows[0]))
    combinations = [set(itertools.combinations(enumerate(row), strength)) for row in rows]
    missing = set().union(*combinations)
    taken: Counter = Counter()
    chosen: set[int] = set()

    def gain(index: int) -> tuple[int, int]:
        return len(combinations[index] & missing), -sum(
            taken[columns] for columns in combinations[index]
        )

    while missing:
        best = max(range(len(rows)), key=gain)
        chosen.add(best)
        missing -= combinations[best]
        taken.update(combinations[best])
    return chosen
