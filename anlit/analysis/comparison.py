"""A comparison of configurations with a baseline, for `anlit compare` and for studies alike."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from anlit.analysis.notes import notes_on, refuse_other_tokenizers
from anlit.analysis.statistics import Interval, SpeedUp, Summary, Test, difference, holm, product, speed_up
from anlit.analysis.wall_clock import StepTimes, read_step_times, usable
from anlit.runs.folders import Run
from anlit.runs.groups import Group


@dataclass(frozen=True, eq=False)
class Result:
    """One configuration and how it compares with the baseline, for which `time` and `loss` are None."""

    group: Group
    speedup: SpeedUp
    """Over the baseline, in tokens."""
    time: Interval | None = None
    """Per token over the baseline's, if steps were timed."""
    loss: Test | None = None
    """The test of its final loss minus the baseline's, with two seeds or more."""
    p_holm: float | None = None
    """That test's p, corrected for the number of configurations."""

    @property
    def label(self) -> str:
        return self.group.label

    @property
    def final_loss(self) -> Summary:
        return Summary(self.group.final_losses())

    @property
    def wall_clock(self) -> Interval | None:
        """The speed-up in wall-clock; None without `time`, or if the speed-up in tokens has no mean.

        Its interval combines that of `time` with the one over seeds, if there are several.
        """
        if self.time is None or self.speedup.mean is None:
            return None
        mean, test, time = self.speedup.mean, self.speedup.test, self.time
        tokens = Interval(mean, test.low, test.high) if test else Interval(mean, mean, mean)
        return product(tokens, Interval(1 / time.median, 1 / time.high, 1 / time.low))

    @property
    def summaries(self) -> dict[str, Summary]:
        """What is known of each counted run at its last validation: losses, training tokens and training seconds."""
        runs = self.group.counted
        seconds = [float(run.curve.seconds[-1]) for run in runs]
        return {
            "final_loss": self.final_loss, "bits_per_byte": Summary([run.bits_per_byte for run in runs]),
            "tokens": Summary([float(run.curve.tokens[-1]) for run in runs]),
            "seconds": Summary([value if math.isfinite(value) else None for value in seconds]),
        }  # fmt: skip

    def raw(self) -> dict[str, Any]:
        """What JSON holds of it; the curves are those of the runs."""
        first, *_ = self.group.counted
        return {
            "label": self.label, "architecture": first.architecture, "attention": first.attention,
            "seeds": [run.seed for run in self.group.counted], "unfinished": self.group.unfinished,
            "parameters": first.parameters,
            **{name: {"mean": each.mean, "sd": each.sd, "values": each.values}
               for name, each in self.summaries.items()},
            "speedup_tokens": {"mean": self.speedup.mean, "test": self.speedup.test, **vars(self.speedup)},
            "loss_difference": self.loss, "p_holm": self.p_holm,
            "time_per_token": self.time, "speedup_wall_clock": self.wall_clock,
        }  # fmt: skip


@dataclass(frozen=True, eq=False)
class Comparison:
    """A comparison as written to the folder `output`; `command` is what the user typed."""

    output: Path
    command: str
    results: tuple[Result, ...]
    """The baseline first, then by final loss."""
    runs: tuple[Run, ...]
    """All runs, also those that are not counted."""
    notes: tuple[str, ...]
    """What makes it less fair, and where its numbers are not known."""
    steps: StepTimes | None
    """The times of interleaved steps, if they were measured."""
    plot: Path
    """The picture."""

    @property
    def baseline(self) -> Result:
        return self.results[0]

    @property
    def others(self) -> tuple[Result, ...]:
        return self.results[1:]

    def label_of(self, run: Run) -> str | None:
        """Label of the group whose numbers include `run`."""
        return next((result.label for result in self.results if run in result.group.counted), None)

    def raw(self) -> dict[str, Any]:
        """Everything that it says, for `write_json`; its runs by their folders."""
        return {
            "command": self.command, "baseline": self.baseline.label,
            "target_loss": float(self.baseline.group.mean()[0].loss[-1]), "notes": self.notes,
            "groups": [result.raw() for result in self.results], "runs": [str(run.folder) for run in self.runs],
        }  # fmt: skip


def compare_groups(
    every: Sequence[Group],
    baseline: Group,
    runs: Sequence[Run],
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
        name: The beginning of the picture's file name, if a folder holds several comparisons.
        notes: Notes to print before the others.
        steps: Times of interleaved steps (default: those that were measured for `output`).

    Raises:
        UserError: Two runs have different tokenizers, or the runs of a group have no training tokens in common.
    """
    groups = [group for group in every if group.counted]
    refuse_other_tokenizers(groups)
    timed, left_out = usable(steps or read_step_times(output), groups)
    for group in groups:
        group.mean()
    others = []
    for group in (group for group in groups if group is not baseline):
        test = difference(group.loss_by_seed(), baseline.loss_by_seed())
        time = timed.ratio(group, baseline) if timed else None
        others.append(Result(group, speed_up(baseline.seeded_curves(), group.seeded_curves()), time, test))
    others.sort(key=lambda result: result.final_loss.mean or math.inf)
    corrected = holm([result.loss.p if result.loss else None for result in others])
    results = [Result(baseline, SpeedUp((1.0,))),
               *(replace(result, p_holm=p) for result, p in zip(others, corrected, strict=True))]  # fmt: skip
    own = notes_on({result.group: result.speedup for result in results}, every, runs)
    said, plot = (*notes, *own, *(left_out if others else ())), output / f"{name}convergence.png"
    return Comparison(output, command, tuple(results), tuple(runs), said, timed, plot)


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
        values: list[Any] = [each.get(key) for each in mappings]
        if all(isinstance(each, dict) for each in values):
            shared |= {key: common} if (common := _common(values)) else {}
        elif value is not None and all(each == value for each in values):
            shared[key] = value
    return shared


def _without(mapping: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    """The entries of a mapping that are not in `shared`."""
    rest = {key: _without(value, shared.get(key) or {}) if isinstance(value, dict) else value
            for key, value in mapping.items() if isinstance(value, dict) or key not in shared}  # fmt: skip
    return {key: value for key, value in rest.items() if value != {} or key not in shared}
