"""Run folders of a study as training would write them, with losses that a function decides."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from anlit.study.estimate import estimate_cost, merge_configuration
from anlit.study.plan import PlannedRun, Study
from anlit.study.results import read_tunings, select_points
from tests.compare.conftest import write_run

SHARE = np.arange(1, 11) / 10
Final = Callable[[PlannedRun, dict[str, Any], float, float], float]
"""(run, its settings by short name, parameters N, tokens D) → final loss in nats per token.

NaN for a failed run, infinite for a run that diverged late.
"""


def curve_to(loss: float) -> np.ndarray:
    """The losses of a run that ends at `loss`, at each of `SHARE` of its tokens."""
    return loss + 2.0 * (SHARE**-0.4 - 1)


def train(study: Study, output: Path, final: Final) -> None:
    """Write all runs of both phases."""
    for run in study.tuning_runs():
        _write(output / run.name, run, final)
    for run in study.measuring_runs(select_points(study, read_tunings(study, output))):
        _write(output / run.name, run, final)


def _write(folder: Path, run: PlannedRun, final: Final) -> None:
    cost = estimate_cost(run)
    values = {"seed": 0}
    for point in (run.arm.varied, run.point, run.seed):
        values |= point.shown
    loss = final(run, values, cost.parameters, cost.tokens)
    record = {
        "parameters": int(cost.parameters),
        "command": f"anlit fit --run_dir={folder.name}",
    }
    losses_by_tokens = {}
    if np.isnan(loss):
        record |= {"status": "failed", "error": "UserError: the loss became NaN"}
    else:
        tokens = SHARE * cost.tokens
        losses = curve_to(loss)
        if np.isinf(loss):
            losses = curve_to(2.0)
            losses[-1] = np.nan
        losses_by_tokens = dict(zip(tokens.tolist(), losses.tolist(), strict=True))
    write_run(folder, merge_configuration(run), record, losses_by_tokens)
