"""The section `onset`: when each arm acquires a skill such as copying, at a level of loss.

It has the tokens until each run is at the level, and the loss some tokens later.
"""

from typing import Any

import numpy as np

from anlit.compare.crossings import tokens_to_loss
from anlit.compare.notes import obstacle_to_comparison
from anlit.compare.statistics import MEANING_OF_SD, Summary, mean_difference, mean_sd
from anlit.reporting.table import NONE, markdown_table
from anlit.reporting.text import literal, short_number
from anlit.runs.folders import Run
from anlit.study.plan import Arm
from anlit.study.results import StudyResults

ValueBySeed = dict[Any, float | None]
"""A value for each seed. None for a run that is lost or does not get so far."""


def onset(results: StudyResults, options: dict[str, Any]) -> list[str]:
    """Return a heading, a paragraph of definitions, and the table of onsets and later losses.

    Options: `loss`, the level in nats per token; `after`, a number of tokens; `baseline`, an arm.
    """
    level = float(options["loss"])
    n_tokens_later = float(options["after"])
    (baseline,) = (arm for arm in results.study.arms if arm.name == options["baseline"])
    onsets, later_losses = _measure_onsets(results, level, n_tokens_later)
    rows = []
    for arm in results.study.arms:
        if not onsets[arm.name]:
            continue
        onset_gap = NONE
        loss_gap = NONE
        obstacle = _obstacle(results, arm, baseline)
        if obstacle:
            onset_gap = loss_gap = f"{NONE} ({obstacle})"
        elif arm is not baseline:
            baseline_onsets = onsets[baseline.name]
            baseline_losses = later_losses[baseline.name]
            onset_gap = mean_difference(onsets[arm.name], baseline_onsets, ".3f")
            loss_gap = mean_difference(later_losses[arm.name], baseline_losses, ".3f")
        tokens = ", ".join(map(_tokens, onsets[arm.name].values()))
        loss = mean_sd(Summary([*later_losses[arm.name].values()]), 3)
        rows.append([literal(arm.title), tokens, onset_gap, loss, loss_gap])
    if not rows:
        return ["## Onset", "No run has finished yet."]
    base = literal(baseline.title)
    later = short_number(n_tokens_later)
    head = [
        "arm",
        "onset of each seed, tokens",
        f"minus that of {base}, 10⁶ tokens",
        f"loss {later} tokens after it",
        f"minus that of {base}",
    ]
    return [
        "## Onset",
        f"The onset is where a run's validation loss first is {level:g} nats per token, linear "
        f"between points. The loss after it is {later} training tokens later; {NONE} if no run "
        f"gets so far. Differences are from {base}, over the seeds that both have, with 95 % "
        f"intervals of a paired t-test. {MEANING_OF_SD}",
        markdown_table(head, rows, left=(0, 1)),
    ]


def _obstacle(results: StudyResults, arm: Arm, baseline: Arm) -> str:
    """Why losses of two arms cannot be compared, in two words. "" if they can."""
    group = results.group(arm)
    baseline_group = results.group(baseline)
    return obstacle_to_comparison(group, baseline_group) if group and baseline_group else ""


def _measure_onsets(
    results: StudyResults, level: float, n_tokens_later: float
) -> tuple[dict[str, ValueBySeed], dict[str, ValueBySeed]]:
    """Onsets in 10⁶ tokens, and the losses `n_tokens_later`, by arm and seed.

    Runs that have not ended are left out.
    """
    onsets: dict[str, ValueBySeed] = {}
    later_losses: dict[str, ValueBySeed] = {}
    for arm in results.study.arms:
        runs_by_seed = _ended_runs(results, arm)
        onsets[arm.name] = dict.fromkeys(runs_by_seed)
        later_losses[arm.name] = dict.fromkeys(runs_by_seed)
        for seed, run in runs_by_seed.items():
            if not run.complete:
                continue
            curve = run.curve.finite()
            tokens = tokens_to_loss(curve, level)
            if tokens is None:
                continue
            onsets[arm.name][seed] = tokens / 1e6
            if tokens + n_tokens_later <= curve.tokens[-1]:
                loss = float(np.interp(tokens + n_tokens_later, curve.tokens, curve.loss))
                later_losses[arm.name][seed] = loss
    return onsets, later_losses


def _ended_runs(results: StudyResults, arm: Arm) -> dict[Any, Run]:
    """The complete and lost runs of an arm, by seeds."""
    return {run.seeds: run for run in results.runs_of(arm) if run.complete or run.lost}


def _tokens(millions: float | None) -> str:
    return NONE if millions is None else short_number(1e6 * millions)
