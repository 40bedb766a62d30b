"""A small subset of a product of parameters with every value, or every pair of values.

https://en.wikipedia.org/wiki/Covering_array
"""

import itertools
from collections import Counter
from collections.abc import Hashable, Sequence


def covering(rows: Sequence[Sequence[Hashable]], strength: int) -> set[int]:
    """Return indices of rows which have every combination of values in `strength` columns.

    Each choice is the row with the most missing combinations. Among equals it is the row with the
    least frequent combinations.
    """
    strength = min(strength, len(rows[0]))
    combinations = [set(itertools.combinations(enumerate(row), strength)) for row in rows]
    missing = set().union(*combinations)
    frequency: Counter = Counter()
    chosen: set[int] = set()

    def gain(index: int) -> tuple[int, int]:
        n_missing = len(combinations[index] & missing)
        return n_missing, -sum(frequency[columns] for columns in combinations[index])

    while missing:
        best = max(range(len(rows)), key=gain)
        chosen.add(best)
        missing -= combinations[best]
        frequency.update(combinations[best])
    return chosen
