"""The section `onset`: when each run's loss falls below a level that needs a skill, such as copying, and what follows.

A run's curve has two parts then: the tokens until the onset, and what it learns in a fixed number of tokens after it.
Arms are compared in both, seed by seed.
"""

from typing import Any

import numpy as np

from anlit.analysis.statistics import Summary, difference, mean_sd, tokens_to_loss
from anlit.analysis.study.results import StudyResults
from anlit.errors import UserError
from anlit.reporting.table import NONE, markdown_table
from anlit.reporting.text import literal, minus, short_number
from anlit.runs.folders import Curve

Values = dict[Any, float | None]
"""One number for each seed; None for a run that does not get there."""


def onset(results: StudyResults, options: dict[str, Any]) -> list[str]:
    """A table of the onset in tokens and of the loss `after` tokens later, against the arm `baseline`.

    Args:
        options: `loss`, the level in nats per token; `after`, tokens; `baseline`, the name of an arm.
    """
    level, after, baseline = float(options["loss"]), float(options["after"]), options["baseline"]
    arms = {arm.name: arm for arm in results.study.arms}
    if baseline not in arms:
        raise UserError(f"the section 'onset' of {results.study.path} has the baseline '{baseline}', which is none of "
                        + ", ".join(arms))  # fmt: skip
    begun: dict[str, Values] = {}
    later: dict[str, Values] = {}
    for name, arm in arms.items():
        curves = {run.seeds: run.curve.finite() for run in results.measured(arm) if run.complete}
        begun[name] = {seeds: tokens_to_loss(curve, level) for seeds, curve in curves.items()}
        later[name] = {seeds: _loss_at(curve, begun[name][seeds], after) for seeds, curve in curves.items()}
    rows = []
    for name in (name for name in arms if begun[name]):
        each = ", ".join(NONE if tokens is None else short_number(tokens) for tokens in begun[name].values())
        onset_gap, loss_gap = NONE, NONE
        if name != baseline:
            onset_gap = _against(begun[name], begun[baseline], 1e-6)
            loss_gap = _against(later[name], later[baseline])
        losses = mean_sd(Summary([*later[name].values()]), 3)
        rows.append([literal(arms[name].title), each, onset_gap, losses, loss_gap])
    title, base = "## Onset", literal(arms[baseline].title)
    if not rows:
        return [title, "No run has finished yet."]
    return [
        title,
        f"The onset is where a run's validation loss first is {level:g} nats per token, linear between points. The "
        f"loss after it is that of {short_number(after)} training tokens later; {NONE} where the run ends before. "
        f"Differences are from {base}, over the seeds that both have, with 95 % intervals of a paired t-test.",
        markdown_table(
            ["arm", "onset of each seed, tokens", f"minus that of {base}, 10⁶ tokens",
             f"loss {short_number(after)} tokens after it", f"minus that of {base}"], rows, left=(0, 1)),
    ]  # fmt: skip


def _loss_at(curve: Curve, begun: float | None, after: float) -> float | None:
    """The loss `after` tokens past the onset, linear between validations; None beyond the curve."""
    if begun is None or begun + after > curve.tokens[-1]:
        return None
    return float(np.interp(begun + after, curve.tokens, curve.loss))


def _against(ours: Values, theirs: Values, scale: float = 1.0) -> str:
    """`−0.041 (−0.080 … −0.002)`; without an interval for one seed; – without a seed that both have."""
    a = {seed: scale * value for seed, value in ours.items() if value is not None and theirs.get(seed) is not None}
    b = {seed: scale * value for seed, value in theirs.items() if value is not None and seed in a}
    if not a:
        return NONE
    test = difference(a, b)
    mean = float(np.mean([a[seed] - b[seed] for seed in a]))
    return minus(f"{mean:.3f}" + (f" ({test.low:.3f} … {test.high:.3f})" if test else ""))
