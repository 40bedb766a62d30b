"""The ablation: how much each change moves the loss, and which claims about the changes hold."""

from __future__ import annotations

from typing import Any

import numpy as np

from anlit.analysis.comparison_report import spread
from anlit.analysis.significance import difference
from anlit.analysis.speedup import Summary
from anlit.analysis.study import plots
from anlit.analysis.study.outcome import Outcome
from anlit.analysis.study.plan import Arm
from anlit.errors import UserError
from anlit.reporting.table import NONE, markdown_table
from anlit.reporting.text import minus
from anlit.runs.folders import Run

MARGIN = 0.005
"""The share of the loss that counts as no change, unless a claim gives another."""


def ablation(outcome: Outcome, options: dict[str, Any]) -> list[str]:
    """The section `ablation`: {baseline: arm, claims: [{arm, against, expect: same|unstable|better|worse, margin}]}."""
    baseline = _arm(outcome, options["baseline"])
    base = losses_by_seed(outcome.measured(baseline))
    if not base:
        return ["## Ablation", f"{baseline.title}, the baseline, has no finished run yet."]
    rows = []
    drawn: list[tuple[str, float | str, tuple[float, float] | None]] = []
    for arm in outcome.study.arms:
        if arm is baseline:
            continue
        losses = losses_by_seed(outcome.measured(arm))
        ours, theirs = shared(losses, base)
        test = difference(ours, theirs) if ours else None
        level = float(np.mean(list(theirs.values())))
        change = 100 * (float(np.mean(list(ours.values()))) / level - 1) if ours else None
        interval = (100 * test.low / level, 100 * test.high / level) if test else None
        failed = _failed(outcome, arm)
        rows.append([
            arm.title, str(len(losses)), str(failed), spread(Summary(tuple(losses.values())), 4),
            minus(f"{-change:+.2f} %") if change is not None else NONE,
            minus(f"{-interval[1]:+.2f} … {-interval[0]:+.2f} %") if interval else NONE,
            f"{test.p:.3g}" if test else NONE,
        ])  # fmt: skip
        drawn.append((arm.title, change if change is not None else "failed" if failed else "not run", interval))
    path = outcome.output / "ablation.png"
    plots.changes(drawn, path, baseline.title)
    head = ["arm", "n", "failed", "final loss (nats/token)", "improvement", "95 % interval", "p"]
    told = f"Against {baseline.title}, {spread(Summary(tuple(base.values())), 4)} (n = {len(base)}); paired by seed, "
    told += "on the seeds that both have."
    return [
        "## Ablation",
        told,
        f"![change of the loss]({path.name})",
        markdown_table(head, rows),
        *_claims(outcome, options),
    ]


def losses_by_seed(runs: tuple[Run, ...]) -> dict[Any, float]:
    """Final loss of the complete runs."""
    return {run.seeds: float(run.curve.loss[-1]) for run in runs if run.complete}


def shared(ours: dict[Any, float], theirs: dict[Any, float]) -> tuple[dict[Any, float], dict[Any, float]]:
    """Both, restricted to their common seeds for a paired test; unchanged if they share fewer than two seeds."""
    both = [seed for seed in ours if seed in theirs]
    return ({seed: ours[seed] for seed in both}, {seed: theirs[seed] for seed in both}) if both[1:] else (ours, theirs)


def _claims(outcome: Outcome, options: dict[str, Any]) -> list[str]:
    rows = []
    for claim in options.get("claims") or []:
        arm, against = _arm(outcome, claim["arm"]), _arm(outcome, claim["against"])
        expected, margin = claim["expect"], claim.get("margin", MARGIN)
        ours, theirs = (losses_by_seed(outcome.measured(one)) for one in (arm, against))
        failed = _failed(outcome, arm)
        found = verdict(expected, ours, theirs, failed, margin)
        rows.append([f"{arm.title} against {against.title}", _words(expected, margin), found])
    return ["### Claims", markdown_table(["claim about", "expected", "found"], rows, left=(0, 1, 2))] if rows else []


def verdict(expected: str, ours: dict[Any, float], theirs: dict[Any, float], failed: int, margin: float) -> str:
    """Whether a claim holds on the common seeds; `open` if they cannot decide.

    same: the 95 % interval of the difference lies within ± margin × their loss. better, worse: it lies on one side of
    0. unstable: a seed diverged, or the spread over seeds is at least three times theirs. A loss that is only higher is
    called worse.
    """
    if expected == "unstable" and failed:
        return f"holds: {failed} of {failed + len(ours)} seeds diverged"
    ours, theirs = shared(ours, theirs)
    test = difference(ours, theirs) if ours and theirs else None
    if test is None:
        return "open: too few finished seeds"
    room = margin * float(np.mean(list(theirs.values())))
    told = minus(f"{test.difference:+.4f} nats ({test.low:+.4f} … {test.high:+.4f})") + f", p = {test.p:.2g}"
    wider = np.std(list(ours.values())) >= 3 * np.std(list(theirs.values())) > 0
    answers = {
        "same": (-room <= test.low and test.high <= room, test.low > room or test.high < -room),
        "better": (test.high < 0, test.low > 0),
        "worse": (test.low > 0, test.high < 0),
        "unstable": (bool(wider), False),
    }
    if expected not in answers:
        raise UserError(f"a claim expects '{expected}': choose one of {', '.join(answers)}")
    holds, fails = answers[expected]
    if expected == "unstable" and not holds and test.low > 0:
        return f"worse, but no seed diverged: {told}"
    return f"{'holds' if holds else 'fails' if fails else 'open'}: {told}"


def _words(expected: str, margin: float) -> str:
    return f"same within ±{100 * margin:g} %" if expected == "same" else expected


def _failed(outcome: Outcome, arm: Arm) -> int:
    """The number of measured seeds that failed; if the whole grid failed, the number of its points."""
    measured = {run.name for run in outcome.study.measured_runs(outcome.selected) if run.arm is arm}
    if arm.name in outcome.selected:
        return sum(state.status == "failed" for run, state, _ in outcome.runs if run.name in measured)
    return sum(state.status == "failed" for run, state, _ in outcome.runs if run.arm is arm)


def _arm(outcome: Outcome, name: str) -> Arm:
    for arm in outcome.study.arms:
        if arm.name == name:
            return arm
    raise UserError(f"a section of {outcome.study.path} names the arm '{name}': choose one of "
                    + ", ".join(arm.name for arm in outcome.study.arms))  # fmt: skip
