"""A comparison of configurations with a baseline, for `anlit compare` and for studies alike.

The seconds of a run include other work of the machine. So `anlit.benchmarks.run_steps` lets all
configurations take training steps in turns, in one process. It writes `paired_steps.json`, which is
read here:

    speed-up in wall-clock = speed-up in tokens × baseline's time per token / time per token
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

from anlit.compare.notes import notes_on, obstacle_to_comparison, refuse_other_tokenizers
from anlit.compare.statistics import (
    Interval,
    SpeedUp,
    Summary,
    Test,
    difference,
    holm,
    median_with_interval,
    speed_up,
)
from anlit.errors import UserError
from anlit.io.read import read_json
from anlit.runs.folders import LAUNCHES, RECORD_SCHEMA, Run, hardware_label
from anlit.runs.groups import Group, callbacks_of, counted_runs
from anlit.runs.measure import NATS_PER_TOKEN, Measure

COMPARISON = "convergence.json"
"""The record of `anlit compare`, beside report.md."""
STUDY = "report.json"
"""The record of `anlit study`, beside report.md."""
REPORTS = (COMPARISON, STUDY, "diagnose.json", "gaussian.json")
"""The records of all commands that write report.md."""
REPORT_SCHEMA = {"runs": list, "command": str, "path": str, "budget": str}
STEPS = "paired_steps.json"
"""The times of training steps in turns."""
STEPS_SCHEMA = RECORD_SCHEMA | {"arms": [{"key": str, "seconds_per_token": [(int, float)]}]}
LEFT_OUT = "Speed-ups in wall-clock are left out, because"
NOT_MEASURED = f"{LEFT_OUT} no steps of the baseline were timed in turns: add --measure_steps."


def read_step_times(folder: Path) -> dict[str, Any]:
    """The content of paired_steps.json for the report in `folder`. {} without it."""
    advice = "remove it and measure again with --measure_steps"
    return dict(read_json(folder / STEPS, STEPS_SCHEMA, advice, missing={}))


def seconds_per_token(steps: dict[str, Any]) -> dict[str, list[float]]:
    """The times of each round in paired_steps.json, by `Group.key`."""
    times = {}
    for arm in steps.get("arms") or ():
        times[str(arm.get("key"))] = list(arm.get("seconds_per_token") or ())
    return times


def _usable_steps(
    steps: dict[str, Any], groups: Sequence[Group], baseline: Group
) -> tuple[dict[str, Any], list[str]]:
    """`steps` if they hold for these groups, and a sentence for each reason against it."""
    trained_on = {run.hardware for run in counted_runs(groups)}
    timed_on = hardware_label(steps)
    times = seconds_per_token(steps)
    if len(trained_on) > 1:
        return {}, [f"{LEFT_OUT} the runs were trained on different hardware."]
    if baseline.key not in times:
        return {}, [NOT_MEASURED]
    if {timed_on} != trained_on:
        hardware = trained_on.pop() or "hardware that they did not record"
        cause = f"steps were timed on {timed_on} and the runs were trained on {hardware}"
        return {}, [f"{LEFT_OUT} {cause}."]
    notes = []
    for group in groups:
        if group.key not in times:
            fix = "measure again with --measure_steps"
            notes.append(f"{group.label}: no steps were timed for it; {fix}.")
        elif callbacks_of(group):
            names = " and ".join(callbacks_of(group))
            notes.append(f"{group.label}: its steps were timed without {names}.")
    return steps, notes


@dataclass(frozen=True, eq=False)
class Result:
    """A configuration and how it compares with the baseline.

    Args:
        group: The configuration.
        speedup: The speed-up in tokens, or in bytes of text across tokenizers.
        time: The time per token or byte over the baseline's, if steps were timed.
        loss: The test of the final losses, with two seeds or more.
        p_holm: Its p, corrected for the number of configurations.
    """

    group: Group
    speedup: SpeedUp
    time: Interval | None = None
    loss: Test | None = None
    p_holm: float | None = None

    @property
    def label(self) -> str:
        return self.group.label

    @property
    def final_loss(self) -> Summary:
        return Summary(self.group.final_losses())

    @property
    def wall_clock(self) -> Interval | None:
        """The speed-up in wall-clock.

        None without `time`, or if the speed-up in tokens has no mean.
        """
        return self.speedup.over(self.time) if self.time is not None else None

    @property
    def summaries(self) -> dict[str, Summary]:
        """Values at the last validation.

        Losses are None for a lost run; tokens and seconds are of the counted runs.
        """
        runs = self.group.counted
        bits: list[float | None] = [run.bits_per_byte for run in runs]
        return {
            "final_loss": self.final_loss,
            "bits_per_byte": Summary(bits + [None] * len(self.group.lost)),
            "tokens": Summary([float(run.curve.tokens[-1]) for run in runs]),
            "seconds": Summary([_finite(run.curve.seconds[-1]) for run in runs]),
        }

    def raw(self) -> dict[str, Any]:
        """The result for JSON, without the curves, which are in the record of the runs."""
        first = self.group.counted[0]
        runs = (*self.group.counted, *self.group.lost)
        speedup = self.speedup
        measure = self.group.measure
        summaries = {}
        for name, summary in self.summaries.items():
            summaries[name] = {"mean": summary.mean, "sd": summary.sd, "values": summary.values}
        return {
            "label": self.label,
            "architecture": first.architecture,
            "attention": first.attention,
            "seeds": [run.seed for run in runs],
            "unfinished": self.group.unfinished,
            "parameters": first.parameters,
            **summaries,
            f"speedup_{measure.short_length}": {
                "mean": speedup.mean,
                "test": speedup.test,
                "values": speedup.values,
                "bound": speedup.bound,
                "paired": speedup.paired,
            },
            "loss_difference": self.loss,
            "p_holm": self.p_holm,
            f"time_per_{measure.unit}": self.time,
            "speedup_wall_clock": self.wall_clock,
        }


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


@dataclass(frozen=True, eq=False)
class Comparison:
    """A comparison as written to the folder `output` by the `command` that the user typed.

    Args:
        results: The baseline first, then by final loss.
        runs: All, also runs that are not counted.
        notes: Sentences on its fairness, and on numbers that are not known.
        steps: The content of paired_steps.json. {} if no steps were timed.
        plot: The picture's file.
    """

    output: Path
    command: str
    results: tuple[Result, ...]
    runs: tuple[Run, ...]
    notes: tuple[str, ...]
    steps: dict[str, Any]
    plot: Path

    @property
    def baseline(self) -> Result:
        return self.results[0]

    @property
    def measure(self) -> Measure:
        """The units of all losses and curves."""
        return self.baseline.group.measure

    @property
    def target(self) -> float | None:
        """The baseline's mean final loss.

        None before a run has finished, or if a run is lost.
        """
        return None if self.baseline.group.unfinished else self.baseline.final_loss.mean

    def label_of(self, run: Run) -> str | None:
        """Label of the group whose numbers include `run`."""
        for result in self.results:
            if run in (*result.group.counted, *result.group.lost):
                return result.label
        return None

    def raw(self) -> dict[str, Any]:
        """The comparison for `write_json`; its runs by their folders."""
        return {
            "command": self.command,
            "baseline": self.baseline.label,
            "target_loss": self.target,
            "loss_unit": self.measure.loss,
            "length_unit": self.measure.length,
            "notes": self.notes,
            "groups": [result.raw() for result in self.results],
            "runs": [str(run.folder) for run in self.runs],
        }


def compare_groups(
    groups: Sequence[Group],
    baseline: Group,
    runs: Sequence[Run],
    output: Path,
    command: str,
    name: str = "",
    steps: dict[str, Any] | None = None,
) -> Comparison:
    """Results, and notes on the comparison's fairness.

    UserError if two runs have different tokenizers, and the groups are measured in nats per token.

    Args:
        groups: All groups; notes alone tell of groups without a counted run.
        runs: All runs, also those in no group.
        name: The beginning of the picture's file name, if a folder holds several comparisons.
        steps: Times of interleaved steps (default: those that were measured for `output`).
    """
    counted = [group for group in groups if group.counted]
    if baseline.measure is NATS_PER_TOKEN:
        refuse_other_tokenizers(counted)
    steps, notes_on_steps = _usable_steps(steps or read_step_times(output), counted, baseline)
    times = seconds_per_token(steps)
    results = [_compare(group, baseline, times) for group in counted if group is not baseline]
    results.sort(key=lambda result: result.final_loss.mean or math.inf)
    results = [Result(baseline, SpeedUp((1.0,))), *_with_holm(results)]
    notes = notes_on({result.group: result.speedup for result in results}, groups, runs)
    if len(results) > 1:
        notes += notes_on_steps
    plot = output / f"{name}convergence.png"
    return Comparison(output, command, tuple(results), tuple(runs), tuple(notes), steps, plot)


def _compare(group: Group, baseline: Group, times: dict[str, list[float]]) -> Result:
    """A group and the baseline; `times` are seconds per token by round."""
    obstacle = obstacle_to_comparison(group, baseline)
    speedup = speed_up(baseline.seeded_curves(), group.seeded_curves(), obstacle)
    loss_test = None
    if not obstacle and not group.unfinished:
        loss_test = difference(group.loss_by_seed(), baseline.loss_by_seed())
    time = _time_ratio(_times_of(group, times), _times_of(baseline, times))
    return Result(group, speedup, time, loss_test)


def _times_of(group: Group, times: dict[str, list[float]]) -> list[float]:
    """Seconds by round for a token or byte of the group. [] if it was not timed."""
    units_per_token = group.measure.units_per_token(group.counted[0])
    return [seconds / units_per_token for seconds in times.get(group.key, [])]


def _time_ratio(times: list[float], baseline_times: list[float]) -> Interval | None:
    """Time per token or byte over the baseline's, round by round. None without times."""
    if not times or len(times) != len(baseline_times):
        return None
    ratios = [time / base for time, base in zip(times, baseline_times, strict=True)]
    return median_with_interval(ratios)


def _with_holm(results: Sequence[Result]) -> list[Result]:
    """The results with p corrected for their number."""
    corrected = holm([result.loss.p if result.loss else None for result in results])
    return [replace(result, p_holm=p) for result, p in zip(results, corrected, strict=True)]


def record_runs(
    comparisons: Sequence[Comparison], further_runs: Iterable[Run] = ()
) -> dict[str, Any]:
    """The runs of comparisons, and further runs, for `write_json`.

    What all their files have in common is under `shared`, what differs under the run.
    """
    runs = {str(run.folder): run for run in further_runs}
    labels: dict[str, str | None] = {}
    for comparison in comparisons[::-1]:
        for run in comparison.runs:
            runs[str(run.folder)] = run
            labels[str(run.folder)] = comparison.label_of(run)
    shared_config = reduce(_common, [run.config for run in runs.values()] or [{}])
    shared_record = reduce(_common, [run.record for run in runs.values()] or [{}])
    measured = {}
    for folder, run in runs.items():
        measured[folder] = {
            "counted_in": labels.get(folder),
            "seed": run.seed,
            "state": run.state,
            "commit": run.commit,
            "curve": run.curve,
            "bits_per_byte": run.bits_per_byte,
            "config": _without(run.config, shared_config),
            "record": _without(run.record, shared_record),
        }
    steps = [comparison.steps for comparison in comparisons if comparison.steps]
    return {
        "paired_steps": steps[0] if steps else None,
        "shared": {"config": shared_config, "record": shared_record},
        "measured": measured,
    }


def _common(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """The entries that two mappings have in common, also the entries of mappings within them."""
    common = {}
    for key, value in a.items():
        if key not in b:
            continue
        if isinstance(value, dict) and isinstance(b[key], dict):
            common[key] = _common(value, b[key])
        elif value == b[key]:
            common[key] = value
    return common


def _without(entries: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    """The entries of a mapping that are not in `shared`, which has no others."""
    remaining = dict(entries)
    for key, value in shared.items():
        remaining[key] = _without(entries[key], value) if isinstance(value, dict) else {}
        if remaining[key] == {}:
            del remaining[key]
    return remaining


def refuse_other_report(
    folder: Path, name: str, is_same: Callable[[dict[str, Any]], bool] = lambda _: True
) -> None:
    """Raise UserError if `folder` has another report than `name` records, or runs of a study.

    All reports are written to report.md, and a study will write its report beside its runs.
    """
    for path in [folder / report for report in REPORTS]:
        if not path.exists():
            continue
        record = read_json(path, REPORT_SCHEMA, "remove it, or give another --output")
        if path.name != name or not is_same(record):
            raise UserError(
                f"--output {folder} has another report ({record.get('command')}): give another "
                "folder, or remove that report"
            )
    if name != STUDY and any(folder.glob(f"*/{LAUNCHES}")):
        raise UserError(
            f"--output {folder} has the runs of a study, which reports there: give another folder"
        )
