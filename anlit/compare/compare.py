"""`anlit compare`: a report on run folders, with a picture and the raw numbers.

A group is a configuration: runs that differ only in their seeds. Its counted runs are the runs
behind its numbers.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from anlit.compare.comparison import (
    COMPARISON,
    STUDY,
    Comparison,
    compare_groups,
    record_runs,
    refuse_other_report,
)
from anlit.compare.comparison_report import section, show, sources
from anlit.compare.notes import differs_in_tuning_alone, note_on_model
from anlit.compare.statistics import Summary
from anlit.compare.tokenizers import with_common_measure
from anlit.config.labels import ARCHITECTURES
from anlit.errors import UserError
from anlit.io.read import read_json
from anlit.io.write import output_folder, write_json, writing
from anlit.reporting.page import listed, write_page
from anlit.reporting.text import code, literal
from anlit.runs.folders import Run, find_runs, load_run
from anlit.runs.groups import Group, counted_runs, group_runs

STANDARD = ARCHITECTURES["GPT"]
"""The architecture of the baseline, if the user names none."""
TimeSteps = Callable[[list[Group], Path], None]
"""Times steps of groups in turns, and writes the times into a folder."""


def compare(
    paths: list[str],
    output: str,
    baseline: str | None = None,
    time_steps: TimeSteps | None = None,
    command: str = "anlit compare",
) -> Comparison:
    """Compare runs with a baseline.

    Writes report.html, report.md, convergence.json and the picture into `output`.

    Args:
        paths: Run folders, or folders above run folders.
        output: The folder of the report.
        baseline: A label, an architecture or a run folder. By default it is the GPT+
            group with the lowest mean final validation loss.
        time_steps: Called with the groups, the baseline first, and the folder. Without it the
            report uses the times that an earlier call left in `output`.
        command: The command line that the report names.

    Raises:
        UserError: There is nothing to compare, or no such baseline. Tokenizers differ and a run
            has no bits per byte. `output` is not writable, or has a report on runs that are not
            in `paths`.
    """
    runs = [load_run(folder) for folder in find_runs(paths)]
    groups = with_common_measure(group_runs(runs))
    counted = [group for group in groups if group.counted]
    if not counted:
        raise UserError(
            f"none of the {len(runs)} runs in {', '.join(paths)} has a configuration and a finite "
            "validation loss: wait for the first validation, or give other runs"
        )
    baseline_group, notes = _find_baseline(counted, baseline)
    folder = output_folder(output)
    _refuse_report_of_other_runs(folder, runs)
    if time_steps is not None:
        compared = [group for group in counted if group is not baseline_group]
        time_steps([baseline_group, *compared], folder)
    comparison = compare_groups(groups, baseline_group, runs, folder, command)
    notes += _notes_on_studies(runs, paths)
    for group in counted:
        if group is not baseline_group:
            notes += note_on_model(group, baseline_group)
    comparison = replace(comparison, notes=(*notes, *comparison.notes))
    _write(comparison)
    show(comparison)
    return comparison


def _notes_on_studies(runs: Sequence[Run], paths: Sequence[str]) -> list[str]:
    """Tell of runs that were found in a study's folder: some of them chose its settings."""
    given = {Path(path) for path in paths}
    folders = {run.folder.parent for run in runs if run.folder not in given}
    notes = []
    for folder in sorted(folders):
        record = read_json(folder / STUDY, {}, "repeat anlit study", missing={})
        if record.get("tuning"):
            notes.append(
                f"{folder}: the folder of a study, whose TUNING RUNS count as seeds here; the "
                "study's own report leaves them out."
            )
    return notes


def _refuse_report_of_other_runs(folder: Path, runs: Sequence[Run]) -> None:
    """Raise UserError if `folder` has a report on runs that are not among `runs`.

    A report on fewer runs is replaced, so that a comparison can grow.
    """
    folders = {str(run.folder) for run in runs}
    refuse_other_report(
        folder, COMPARISON, lambda record: {*map(str, record.get("runs") or ())} <= folders
    )


def _write(comparison: Comparison) -> None:
    """Write the picture, the raw numbers and the page."""
    from anlit.compare import plots  # matplotlib takes a second: errors do not wait for it

    folder = comparison.output
    counted = counted_runs(result.group for result in comparison.results)
    commands = [f"compared with: {code(comparison.command)}"]
    with writing(folder):
        plots.plot_convergence(comparison)
        write_json(folder / COMPARISON, comparison.raw() | record_runs([comparison]), indent=None)
        blocks = [
            "# Convergence",
            f"Baseline: **{literal(comparison.baseline.label)}**",
            "## Comparison",
            *section(comparison),
            "## Notes and warnings",
            listed(comparison.notes) or "None.",
            *sources(comparison.runs, comparison.label_of, counted, commands),
        ]
        write_page(folder, "report", blocks)


def _find_baseline(groups: list[Group], name: str | None) -> tuple[Group, list[str]]:
    """The baseline among groups, and notes on how it was chosen. UserError if there is none."""
    labels = "; ".join(repr(group.label) for group in groups)
    if name is not None:
        group = _baseline_named(groups, name, labels)
        return group, list(_notes_on_weak_baseline(group, groups))
    standard = [group for group in groups if group.architecture == STANDARD]
    if not standard:
        raise UserError(
            f"no {STANDARD} run to compare with: name the baseline with --baseline, one of {labels}"
        )
    best = min(standard, key=_rank)
    notes = []
    if len(standard) > 1:
        reason = f"{best.label!r} has the lowest mean final loss"
        if not best.unfinished and any(group.unfinished for group in standard):
            reason += " of those that finished"
        elif not best.lost and any(group.lost for group in standard):
            reason += " of those without a LOST run"
        notes.append(f"Baseline: of {len(standard)} {STANDARD} groups, {reason}.")
    return best, notes


def _notes_on_weak_baseline(baseline: Group, groups: Sequence[Group]) -> Iterator[str]:
    """Tell if the same model with another tuning ends lower than a baseline that the user named."""
    loss = Summary(baseline.final_losses()).mean
    for group in groups:
        other_loss = Summary(group.final_losses()).mean
        if not (loss and other_loss and other_loss < loss) or group.unfinished:
            continue
        if differs_in_tuning_alone(group, baseline):
            losses = f"at {other_loss:.4f}, the baseline at {loss:.4f}"
            consequence = "speed-ups over a worse tuned baseline are too good"
            yield f"Baseline: {group.label!r} ends LOWER, {losses}; {consequence}."


def _rank(group: Group) -> tuple[bool, float]:
    """Finished groups first, then by loss."""
    return group.unfinished, Summary(group.final_losses()).mean or math.inf


def _baseline_named(groups: list[Group], name: str, labels: str) -> Group:
    """The group with this label, run folder or name of a run, else with this architecture."""
    spelled = name.casefold()
    folder = Path(name).resolve()
    named = [group for group in groups if _has_name(group, spelled, folder)]
    if not named:
        named = [group for group in groups if group.architecture.casefold() == spelled]
    if len(named) == 1:
        return named[0]
    fault = "names more than one group" if named else "is none of the groups that can be compared"
    fix = f"give a run folder or one of the labels {labels}"
    raise UserError(f"--baseline {name!r} {fault}: {fix}")


def _has_name(group: Group, spelled: str, folder: Path) -> bool:
    """Whether a group has this label, or a run with this name or folder."""
    names = {run.name.casefold() for run in group.runs if run.name}
    folders = {run.folder.resolve() for run in group.runs}
    return spelled in {group.label.casefold(), *names} or folder in folders
