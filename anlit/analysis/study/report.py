"""A study's report: one HTML page, its Markdown twin, and the raw numbers."""

import math
from pathlib import Path
from typing import Any

from anlit.analysis.comparison import record_runs
from anlit.analysis.comparison_report import provenance, runs_table
from anlit.analysis.statistics import Summary, mean_sd
from anlit.analysis.study.results import StudyResults
from anlit.analysis.study.sections import comparison_of, render, winners
from anlit.reporting.files import write_json
from anlit.reporting.page import write_page
from anlit.reporting.table import NONE, SafeConsole, Table, markdown_table
from anlit.reporting.table import console as terminal
from anlit.reporting.text import code, literal, without_control_codes


def write(results: StudyResults) -> Path:
    """Write report.html, report.md and report.json to the study's folder; returns the path of the page."""
    results.output.mkdir(parents=True, exist_ok=True)
    write_json(results.output / "report.json", raw(results))
    return write_page(results.output, "report", paragraphs(results))


def show(results: StudyResults, console: SafeConsole | None = None) -> None:
    """Print each arm's setting with its loss and speed-up, and the settings that lie at the edge of their grid."""
    console = console or terminal()
    speeds = _speed_ups(results)
    head = ["arm", "setting", "seeds", "final loss", *(["speed-up in tokens"] if speeds else [])]
    rows = []
    for point in results.points():
        setting = results.selected[point.arm.name].words or "as configured"
        cells = [point.arm.title, setting, str(len(point.losses)), mean_sd(Summary(point.losses), 4)]
        rows.append([*cells, *([speeds.get(point.arm.name, NONE)] if speeds else [])])
    if rows:
        console.print(Table(results.study.title, head, rows, left=(0, 1)))
    for tuning in results.tunings:
        for edge in tuning.edges:
            note = f"note: {tuning.arm.name}: {edge}: a wider grid might find a better one"
            console.print(without_control_codes(note))


def _speed_ups(results: StudyResults) -> dict[str, str]:
    """Arm's name → its speed-up in tokens over the baseline of the first comparison that has the arm."""
    words: dict[str, str] = {}
    for planned in results.study.comparisons:
        comparison = comparison_of(results, planned)
        arms = {arm.title: arm.name for arm in planned.arms}
        for result in comparison.results if comparison is not None else ():
            words.setdefault(arms[result.label], result.speedup.words)
    return words


def paragraphs(results: StudyResults) -> list[str]:
    """The report in Markdown."""
    study = results.study
    read = [run for _, _, run in results.runs if run is not None and run.config]
    labels = {run.folder: planned.arm.title for planned, _, run in results.runs if run is not None}
    failed = [[code(run.name), literal(state.reason)] for run, state, _ in results.runs if state.status == "failed"]
    made = [f"made by: {code(results.command)}", f"study: {code(str(study.path))}, budget {study.budget or 'none'}"]
    return [
        f"# {study.title}",
        str(study.content.get("question") or "").strip(),
        _progress(results),
        *render(results),
        *([] if any("tuning" in section for section in study.sections) else winners(results)),
        "## Failures",
        markdown_table(["run", "why"], failed, left=(0, 1)) if failed else "No run failed.",
        "## Runs",
        runs_table(read, lambda run: labels.get(run.folder)),
        "## Where the numbers come from",
        provenance(read, made),
    ]


def raw(results: StudyResults) -> dict[str, Any]:
    """The numbers behind the report; a comparison names its runs by their folders, as keys of `measured`."""
    study = results.study
    comparisons = [comparison for planned in study.comparisons if (comparison := comparison_of(results, planned))]
    return {
        "title": study.title, "path": study.path, "budget": study.budget, "command": results.command,
        "selected": {name: choice.shown for name, choice in results.selected.items()},
        "tuning": {tuning.arm.name: [{"setting": point.setting.shown, "loss": point.loss} for point in tuning.points]
                   for tuning in results.tunings},
        "points": [{"arm": point.arm.name, "values": point.values, "losses": point.losses, "failed": point.failed}
                   for point in results.points()],
        "comparisons": [comparison.raw() for comparison in comparisons],
        **record_runs(comparisons),
        "runs": [{"name": run.name, "status": state.status, "reason": state.reason} for run, state, _ in results.runs],
    }  # fmt: skip


def _progress(results: StudyResults) -> str:
    """How many runs there are in each state, on how many seeds, and what is not measured yet."""
    names = {
        "finished": "finished",
        "failed": "failed",
        "interrupted": "under way or interrupted",
        "pending": "pending",
    }
    counts = {words: sum(state.status == name for _, state, _ in results.runs) for name, words in names.items()}
    told = f"{len(results.runs)} runs: " + ", ".join(f"{count} {words}" for words, count in counts.items() if count)
    seeds = len(results.study.seeds)
    told += (
        f". Each arm is measured on {seeds} seed{'s' * (seeds > 1)}."
        if seeds
        else ". Tuning only, nothing is measured."
    )
    if left := [arm.title for arm in results.study.arms if arm.name not in results.selected]:
        told += f" Not measured, because their tuning has not ended or failed everywhere: {'; '.join(left)}."
    ends = [float(run.curve.seconds[-1]) for *_, run in results.runs if run is not None and len(run.curve)]
    hours = sum(seconds for seconds in ends if not math.isnan(seconds)) / 3600
    return told + (f" {hours:.2f} hours of training in all." if hours else "")
