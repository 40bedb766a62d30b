"""Seconds per token of training steps that all configurations took in turns, for speed-ups in wall-clock.

The seconds of a run include other work of the machine: two runs of the same model can differ by half. So
`anlit.benchmarks.runs` builds the model of each configuration again, lets all take training steps in turns in one
process, and writes `paired_steps.json`, which is read here:

    speed-up in wall-clock = speed-up in tokens × (the baseline's time per token / this configuration's)
"""

from pathlib import Path
from typing import Any

from anlit.analysis.statistics import Interval, median_with_interval
from anlit.reading import read_json
from anlit.runs.folders import RECORD_SCHEMA, hardware_label
from anlit.runs.groups import Group

FILE = "paired_steps.json"
SCHEMA = RECORD_SCHEMA | {"arms": [{"key": str, "seconds_per_token": [(int, float)]}]}
LEFT_OUT = "Speed-ups in wall-clock are left out, because"
NOT_MEASURED = (
    f"{LEFT_OUT} no steps were timed in turns: add --measure_steps. The seconds of "
    "runs that were trained one after another include other work of the machine."
)


class StepTimes:
    """The content of the file, `record`; `seconds` has one value per token for each round, by `Group.key`."""

    def __init__(self, record: dict[str, Any]) -> None:
        self.record = record
        self.seconds: dict[str, list[float]] = {
            arm.get("key", ""): [float(value) for value in arm.get("seconds_per_token") or ()]
            for arm in record.get("arms") or []
        }

    def ratio(self, group: Group, baseline: Group) -> Interval | None:
        """The time per token of `group` over that of `baseline`, round by round; None if one was not timed."""
        ours, theirs = self.seconds.get(group.key), self.seconds.get(baseline.key)
        if not ours or not theirs or len(ours) != len(theirs):
            return None
        return median_with_interval([a / b for a, b in zip(ours, theirs, strict=True)])


def read_step_times(folder: Path) -> StepTimes | None:
    """The steps that were timed for the report in `folder`; None if there are none."""
    advice = "remove it and measure again with --measure_steps"
    return StepTimes(read_json(folder / FILE, SCHEMA, advice)) if (folder / FILE).exists() else None


def usable(steps: StepTimes | None, groups: list[Group]) -> tuple[StepTimes | None, list[str]]:
    """`steps` if it holds for these groups, and one sentence for each reason that it does not."""
    trained = {run.hardware for group in groups for run in group.counted}
    if len(trained) > 1:
        return None, [f"{LEFT_OUT} the runs were trained on different hardware."]
    if steps is None:
        return None, [NOT_MEASURED]
    timed, (own,) = hardware_label(steps.record), trained
    if own != timed:
        where = own or "hardware that they did not record"
        return None, [f"{LEFT_OUT} steps were timed on {timed} and the runs were trained on {where}."]
    missing = [group.label for group in groups if group.key not in steps.seconds]
    return steps, [f"{label}: no steps were timed for it; measure again with --measure_steps." for label in missing]
