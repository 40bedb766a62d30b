"""A comparison's files, timings beside it, and intervals by scipy, for tests."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from anlit.compare.compare import compare
from anlit.compare.comparison import STEPS, Comparison
from anlit.runs.folders import load_run
from anlit.runs.groups import group_runs
from tests.compare.conftest import HARDWARE

LR = "model.init_args.optimizer.init_args.lr"
FASTER = {100: 4.0, 200: 3.2, 300: 2.8, 400: 2.6}
SLOWER = {100: 6.0, 400: 3.5}
SECOND = {100: 5.2, 200: 4.2, 300: 3.7, 400: 3.2}
"""The second seed of conftest's FALLING."""
H200 = {"hardware": {"devices": ["H200"]}}


class Report(NamedTuple):
    """A comparison, its JSON and its Markdown."""

    comparison: Comparison
    raw: dict[str, Any]
    markdown: str

    @property
    def notes(self) -> str:
        return "\n".join(self.comparison.notes)

    def row(self, label: str) -> dict[str, str]:
        """The cells of a configuration by the columns of the table."""
        columns = self._first_row("configuration")
        cells = self._first_row(label)
        return dict(zip(columns, cells, strict=True))

    def _first_row(self, beginning: str) -> list[str]:
        lines = self.markdown.splitlines()
        row = next(line for line in lines if line.startswith(f"| {beginning}"))
        return [cell.strip() for cell in row.strip("|").split("|")]


def report_on_runs(folder: Path, output: str = "out", **options: str) -> Report:
    """Compare the runs in FOLDER/runs. The report is in FOLDER/OUTPUT."""
    comparison = compare([str(folder / "runs")], str(folder / output), **options)
    raw = json.loads((folder / output / "convergence.json").read_text())
    markdown = (folder / output / "report.md").read_text()
    return Report(comparison, raw, markdown)


def write_paired(
    folder: Path, runs: list[Path], seconds: list[list[float]], **record: object
) -> None:
    """Write paired_steps.json for some runs, with seconds per token by round for each run."""
    folder.mkdir(parents=True, exist_ok=True)
    arms = []
    for run, times in zip(runs, seconds, strict=True):
        (group,) = group_runs([load_run(run)])
        arms.append({"key": group.key, "seconds_per_token": times})
    content = {"hardware": HARDWARE, **record, "arms": arms}
    (folder / STEPS).write_text(json.dumps(content))


def t_interval(values: Sequence[float]) -> tuple[float, float]:
    """The interval of 95 % for the mean."""
    low, high = stats.ttest_1samp(values, 0).confidence_interval()
    return low, high


def geometric_t_interval(values: Sequence[float]) -> tuple[float, float]:
    """The interval of 95 % for the geometric mean."""
    low, high = np.exp(t_interval(np.log(values)))
    return low, high
