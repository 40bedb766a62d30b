"""Figures that the pages of results print, computed from the records beside them."""

import json
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from anlit.compare.statistics import (
    SpeedUp,
    Summary,
    Test,
    difference,
    holm,
    mean_difference,
    mean_sd,
    speed_up,
    tokens_to_loss,
)
from anlit.runs.folders import Curve

RESULTS = Path(__file__).parents[2] / "docs" / "results"
DIGITS = 6
"""Digits after the point of what is computed; pages print fewer."""
FORM = f".{DIGITS}f"


@cache
def read_record(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


class Study:
    """The finished runs in a record of `anlit study`: a curve by arm and seed, and the losses of tuning."""

    def __init__(self, folder: str) -> None:
        self.record = read_record(f"{folder}/report.json")
        self.curves: dict[str, dict[int, Curve]] = {}
        self.parameters: dict[str, int] = {}
        for run in self.record["measured"].values():
            arm = run["counted_in"]
            if arm is None or run["state"] != "finished":
                continue
            points = run["curve"]
            columns = [np.array(points[name], float) for name in ("tokens", "seconds", "loss")]
            self.curves.setdefault(arm, {})[run["seed"]] = Curve(*columns)
            self.parameters[arm] = (self.record["shared"]["record"] | run["record"])["parameters"]

    def losses(self, arm: str, seeds: Sequence[int] | None = None) -> dict[int, float]:
        """The final loss by seed; of all seeds by default."""
        curves = self.curves[arm]
        return {seed: float(curves[seed].loss[-1]) for seed in seeds or sorted(curves)}

    def seeds(self, arm: str) -> list[str]:
        """The final loss of each seed."""
        return [figure(loss) for loss in self.losses(arm).values()]

    def mean(self, arm: str, seeds: Sequence[int] | None = None) -> str:
        """`2.0883 ± 0.0142`, of the final losses."""
        return summary(self.losses(arm, seeds).values())

    def test(self, arm: str, baseline: str, seeds: Sequence[int] | None = None) -> Test:
        """The test of the arm's final losses minus the baseline's."""
        test = difference(self.losses(arm, seeds), self.losses(baseline, seeds))
        assert test is not None
        return test

    def minus(self, arm: str, baseline: str, seeds: Sequence[int] | None = None) -> str:
        """`−0.088 (−0.122 … −0.053)`, of the final losses."""
        losses = self.losses(arm, seeds), self.losses(baseline, seeds)
        return mean_difference(*losses, FORM)

    def lower(self, arm: str, baseline: str, seeds: Sequence[int] | None = None) -> str:
        """`0.088 (0.053 … 0.122)`: by how much the arm's final losses are below the baseline's."""
        return self.minus(baseline, arm, seeds)

    def p(self, arm: str, baseline: str, seeds: Sequence[int] | None = None) -> float:
        return self.test(arm, baseline, seeds).p

    def p_holm(self, arm: str, baseline: str, arms: Iterable[str]) -> float:
        """p corrected for comparisons of all `arms` with the baseline."""
        values = {other: self.p(other, baseline) for other in arms}
        corrected = dict(zip(values, holm(list(values.values())), strict=True))[arm]
        assert corrected is not None
        return corrected

    def speed_up(self, arm: str, baseline: str) -> SpeedUp:
        curves = [sorted(self.curves[name].items()) for name in (baseline, arm)]
        return speed_up(*curves)

    def faster(self, arm: str, baseline: str) -> str:
        """`1.23 (1.17 … 1.30)`, `not reached` or `1 of 3 seeds`."""
        return self.speed_up(arm, baseline).words

    def onsets(self, arm: str, loss: float) -> dict[int, float | None]:
        """Millions of tokens after which each seed's run first has the loss."""
        found = {seed: tokens_to_loss(curve, loss) for seed, curve in self.curves[arm].items()}
        return {seed: None if found[seed] is None else found[seed] / 1e6 for seed in sorted(found)}

    def onset_minus(self, arm: str, baseline: str, loss: float) -> str:
        """`−0.31 (−1.10 … 0.47)`, in millions of tokens."""
        return mean_difference(self.onsets(arm, loss), self.onsets(baseline, loss), FORM)


def figure(value: float) -> str:
    return signed(f"{value:{FORM}}")


def summary(values: Iterable[float]) -> str:
    """`3.2101 ± 0.0042`."""
    return signed(mean_sd(Summary(list(values)), DIGITS))


class Lengths:
    """A record of `anlit lengths`: losses by arm, masking and length, one for each checkpoint."""

    def __init__(self, folder: str) -> None:
        self.record = read_record(f"{folder}/lengths.json")
        self.losses: dict[tuple[str, bool], dict[int, list[float]]] = {}
        for checkpoint, points in zip(
            self.record["checkpoints"], self.record["measurements"], strict=True
        ):
            arm = arm_of_run(Path(checkpoint["file"]).parts[-3])
            for point in points:
                by_length = self.losses.setdefault((arm, point["masking"]), {})
                by_length.setdefault(point["length"], []).append(point["total"]["loss"])

    def row(self, arm: str, masking: bool = True) -> list[str]:
        """The loss at the training length, and what each longer one adds."""
        first, *longer = self.losses[arm, masking].values()
        added = [[b - a for a, b in zip(first, losses, strict=True)] for losses in longer]
        return [summary(values) for values in (first, *added)]

    def absolute(self, arm: str) -> list[str]:
        """The loss at each length."""
        return [summary(losses) for losses in self.losses[arm, True].values()]


def arm_of_run(name: str) -> str:
    """`log-n` of `log-n_seed=1-0f7657` and of `log-n_document_masking=True_data_seed=42…`."""
    for setting in ("_document_masking=", "_data_seed=", "_seed="):
        name = name.partition(setting)[0]
    return name


def signed(text: str) -> str:
    return text.replace("-", "−")


def saving(diagnosis: dict[str, Any]) -> str:
    """What a copy of random tokens saves, in nats per token."""
    copying = diagnosis["copying"]
    return figure(copying["first"] - copying["second"])
