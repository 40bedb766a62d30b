"""A study's report: an HTML page, its Markdown twin, and the raw numbers."""

import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from anlit.compare.comparison import STUDY, record_runs
from anlit.compare.comparison_report import explain_marks, sources
from anlit.compare.statistics import mean_sd
from anlit.errors import UserError, report_unforeseen
from anlit.io.write import write_json
from anlit.reporting.page import write_page
from anlit.reporting.table import NONE, SafeConsole, Table, markdown_table
from anlit.reporting.text import code, count_of, echo, literal, without_control_codes
from anlit.study.fairness import unequal_tuning
from anlit.study.plan import AnnealedRun
from anlit.study.results import StudyResults
from anlit.study.sections.annealed import raw_numbers, summary_tables
from anlit.study.sections.registry import SECTIONS, check_sections

STATUS_NAMES = {
    "finished": "finished",
    "failed": "failed",
    "interrupted": "under way or interrupted",
    "pending": "pending",
}


def write_report(results: StudyResults) -> Path:
    """Write report.html, report.md and report.json to the study's folder; returns the page."""
    results.output.mkdir(parents=True, exist_ok=True)
    write_json(results.output / STUDY, _raw_numbers(results), indent=None)
    return write_page(results.output, "report", _paragraphs(results))


def print_summary(results: StudyResults, console: SafeConsole) -> None:
    """Print each arm's point with loss and speed-up, and the values at the edge of their grid.

    With `anneal`, print the annealed losses and speed-ups.
    """
    if results.study.annealing is not None:
        for table in summary_tables(results):
            console.print(table)
            for line in explain_marks(table.rows):
                console.print(line)
        return
    baseline, speedups = _speedups(results)
    head = ["arm", "setting", "seeds", "final loss"]
    if speedups:
        head.append(f"speed-up in tokens over {baseline}")
    rows = []
    for measured in results.measured_arms():
        title = measured.arm.title
        setting = results.selected[measured.arm.name].label or "as configured"
        seeds = str(len(measured.losses))
        if measured.failed:
            seeds += f" of {len(measured.losses) + measured.failed}"
        row = [title, setting, seeds, mean_sd(measured.summary, 4)]
        if speedups:
            row.append(speedups.get(title, NONE))
        rows.append(row)
    for arm_tuning in results.tunings:
        if arm_tuning.has_ended and arm_tuning.best is None:
            row = [arm_tuning.arm.title, "every setting failed", "0", NONE]
            rows.append(row + [NONE] * (len(head) - len(row)))
    if rows:
        console.print(Table(results.study.title, head, rows, left=(0, 1)))
    for line in explain_marks(rows):
        console.print(line)
    counts = unequal_tuning(results.study)
    if counts:
        console.print(without_control_codes(f"note: UNEQUAL TUNING, settings tried: {counts}"))
    for arm_tuning in results.tunings:
        for edge in arm_tuning.edges:
            noun = "range" if arm_tuning.arm.ranges else "grid"
            note = f"note: {arm_tuning.arm.name}: {edge}: a wider {noun} might find a better one"
            console.print(without_control_codes(note))


def describe_incomplete(results: StudyResults) -> list[str]:
    """The number of runs in each state, and how to go on; no line if all runs finished."""
    statuses = {state.status for _, state, _ in results.runs}
    if statuses <= {"finished"}:
        return []
    lines = [_count_runs(results)]
    if "failed" in statuses:
        lines.append("failed: the report says why; --retry_failed tries these runs again")
    if statuses & {"interrupted", "pending"}:
        lines.append("the rest: anlit study without --report_only trains it")
    return lines


def _speedups(results: StudyResults) -> tuple[str, dict[str, str]]:
    """The first baseline, and the speed-up of each arm in the first comparison that has it.

    A speed-up over another baseline names it.
    """
    comparisons = results.made_comparisons
    speedups: dict[str, str] = {}
    if not comparisons:
        return "", speedups
    first_baseline = comparisons[0].baseline.label
    for comparison in comparisons:
        baseline = comparison.baseline.label
        suffix = "" if baseline == first_baseline else f"\nover {baseline}"
        for result in comparison.results:
            if not result.group.unfinished:
                speedups.setdefault(result.label, f"{result.speedup.words}{suffix}")
    return first_baseline, speedups


def _paragraphs(results: StudyResults) -> list[str]:
    """The report in Markdown. UserError as in `check_sections`."""
    study = results.study
    check_sections(study)
    paragraphs = [
        f"# {study.title}",
        str(study.content.get("question") or "").strip(),
        _progress(results),
    ]
    sections = list(study.sections)
    if "tuning" not in dict(sections):
        sections.append(("tuning", {}))
    for name, options in sections:
        paragraphs += _section(results, name, options)
    paragraphs += ["## Failures", _failures(results)]
    paragraphs += _sources(results)
    return paragraphs


def _section(results: StudyResults, name: str, options: dict[str, Any]) -> list[str]:
    """A section in Markdown. If it fails, it says why, and the rest of the report comes."""
    try:
        return SECTIONS[name].write(results, options)
    except UserError as error:
        reason = str(error)
    except Exception as error:
        reason = report_unforeseen(error)
    echo(f"the section '{name}' could not be made: {reason}", sys.stderr)
    return [f"## {name}", f"This section could not be made: {literal(reason)}"]


def _failures(results: StudyResults) -> str:
    rows = []
    for planned, state, _ in results.runs:
        if state.status == "failed":
            rows.append([code(planned.name), literal(state.reason)])
    return markdown_table(["run", "why"], rows, left=(0, 1)) if rows else "No run failed."


def _sources(results: StudyResults) -> list[str]:
    """Data, hardware, versions and commands of the runs, in Markdown."""
    study = results.study
    runs = []
    labels = {}
    for planned, _, run in results.runs:
        if run is not None:
            labels[run.folder] = planned.arm.title
            if run.config:
                runs.append(run)
    origin = [
        f"made by: {code(results.command)}",
        f"study: {code(str(study.path))}, budget {study.budget or 'none'}",
    ]
    return sources(runs, lambda run: labels.get(run.folder), runs, origin)


def _raw_numbers(results: StudyResults) -> dict[str, Any]:
    """The numbers behind the report, for report.json.

    A comparison names its runs by their folders, as keys of `measured`. `measured` has the tuning
    runs too, so that a study goes on from its record.
    """
    study = results.study
    comparisons = results.made_comparisons
    tunings = {}
    for arm_tuning in results.tunings:
        tunings[arm_tuning.arm.name] = [
            {"setting": tuned.point.shown, "loss": tuned.loss} for tuned in arm_tuning.points
        ]
    points = []
    for measured in results.measured_arms():
        points.append({
            "arm": measured.arm.name,
            "values": measured.values,
            "losses": measured.losses,
            "failed": measured.failed,
        })  # fmt: skip
    statuses = []
    for planned, state, _ in results.runs:
        statuses.append({"name": planned.name, "status": state.status, "reason": state.reason})
    runs = [run for _, _, run in results.runs if run is not None]
    search = {}
    if study.search is not None:
        search["search"] = asdict(study.search)
    annealed = {}
    if study.annealing is not None:
        annealed["annealed"] = raw_numbers(results)
    return {
        "title": study.title,
        "path": study.path,
        "budget": study.budget,
        "command": results.command,
        "selected": {name: point.shown for name, point in results.selected.items()},
        "tuning": tunings,
        "points": points,
        "comparisons": [comparison.raw() for comparison in comparisons],
        **search,
        **annealed,
        **record_runs(comparisons, runs),
        "runs": statuses,
    }


def _count_runs(results: StudyResults) -> str:
    """`5 runs: 4 finished, 1 failed`."""
    counts = Counter[str](state.status for _, state, _ in results.runs)
    texts = []
    for status, name in STATUS_NAMES.items():
        if counts[status]:
            texts.append(f"{counts[status]} {name}")
    return f"{count_of(len(results.runs), 'run')}: {', '.join(texts)}"


def _progress(results: StudyResults) -> str:
    """The number of runs in each state and of seeds, and the arms that are not measured yet."""
    n_seeds = len(results.study.seeds)
    sentences = [f"{_count_runs(results)}."]
    if n_seeds:
        sentences.append(f"Each arm is measured on {count_of(n_seeds, 'seed')}.")
        if results.study.annealing is not None:
            lengths = ", ".join(map(str, results.study.annealing.max_steps))
            sentences.append(f"Each measured run is annealed to {lengths} steps.")
    else:
        sentences.append("Tuning only, nothing is measured.")
    counts = unequal_tuning(results.study)
    if counts:
        sentences.append(f"UNEQUAL TUNING, settings tried: {literal(counts)}.")
    unfinished_arms = []
    failed_arms = []
    for arm in results.study.arms:
        unfinished = results.unfinished_steps(arm)
        if unfinished:
            unfinished_arms.append(f"{arm.title} ({unfinished})")
        elif n_seeds and results.group(arm) is None:
            failed_arms.append(arm.title)
    if unfinished_arms:
        sentences.append(f"NOT ENDED: {'; '.join(unfinished_arms)}.")
    if failed_arms:
        sentences.append(f"NO RUN CAN BE COMPARED: {'; '.join(failed_arms)}; see Failures.")
    hours = _training_hours(results)
    if hours:
        sentences.append(f"{hours:.2f} hours of training in all.")
    return " ".join(sentences)


def _training_hours(results: StudyResults) -> float:
    seconds = []
    for planned, _, run in results.runs:
        if run is not None and len(run.curve):
            # An annealed run counts on from the seconds and steps of its stable run.
            share = 1.0
            if isinstance(planned, AnnealedRun):
                share -= planned.n_stable / planned.max_steps
            seconds.append(share * float(run.curve.seconds[-1]))
    return float(np.nansum(seconds)) / 3600
