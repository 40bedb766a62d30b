"""A study's report: one HTML page, its Markdown twin, and the raw numbers."""

from pathlib import Path
from typing import Any

from anlit.analysis.comparison import record_runs
from anlit.analysis.comparison_report import provenance, runs_table
from anlit.analysis.study.results import StudyResults
from anlit.analysis.study.sections import comparison_of, render, winners
from anlit.reporting.files import write_json
from anlit.reporting.intervals import Summary, mean_sd
from anlit.reporting.page import write_page
from anlit.reporting.table import NONE, SafeConsole, Table, markdown_table
from anlit.reporting.table import console as terminal
from anlit.reporting.text import code, literal, visible
from anlit.runs.folders import Run


def write(results: StudyResults) -> Path:
    """Write report.html, report.md and report.json to the study's folder; returns the path of the page."""
    results.output.mkdir(parents=True, exist_ok=True)
    write_json(results.output / "report.json", raw(results))
    return write_page(results.output, "report", paragraphs(results))


def show(results: StudyResults, console: SafeConsole | None = None) -> None:
    """Print each arm's setting with its loss and speed-up, and the settings that lie at the edge of their grid."""
    console = console or terminal()
    edges = {one.arm.name: one.edges for one in results.tunings}
    speeds = _speed_ups(results)
    head = ["arm", "setting", "seeds", "final loss", *(["speed-up in tokens"] if speeds else [])]
    rows = []
    for point in results.points():
        setting = results.selected[point.arm.name].words or "as configured"
        loss = mean_sd(Summary(point.losses), 4) if point.losses else NONE
        rows.append([point.arm.title, setting, str(len(point.losses)), loss,
                     *([speeds.get(point.arm.name, NONE)] if speeds else [])])  # fmt: skip
    if rows:
        console.print(Table(results.study.title, head, rows, left=(0, 1)))
    for name, found in edges.items():
        for edge in found:
            console.print(visible(f"note: {name}: {edge}: a wider grid might find a better one"))


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
    return [
        f"# {study.title}",
        *([str(study.content["question"]).strip()] if study.content.get("question") else []),
        _progress(results),
        *render(results),
        *([] if any("tuning" in one for one in study.sections) else winners(results)),
        "## Failures",
        _failures(results),
        "## Runs",
        runs_table(read, lambda run: labels.get(run.folder)),
        "## Where the numbers come from",
        provenance(
            read,
            [f"made by: {code(results.command)}", f"study: {code(str(study.path))}, budget {study.budget or 'none'}"],
        ),
    ]


def raw(results: StudyResults) -> dict[str, Any]:
    """The numbers behind the report; a comparison names its runs by their folders, as keys of `measured`."""
    study = results.study
    asked = [comparison_of(results, planned) for planned in study.comparisons]
    comparisons = [comparison for comparison in asked if comparison is not None]
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
    counts = {status: sum(state.status == status for _, state, _ in results.runs)
              for status in ("finished", "failed", "interrupted", "pending")}  # fmt: skip
    names = {"interrupted": "under way or interrupted"}
    told = ", ".join(f"{count} {names.get(status, status)}" for status, count in counts.items() if count)
    left = [arm.title for arm in results.study.arms if arm.name not in results.selected]
    waits = (
        f" Not measured, because their tuning has not ended or failed everywhere: {'; '.join(left)}." if left else ""
    )
    seeds = len(results.study.seeds)
    measured = (
        f"Each arm is measured on {seeds} seed{'s' * (seeds > 1)}." if seeds else "Tuning only, nothing is measured."
    )
    hours = sum(_seconds(run) for _, _, run in results.runs) / 3600
    trained = f" {hours:.2f} hours of training in all." if hours else ""
    return f"{len(results.runs)} runs: {told}. {measured}{waits}{trained}"


def _seconds(run: Run | None) -> float:
    if run is None or not len(run.curve):
        return 0.0
    last = float(run.curve.seconds[-1])
    return last if last == last else 0.0


def _failures(results: StudyResults) -> str:
    failed = [(run, state) for run, state, _ in results.runs if state.status == "failed"]
    if not failed:
        return "No run failed."
    return markdown_table(
        ["run", "why"], [[code(run.name), literal(state.reason)] for run, state in failed], left=(0, 1)
    )
