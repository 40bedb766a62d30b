"""`anlit study`: the runs of a study's YAML, launched, and its report."""

import shlex
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from anlit.commands import COMMANDS
from anlit.compare.comparison import STUDY, read_step_times, refuse_other_report, seconds_per_token
from anlit.config.options import ToolParser, at_least
from anlit.errors import PREEMPTED, UserError
from anlit.io.provenance import cores
from anlit.io.write import output_folder
from anlit.reporting.text import echo
from anlit.study.estimate import describe_plan
from anlit.study.launch import launch
from anlit.study.plan import PlannedRun, Study, read_config
from anlit.study.read_study import read_study
from anlit.study.results import (
    StudyResults,
    plan_runs,
    read_results,
    read_tunings,
    select_points,
)
from anlit.study.reuse import find_reusable, reuse
from anlit.study.slurm import submit
from anlit.study.state import forget_failure, read_state


def main(argv: list[str]) -> int:
    """`anlit study`; 0: every run finished, 1: some failed (the report says which), 75: it was interrupted."""
    given = parser().parse_args(argv)
    if given.recompute:
        from anlit.study.recompute import recompute  # matplotlib takes a second

        for folder in given.recompute:
            for result in (
                result for comparison in recompute(folder) for result in comparison.results[1:]
            ):
                echo(f"{folder}: {result.label}: speed-up in tokens {result.speedup.words}")
        return 0
    if given.config is None:
        raise UserError(
            "the option --config is missing: name the study, such as study/convergence.yaml"
        )
    for folder in given.reuse:
        if not folder.is_dir():
            raise UserError(f"--reuse {folder} is no folder: give the output folder of a study")
    study, jobs = read_study(given.config, given.budget), given.jobs or 1
    output = Path(given.output or f"runs/{study.label}")
    name = Path(study.path).name
    refuse_other_report(output, STUDY, lambda record: Path(str(record.get("path"))).name == name
                        and record.get("budget") == study.budget)  # fmt: skip
    if not given.report_only:
        check_study(study)
    if given.dry_run:
        echo(_overview(study, output, given))
        return 0
    typed = shlex.join(["anlit", "study", *argv])
    if given.report_only:
        for trials in _phases(study, output) if given.reuse else ():
            reuse(trials, output, given.reuse)
        if not output.is_dir():
            raise UserError(
                f"--report_only finds no folder {output}: give --output, the folder of the study's runs"
            )
        if not any(
            (output / trial.name).exists()
            for trial in plan_runs(study, select_points(study, read_tunings(study, output)))
        ):
            fix = "give the --output of its runs, or the file as it was"
            raise UserError(f"--report_only finds no run of {study.path} in {output}: {fix}")
        return _report(study, output, typed)
    output_folder(str(output))
    if not (output / STUDY).exists():  # from here on the folder is this study's
        _write(study, output, typed)
    for trial in (
        plan_runs(study, select_points(study, read_tunings(study, output)))
        if given.retry_failed
        else ()
    ):
        if read_state(output / trial.name).status == "failed":
            forget_failure(output / trial.name)
    try:
        if given.slurm is None:
            echo(_overview(study, output, given))
        for trials in _phases(study, output):
            reuse(trials, output, given.reuse)
            if given.slurm is None:
                launch(trials, output, jobs, given.threads or max(1, cores() // jobs))
                continue
            again = ["study", *(word for word in argv if word != "--retry_failed")]
            if array := submit(trials, output, again, shlex.split(given.slurm), given.jobs or 0):
                echo(
                    f"submitted as job array {array}; the study goes on by itself when it has ended"
                )
                return 0
        _time_steps(study, output)
        _after(study, output)
    except KeyboardInterrupt:
        echo("interrupted: the same command goes on where this one ended", sys.stderr)
        return PREEMPTED
    return _report(study, output, typed)


def parser() -> ToolParser:
    parser = ToolParser(
        prog="anlit study",
        description="Trains a study's runs (a tuning grid for each arm, then its best setting on several seeds) and "
        "writes report.html and report.md. Started again, it goes on: only failed runs stay failed.",
        epilog="Example: anlit study --config study/convergence.yaml --budget cpu --jobs 2",
    )
    add = parser.add_argument
    folders: dict[str, Any] = {"nargs": "+", "type": Path, "metavar": "DIR"}
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
        help="write the report from what is run or taken over, start nothing",
    )
    add(
        "--retry_failed",
        action="store_true",
        help="try failed runs again, from their last checkpoint",
    )
    reuse = "folders of studies, or of their report.json, whose finished runs with equal settings are taken over"
    add("--reuse", **folders, default=[], help=reuse)
    add(
        "--recompute",
        **folders,
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
        help="CPU threads of each run (default: the cores over --jobs)",
    )
    slurm = 'submit job arrays, with options of sbatch: --slurm="--time=1:00 --gpus-per-node=1"'
    add("--slurm", nargs="?", const="", metavar="OPTIONS", help=slurm)
    return parser


def check_study(study: Study) -> None:
    """Check every run's configuration, the report's sections, the commands afterwards; raises UserError."""
    from anlit.commands.parser import ConfigurationParser, read_command  # torch
    from anlit.study.sections.registry import check_sections

    check_sections(study)
    for name, template in (study.content.get("after") or {}).items():
        try:
            program, command, *_ = [*shlex.split(template or ""), "", ""]
        except ValueError as error:
            raise UserError(
                f"after of {study.path} has {name}: {template}, which is no command ({error})"
            ) from error
        if program != "anlit" or command not in COMMANDS:
            raise UserError(f"after of {study.path} has {name}: {template}, which is no command of anlit's: give one "
                            "such as `anlit lengths {runs} --output {output}`")  # fmt: skip

    cli: ConfigurationParser | None = None
    # Each arm at each of its points once, with a seed; and each further seed once.
    first, *others = [*study.seeds, *study.tuning_seeds]
    trials = [PlannedRun(arm, point, first) for arm in study.arms for point in arm.points]
    for trial in [
        *trials,
        *(PlannedRun(study.arms[0], study.arms[0].points[0], seed) for seed in others),
    ]:
        arguments = ["fit", *trial.options(Path("runs"))]
        try:
            cli = cli or read_command(ConfigurationParser, arguments)
            cli.model_of(cli.read(arguments))
        except UserError as error:
            raise _refusal(trial, study, str(error)) from error


def _refusal(trial: PlannedRun, study: Study, sentence: str) -> UserError:
    """The parser's sentence, with the arm and the file that has the key."""
    sentence = sentence.lstrip("-")
    key = sentence.split("=")[0].split()[0].rsplit(".", 1)[-1]
    below = [config for config in trial.arm.configs if f"'{key}':" in str(read_config(config))]
    in_study = not below or any(key == name.rsplit(".", 1)[-1] for name in trial.settings)
    return UserError(f"arm '{trial.arm.name}', {study.path if in_study else below[-1]}: {sentence}")


def _overview(study: Study, output: Path, given: Namespace) -> str:
    """The study's overview with what is left of it under `output`."""
    selected = select_points(study, read_tunings(study, output))
    trials = plan_runs(study, selected)
    ended = dict.fromkeys(find_reusable(trials, output, given.reuse), "taken by --reuse")
    kept = ("finished",) if given.retry_failed else ("finished", "failed")
    ended |= {
        trial.name: state.status
        for trial in trials
        if (state := read_state(output / trial.name)).status in kept
    }
    return describe_plan(study, given.jobs or 1, selected, ended)


def _phases(study: Study, output: Path) -> Iterator[list[PlannedRun]]:
    """The runs that tune, then, once these are done, those that measure the best settings."""
    yield study.tuning_runs()
    selected = select_points(study, read_tunings(study, output))
    if not selected:
        raise UserError(
            f"none of the tuning runs of {study.path} succeeded: see fit.log in the run folders"
        )
    yield study.measuring_runs(selected)


def _time_steps(study: Study, output: Path) -> None:
    """Let the arms of a study that compares speeds take steps in turns, where that has not been measured yet."""
    results, known = read_results(study, output), seconds_per_token(read_step_times(output))
    groups = [group for arm in study.arms if (group := results.group(arm)) is not None]
    if (
        "convergence" not in dict(study.sections)
        or len(groups) < 2
        or known.keys() >= {each.key for each in groups}
    ):
        return
    from anlit.benchmarks.run_steps import time_steps  # torch

    try:
        time_steps(groups, output)
    except UserError as error:
        echo(f"{error}; the report is without speed-ups in wall-clock")


def _after(study: Study, output: Path) -> None:
    """The study's `after` commands, `name: anlit …`, on the measured runs that finished, if one is newer than folder
    `name` or was taken over later. {runs} and {output} stand for the run folders and for that folder.
    """
    trials = study.measuring_runs(select_points(study, read_tunings(study, output)))
    done = [
        folder for trial in trials if read_state(folder := output / trial.name).status == "finished"
    ]
    newest = max((folder.stat().st_mtime for folder in done), default=0.0)
    for name, template in (study.content.get("after") or {}).items() if done else ():
        stamp = output / name / f"{name}.json"
        if stamp.is_file() and stamp.stat().st_mtime > newest:
            continue
        words = shlex.split(template.replace("{runs}", shlex.join(map(str, done))))
        words = [word.replace("{output}", str(output / name)) for word in words]
        echo(f"{name}: {template}")
        if code := subprocess.run([sys.executable, "-m", *words]).returncode:
            echo(f"{name}: FAILED with exit code {code}; the report is without it")


def _write(study: Study, output: Path, typed: str) -> tuple[StudyResults, Path]:
    """The results so far and the page that is written of them."""
    from anlit.study.report import write_report

    results = read_results(study, output, typed)
    return results, write_report(results)


def _report(study: Study, output: Path, typed: str) -> int:
    from anlit.study.report import print_summary

    results, page = _write(study, output, typed)
    print_summary(results)
    echo(f"Report: {page}")
    return 0 if all(state.status == "finished" for _, state, _ in results.runs) else 1
