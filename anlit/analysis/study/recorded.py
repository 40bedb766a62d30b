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
from anlit.analysis.wall_clock import StepTimes
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
    path, page = folder / "report.json", folder / "report.md"
    record = read_json(path, SCHEMA, "give the folder of a study's report")
    try:
        comparisons = [_compare(folder, number, recorded, record)
                       for number, recorded in enumerate(record["comparisons"], 1)]  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration) as error:
        raise UserError(f"{path} is no report of a study ({error}): give the folder of one") from error
    record |= {"comparisons": [comparison.raw() for comparison in comparisons], **record_runs(comparisons)}
    write_text(path, json.dumps(jsonable(record, DIGITS), ensure_ascii=False, separators=(",", ":")) + "\n")
    if page.is_file():
        _rewrite(page, comparisons)
    return comparisons


def _compare(folder: Path, number: int, recorded: dict[str, Any], record: dict[str, Any]) -> Comparison:
    measured, steps = record["measured"], record["paired_steps"]
    runs = {name: _run(name, measured[name], record["shared"]) for name in recorded["runs"]}
    groups = []
    for label in (group["label"] for group in recorded["groups"]):
        # The label of a run is that of the first comparison that has it; a run that counts nowhere is in no group.
        own = tuple(run for name, run in runs.items() if measured[name]["counted_in"] == label)
        groups.append(Group(label, own, learned_settings(own[0])))
    baseline = next(group for group in groups if group.label == recorded["baseline"])
    return compare_groups(groups, baseline, [*runs.values()], folder, recorded["command"], f"{number}-",
                          steps=StepTimes(steps) if steps else None)  # fmt: skip


def _run(name: str, run: dict[str, Any], shared: dict[str, Any]) -> Run:
    curve = Curve(*(np.array(run["curve"][key], dtype=np.float64) for key in ("tokens", "seconds", "loss")))
    config, record = (merged(shared[part], run[part]) for part in ("config", "record"))
    return Run(Path(name), config, record, curve, run["bits_per_byte"])


def _rewrite(page: Path, comparisons: Sequence[Comparison]) -> None:
    """Replaces each comparison's section of report.md, which is known by its picture, and the picture."""
    sections = page.read_text(encoding="utf-8").split("\n## ")
    for number, comparison in enumerate(comparisons):
        for place, old in enumerate(sections):
            if f"({comparison.plot.name})" in old:
                plot_convergence(comparison)
                title = old.partition("\n")[0]
                parts = [title, *section(comparison, explained=number > 0), listed(comparison.notes)]
                sections[place] = "\n\n".join(part for part in parts if part) + "\n"
    write_text(page, "\n## ".join(sections).rstrip("\n") + "\n")
