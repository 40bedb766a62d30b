"""Figures that the pages of results print, computed from the records beside them."""

import json
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from anlit.compare.crossings import tokens_to_loss
from anlit.compare.statistics import (
    SpeedUp,
    Summary,
    Test,
    difference,
    holm,
    mean_difference,
    mean_sd,
    speed_up,
)
from anlit.runs.folders import Curve

RESULTS = Path(__file__).parents[2] / "docs" / "results"
DIGITS = 6
"""Digits after the point of computed figures. Pages print fewer."""
FORM = f".{DIGITS}f"


@cache
def read_record(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def column(rows: Iterable[dict[str, Any]], key: str) -> list[Any]:
    """Return an entry of every row."""
    return [row[key] for row in rows]


def by_key(rows: Sequence[dict[str, Any]], key: str) -> dict[Any, dict[str, Any]]:
    """Return the rows by the value of an entry."""
    return dict(zip(column(rows, key), rows, strict=True))


def listed(values: Iterable[float]) -> str:
    """`3.21, 3.22`."""
    return ", ".join(map(figure, values))


def curve_of(run: dict[str, Any]) -> Curve:
    """Return the curve of a run in a study's record."""
    curve = run["curve"]
    tokens = np.array(curve["tokens"], float)
    seconds = np.array(curve["seconds"], float)
    loss = np.array(curve["loss"], float)
    return Curve(tokens, seconds, loss)


def seconds_per_token(name: str) -> dict[str, list[float]]:
    """Return the times of a record of steps in turns, by the run's name without its seed."""
    seconds = {}
    for arm in read_record(name)["arms"]:
        run = Path(arm["run"]).name.partition("_")[0]
        seconds[run] = arm["seconds_per_token"]
    return seconds


class Study:
    """The finished runs in a record of `anlit study`: a curve by arm and seed, and the tuning."""

    def __init__(self, folder: str) -> None:
        self.record = read_record(f"{folder}/report.json")
        self.curves: dict[str, dict[int, Curve]] = {}
        self.parameters: dict[str, int] = {}
        for run in self.record["measured"].values():
            arm = run["counted_in"]
            if arm is not None and run["state"] == "finished":
                self.curves.setdefault(arm, {})[run["seed"]] = curve_of(run)
                run_record = self.record["shared"]["record"] | run["record"]
                self.parameters[arm] = run_record["parameters"]

    def losses(self, arm: str, seeds: Sequence[int] | None = None) -> dict[int, float]:
        """Return the final loss by seed, by default of all seeds."""
        curves = self.curves[arm]
        wanted_seeds = seeds or sorted(curves)
        return {seed: float(curves[seed].loss[-1]) for seed in wanted_seeds}

    def seeds(self, arm: str) -> list[str]:
        """Return the final loss of each seed as text."""
        return list(map(figure, self.losses(arm).values()))

    def mean_loss(self, arm: str) -> float:
        """Return the mean of the final losses."""
        losses = self.losses(arm).values()
        return fmean(losses)

    def mean(self, arm: str, seeds: Sequence[int] | None = None) -> str:
        """`2.0883 ± 0.0142`, of the final losses."""
        return summary(self.losses(arm, seeds).values())

    def best_tuned_loss(self, key: str) -> float:
        """Return the lowest final loss of an architecture on the tuning seed."""
        return min(column(self.record["tuning"][key], "loss"))

    def test(self, arm: str, baseline: str, seeds: Sequence[int] | None = None) -> Test:
        """Return the test of the arm's final losses minus the baseline's."""
        losses = self.losses(arm, seeds)
        baseline_losses = self.losses(baseline, seeds)
        test = difference(losses, baseline_losses)
        assert test is not None
        return test

    def minus(self, arm: str, baseline: str, seeds: Sequence[int] | None = None) -> str:
        """`−0.088 (−0.122 … −0.053)`, of the final losses."""
        losses = self.losses(arm, seeds)
        baseline_losses = self.losses(baseline, seeds)
        return mean_difference(losses, baseline_losses, FORM)

    def lower(self, arm: str, baseline: str, seeds: Sequence[int] | None = None) -> str:
        """`0.088 (0.053 … 0.122)`: the baseline's final losses minus the arm's."""
        return self.minus(baseline, arm, seeds)

    def p(self, arm: str, baseline: str, seeds: Sequence[int] | None = None) -> float:
        return self.test(arm, baseline, seeds).p

    def p_holm(self, arm: str, baseline: str, arms: Iterable[str]) -> float:
        """Return p corrected for comparisons of all `arms` with the baseline."""
        names = list(arms)
        p_values = holm([self.p(name, baseline) for name in names])
        p = p_values[names.index(arm)]
        assert p is not None
        return p

    def speed_up(self, arm: str, baseline: str) -> SpeedUp:
        baseline_curves = sorted(self.curves[baseline].items())
        curves = sorted(self.curves[arm].items())
        return speed_up(baseline_curves, curves)

    def faster(self, arm: str, baseline: str) -> str:
        """`1.23 (1.17 … 1.30)`, `not reached` or `1 of 3 seeds`."""
        return self.speed_up(arm, baseline).words

    def onsets(self, arm: str, loss: float) -> dict[int, float | None]:
        """Return millions of tokens after which each seed's run first has the loss."""
        onsets: dict[int, float | None] = {}
        for seed, curve in sorted(self.curves[arm].items()):
            tokens = tokens_to_loss(curve, loss)
            onsets[seed] = None if tokens is None else tokens / 1e6
        return onsets

    def onset_minus(self, arm: str, baseline: str, loss: float) -> str:
        """`−0.31 (−1.10 … 0.47)`, in millions of tokens."""
        return mean_difference(self.onsets(arm, loss), self.onsets(baseline, loss), FORM)


def figure(value: float) -> str:
    return with_minus_sign(f"{value:{FORM}}")


def summary(values: Iterable[float]) -> str:
    """`3.2101 ± 0.0042`."""
    return with_minus_sign(mean_sd(Summary(list(values)), DIGITS))


class Lengths:
    """A record of `anlit lengths`: a loss for each checkpoint, by arm, masking and length."""

    def __init__(self, folder: str) -> None:
        record = read_record(f"{folder}/lengths.json")
        self.losses: dict[tuple[str, bool], dict[int, list[float]]] = {}
        for checkpoint, points in zip(record["checkpoints"], record["measurements"], strict=True):
            run = Path(checkpoint["file"]).parts[-3]
            arm = arm_of_run(run)
            for point in points:
                by_length = self.losses.setdefault((arm, point["masking"]), {})
                by_length.setdefault(point["length"], []).append(point["total"]["loss"])

    def row(self, arm: str, masking: bool = True) -> list[str]:
        """Return the loss at the training length, and the added loss at each longer length."""
        training_losses, *longer = map(np.array, self.losses[arm, masking].values())
        cells = [summary(training_losses)]
        for losses in longer:
            cells.append(summary(losses - training_losses))
        return cells

    def absolute(self, arm: str) -> list[str]:
        """Return the loss at each length."""
        return list(map(summary, self.losses[arm, True].values()))


def arm_of_run(name: str) -> str:
    """`log-n` of `log-n_seed=1-0f7657` and of `log-n_document_masking=True_data_seed=42…`."""
    for setting in ("_document_masking=", "_data_seed=", "_seed="):
        name = name.partition(setting)[0]
    return name


def with_minus_sign(text: str) -> str:
    return text.replace("-", "−")


def saving(diagnosis: dict[str, Any]) -> str:
    """Return the nats per token that a copy of random tokens saves."""
    copying = diagnosis["copying"]
    return figure(copying["first"] - copying["second"])
