"""Did the machine train all runs at a steady pace? Says of runs, by name, where it did not."""

from __future__ import annotations

from statistics import median

from anlit.analysis.wall_clock import PairedSteps
from anlit.configuration import init_args
from anlit.runs.folders import Run
from anlit.runs.groups import Group

WITHIN = 0.10
"""Two halves of a run, or two seeds of a configuration, that differ by more are unsteady."""
BETWEEN = 0.25
"""Two configurations whose FLOP/s differ by more are, where no steps were timed in turns: normalisations and
attention cost time that FLOPs do not count, and no architecture here needs more than that."""
FEWEST = 5
"""Validation points, to have two halves after the first interval, in which compilers and caches warm up."""


def unsteady(groups: list[Group], baseline: Group, paired: PairedSteps | None) -> list[str]:
    """One sentence for each run or configuration whose throughput cannot be that of its model."""
    found = [note for group in groups for run in group.counted if (note := _within(run)) is not None]
    for group in groups:
        found += _between_seeds(group)
        found += _between_arms(group, baseline, paired) if group is not baseline else []
    return found


def rate(run: Run) -> float | None:
    """Training tokens per second between the first and the last validation; None where times are not known."""
    curve = run.curve.finite()
    return _rate(run, 0, len(curve) - 1) if len(curve) > 1 else None


def _rate(run: Run, first: int, last: int) -> float | None:
    curve = run.curve.finite()
    seconds = float(curve.seconds[last] - curve.seconds[first])
    return float(curve.tokens[last] - curve.tokens[first]) / seconds if seconds > 0 else None


def _within(run: Run) -> str | None:
    points = len(run.curve.finite())
    settings = init_args(run.config.get("data"))
    if points < FEWEST or any(key.endswith("context_schedule") and settings[key] is not None for key in settings):
        return None
    middle = (points - 1) // 2 + 1
    early, late = _rate(run, 1, middle), _rate(run, middle, points - 1)
    if early is None or late is None or not _apart(early, late, WITHIN):
        return None
    return (
        f"{run.folder.name}: unsteady throughput, {early:,.0f} tokens/s in its first half and {late:,.0f} in its "
        "second; its seconds are not comparable."
    )


def _between_seeds(group: Group) -> list[str]:
    known = {run.folder.name: speed for run in group.counted if (speed := rate(run)) is not None}
    if len(known) < 2 or not _apart(min(known.values()), max(known.values()), WITHIN):
        return []
    slowest, fastest = min(known, key=known.__getitem__), max(known, key=known.__getitem__)
    return [
        f"{group.label}: unsteady throughput between seeds, {known[slowest]:,.0f} tokens/s in {slowest} and "
        f"{known[fastest]:,.0f} in {fastest}."
    ]


def _between_arms(group: Group, baseline: Group, paired: PairedSteps | None) -> list[str]:
    rates = [_median_rate(one) for one in (group, baseline)]
    sizes = [one.counted[0].parameters for one in (group, baseline)]
    if rates[0] is None or rates[1] is None or group.counted[0].hardware != baseline.counted[0].hardware:
        return []
    seen = rates[0] / rates[1]
    time = paired.ratio(group, baseline) if paired is not None else None
    if time is not None:
        expected, source = 1 / time.median, "steps in turns say"
        low, high = 1 / time.high / (1 + WITHIN), (1 + WITHIN) / time.low
    elif sizes[0] and sizes[1]:
        expected, source = sizes[1] / sizes[0], "their FLOPs explain"
        low, high = expected / (1 + BETWEEN), expected * (1 + BETWEEN)
    else:
        return []
    if low <= seen <= high:
        return []
    names = ", ".join(run.folder.name for run in (*group.counted, *baseline.counted))
    return [
        f"{group.label}: unsteady throughput, {seen:.2f} times the baseline's tokens per second where {source} "
        f"{expected:.2f}: the machine was faster or slower during some of {names}."
    ]


def _median_rate(group: Group) -> float | None:
    known = [speed for run in group.counted if (speed := rate(run)) is not None]
    return median(known) if known else None


def _apart(one: float, other: float, share: float) -> bool:
    return max(one, other) > (1 + share) * min(one, other)
