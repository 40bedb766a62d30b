"""A comparison of configurations with a baseline, for `anlit compare` and for studies alike."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anlit.analysis import fairness
from anlit.analysis.significance import Test, difference, holm
from anlit.analysis.speedup import SpeedUp, speed_up
from anlit.analysis.throughput import unstable_throughput
from anlit.analysis.wall_clock import StepTimes, WallClock, read_step_times, usable, wall_clock
from anlit.reporting.intervals import Summary
from anlit.runs.folders import Curve, Run
from anlit.runs.groups import Group

LEAST_PARTED, GAP = 4, 3.0


@dataclass(frozen=True, eq=False)
class Result:
    """One configuration and how it compares with the baseline.

    Args:
        group: Its runs.
        mean: Its mean validation curve.
        sd: The loss's standard deviation at each point of the curve.
        speedup: Over the baseline, in tokens.
        wall_clock: Its time against the baseline's; None for the baseline and if no steps were timed.
        loss: The test of its final loss minus the baseline's; None for the baseline and without two seeds.
        p_holm: That test's p, corrected for the number of configurations.
    """

    group: Group
    mean: Curve
    sd: NDArray[np.float64]
    speedup: SpeedUp
    wall_clock: WallClock | None = None
    loss: Test | None = None
    p_holm: float | None = None

    @property
    def label(self) -> str:
        return self.group.label

    @property
    def final_loss(self) -> Summary:
        """Last validation loss of each counted run, nats per token."""
        return Summary(tuple(float(run.curve.loss[-1]) for run in self.group.counted))

    @property
    def bits_per_byte(self) -> Summary:
        return Summary(tuple(run.bits_per_byte for run in self.group.counted))

    @property
    def tokens(self) -> Summary:
        """Training tokens at the last validation."""
        return Summary(tuple(float(run.curve.tokens[-1]) for run in self.group.counted))

    @property
    def seconds(self) -> Summary:
        """Training seconds at the last validation; None if time was not logged."""
        last = [float(run.curve.seconds[-1]) for run in self.group.counted]
        return Summary(tuple(value if math.isfinite(value) else None for value in last))

    def raw(self) -> dict[str, Any]:
        """What JSON holds of it; the curves are those of the runs."""
        summaries = {name: getattr(self, name) for name in ("final_loss", "bits_per_byte", "tokens", "seconds")}
        return {
            "label": self.label,
            "architecture": self.group.architecture,
            "attention": self.group.attention,
            "seeds": [run.seed for run in self.group.counted],
            "unfinished": self.group.unfinished,
            "parameters": self.group.counted[0].parameters,
            **{name: {"mean": s.mean, "sd": s.sd, "values": s.values} for name, s in summaries.items()},
            "speedup_tokens": {"mean": self.speedup.mean, "test": self.speedup.test, **vars(self.speedup)},
            "loss_difference": self.loss,
            "p_holm": self.p_holm,
            "time_per_token": self.wall_clock and self.wall_clock.time,
            "speedup_wall_clock": self.wall_clock and self.wall_clock.speedup,
        }


@dataclass(frozen=True, eq=False)
class Comparison:
    """A comparison as written to `output`.

    Args:
        output: The folder.
        command: What the user typed.
        results: The baseline first, then by final loss.
        runs: All runs, also those that are not counted.
        notes: What makes it less fair, and where its numbers are not known.
        steps: The times of interleaved steps, if they were measured.
        name: The beginning of the picture's file name, if a folder holds several comparisons.
    """

    output: Path
    command: str
    results: tuple[Result, ...]
    runs: tuple[Run, ...]
    notes: tuple[str, ...]
    steps: StepTimes | None = None
    name: str = ""

    @property
    def baseline(self) -> Result:
        return self.results[0]

    @property
    def others(self) -> tuple[Result, ...]:
        """All results but the baseline's."""
        return self.results[1:]

    @property
    def plot(self) -> Path:
        return self.output / f"{self.name}convergence.png"

    def label_of(self, run: Run) -> str | None:
        """Label of the group whose numbers include `run`."""
        return next((result.label for result in self.results if run in result.group.counted), None)

    def raw(self) -> dict[str, Any]:
        """Everything that it says, for `write_json`; its runs by their folders."""
        return {
            "command": self.command,
            "baseline": self.baseline.label,
            "target_loss": float(self.baseline.mean.loss[-1]),
            "notes": list(self.notes),
            "groups": [result.raw() for result in self.results],
            "runs": [str(run.folder) for run in self.runs],
        }


def record_runs(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """The runs of comparisons for `write_json`: what all their files say once, and what each says beside it."""
    runs = {str(run.folder): (run, comparison.label_of(run)) for comparison in comparisons[::-1]
            for run in comparison.runs}  # fmt: skip
    shared = {name: _common([getattr(run, name) for run, _ in runs.values()]) for name in ("config", "record")}
    return {
        "paired_steps": next((comparison.steps.record for comparison in comparisons if comparison.steps), None),
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


def _common(mappings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The entries that all mappings have, those of mappings within them too."""
    shared: dict[str, Any] = {}
    for key, value in mappings[0].items() if mappings else ():
        values = [each.get(key) for each in mappings]
        below = [each for each in values if isinstance(each, dict)]
        if len(below) == len(values):
            shared |= {key: common} if (common := _common(below)) else {}
        elif value is not None and all(each == value for each in values):
            shared[key] = value
    return shared


def _without(mapping: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    """The entries of a mapping that are not in `shared`."""
    rest = {key: _without(value, shared.get(key) or {}) if isinstance(value, dict) else value
            for key, value in mapping.items() if isinstance(value, dict) or key not in shared}  # fmt: skip
    return {key: value for key, value in rest.items() if value != {} or key not in shared}


def compare_groups(
    every: list[Group],
    baseline: Group,
    runs: tuple[Run, ...],
    output: Path,
    command: str,
    name: str = "",
    notes: Sequence[str] = (),
    steps: StepTimes | None = None,
) -> Comparison:
    """Results, and notes on what makes the comparison less fair.

    Args:
        every: All groups; those without a counted run are only noted.
        runs: All runs, also those in no group.
        notes: Notes to print before the others.
        steps: Times of interleaved steps (default: those that were measured for `output`).

    Raises:
        UserError: Two runs have different tokenizers, or the runs of a group have no training tokens in common.
    """
    groups = [group for group in every if group.counted]
    fairness.refuse_other_tokenizers(groups)
    timed, left_out = usable(steps or read_step_times(output), groups)
    results = results_against(groups, baseline, timed)
    told = (
        *notes,
        *parted_notes(results),
        *pairing_notes(results),
        *fairness.state_notes(every, list(runs)),
        *fairness.notes(groups, baseline),
        *unstable_throughput(groups),
        *(left_out if len(groups) > 1 else []),
    )
    return Comparison(output, command, tuple(results), runs, told, timed, name)


def results_against(groups: list[Group], baseline: Group, steps: StepTimes | None = None) -> list[Result]:
    """The baseline first, then by final loss."""
    mean, sd = baseline.mean()
    others = []
    for group in groups:
        if group is not baseline:
            speedup = speed_up(_seeded(baseline), _seeded(group))
            test = difference(loss_by_seed(group), loss_by_seed(baseline))
            others.append(Result(group, *group.mean(), speedup, wall_clock(steps, group, baseline, speedup), test))
    others.sort(key=lambda result: result.final_loss.mean or math.inf)
    corrected = holm([result.loss.p if result.loss else None for result in others])
    return [
        Result(baseline, mean, sd, SpeedUp((1.0,))),
        *(replace(result, p_holm=p) for result, p in zip(others, corrected, strict=True)),
    ]


def loss_by_seed(group: Group) -> dict[Any, float]:
    """Final loss by the seeds of model and data order; by number if a pair of seeds occurs twice."""
    seeds = [run.seeds for run in group.counted]
    keys = seeds if len(set(seeds)) == len(seeds) else list(range(len(seeds)))
    return {key: float(run.curve.loss[-1]) for key, run in zip(keys, group.counted, strict=True)}


def pairing_notes(results: list[Result]) -> list[str]:
    """How speed-ups were paired, where the baseline or another group has several seeds."""
    notes = []
    for result in results[1:]:
        pairs, runs = len(result.speedup.values), max(len(each.group.counted) for each in (result, results[0]))
        if not result.speedup.paired and runs > 1:
            notes.append(f"{result.label}: no seed in common with the baseline, so its speed-up is over the baseline's "
                         "mean curve.")  # fmt: skip
        elif result.speedup.paired and pairs < runs:
            notes.append(f"{result.label}: its speed-up is of the {pairs} seeds that it has in common with the "
                         "baseline.")  # fmt: skip
    return notes


def parted(losses: Sequence[float]) -> tuple[list[float], list[float]] | None:
    """Final losses in two groups, if a gap of more than three times the spread within parts them.

    The spread within is the larger range of the two groups. Of fewer than four runs nothing is said: of three numbers
    drawn by chance half are parted so.
    """
    ordered = sorted(losses)
    if len(ordered) < LEAST_PARTED:
        return None
    at = max(range(1, len(ordered)), key=lambda i: ordered[i] - ordered[i - 1])
    low, high = ordered[:at], ordered[at:]
    within = max(low[-1] - low[0], high[-1] - high[0])
    return (low, high) if high[0] - low[-1] > GAP * within else None


def parted_notes(results: list[Result]) -> list[str]:
    """One sentence for each configuration whose final losses are in two groups."""
    notes = []
    for result in results:
        if groups := parted([float(run.curve.loss[-1]) for run in result.group.counted]):
            low, high = (", ".join(f"{loss:.4f}" for loss in losses) for losses in groups)
            notes.append(f"{result.label}: TWO GROUPS of final losses, {low} and {high}; the mean lies between them "
                         "and says nothing.")  # fmt: skip
    return notes


def _seeded(group: Group) -> list[tuple[Any, Curve]]:
    return [(run.seeds, run.curve.finite()) for run in group.counted]
