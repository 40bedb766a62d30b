"""What a comparison found: one result per group, and the report that holds them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anlit.analysis.groups import Group
from anlit.analysis.runs import Curve, Run
from anlit.analysis.speedup import SpeedUp, Summary


@dataclass(frozen=True, eq=False)
class Result:
    """One group: its mean curve, the loss's standard deviation at each point, its speed-up."""

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
        """Training seconds at the last validation, None where time was not logged."""
        last = [float(run.curve.seconds[-1]) for run in self.group.counted]
        return Summary(tuple(value if math.isfinite(value) else None for value in last))


@dataclass(frozen=True, eq=False)
class Report:
    """A comparison as written to `output`; `runs` lists every run, also those in no number."""

    output: Path
    command: str
    results: tuple[Result, ...]
    baseline: Result
    runs: tuple[Run, ...]
    notes: tuple[str, ...]

    @property
    def plot(self) -> Path:
        return self.output / "convergence.png"

    @property
    def markdown(self) -> Path:
        return self.output / "report.md"

    @property
    def json(self) -> Path:
        return self.output / "convergence.json"

    def label_of(self, run: Run) -> str | None:
        """Label of the group whose numbers include `run`."""
        return next((r.label for r in self.results if run in r.group.counted), None)

    def raw(self) -> dict[str, Any]:
        """Everything as JSON types; numbers that are not finite become null."""
        content = {
            "command": self.command,
            "baseline": self.baseline.label,
            "target_loss": float(self.baseline.mean.loss[-1]),
            "notes": list(self.notes),
            "groups": [_group(result) for result in self.results],
            "runs": [_run(run, self.label_of(run)) for run in self.runs],
        }
        return _jsonable(content)


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
        "speedup_tokens": _summary(speedup.tokens),
        "tokens_share_percent": speedup.tokens_share,
        "speedup_seconds": _summary(speedup.seconds),
        "speedup_tokens_by_fraction": {f"{f:g}": _summary(value) for f, value in speedup.by_fraction.items()},
        "speedup_tokens_averaged": _summary(speedup.averaged_tokens),
        "speedup_seconds_averaged": _summary(speedup.averaged_seconds),
        "speedup_is_lower_bound": speedup.bound,
        "mean_curve": _curve(result.mean) | {"sd": result.sd.tolist()},
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
        "curve": _curve(run.curve),
        "bits_per_byte": run.bits_per_byte,
        "record": run.record,
        "config": run.config,
    }


def _curve(curve: Curve) -> dict[str, list[float]]:
    return {"tokens": curve.tokens.tolist(), "seconds": curve.seconds.tolist(), "loss": curve.loss.tolist()}


def _summary(summary: Summary) -> dict[str, Any]:
    return {"mean": summary.mean, "sd": summary.sd, "values": list(summary.values)}


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _jsonable(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(below) for below in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)
