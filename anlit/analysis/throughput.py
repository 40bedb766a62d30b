"""Names the runs whose throughput was not stable."""

from anlit.configuration import init_args
from anlit.runs.folders import Curve, Run
from anlit.runs.groups import Group

WITHIN = 0.10
"""Two halves of a run, or two seeds of a configuration, may differ by this share."""
FEWEST = 5
"""The fewest validation points for two halves. The first interval is left out, because compilers warm up in it."""


def unstable_throughput(groups: list[Group]) -> list[str]:
    """One sentence for each run whose halves, and each configuration whose seeds, were not equally fast."""
    notes = []
    for group in groups:
        for run in group.counted:
            early, late = _halves(run)
            if early and late and _apart(early, late):
                notes.append(f"{run.folder.name}: unstable throughput, {early:,.0f} tokens/s in its first half and "
                             f"{late:,.0f} in its second; its seconds are not comparable.")  # fmt: skip
        curves = {run.folder.name: run.curve.finite() for run in group.counted}
        rates = sorted((_rate(curve, 0, len(curve) - 1) or 0, name) for name, curve in curves.items() if len(curve) > 1)
        known = [(rate, name) for rate, name in rates if rate]
        if known and _apart(known[0][0], known[-1][0]):
            (low, slowest), (high, fastest) = known[0], known[-1]
            notes.append(f"{group.label}: unstable throughput between seeds, {low:,.0f} tokens/s in {slowest} and "
                         f"{high:,.0f} in {fastest}.")  # fmt: skip
    return notes


def _halves(run: Run) -> tuple[float | None, float | None]:
    """Tokens per second of both halves; None for short runs and for those whose context grows."""
    curve, settings = run.curve.finite(), init_args(run.config.get("data"))
    if len(curve) < FEWEST or any(key.endswith("context_schedule") and settings[key] is not None for key in settings):
        return None, None
    middle = (len(curve) - 1) // 2 + 1
    return _rate(curve, 1, middle), _rate(curve, middle, len(curve) - 1)


def _rate(curve: Curve, first: int, last: int) -> float | None:
    """Training tokens per second between two validations; None where times are not known."""
    seconds = float(curve.seconds[last] - curve.seconds[first])
    return float(curve.tokens[last] - curve.tokens[first]) / seconds if seconds > 0 else None


def _apart(one: float, other: float) -> bool:
    return max(one, other) > (1 + WITHIN) * min(one, other)
