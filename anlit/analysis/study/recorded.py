"""Recomputes the comparisons of recorded studies from the runs and curves in their report.json.

`anlit study --recompute FOLDER…` writes their numbers, their sections of report.md and their pictures anew, by today's
definitions. What needs more than curves (tuning, scaling, dynamics) stays as it was recorded.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from anlit.analysis.compare import comparison
from anlit.analysis.comparison_report import comparison as comparison_text
from anlit.analysis.plots import plot_convergence
from anlit.analysis.results import Report
from anlit.analysis.wall_clock import PairedSteps
from anlit.errors import UserError
from anlit.reporting.files import jsonable, write_text
from anlit.reporting.page import listed
from anlit.runs.folders import Curve, Run, hardware_label
from anlit.runs.groups import Group

DIGITS = 6
"""Significant digits of a recorded number."""


def recompute(folder: Path) -> list[Report]:
    """The comparisons recorded in `folder`, computed again and written.

    Raises:
        UserError: There is no report.json of a study, or it is damaged.
    """
    path = folder / "report.json"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if "measured" not in record:  # as reports were before each run was recorded once
            record["measured"] = {run["folder"]: run for one in record["comparisons"] for run in one["runs"]}
            record["comparisons"] = [one | {"runs": [run["folder"] for run in one["runs"]]}
                                     for one in record["comparisons"]]  # fmt: skip
        runs = {name: _run(name, run) for name, run in record["measured"].items()}
        reports = [_report(folder, number, one, record, runs) for number, one in enumerate(record["comparisons"], 1)]
        for report, one in zip(reports, record["comparisons"], strict=True):
            raw = report.raw()
            del raw["paired_steps"]
            one.update(raw, runs=[run["folder"] for run in raw["runs"]])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is no report of a study ({error}): give the folder of one") from error
    page = folder / "report.md"
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    for report in reports:
        if f"({report.plot.name})" in text:
            plot_convergence(report)
    write_text(path, json.dumps(jsonable(record, DIGITS), ensure_ascii=False, separators=(",", ":")) + "\n")
    _rewrite(page, text, reports)
    return reports


def _report(folder: Path, number: int, one: dict[str, Any], record: dict[str, Any], runs: dict[str, Run]) -> Report:
    labels = {name: run["counted_in"] for name, run in record["measured"].items()}
    members = [runs[name] for name in one["runs"]]
    groups = []
    for group in one["groups"]:
        # The label of a run is that of the first comparison that has it; a run that counts nowhere is in no group.
        own = tuple(run for run in members if labels[str(run.folder)] == group["label"])
        groups.append(Group(group["label"], own, group["settings"]))
    baseline = next(group for group in groups if group.label == one["baseline"])
    return comparison(groups, baseline, tuple(members), folder, one["command"], f"{number}-", paired=_paired(record))


def _paired(record: dict[str, Any]) -> PairedSteps | None:
    steps = record.get("paired_steps") or next(
        (one["paired_steps"] for one in record["comparisons"] if one.get("paired_steps")), None
    )
    if not steps:
        return None
    seconds = {arm["key"]: tuple(map(float, arm["seconds_per_token"])) for arm in steps["arms"]}
    return PairedSteps(hardware_label(steps), seconds, steps)


def _run(name: str, run: dict[str, Any]) -> Run:
    curve = Curve(*(np.array(run["curve"][key], dtype=np.float64) for key in ("tokens", "seconds", "loss")))
    return Run(Path(name), run["config"], run["record"], curve, run["bits_per_byte"])


def _rewrite(path: Path, text: str, reports: Sequence[Report]) -> None:
    """Replaces each comparison's section of report.md, which is known by its picture."""
    if not text:
        return
    sections = text.split("\n## ")
    for number, report in enumerate(reports):
        for place, section in enumerate(sections):
            if f"({report.plot.name})" in section:
                title = section.splitlines()[0]
                parts = [title, *comparison_text(report, explained=number > 0), listed(report.notes)]
                sections[place] = "\n\n".join(part for part in parts if part) + "\n"
    write_text(path, "\n## ".join(sections).rstrip("\n") + "\n")
