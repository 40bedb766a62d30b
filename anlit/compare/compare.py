"""`anlit compare`: groups runs by configuration, finds the baseline, writes picture, report and raw numbers."""

import math
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from anlit.compare.comparison import (
    COMPARISON,
    Comparison,
    compare_groups,
    record_runs,
    refuse_other_report,
)
from anlit.compare.comparison_report import section, show, sources
from anlit.compare.notes import refuse_other_tokenizers
from anlit.compare.statistics import Summary
from anlit.config.labels import ARCHITECTURES
from anlit.errors import UserError
from anlit.io.write import output_folder, write_json, writing
from anlit.reporting.page import listed, write_page
from anlit.reporting.text import code, literal
from anlit.runs.folders import find_runs, load_run
from anlit.runs.groups import Group, group_runs

STANDARD = ARCHITECTURES["GPT"]
TimeSteps = Callable[[list[Group], Path], None]


def compare(
    runs: list[str], output: str, baseline: str | None = None, time_steps: TimeSteps | None = None
) -> Comparison:
    """Compares run folders, or all below folders; writes report.html, report.md, convergence.json and the picture.

    Args:
        baseline: A label, an architecture or a run folder; by default the GPT+ group, and of several
            the one with the lowest mean final validation loss.
        time_steps: Times steps of every configuration in turns, given the groups and the folder. Without it the
            report uses what an earlier call measured for `output`.

    Raises:
        UserError: Nothing to compare, no such baseline, other tokenizers, `output` not writable or of other runs.
    """
    loaded = [load_run(folder) for folder in find_runs(runs)]
    every = group_runs(loaded)
    groups = [group for group in every if group.counted]
    if not groups:
        raise UserError(f"None of the {len(loaded)} runs in {', '.join(runs)} has a configuration and a finite "
                        "validation loss: wait for the first validation, or give other runs.")  # fmt: skip
    chosen, notes = _find_baseline(groups, baseline)
    refuse_other_tokenizers(groups)
    folder = output_folder(output)
    named = [] if baseline is None else ["--baseline", baseline]
    measured = ["--measure_steps"] if time_steps else []
    command = shlex.join(["anlit", "compare", *runs, "--output", output, *named, *measured])
    names = {str(run.folder) for run in loaded}
    refuse_other_report(
        folder, COMPARISON, lambda record: {*map(str, record.get("runs") or ())} <= names
    )
    if time_steps is not None:
        time_steps([chosen, *(group for group in groups if group is not chosen)], folder)
    comparison = compare_groups(every, chosen, loaded, folder, command)
    comparison = replace(comparison, notes=(*notes, *comparison.notes))
    from anlit.compare import plots  # matplotlib takes a second: errors do not wait for it

    counted = [run for result in comparison.results for run in result.group.counted]
    with writing(folder):
        plots.plot_convergence(comparison)
        write_json(folder / COMPARISON, comparison.raw() | record_runs([comparison]), indent=None)
        write_page(folder, "report", [
            "# Convergence", f"Baseline: **{literal(chosen.label)}**", "## Comparison", *section(comparison),
            "## Notes and warnings", listed(comparison.notes) or "None.",
            *sources(loaded, comparison.label_of, counted, [f"compared with: {code(command)}"]),
        ])  # fmt: skip
    show(comparison)
    return comparison


def _find_baseline(groups: list[Group], name: str | None) -> tuple[Group, list[str]]:
    """The group that the others are compared with, and notes on how it was chosen."""
    labels = "; ".join(repr(group.label) for group in groups)
    if name is not None:
        folder, spelled = Path(name).resolve(), name.casefold()
        named = [group for group in groups if group.label.casefold() == spelled
                 or any(run.folder.resolve() == folder for run in group.runs)]  # fmt: skip
        named = named or [group for group in groups if group.architecture.casefold() == spelled]
        if len(named) != 1:
            fault = (
                "names more than one group"
                if named
                else "is none of the groups that can be compared"
            )
            raise UserError(
                f"--baseline {name!r} {fault}: give a run folder or one of the labels {labels}."
            )
        return named[0], []
    standard = [group for group in groups if group.architecture == STANDARD]
    if not standard:
        raise UserError(
            f"No {STANDARD} run to compare with: name the baseline with --baseline, one of {labels}."
        )
    best = min(
        standard,
        key=lambda group: (group.unfinished, Summary(group.final_losses()).mean or math.inf),
    )
    note = f"Baseline: of {len(standard)} {STANDARD} groups, {best.label!r} has the lowest mean final loss."
    return best, [note] * (len(standard) > 1)
