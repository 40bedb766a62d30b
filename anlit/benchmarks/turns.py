"""Candidates take turns, so that other work of the machine slows all of them. Ratios are paired by round."""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from anlit.analysis.statistics import Interval, median_with_interval

Name = TypeVar("Name", bound=Hashable)
Result = TypeVar("Result")
Seconds = Mapping[str, float]
"""Seconds by kind, such as forward and both."""

AGREEMENT, LAST, MOST_WARM_UP = 0.02, 3, 50
"""A warm-up ends when the last 3 times of every candidate lie within 2 %, or after 50 rounds."""
STEADY = 0.05
"""Quartiles further apart than this share of the median are marked: the speed changed while it was measured."""


def alternate(
    candidates: Mapping[Name, Callable[[], Result]],
    rounds: int,
    *,
    deadline: float | None = None,
    after_round: Callable[[dict[Name, list[Result]]], bool | None] | None = None,
) -> dict[Name, list[Result]]:
    """Call every candidate once in each round. Each round begins with another candidate.

    Args:
        candidates: Functions that measure, by name.
        rounds: Rounds, at most.
        deadline: After this `time.monotonic()` no round begins, except the first.
        after_round: Gets all results so far after each round. If it returns True, no other round begins.

    Returns:
        The results of each candidate, round by round.
    """
    names = list(candidates)
    results: dict[Name, list[Result]] = {name: [] for name in names}
    for turn in range(rounds):
        if turn and deadline is not None and time.monotonic() > deadline:
            break
        first = turn % max(1, len(names))
        for name in (*names[first:], *names[:first]):
            results[name].append(candidates[name]())
        if after_round is not None and after_round(results):
            break
    return results


def warm_up(candidates: Mapping[Name, Callable[[], Seconds]], deadline: float) -> bool:
    """Let the candidates take turns until the last times of each agree; returns whether they do.

    A GPU lowers its clock while it warms up, and once more when it reaches its power limit.
    """

    def agree(results: dict[Name, list[Seconds]]) -> bool:
        lasts = [[times[kind] for times in turns[-LAST:]] for turns in results.values() for kind in turns[0]]
        return all(len(last) == LAST and max(last) <= (1 + AGREEMENT) * min(last) for last in lasts)

    return agree(alternate(candidates, MOST_WARM_UP, deadline=deadline, after_round=agree))


def paired_ratio(times: Sequence[float], others: Sequence[float]) -> Interval:
    """The median over rounds of the ratios of times, with its 95 % interval."""
    return median_with_interval([mine / other for mine, other in zip(times, others, strict=True)])


def quartiles(values: Sequence[float]) -> dict[str, Any]:
    """Median, quartiles and the values themselves, as a record keeps them; and whether they are steady."""
    low, middle, high = (float(value) for value in np.percentile(values, (25, 50, 75)))
    steady = high - low <= STEADY * middle
    return {"median": middle, "quartiles": [low, high], "steady": steady, "values": list(values)}
