"""The section `onset`: when each run's loss falls below a level that needs a skill, such as copying, and what follows.

Arms are compared seed by seed in the tokens until then, and in the loss a fixed number of tokens later.
"""

from typing import Any

import numpy as np

from anlit.analysis.statistics import Summary, mean_difference, mean_sd, tokens_to_loss
from anlit.analysis.study.results import StudyResults
from anlit.errors import UserError
from anlit.reporting.table import NONE, markdown_table
from anlit.reporting.text import literal, short_number


def onset(results: StudyResults, options: dict[str, Any]) -> list[str]:
    """Options: `loss`, the level in nats per token; `after`, a number of tokens; `baseline`, the name of an arm."""
    level, after, baseline = float(options["loss"]), float(options["after"]), options["baseline"]
    arms = {arm.name: arm for arm in results.study.arms}
    if baseline not in arms:
        raise UserError(f"the section 'onset' of {results.study.path} has the baseline '{baseline}', which is none of "
                        + ", ".join(arms))  # fmt: skip
    shown: dict[str, tuple[str, str]] = {}
    begun: dict[str, dict[Any, float]] = {}
    later: dict[str, dict[Any, float]] = {}
    for name, arm in arms.items():
        curves = {run.seeds: run.curve.finite() for run in results.measured(arm) if run.complete}
        onsets = {seed: tokens_to_loss(curve, level) for seed, curve in curves.items()}
        begun[name] = {seed: tokens / 1e6 for seed, tokens in onsets.items() if tokens is not None}
        ends = {seed: 1e6 * tokens + after for seed, tokens in begun[name].items()}
        later[name] = {seed: float(np.interp(end, curves[seed].tokens, curves[seed].loss))
                       for seed, end in ends.items() if end <= curves[seed].tokens[-1]}  # fmt: skip
        each = ", ".join(NONE if tokens is None else short_number(tokens) for tokens in onsets.values())
        shown[name] = each, mean_sd(Summary([later[name].get(seed) for seed in curves]), 3)
    title, base = "## Onset", literal(arms[baseline].title)
    rows = []
    for name in (name for name, (each, _) in shown.items() if each):
        gaps = [
            NONE if name == baseline else mean_difference(own[name], own[baseline], ".3f") for own in (begun, later)
        ]
        rows.append([literal(arms[name].title), shown[name][0], gaps[0], shown[name][1], gaps[1]])
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
