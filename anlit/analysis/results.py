"""The results of a comparison: one per group, and the report that holds them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anlit.analysis.significance import Test, difference, holm
from anlit.analysis.speedup import SpeedUp, speed_up
from anlit.analysis.wall_clock import PairedSteps, WallClock, wall_clock
from anlit.reporting.intervals import Summary
from anlit.runs.folders import Curve, Run
from anlit.runs.groups import Group

LEAST_PARTED, GAP = 4, 3.0


@dataclass(frozen=True, eq=False)
class Result:
    """One group: its mean curve, the standard deviation of the loss at each point, its speed-up."""

    group: Group
    mean: Curve
    sd: NDArray[np.float64]
    speedup: SpeedUp

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

    @property
    def loss_by_seed(self) -> dict[Any, float]:
        """Final loss by the seeds of model and data order; by number if a pair of seeds occurs twice."""
        seeds = [run.seeds for run in self.group.counted]
        keys = seeds if len(set(seeds)) == len(seeds) else list(range(len(seeds)))
        return {key: float(run.curve.loss[-1]) for key, run in zip(keys, self.group.counted, strict=True)}


@dataclass(frozen=True)
class Claim:
    """The comparison of one configuration with the baseline; a test is None without two seeds.

    `loss` is its final loss minus the baseline's, `tokens` its speed-up in tokens. `p_holm` is the loss's p,
    corrected for the number of configurations.
    """

    result: Result
    loss: Test | None
    tokens: Test | None
    wall_clock: WallClock | None
    p_holm: float | None = None


@dataclass(frozen=True, eq=False)
class Report:
    """A comparison as written to `output`; `runs` lists every run, also those that are not counted.

    `paired` is the time of steps taken in turns, if it was measured. `name` begins the picture's file name if a folder
    holds several comparisons.
    """

    output: Path
    command: str
    results: tuple[Result, ...]
    baseline: Result
    runs: tuple[Run, ...]
    notes: tuple[str, ...]
    paired: PairedSteps | None = None
    name: str = ""

    @property
    def plot(self) -> Path:
        return self.output / f"{self.name}convergence.png"

    @property
    def page(self) -> Path:
        return self.output / "report.html"

    @property
    def markdown(self) -> Path:
        return self.output / "report.md"

    @property
    def json(self) -> Path:
        return self.output / "convergence.json"

    def claim_of(self, result: Result) -> Claim | None:
        """The claim about a configuration; None for the baseline."""
        return next((claim for claim in self.claims if claim.result is result), None)

    def label_of(self, run: Run) -> str | None:
        """Label of the group whose numbers include `run`."""
        return next((r.label for r in self.results if run in r.group.counted), None)

    @property
    def claims(self) -> list[Claim]:
        """One for each configuration but the baseline."""
        others = [result for result in self.results if result is not self.baseline]
        found = []
        for result in others:
            timed = wall_clock(self.paired, result.group, self.baseline.group, result.speedup)
            loss = difference(result.loss_by_seed, self.baseline.loss_by_seed)
            found.append(Claim(result, loss, result.speedup.test, timed))
        corrected = holm([claim.loss.p if claim.loss else None for claim in found])
        return [replace(claim, p_holm=p) for claim, p in zip(found, corrected, strict=True)]

    def raw(self) -> dict[str, Any]:
        """Everything that the report says, and the runs, for `write_json`."""
        return {
            "command": self.command,
            "baseline": self.baseline.label,
            "target_loss": float(self.baseline.mean.loss[-1]),
            "notes": list(self.notes),
            "paired_steps": self.paired.record if self.paired else None,
            "groups": [_group(result) for result in self.results],
            "claims": [
                {
                    "label": claim.result.label,
                    "loss": claim.loss,
                    "p_holm": claim.p_holm,
                    "speedup_tokens": claim.tokens,
                    "time_per_token": claim.wall_clock and claim.wall_clock.time,
                    "speedup_wall_clock": claim.wall_clock and claim.wall_clock.speedup,
                }
                for claim in self.claims
            ],
            "runs": [_run(run, self.label_of(run)) for run in self.runs],
        }


def results_against(groups: list[Group], baseline: Group) -> list[Result]:
    """The baseline first, then by final loss."""
    results = []
    for group in groups:
        mean, sd = group.mean()
        speedup = SpeedUp((1.0,)) if group is baseline else speed_up(_seeded(baseline), _seeded(group))
        results.append(Result(group, mean, sd, speedup))
    return sorted(results, key=lambda result: (result.group is not baseline, result.final_loss.mean))


def pairing_notes(results: list[Result]) -> list[str]:
    """How speed-ups were paired, where the baseline or another group has several seeds."""
    notes = []
    baseline = results[0].group
    for result in results[1:]:
        pairs, runs = len(result.speedup.values), len(result.group.counted)
        if not result.speedup.paired and max(runs, len(baseline.counted)) > 1:
            notes.append(f"{result.label}: no seed in common with the baseline, so its speed-up is over the baseline's "
                         "mean curve.")  # fmt: skip
        elif result.speedup.paired and pairs < max(runs, len(baseline.counted)):
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


def _group(result: Result) -> dict[str, Any]:
    speedup = result.speedup
    return {
        "label": result.label,
        "architecture": result.group.architecture,
        "attention": result.group.attention,
        "seeds": [run.seed for run in result.group.counted],
        "unfinished": result.group.unfinished,
        "parameters": result.group.counted[0].parameters,
        "settings": result.group.settings,
        "final_loss": _summary(result.final_loss),
        "bits_per_byte": _summary(result.bits_per_byte),
        "tokens": _summary(result.tokens),
        "seconds": _summary(result.seconds),
        "speedup_tokens": {"mean": speedup.mean, "values": list(speedup.values), "paired": speedup.paired},
        "speedup_is_lower_bound": speedup.bound,
        "mean_curve": {**vars(result.mean), "sd": result.sd},
    }


def _run(run: Run, label: str | None) -> dict[str, Any]:
    return {
        "folder": str(run.folder),
        "counted_in": label,
        "architecture": run.architecture,
        "attention": run.attention,
        "seed": run.seed,
        "state": run.state,
        "commit": run.commit,
        "curve": run.curve,
        "bits_per_byte": run.bits_per_byte,
        "record": run.record,
        "config": run.config,
    }


def _summary(summary: Summary) -> dict[str, Any]:
    return {"mean": summary.mean, "sd": summary.sd, "values": list(summary.values)}
