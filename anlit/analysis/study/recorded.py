"""Recomputes the comparisons of recorded studies from the runs and curves in their report.json.

`anlit study --recompute FOLDER…` writes their numbers, their sections of report.md and their pictures anew, by today's
definitions. What needs more than curves (tuning, scaling, dynamics) stays as it was recorded.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from anlit.analysis.comparison import Comparison, compare_groups, record_runs
from anlit.analysis.comparison_report import section
from anlit.analysis.plots import plot_convergence
from anlit.analysis.study.plan import merged
from anlit.analysis.wall_clock import StepTimes, step_times
from anlit.errors import UserError
from anlit.reading import read_json
from anlit.reporting.files import jsonable, write_text
from anlit.reporting.page import listed
from anlit.runs.folders import Curve, Run
from anlit.runs.groups import Group, learned_settings

SCHEMA = {"comparisons": [dict], "measured": dict, "shared": {"config": dict, "record": dict}}
DIGITS = 6
"""Significant digits of a recorded number."""


def recompute(folder: Path) -> list[Comparison]:
    """The comparisons recorded in `folder`, computed again and written.

    Raises:
        UserError: There is no report.json of a study, or it is damaged.
    """
    path = folder / "report.json"
    record = read_json(path, SCHEMA, "give the folder of a study's report")
    try:
        runs = {name: _run(name, run, record["shared"]) for name, run in record["measured"].items()}
        labels = {name: run["counted_in"] for name, run in record["measured"].items()}
        steps = step_times(record["paired_steps"]) if record["paired_steps"] else None
        comparisons = [_compare(folder, number, recorded, [runs[name] for name in recorded["runs"]], labels, steps)
                       for number, recorded in enumerate(record["comparisons"], 1)]  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration) as error:
        raise UserError(f"{path} is no report of a study ({error}): give the folder of one") from error
    page = folder / "report.md"
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    for comparison in comparisons:
        if f"({comparison.plot.name})" in text:
            plot_convergence(comparison)
    record |= {"comparisons": [comparison.raw() for comparison in comparisons], **record_runs(comparisons)}
    write_text(path, json.dumps(jsonable(record, DIGITS), ensure_ascii=False, separators=(",", ":")) + "\n")
    _rewrite(page, text, comparisons)
    return comparisons


def _compare(
    folder: Path,
    number: int,
    recorded: dict[str, Any],
    runs: list[Run],
    labels: dict[str, str | None],
    steps: StepTimes | None,
) -> Comparison:
    groups = []
    for label in (group["label"] for group in recorded["groups"]):
        # The label of a run is that of the first comparison that has it; a run that counts nowhere is in no group.
        own = tuple(run for run in runs if labels[str(run.folder)] == label)
        groups.append(Group(label, own, learned_settings(own[0])))
    baseline = next(group for group in groups if group.label == recorded["baseline"])
    return compare_groups(groups, baseline, tuple(runs), folder, recorded["command"], f"{number}-", steps=steps)


def _run(name: str, run: dict[str, Any], shared: dict[str, Any]) -> Run:
    curve = Curve(*(np.array(run["curve"][key], dtype=np.float64) for key in ("tokens", "seconds", "loss")))
    config, record = (merged(shared[part], run[part]) for part in ("config", "record"))
    return Run(Path(name), config, record, curve, run["bits_per_byte"])


def _rewrite(path: Path, text: str, comparisons: Sequence[Comparison]) -> None:
    """Replaces each comparison's section of report.md, which is known by its picture."""
    if not text:
        return
    sections = text.split("\n## ")
    for number, comparison in enumerate(comparisons):
        for place, old in enumerate(sections):
            if f"({comparison.plot.name})" in old:
                title = old.splitlines()[0]
                parts = [title, *section(comparison, explained=number > 0), listed(comparison.notes)]
                sections[place] = "\n\n".join(part for part in parts if part) + "\n"
    write_text(path, "\n## ".join(sections).rstrip("\n") + "\n")
