"""Speed-ups in wall-clock, from training steps that all configurations take in turns.

The seconds of a run include other work of the machine: two runs of the same model can differ by half. So
`anlit.benchmarks.runs` builds the model of each configuration again and lets all take training steps in turns, in one
process. It writes `paired_steps.json`, which is read here:

    speed-up in wall-clock = speed-up in tokens × (the baseline's time per token / this configuration's)
"""

from pathlib import Path
from typing import Any

from anlit.analysis.statistics import Interval, SpeedUp, median_with_interval, product
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
    """Seconds per training token of configurations that took steps in turns.

    Attributes:
        record: The content of the file.
        hardware: The name of the machine, as in `Run.hardware`.
        seconds: `Group.key` → one value for each round.
    """

    def __init__(self, record: dict[str, Any]) -> None:
        self.record = record
        self.hardware = hardware_label(record)
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


def wall_clock(time: Interval | None, tokens: SpeedUp) -> Interval | None:
    """The speed-up in wall-clock, from the time per token over the baseline's and the speed-up in tokens.

    None if no steps were timed, or if the speed-up in tokens has no mean. The interval combines that of `time` with the
    one over seeds, if there are several.
    """
    if time is None or tokens.mean is None:
        return None
    faster = Interval(1 / time.median, 1 / time.high, 1 / time.low)
    low, high = (tokens.test.low, tokens.test.high) if tokens.test else (tokens.mean, tokens.mean)
    return product(Interval(tokens.mean, low, high), faster)


def read_step_times(folder: Path) -> StepTimes | None:
    """The steps that were timed for the report in `folder`; None if there are none.

    Raises:
        UserError: The file is damaged.
    """
    path = folder / FILE
    if not path.exists():
        return None
    return StepTimes(read_json(path, SCHEMA, "remove it and measure again with --measure_steps"))


def usable(steps: StepTimes | None, groups: list[Group]) -> tuple[StepTimes | None, list[str]]:
    """`steps` if it holds for these groups, and one sentence for each reason that it does not."""
    hardware = {run.hardware for group in groups for run in group.counted}
    if len(hardware) > 1:
        return None, [f"{LEFT_OUT} the runs were trained on different hardware."]
    if steps is None:
        return None, [NOT_MEASURED]
    (own,) = hardware
    if own != steps.hardware:
        trained = own or "hardware that they did not record"
        return None, [f"{LEFT_OUT} steps were timed on {steps.hardware} and the runs were trained on {trained}."]
    missing = [group.label for group in groups if group.key not in steps.seconds]
    return steps, [f"{label}: no steps were timed for it; measure again with --measure_steps." for label in missing]
