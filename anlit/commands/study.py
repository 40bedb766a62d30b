"""`anlit study`: starts the runs of a study's YAML, and writes its report."""

import shlex
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from anlit.commands.annealed_runs import begin_annealed_runs
from anlit.commands.study_checks import check_study
from anlit.compare.comparison import STUDY, read_step_times, refuse_other_report, seconds_per_token
from anlit.compare.statistics import partial_reach
from anlit.config.labels import CONFIG, modules_to_import
from anlit.config.options import ToolParser, at_least
from anlit.errors import PREEMPTED, UserError
from anlit.io.cores import cores
from anlit.io.read import read_yaml
from anlit.io.write import output_folder
from anlit.reporting.table import console
from anlit.reporting.text import echo
from anlit.study.estimate import describe_plan
from anlit.study.launch import launch
from anlit.study.plan import PlannedRun, Study
from anlit.study.read_study import read_study
from anlit.study.results import (
    StudyResults,
    plan_runs,
    read_results,
    read_selection,
)
from anlit.study.reuse import find_reusable, reuse, selection_after_reuse
from anlit.study.slurm import submit
from anlit.study.state import forget_failure, read_state


def main(argv: list[str]) -> int:
    """Run `anlit study` and return 0; 1 if runs failed, 75 after an interruption."""
    options = parser().parse_args(argv)
    if options.recompute:
        _recompute_comparisons(options.recompute)
        return 0
    study = _read_study(options)
    output = Path(options.output or f"runs/{study.label}")
    _refuse_other_study(study, output)
    if not options.report_only:
        check_study(study, output)
    if options.dry_run:
        echo(_overview(study, output, options))
        return 0
    command = shlex.join(["anlit", "study", *argv])
    if options.report_only:
        _collect_runs(study, output, options)
        return _report(study, output, command)
    output_folder(str(output))
    if not (output / STUDY).exists():
        _write_report(study, output, command)  # which makes the folder this study's
    if options.retry_failed:
        _forget_failures(study, output)
    try:
        if not _train_all(study, output, options, argv):
            return 0
        measure_step_times(study, output)
        _run_after_commands(study, output)
    except KeyboardInterrupt:
        echo("interrupted: the same command goes on where this one ended", sys.stderr)
        return PREEMPTED
    return _report(study, output, command)


def parser() -> ToolParser:
    parser = ToolParser(
        prog="anlit study",
        description="Trains a study's runs (a tuning grid for each arm, then its best setting on "
        "several seeds) and writes report.html and report.md. Started again, it goes on: only "
        "failed runs stay failed.",
        epilog="Example: anlit study --config study/convergence.yaml --budget cpu --jobs 2",
    )
    add = parser.add_argument
    add("--config", metavar="FILE", help="the study, such as study/convergence.yaml")
    add("--budget", metavar="NAME", help="one of the file's budgets: cpu, 1gpu …")
    add(
        "--output",
        metavar="DIR",
        help="folder of the run folders and the report (default: runs/<study>-<budget>)",
    )
    add(
        "--dry_run",
        action="store_true",
        help="print the runs, their tokens and the estimated hours, start nothing",
    )
    add(
        "--report_only",
        action="store_true",
        help="write the report on the present runs, start nothing",
    )
    add(
        "--retry_failed",
        action="store_true",
        help="try failed runs again, from their last checkpoint",
    )
    add(
        "--reuse",
        nargs="+",
        type=Path,
        metavar="DIR",
        default=[],
        help="folders of studies, or of their report.json, whose finished runs with equal settings "
        "are taken over",
    )
    add(
        "--recompute",
        nargs="+",
        type=Path,
        metavar="DIR",
        help="compute the comparisons in these folders' report.json again from their curves",
    )
    add(
        "--jobs",
        type=at_least(1),
        metavar="N",
        help="runs at the same time (1); with --slurm, tasks at once (all)",
    )
    add(
        "--threads",
        type=at_least(1),
        metavar="N",
        help="CPU threads of each run, shared by its ranks (default: the cores over --jobs)",
    )
    add(
        "--slurm",
        nargs="?",
        const="",
        metavar="OPTIONS",
        help='submit job arrays, with options of sbatch: --slurm="--time=1:00 --gpus-per-node=1"',
    )
    return parser


def measure_step_times(study: Study, output: Path) -> None:
    """Time training steps of the arms in turns, if the report compares speeds and lacks them."""
    results = read_results(study, output)
    groups = []
    for arm in study.arms:
        group = results.group(arm)
        if group is not None:
            groups.append(group)
    measured_keys = seconds_per_token(read_step_times(output)).keys()
    is_measured = measured_keys >= {group.key for group in groups}
    if "convergence" not in dict(study.sections) or len(groups) < 2 or is_measured:
        return
    from anlit.benchmarks.run_steps import time_steps  # torch

    try:
        time_steps(groups, output)
    except UserError as error:
        echo(f"{error}; the report is without speed-ups in wall-clock")


def _read_study(options: Namespace) -> Study:
    if options.config is None:
        fix = "name the study, such as study/convergence.yaml"
        raise UserError(f"the option --config is missing: {fix}")
    for folder in options.reuse:
        if not folder.is_dir():
            raise UserError(f"--reuse {folder} is not a folder: give the output folder of a study")
    return read_study(options.config, options.budget)


def _refuse_other_study(study: Study, output: Path) -> None:
    """Raise UserError if the folder has the report of another study or budget."""
    file_name = Path(study.path).name

    def is_same_study(record: dict[str, Any]) -> bool:
        has_same_file = Path(str(record.get("path"))).name == file_name
        return has_same_file and record.get("budget") == study.budget

    refuse_other_report(output, STUDY, is_same_study)


def _recompute_comparisons(folders: list[Path]) -> None:
    from anlit.study.recompute import recompute  # matplotlib takes a second

    for folder in folders:
        for comparison in recompute(folder):
            for result in comparison.results[1:]:
                speedup = f"speed-up in tokens {result.speedup.words}"
                echo(f"{folder}: {result.label}: {partial_reach(result.speedup) or speedup}")


def _collect_runs(study: Study, output: Path, options: Namespace) -> None:
    """Take over runs of `--reuse` for a report. Raises UserError if the study has no run at all."""
    if options.reuse:
        for runs in _phases(study, output):
            reuse(runs, output, options.reuse)
    if not output.is_dir():
        fix = "give --output, the folder of the study's runs"
        raise UserError(f"--report_only finds no folder {output}: {fix}")
    folders = [output / run.name for run in _planned_runs(study, output)]
    if not any(folder.exists() for folder in folders):
        fix = "give the --output of its runs, or the file as it was"
        raise UserError(f"--report_only finds no run of {study.path} in {output}: {fix}")


def _forget_failures(study: Study, output: Path) -> None:
    for run in _planned_runs(study, output):
        if read_state(output / run.name).status == "failed":
            forget_failure(output / run.name)


def _train_all(study: Study, output: Path, options: Namespace, argv: list[str]) -> bool:
    """Train the runs of all phases. Return False if a job array was submitted in place of it."""
    n_jobs = options.jobs or 1
    n_threads = options.threads or max(1, cores() // n_jobs)
    if options.slurm is None:
        echo(_overview(study, output, options))
    for runs in _phases(study, output):
        reuse(runs, output, options.reuse)
        begin_annealed_runs(runs, output)
        if options.slurm is None:
            launch(runs, output, n_jobs, n_threads)
            continue
        repeated = ["study", *(argument for argument in argv if argument != "--retry_failed")]
        sbatch_options = shlex.split(options.slurm)
        array = submit(runs, output, repeated, sbatch_options, options.jobs or 0)
        if array:
            echo(f"submitted as job array {array}; the study goes on by itself when it has ended")
            return False
    return True


def _phases(study: Study, output: Path) -> Iterator[Sequence[PlannedRun]]:
    """Yield the runs that tune, the runs that measure the best settings, and the annealed runs.

    Each phase needs the runs of the phase before.
    """
    yield study.tuning_runs()
    selected = read_selection(study, output)
    if not selected:
        fix = "see fit.log in the run folders"
        raise UserError(f"none of the tuning runs of {study.path} succeeded: {fix}")
    yield study.measuring_runs(selected)
    yield study.annealed_runs(selected)


def _planned_runs(study: Study, output: Path) -> list[PlannedRun]:
    return plan_runs(study, read_selection(study, output))


def _overview(study: Study, output: Path, options: Namespace) -> str:
    """Return the study's overview with the runs that are not done under `output`."""
    selected = selection_after_reuse(study, output, options.reuse)
    runs = plan_runs(study, selected)
    final_states = ("finished",) if options.retry_failed else ("finished", "failed")
    reasons = dict.fromkeys(find_reusable(runs, output, options.reuse), "taken by --reuse")
    for run in runs:
        status = read_state(output / run.name).status
        if status in final_states:
            reasons[run.name] = status
    return describe_plan(study, options.jobs or 1, selected, reasons)


def _run_after_commands(study: Study, output: Path) -> None:
    """Run the study's `after` commands, `name: anlit …`, on the measured runs that finished.

    With `anneal` these are the annealed runs. A command is up to date if folder `name` is newer
    than all these runs. In a command `{runs}` stands for the run folders. `{output}` stands for the
    command's folder. A command imports the modules of classes that the runs have from other
    packages; the runs have imported them too.
    """
    finished_folders = []
    selected = read_selection(study, output)
    for run in study.annealed_runs(selected) or study.measuring_runs(selected):
        if read_state(output / run.name).status == "finished":
            finished_folders.append(output / run.name)
    if not finished_folders:
        return
    newest = max(folder.stat().st_mtime for folder in finished_folders)
    run_folders = shlex.join(map(str, finished_folders))
    configurations = [read_yaml(folder / CONFIG, dict) for folder in finished_folders]
    imports = []
    for module in modules_to_import(configurations):
        imports += ["--import", module]
    for name, template in (study.content.get("after") or {}).items():
        result_file = output / name / f"{name}.json"
        if result_file.is_file() and result_file.stat().st_mtime > newest:
            continue
        command = []
        for word in shlex.split(template.replace("{runs}", run_folders)):
            command.append(word.replace("{output}", str(output / name)))
        echo(f"{name}: {template}")
        exit_code = subprocess.run([sys.executable, "-m", *command, *imports]).returncode
        if exit_code:
            echo(f"{name}: FAILED with exit code {exit_code}; the report is without it")


def _write_report(study: Study, output: Path, command: str) -> tuple[StudyResults, Path]:
    """Write the report on the results so far; return the results and the page."""
    from anlit.study.report import write_report

    results = read_results(study, output, command)
    return results, write_report(results)


def _report(study: Study, output: Path, command: str) -> int:
    """Write and print the report; return 0 if every run finished, else 1."""
    from anlit.study.report import describe_incomplete, print_summary

    results, page = _write_report(study, output, command)
    print_summary(results, console())
    echo(f"Report: {page}")
    missing_lines = describe_incomplete(results)
    for line in missing_lines:
        echo(line)
    return 1 if missing_lines else 0
