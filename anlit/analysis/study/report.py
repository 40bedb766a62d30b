"""A study's report: one HTML page, its Markdown twin, and the raw numbers."""

from pathlib import Path
from typing import Any

from anlit.analysis.comparison import record_runs
from anlit.analysis.comparison_report import provenance, runs_table
from anlit.analysis.study.outcome import Outcome
from anlit.analysis.study.sections import comparison_of, render, winners
from anlit.reporting.files import write_json
from anlit.reporting.intervals import Summary, mean_sd
from anlit.reporting.page import write_page
from anlit.reporting.table import NONE, SafeConsole, TerminalTable, markdown_table
from anlit.reporting.table import console as terminal
from anlit.reporting.text import code, literal, visible
from anlit.runs.folders import Run


def write(outcome: Outcome) -> Path:
    """Write report.html, report.md and report.json to the study's folder; returns the path of the page."""
    outcome.output.mkdir(parents=True, exist_ok=True)
    write_json(outcome.output / "report.json", raw(outcome))
    return write_page(outcome.output, "report", paragraphs(outcome))


def show(outcome: Outcome, console: SafeConsole | None = None) -> None:
    """Print each arm's setting with its loss and speed-up, and the settings that lie at the edge of their grid."""
    console = console or terminal()
    edges = {one.arm.name: one.edges for one in outcome.tunings}
    speeds = _speed_ups(outcome)
    head = ["arm", "setting", "seeds", "final loss", *(["speed-up in tokens"] if speeds else [])]
    rows = []
    for point in outcome.points():
        setting = outcome.selected[point.arm.name].words or "as configured"
        loss = mean_sd(Summary(point.losses), 4) if point.losses else NONE
        rows.append([point.arm.title, setting, str(len(point.losses)), loss,
                     *([speeds.get(point.arm.name, NONE)] if speeds else [])])  # fmt: skip
    if rows:
        console.print(TerminalTable(outcome.study.title, head, rows, left=(0, 1)))
    for name, found in edges.items():
        for edge in found:
            console.print(visible(f"note: {name}: {edge}: a wider grid might find a better one"))


def _speed_ups(outcome: Outcome) -> dict[str, str]:
    """Arm's name → its speed-up in tokens over the baseline of the first comparison that has the arm."""
    words: dict[str, str] = {}
    for planned in outcome.study.comparisons:
        comparison = comparison_of(outcome, planned)
        arms = {arm.title: arm.name for arm in planned.arms}
        for result in comparison.results if comparison is not None else ():
            words.setdefault(arms[result.label], result.speedup.words)
    return words


def paragraphs(outcome: Outcome) -> list[str]:
    """The report in Markdown."""
    study = outcome.study
    read = [run for _, _, run in outcome.runs if run is not None and run.config]
    labels = {run.folder: planned.arm.title for planned, _, run in outcome.runs if run is not None}
    return [
        f"# {study.title}",
        *([str(study.content["question"]).strip()] if study.content.get("question") else []),
        _progress(outcome),
        *render(outcome),
        *([] if any("tuning" in one for one in study.sections) else winners(outcome)),
        "## Failures",
        _failures(outcome),
        "## Runs",
        runs_table(read, lambda run: labels.get(run.folder)),
        "## Where the numbers come from",
        provenance(
            read,
            [f"made by: {code(outcome.command)}", f"study: {code(str(study.path))}, budget {study.budget or 'none'}"],
        ),
    ]


def raw(outcome: Outcome) -> dict[str, Any]:
    """The numbers behind the report; a comparison names its runs by their folders, as keys of `measured`."""
    study = outcome.study
    asked = [comparison_of(outcome, planned) for planned in study.comparisons]
    comparisons = [comparison for comparison in asked if comparison is not None]
    return {
        "title": study.title, "path": study.path, "budget": study.budget, "command": outcome.command,
        "selected": {name: choice.shown for name, choice in outcome.selected.items()},
        "tuning": {one.arm.name: [{"setting": tried.point.shown, "loss": tried.loss} for tried in one.tried]
                   for one in outcome.tunings},
        "points": [{"arm": point.arm.name, "values": point.values, "losses": point.losses, "failed": point.failed}
                   for point in outcome.points()],
        "comparisons": [comparison.raw() for comparison in comparisons],
        **record_runs(comparisons),
        "runs": [{"name": run.name, "status": state.status, "reason": state.reason} for run, state, _ in outcome.runs],
    }  # fmt: skip


def _progress(outcome: Outcome) -> str:
    counts = {status: sum(state.status == status for _, state, _ in outcome.runs)
              for status in ("finished", "failed", "cut", "waiting")}  # fmt: skip
    names = {"cut": "under way or cut"}
    told = ", ".join(f"{count} {names.get(status, status)}" for status, count in counts.items() if count)
    left = [arm.title for arm in outcome.study.arms if arm.name not in outcome.selected]
    waits = (
        f" Not measured, because their tuning has not ended or failed everywhere: {'; '.join(left)}." if left else ""
    )
    seeds = len(outcome.study.seeds)
    measured = (
        f"Each arm is measured on {seeds} seed{'s' * (seeds > 1)}." if seeds else "Tuning only, nothing is measured."
    )
    hours = sum(_seconds(run) for _, _, run in outcome.runs) / 3600
    trained = f" {hours:.2f} hours of training in all." if hours else ""
    return f"{len(outcome.runs)} runs: {told}. {measured}{waits}{trained}"


def _seconds(run: Run | None) -> float:
    if run is None or not len(run.curve):
        return 0.0
    last = float(run.curve.seconds[-1])
    return last if last == last else 0.0


def _failures(outcome: Outcome) -> str:
    failed = [(run, state) for run, state, _ in outcome.runs if state.status == "failed"]
    if not failed:
        return "No run failed."
    return markdown_table(
        ["run", "why"], [[code(run.name), literal(state.reason)] for run, state in failed], left=(0, 1)
    )
