"""Names the runs whose throughput was unsteady."""

from statistics import median

from anlit.analysis.wall_clock import PairedSteps
from anlit.configuration import init_args
from anlit.runs.folders import Curve, Run
from anlit.runs.groups import Group

WITHIN = 0.10
"""Two halves of a run, or two seeds of a configuration, may differ by this share."""
BETWEEN = 0.25
"""The FLOP/s of two configurations may differ by this share if no steps were timed in turns, because FLOPs do not count
the time of normalisations and attention."""
FEWEST = 5
"""The fewest validation points for two halves. The first interval is left out, because compilers warm up in it."""


def unsteady(groups: list[Group], baseline: Group, paired: PairedSteps | None) -> list[str]:
    """One sentence for each run or configuration whose throughput its model does not explain."""
    found: list[str] = []
    for group in groups:
        for run in group.counted:
            found += _within(run)
        found += _between_seeds(group)
        found += _between_arms(group, baseline, paired) if group is not baseline else []
    return found


def _rate(curve: Curve, first: int, last: int) -> float | None:
    """Training tokens per second between two validations; None where times are not known."""
    seconds = float(curve.seconds[last] - curve.seconds[first])
    return float(curve.tokens[last] - curve.tokens[first]) / seconds if seconds > 0 else None


def _rates(group: Group) -> dict[str, float]:
    """Run folder's name → tokens per second from the first validation to the last."""
    curves = {run.folder.name: run.curve.finite() for run in group.counted}
    found = {name: _rate(curve, 0, len(curve) - 1) for name, curve in curves.items() if len(curve) > 1}
    return {name: rate for name, rate in found.items() if rate is not None}


def _within(run: Run) -> list[str]:
    curve, settings = run.curve.finite(), init_args(run.config.get("data"))
    has_schedule = any(key.endswith("context_schedule") and settings[key] is not None for key in settings)
    if len(curve) < FEWEST or has_schedule:
        return []
    middle = (len(curve) - 1) // 2 + 1
    early, late = _rate(curve, 1, middle), _rate(curve, middle, len(curve) - 1)
    if early is None or late is None or not _apart(early, late, WITHIN):
        return []
    return [
        f"{run.folder.name}: unsteady throughput, {early:,.0f} tokens/s in its first half and {late:,.0f} in its "
        "second; its seconds are not comparable."
    ]


def _between_seeds(group: Group) -> list[str]:
    known = sorted((rate, name) for name, rate in _rates(group).items())
    if not known or not _apart(known[0][0], known[-1][0], WITHIN):
        return []
    (low, slowest), (high, fastest) = known[0], known[-1]
    return [
        f"{group.label}: unsteady throughput between seeds, {low:,.0f} tokens/s in {slowest} and {high:,.0f} in "
        f"{fastest}."
    ]


def _between_arms(group: Group, baseline: Group, paired: PairedSteps | None) -> list[str]:
    ours, theirs = _rates(group), _rates(baseline)
    sizes = [one.counted[0].parameters for one in (group, baseline)]
    if not ours or not theirs or group.counted[0].hardware != baseline.counted[0].hardware:
        return []
    seen = median(ours.values()) / median(theirs.values())
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
    return [
        f"{group.label}: unsteady throughput, {seen:.2f} times the baseline's tokens per second, and {source} "
        f"{expected:.2f}: the machine was faster or slower during some of {', '.join([*ours, *theirs])}."
    ]


def _apart(one: float, other: float, share: float) -> bool:
    return max(one, other) > (1 + share) * min(one, other)
