"""A comparison of configurations with a baseline, for `anlit compare` and for studies alike.

The seconds of a run include other work of the machine. So `anlit.benchmarks.run_steps` lets the models of all
configurations take training steps in turns in one process, and writes `paired_steps.json`, which is read here:

    speed-up in wall-clock = speed-up in tokens × (the baseline's time per token / this configuration's)
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

from anlit.compare.notes import measured_apart, notes_on, refuse_other_tokenizers
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
from anlit.runs.groups import Group

COMPARISON, STUDY = "convergence.json", "report.json"
"""What the reports of `anlit compare` and of `anlit study` record, each beside report.md."""
REPORTS = (COMPARISON, STUDY, "diagnose.json", "gaussian.json")
"""The records of all commands that write report.md."""
STEPS = "paired_steps.json"
STEPS_SCHEMA = RECORD_SCHEMA | {"arms": [{"key": str, "seconds_per_token": [(int, float)]}]}
LEFT_OUT = "Speed-ups in wall-clock are left out, because"
NOT_MEASURED = f"{LEFT_OUT} no steps of the baseline were timed in turns: add --measure_steps."


def read_step_times(folder: Path) -> dict[str, Any]:
    """The content of paired_steps.json, of the steps that were timed for the report in `folder`; {} without it."""
    advice = "remove it and measure again with --measure_steps"
    return dict(read_json(folder / STEPS, STEPS_SCHEMA, advice, missing={}))


def seconds_per_token(steps: dict[str, Any]) -> dict[str, list[float]]:
    """The times in paired_steps.json, one for each round, by `Group.key`."""
    return {
        str(arm.get("key")): list(arm.get("seconds_per_token") or ())
        for arm in steps.get("arms") or ()
    }


def _usable(
    steps: dict[str, Any], groups: Sequence[Group], baseline: Group
) -> tuple[dict[str, Any], list[str]]:
    """`steps` if they hold for these groups, and one sentence for each reason that they do not."""
    trained, timed = (
        {run.hardware for group in groups for run in group.counted},
        hardware_label(steps),
    )
    if len(trained) > 1:
        return {}, [f"{LEFT_OUT} the runs were trained on different hardware."]
    if baseline.key not in seconds_per_token(steps):
        return {}, [NOT_MEASURED]
    if {timed} != trained:
        where = trained.pop() or "hardware that they did not record"
        return {}, [f"{LEFT_OUT} steps were timed on {timed} and the runs were trained on {where}."]
    missing = [group.label for group in groups if group.key not in seconds_per_token(steps)]
    return steps, [
        f"{label}: no steps were timed for it; measure again with --measure_steps."
        for label in missing
    ]


@dataclass(frozen=True, eq=False)
class Result:
    """One configuration and how it compares with the baseline: the speed-up in tokens, the time per token if steps were
    timed, the test of the final losses of two seeds or more, and its p corrected for the number of configurations.
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
        """The speed-up in wall-clock; None without `time`, or if the speed-up in tokens has no mean."""
        return self.speedup.over(self.time) if self.time is not None else None

    @property
    def summaries(self) -> dict[str, Summary]:
        """What is known of each run at its last validation: losses, None for a lost run, and of those that are counted
        training tokens and training seconds."""
        runs, lost = self.group.counted, [None for _ in self.group.lost]
        seconds = [float(run.curve.seconds[-1]) for run in runs]
        return {
            "final_loss": self.final_loss, "bits_per_byte": Summary([*(run.bits_per_byte for run in runs), *lost]),
            "tokens": Summary([float(run.curve.tokens[-1]) for run in runs]),
            "seconds": Summary([value if math.isfinite(value) else None for value in seconds]),
        }  # fmt: skip

    def raw(self) -> dict[str, Any]:
        """What JSON holds of it; the curves are those of the runs."""
        (first, *_), speedup = self.group.counted, self.speedup
        return {
            "label": self.label, "architecture": first.architecture, "attention": first.attention,
            "seeds": [run.seed for run in (*self.group.counted, *self.group.lost)], "unfinished": self.group.unfinished,
            "parameters": first.parameters,
            **{name: {"mean": each.mean, "sd": each.sd, "values": each.values}
               for name, each in self.summaries.items()},
            "speedup_tokens": {"mean": speedup.mean, "test": speedup.test, "values": speedup.values,
                               "bound": speedup.bound, "paired": speedup.paired},
            "loss_difference": self.loss, "p_holm": self.p_holm,
            "time_per_token": self.time, "speedup_wall_clock": self.wall_clock,
        }  # fmt: skip


@dataclass(frozen=True, eq=False)
class Comparison:
    """A comparison as written to the folder `output` by the `command` that the user typed.

    Args:
        results: The baseline first, then by final loss.
        runs: All, also those that are not counted.
        notes: What makes it less fair, and where its numbers are not known.
        steps: The content of paired_steps.json; {} if no steps were timed.
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
    def target(self) -> float | None:
        """The baseline's mean final loss; None before one of its runs has finished, or if one is lost."""
        return None if self.baseline.group.unfinished else self.baseline.final_loss.mean

    def label_of(self, run: Run) -> str | None:
        """Label of the group whose numbers include `run`."""
        groups = (result.group for result in self.results)
        return next((group.label for group in groups if run in (*group.counted, *group.lost)), None)

    def raw(self) -> dict[str, Any]:
        """Everything that it says, for `write_json`; its runs by their folders."""
        return {
            "command": self.command, "baseline": self.baseline.label, "target_loss": self.target, "notes": self.notes,
            "groups": [result.raw() for result in self.results], "runs": [str(run.folder) for run in self.runs],
        }  # fmt: skip


def compare_groups(
    every: Sequence[Group], baseline: Group, runs: Sequence[Run], output: Path, command: str, name: str = "",
    steps: dict[str, Any] | None = None,
) -> Comparison:  # fmt: skip
    """Results, and notes on what makes the comparison less fair; UserError if two runs have different tokenizers.

    Args:
        every: All groups; those without a counted run are only noted.
        runs: All runs, also those in no group.
        name: The beginning of the picture's file name, if a folder holds several comparisons.
        steps: Times of interleaved steps (default: those that were measured for `output`).
    """
    groups = [group for group in every if group.counted]
    refuse_other_tokenizers(groups)
    steps, left_out = _usable(steps or read_step_times(output), groups, baseline)
    seconds, others = seconds_per_token(steps), []
    for group in (group for group in groups if group is not baseline):
        why = "baseline unfinished" if baseline.unfinished else ""
        why = "validated differently" if measured_apart(group, baseline) else why
        test = (
            None
            if why or group.unfinished
            else difference(group.loss_by_seed(), baseline.loss_by_seed())
        )
        ours, theirs = seconds.get(group.key, []), seconds.get(baseline.key, [])
        ratios = [a / b for a, b in zip(ours, theirs, strict=False)]  # of a round
        time = median_with_interval(ratios) if ratios and len(ours) == len(theirs) else None
        curves = baseline.seeded_curves(), group.seeded_curves()
        others.append(Result(group, SpeedUp((), why=why) if why else speed_up(*curves), time, test))
    others.sort(key=lambda result: result.final_loss.mean or math.inf)
    corrected = holm([result.loss.p if result.loss else None for result in others])
    results = [Result(baseline, SpeedUp((1.0,))),
               *(replace(result, p_holm=p) for result, p in zip(others, corrected, strict=True))]  # fmt: skip
    own = notes_on({result.group: result.speedup for result in results}, every, runs)
    notes, plot = (*own, *(left_out if others else ())), output / f"{name}convergence.png"
    return Comparison(output, command, tuple(results), tuple(runs), notes, steps, plot)


def record_runs(comparisons: Sequence[Comparison], others: Sequence[Run] = ()) -> dict[str, Any]:
    """The runs of comparisons, and others, for `write_json`: what all their files say once, and what each says beside
    it.
    """
    runs: dict[str, tuple[Run, str | None]] = {str(run.folder): (run, None) for run in others}
    runs |= {str(run.folder): (run, comparison.label_of(run)) for comparison in comparisons[::-1]
             for run in comparison.runs}  # fmt: skip
    shared = {name: reduce(_common, [getattr(run, name) for run, _ in runs.values()] or [{}])
              for name in ("config", "record")}  # fmt: skip
    return {
        "paired_steps": next((comparison.steps for comparison in comparisons if comparison.steps), None),
        "shared": shared,
        "measured": {
            folder: {
                "counted_in": label, "seed": run.seed, "state": run.state, "commit": run.commit, "curve": run.curve,
                "bits_per_byte": run.bits_per_byte,
                **{name: _without(getattr(run, name), common) for name, common in shared.items()},
            }
            for folder, (run, label) in runs.items()
        },
    }  # fmt: skip


def _common(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """The entries that both mappings have, those of mappings within them too."""
    pairs = {key: (value, theirs[key]) for key, value in ours.items() if key in theirs}
    return {key: _common(a, b) if isinstance(a, dict) and isinstance(b, dict) else a
            for key, (a, b) in pairs.items() if a == b or (isinstance(a, dict) and isinstance(b, dict))}  # fmt: skip


def _without(mapping: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    """The entries of a mapping that are not in `shared`, which has no others."""
    rest = dict(mapping)
    for key, value in shared.items():
        rest[key] = _without(mapping[key], value) if isinstance(value, dict) else {}
        if rest[key] == {}:
            del rest[key]
    return rest


def refuse_other_report(
    folder: Path, own: str, is_same: Callable[[dict[str, Any]], bool] = lambda _: True
) -> None:
    """Raises a UserError if `folder` has a report that is not the one recorded in `own`, or runs of a study, which will
    write its report there. All are written to report.md.
    """
    schema = {"runs": list, "command": str, "path": str, "budget": str}
    for path in (folder / name for name in REPORTS if (folder / name).exists()):
        record = read_json(path, schema, "remove it, or give another --output")
        if path.name != own or not is_same(record):
            raise UserError(f"--output {folder} has another report ({record.get('command')}): give another "
                            "folder, or remove that report")  # fmt: skip
    if own != STUDY and any(folder.glob(f"*/{LAUNCHES}")):
        raise UserError(
            f"--output {folder} has the runs of a study, which reports there: give another folder"
        )
