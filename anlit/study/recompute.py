"""The comparisons of a recorded study, computed again from its curves."""

from pathlib import Path
from typing import Any

from anlit.compare.comparison import STUDY, Comparison, compare_groups, record_runs
from anlit.errors import UserError
from anlit.io.write import jsonable, write_json, write_text
from anlit.runs.folders import Run
from anlit.runs.groups import Group, learned_settings
from anlit.study.record import ADVICE, read_record
from anlit.study.sections.convergence import compared

DIGITS = 6
"""Significant digits of a recorded number."""
SECTION_START = "\n## "


def recompute(folder: Path) -> list[Comparison]:
    """Compute the comparisons recorded in `folder` again, and write them.

    Raises:
        UserError: `folder` has no complete report.json.
    """
    record, runs = read_record(folder)
    comparisons = []
    try:
        for number, entry in enumerate(record["comparisons"], 1):
            comparisons.append(_compare(folder, f"{number}-", entry, record, runs))
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration) as error:
        cause = f"{folder / STUDY} is not a report of a study ({error})"
        raise UserError(f"{cause}: {ADVICE}") from error
    record["comparisons"] = [comparison.raw() for comparison in comparisons]
    record |= record_runs(comparisons, list(runs.values()))
    write_json(folder / STUDY, jsonable(record, DIGITS), indent=None)
    page = folder / "report.md"
    if page.is_file():
        _update_page(page, comparisons)
    return comparisons


def _update_page(page: Path, comparisons: list[Comparison]) -> None:
    """Replace the sections of a page that show the pictures of the comparisons."""
    sections = page.read_text(encoding="utf-8").split(SECTION_START)
    for number, comparison in enumerate(comparisons):
        for index, section in enumerate(sections):
            if f"({comparison.plot.name})" in section:
                head, _, _ = section.partition("\n\n- ")  # the findings are a list
                paragraphs = [head, *compared(comparison, is_explained=number > 0)]
                sections[index] = "\n\n".join(filter(None, paragraphs)) + "\n"
    write_text(page, SECTION_START.join(sections).rstrip("\n") + "\n")


def _compare(
    folder: Path,
    file_prefix: str,
    entry: dict[str, Any],
    record: dict[str, Any],
    all_runs: dict[str, Run],
) -> Comparison:
    """Make a recorded comparison `entry` again."""
    counted_in = {}
    for name in entry["runs"]:
        counted_in[name] = record["measured"][name]["counted_in"]
    labels = [group["label"] for group in entry["groups"]]
    if len(set(labels)) < len(labels):
        raise ValueError(f"of {labels} two are the same")
    groups = [_group(label, counted_in, all_runs) for label in labels]
    baseline = next(group for group in groups if group.label == entry["baseline"])
    runs = [all_runs[name] for name in entry["runs"]]
    return compare_groups(
        groups,
        baseline,
        runs,
        folder,
        entry["command"],
        file_prefix,
        steps=record["paired_steps"],
    )


def _group(label: str, counted_in: dict[str, str | None], all_runs: dict[str, Run]) -> Group:
    """Make the group of a label; `counted_in` has the recorded label of each run.

    The label of a run is its label in the first comparison that has it. A run that counts nowhere
    joins the group with its settings, which notes that it is left out.
    """
    labelled = [all_runs[name] for name, run_label in counted_in.items() if run_label == label]
    settings = next(learned_settings(run) for run in labelled if run.comparable)
    runs = []
    for name, run_label in counted_in.items():
        run = all_runs[name]
        is_uncounted_member = run_label is None and learned_settings(run) == settings
        if run_label == label or is_uncounted_member:
            runs.append(run)
    return Group(label, tuple(runs), settings)
