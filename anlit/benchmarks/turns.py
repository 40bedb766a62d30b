"""Entrants take turns, so that other work of the machine slows all of them. Ratios are paired by round."""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from anlit.benchmarks.clock import seconds_of
from anlit.reporting.intervals import Interval, median_with_interval

Name = TypeVar("Name", bound=Hashable)
Result = TypeVar("Result")


def alternate(
    entrants: Mapping[Name, Callable[[], Result]],
    rounds: int,
    warmup: int = 0,
    *,
    deadline: float | None = None,
    after_round: Callable[[dict[Name, list[Result]]], bool | None] | None = None,
) -> dict[Name, list[Result]]:
    """Call every entrant once in each round. Each round begins with another entrant.

    Args:
        entrants: Functions that measure, such as `timed(step)`, by name.
        rounds: Rounds that count, at most.
        warmup: Rounds before them that do not count.
        deadline: After this `time.monotonic()` no round begins, except the first.
        after_round: Gets all results so far after each round that counts. If it returns True, no other round begins.

    Returns:
        The results of each entrant, round by round.
    """
    names = list(entrants)
    for _ in range(warmup):
        for name in names:
            entrants[name]()
    results: dict[Name, list[Result]] = {name: [] for name in names}
    for turn in range(rounds):
        if turn and deadline is not None and time.monotonic() > deadline:
            break
        first = turn % max(1, len(names))
        for name in (*names[first:], *names[:first]):
            results[name].append(entrants[name]())
        if after_round is not None and after_round(results):
            break
    return results


def timed(call: Callable[[], Any], device: torch.device = torch.device("cpu"), repeats: int = 1) -> Callable[[], float]:
    """An entrant for `alternate` that returns the seconds of one call, the mean of `repeats`.

    On a GPU its own clock is used.
    """
    return lambda: seconds_of(call, device, repeats)


def paired_ratio(times: Sequence[float], others: Sequence[float]) -> Interval:
    """The median over rounds of the ratios of times, with its 95 % interval."""
    return median_with_interval([one / other for one, other in zip(times, others, strict=True)])


def quartiles(values: Sequence[float]) -> dict[str, Any]:
    """Median, quartiles and the values themselves, as a record keeps them."""
    low, middle, high = np.percentile(values, (25, 50, 75))
    return {"median": float(middle), "quartiles": [float(low), float(high)], "values": list(values)}
