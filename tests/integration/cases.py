"""Parameters of tests, a part of them slow."""

from collections.abc import Iterable
from typing import Any

import pytest

slow = pytest.mark.slow


def slow_cases(cases: Iterable[Any]) -> list[Any]:
    """Return parameters with the marker `slow`. A case with several values is a tuple."""
    marked = []
    for case in cases:
        values = case if type(case) is tuple else (case,)
        marked.append(pytest.param(*values, marks=slow))
    return marked


def slow_except(fast: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """Return all cases in their order. Those that are not in `fast` have the marker `slow`."""
    fast = list(fast)
    chosen = []
    for case in cases:
        chosen += [case] if case in fast else slow_cases([case])
    return chosen
