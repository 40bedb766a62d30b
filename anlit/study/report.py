"""A study's report: an HTML page, its Markdown twin, and the raw numbers; and recorded reports recomputed.

A section of it is a function of the results and of the options in the YAML, see docs/studies.md.
"""

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from anlit.compare.comparison import STUDY, Comparison, compare_groups, record_runs
from anlit.compare.comparison_report import section, sources
from anlit.compare.plots import plot_convergence
from anlit.compare.statistics import mean_sd
from anlit.errors import UserError
from anlit.io.write import jsonable, write_json, write_text
from anlit.reporting.page import listed, write_page
from anlit.reporting.table import NONE, SafeConsole, Table, markdown_table
from anlit.reporting.table import console as terminal
from anlit.reporting.text import code, literal, without_control_codes
from anlit.runs.folders import Run
from anlit.runs.groups import Group, learned_settings
from anlit.study.plan import Study, require
from anlit.study.record import ADVICE, read_record
from anlit.study.results import MEASURED, StudyResults, is_number
from anlit.study.sections.dynamics import dynamics
from anlit.study.sections.loss_gap import loss_gap, onset
from anlit.study.sections.scaling import scaling
from anlit.study.sections.trend import trend

STATES = {
    "finished": "finished",
    "failed": "failed",
    "interrupted": "under way or interrupted",
    "pending": "pending",
}
DIGITS = 6
"""Significant digits of a recorded number."""
NOT_COMPARED, WAITS = "no run can be compared, see Failures.", "waits for "


def write(results: StudyResults) -> Path:
    """Write report.html, report.md and report.json to the study's folder; returns the path of the page."""
    results.output.mkdir(parents=True, exist_ok=True)
    write_json(results.output / STUDY, _raw(results), indent=None)
    return write_page(results.output, "report", _paragraphs(results))


def show(results: StudyResults, console: SafeConsole | None = None) -> None:
    """Print each arm's setting with its loss and speed-up, and the settings that lie at the edge of their grid."""
    console = console or terminal()
    speeds: dict[str, str] = {}  # over the baseline of the first comparison that has the arm
    for comparison in (
        comparison for _, comparison in results.comparisons if comparison is not None
    ):
        ended = (result for result in comparison.results if not result.group.unfinished)
        speeds = {result.label: result.speedup.words for result in ended} | speeds
    head, rows = (
        ["arm", "setting", "seeds", "final loss", *(["speed-up in tokens"] if speeds else [])],
        [],
    )
    for point in results.points():
        setting = results.selected[point.arm.name].words or "as configured"
        seeds = str(len(point.losses)) + f" of {len(point.summary.values)}" * bool(point.failed)
        cells = [point.arm.title, setting, seeds, mean_sd(point.summary, 4)]
        rows.append([*cells, *([speeds.get(point.arm.title, NONE)] if speeds else [])])
    if rows:
        console.print(Table(results.study.title, head, rows, left=(0, 1)))
    for name, edge in (
        (tuning.arm.name, edge) for tuning in results.tunings for edge in tuning.edges
    ):
        console.print(
            without_control_codes(f"note: {name}: {edge}: a wider grid might find a better one")
        )


def _paragraphs(results: StudyResults) -> list[str]:
    """The report in Markdown; UserError if a section of the study's YAML, or an option of one, is not known."""
    require_sections(study := results.study)
    read = [run for _, _, run in results.runs if run is not None and run.config]
    labels = {run.folder: trial.arm.title for trial, _, run in results.runs if run is not None}
    failed = [
        [code(trial.name), literal(state.reason)]
        for trial, state, _ in results.runs
        if state.status == "failed"
    ]
    made = [
        f"made by: {code(results.command)}",
        f"study: {code(str(study.path))}, budget {study.budget or 'none'}",
    ]
    return [
        f"# {study.title}",
        str(study.content.get("question") or "").strip(),
        _progress(results),
        *(part for name, options in study.sections for part in SECTIONS[name][0](results, options)),
        *([] if "tuning" in dict(study.sections) else _tuning(results, {})),
        "## Failures",
        markdown_table(["run", "why"], failed, left=(0, 1)) if failed else "No run failed.",
        *sources(read, lambda run: labels.get(run.folder), read, made),
    ]


def _raw(results: StudyResults) -> dict[str, Any]:
    """The numbers behind the report; a comparison names its runs by their folders, as keys of `measured`, which holds
    the runs that tuned too, so that a study goes on from its record.
    """
    study, comparisons = (
        results.study,
        [comparison for _, comparison in results.comparisons if comparison is not None],
    )
    return {
        "title": study.title, "path": study.path, "budget": study.budget, "command": results.command,
        "selected": {name: choice.shown for name, choice in results.selected.items()},
        "tuning": {tuning.arm.name: [{"setting": point.setting.shown, "loss": point.loss} for point in tuning.points]
                   for tuning in results.tunings},
        "points": [{"arm": point.arm.name, "values": point.values, "losses": point.losses, "failed": point.failed}
                   for point in results.points()],
        "comparisons": [comparison.raw() for comparison in comparisons],
        **record_runs(comparisons, [run for *_, run in results.runs if run is not None]),
        "runs": [{"name": trial.name, "status": state.status, "reason": state.reason}
                 for trial, state, _ in results.runs],
    }  # fmt: skip


def _progress(results: StudyResults) -> str:
    """How many runs there are in each state, on how many seeds, and what is not measured yet."""
    seeds, states = (
        len(results.study.seeds),
        Counter[str](state.status for _, state, _ in results.runs),
    )
    counts = ", ".join(f"{states[name]} {words}" for name, words in STATES.items() if states[name])
    measured = f"Each arm is measured on {seeds} seed{'s' * (seeds > 1)}."
    sentences = [
        f"{len(results.runs)} runs: {counts}.",
        measured if seeds else "Tuning only, nothing is measured.",
    ]
    if left := [
        f"{arm.title} ({waits})" for arm in results.study.arms if (waits := results.waits_for(arm))
    ]:
        sentences.append(f"NOT ENDED: {'; '.join(left)}.")
    if failed := [
        tuning.arm.title for tuning in results.tunings if tuning.has_ended and tuning.best is None
    ]:
        sentences.append(f"Their tuning failed everywhere: {'; '.join(failed)}.")
    ends = [
        float(run.curve.seconds[-1])
        for *_, run in results.runs
        if run is not None and len(run.curve)
    ]
    if hours := np.nansum(ends) / 3600:
        sentences.append(f"{hours:.2f} hours of training in all.")
    return " ".join(sentences)


def require_sections(study: Study) -> None:
    """Raises a UserError if a section, an option of it, or an arm that one names, is not known or not given."""
    known = dict.fromkeys(name for arm in study.arms for name in (arm.base, arm.name))
    for name, options in study.sections:
        if name not in SECTIONS:
            raise UserError(
                f"{study.path} asks for the section '{name}': choose one of {', '.join(SECTIONS)}"
            )
        where, (_, needed, optional) = f"the section '{name}' of {study.path}", SECTIONS[name]
        require(where, options, needed | optional, known=True)
        require(where, options, needed, complete=True)
        for arm in (
            *(options.get("arms") or ()),
            *([options["baseline"]] if "baseline" in options else ()),
        ):
            if arm not in known:
                raise UserError(f"{where} names the arm '{arm}', which is none of "
                                + ", ".join(known))  # fmt: skip
        after = study.content.get("after") or {}
        if name == "embed" and options["name"] not in after:
            raise UserError(f"{where} has the name '{options['name']}', which is no command of `after`: "
                            + (f"choose one of {', '.join(after)}" if after else "give one there"))  # fmt: skip
        if name == "trend":
            _require_numbers(study, options, where)


def _require_numbers(study: Study, options: dict[str, Any], where: str) -> None:
    """Raises a UserError if `over` or `value` of a trend is not in every point of its arms, as a number."""
    for arm in (arm for arm in study.arms if arm.is_among(options.get("arms"))):
        points = [arm.varied.shown | point.shown for point in arm.points]
        known = [
            *MEASURED,
            *(key for key in points[0] if all(is_number(point.get(key)) for point in points)),
        ]
        for key in ("over", "value"):
            if (name := options.get(key, "loss")) not in (
                known if key == "over" else ["loss", *known]
            ):
                raise UserError(f"{where} has {key} '{name}', which is no number of arm '{arm.name}': vary or tune it, "
                                f"or choose one of {', '.join(known)}")  # fmt: skip


def _convergence(results: StudyResults, options: dict[str, Any]) -> list[str]:
    parts: list[str] = []
    for number, (planned, comparison) in enumerate(results.comparisons):
        waits = {arm: results.waits_for(arm) for arm in planned.arms}
        missing = [f"- {arm.title}: {f'{WAITS}{waits[arm]}.' if waits[arm] else NOT_COMPARED}" for arm in planned.arms
                   if waits[arm] or results.group(arm) is None]  # fmt: skip
        if comparison is None:
            yet = f"The baseline, {planned.baseline.title}, has no finished run yet, so nothing is compared."
            parts += [f"## {planned.title}", yet, "\n".join(missing)]
            continue
        parts += [f"## {planned.title}", *_compared(comparison, missing, explained=number > 0)]
    return parts


def _compared(comparison: Comparison, missing: list[str], explained: bool) -> list[str]:
    """A comparison in Markdown with its notes and picture; `missing` are lines on arms that are not in it."""
    plot_convergence(comparison)
    return [
        *section(comparison, explained),
        "\n".join(filter(None, [listed(comparison.notes), *missing])),
    ]


def _tuning(results: StudyResults, options: dict[str, Any]) -> list[str]:
    """Each tuned arm's best setting, where its grid was too narrow, and all settings; every report has this."""
    if not results.tunings:
        return []
    seeds = [seed.name for seed in results.study.tuning_seeds]
    counts = sorted({len(tuning.points) for tuning in results.tunings})
    equal = f"{counts[0]} settings for each arm"
    budget = equal if len(counts) == 1 else f"UNEQUAL: {counts[0]} to {counts[-1]} settings"
    rows, settings = [], []
    for tuning in results.tunings:
        best, second, *_ = tuning.points
        states = [state for point in tuning.points for state in point.states]
        done, failed = (
            sum(state.has_ended for state in states),
            sum(state.status == "failed" for state in states),
        )
        known = tuning.best is not None
        found = (
            best.setting.words
            if known
            else NONE
            if best.loss == math.inf
            else f"so far {best.setting.words}"
        )
        has_numbers = tuning.best is not None and any(map(is_number, tuning.best.shown.values()))
        edge = "; ".join(tuning.edges) or ("inside the grid" if has_numbers else NONE)
        rows.append([tuning.arm.title, f"{done} of {len(states)}", str(failed), found, _loss(best.loss),
                     _loss(second.loss), edge])  # fmt: skip
        for point in tuning.points:
            words = ", ".join(
                literal(f"{state.status} {state.reason}".strip()) for state in point.states
            )
            settings.append([tuning.arm.title, point.setting.words, _loss(point.loss), words])
    head = [
        "arm",
        "runs done",
        "failed",
        "best setting",
        "its loss",
        "second best",
        "edge of the grid",
    ]
    return [
        "## Tuning",
        f"Tuning budget: {budget}, each trained on {len(seeds)} seed{'s' * (len(seeds) > 1)} ({', '.join(seeds)}) that "
        "the measurement does not use, in full length. The best by final validation loss (nats per token) is measured. "
        "A best value at the edge of its grid means that a wider grid might find a better one.",
        markdown_table(head, rows),
        "## Tuning, all settings",
        markdown_table(["arm", "setting", "validation loss", "state"], settings, left=(0, 1, 3)),
    ]


def _embed(results: StudyResults, options: dict[str, Any]) -> list[str]:
    name = options["name"]
    twin = results.output / name / f"{name}.md"
    if not twin.is_file():
        return [f"## {name.capitalize()}", "Not measured yet."]
    lines = [f"#{line}" if line.startswith("#") else line for line in twin.read_text().splitlines()]
    return [f"## {name.capitalize()}", "\n".join(lines).replace("](", f"]({name}/")]


def _loss(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else NONE


NUMBER = (int, float)
SECTIONS: dict[str, tuple[Callable[[StudyResults, dict[str, Any]], list[str]], dict[str, Any], dict[str, Any]]] = {
    "convergence": (_convergence, {}, {}), "tuning": (_tuning, {}, {}),
    "trend": (trend, {"over": str}, {"value": str, "arms": [str]}),
    "loss_gap": (loss_gap, {"baseline": str, "each": str}, {"over": str}),
    "scaling": (scaling, {}, {"resamples": int}),
    "onset": (onset, {"loss": NUMBER, "after": NUMBER, "baseline": str}, {}),
    "dynamics": (dynamics, {}, {"arms": [str]}), "embed": (_embed, {"name": str}, {}),
}  # fmt: skip
"""Name → function, the options that it needs, and those that it may have."""


def recompute(folder: Path) -> list[Comparison]:
    """The comparisons recorded in `folder`, computed again and written; UserError without a whole report.json."""
    (record, runs), path, page = read_record(folder), folder / STUDY, folder / "report.md"
    try:
        comparisons = [
            _compare(folder, n, own, record, runs) for n, own in enumerate(record["comparisons"], 1)
        ]
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration) as error:
        raise UserError(f"{path} is no report of a study ({error}): {ADVICE}") from error
    every = record_runs(comparisons, [*runs.values()])
    record |= {"comparisons": [comparison.raw() for comparison in comparisons], **every}
    write_json(path, jsonable(record, DIGITS), indent=None)
    if page.is_file():
        sections = page.read_text(encoding="utf-8").split("\n## ")
        for number, comparison in enumerate(comparisons):
            for place, old in enumerate(sections):
                if f"({comparison.plot.name})" in old:
                    title, *lines = old.splitlines()
                    missing = [
                        line
                        for line in lines
                        if line.endswith(NOT_COMPARED) or f": {WAITS}" in line
                    ]
                    parts = [title, *_compared(comparison, missing, explained=number > 0)]
                    sections[place] = "\n\n".join(filter(None, parts)) + "\n"
        write_text(page, "\n## ".join(sections).rstrip("\n") + "\n")
    return comparisons


def _compare(
    folder: Path,
    number: int,
    recorded: dict[str, Any],
    record: dict[str, Any],
    every: dict[str, Run],
) -> Comparison:
    measured, runs, groups = (
        record["measured"],
        {name: every[name] for name in recorded["runs"]},
        [],
    )
    labels = [group["label"] for group in recorded["groups"]]
    if len({*labels}) < len(labels):
        raise ValueError(f"of {labels} two are the same")
    for label in labels:
        # The label of a run is that of the first comparison that has it. One that counts nowhere is in the group of
        # its settings, which notes that it is left out.
        settings = next(learned_settings(run) for name, run in runs.items()
                        if measured[name]["counted_in"] == label and run.comparable)  # fmt: skip
        own = (run for name, run in runs.items() if measured[name]["counted_in"] == label
               or (measured[name]["counted_in"] is None and learned_settings(run) == settings))  # fmt: skip
        groups.append(Group(label, tuple(own), settings))
    baseline = next(group for group in groups if group.label == recorded["baseline"])
    return compare_groups(groups, baseline, [*runs.values()], folder, recorded["command"], f"{number}-",
                          steps=record["paired_steps"])  # fmt: skip
