"""Submit the runs of a study to a cluster, as a Slurm job array of docker/slurm/train.sbatch.

That script starts and continues a run with its signals, requeues and images. The array only chooses
the options of each task. (submitit starts Python functions instead.)
"""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from anlit.errors import UserError
from anlit.study.plan import PlannedRun
from anlit.study.state import note_start, read_launches, read_state

TRAIN_SCRIPT = Path("docker/slurm/train.sbatch")
ARRAY_SCRIPT = """\
#!/usr/bin/env bash
# A run of a study for each task of the array: its line in the file has the options of `anlit fit`.
set -euo pipefail
line=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {options})
eval "set -- $line"
exec bash {train} "$@"
"""


def submit(
    runs: Sequence[PlannedRun],
    output: Path,
    continue_arguments: list[str],
    options: list[str],
    max_tasks: int,
) -> str | None:
    """Submit the runs that have not ended as a job array.

    When the array has ended, also after failures, `anlit` continues the study.

    Args:
        runs: The runs of a phase.
        output: The folder of the study.
        continue_arguments: Arguments of the `anlit` that continues the study.
        options: Options of sbatch. They win over the options in docker/slurm/train.sbatch.
        max_tasks: Tasks at the same time. 0 for no limit.

    Returns:
        The number of the array, or None if all runs have ended.

    Raises:
        UserError: train.sbatch is not in the working directory, or sbatch refuses. An earlier array
            with some of the runs has not ended.
    """
    unfinished = [run for run in runs if not read_state(output / run.name).has_ended]
    if not unfinished:
        return None
    if not TRAIN_SCRIPT.is_file():
        raise UserError(f"{TRAIN_SCRIPT} is not here: run anlit study --slurm in anlit's checkout")
    _check_earlier_arrays(unfinished, output)
    folder = output / "slurm"
    folder.mkdir(parents=True, exist_ok=True)
    script = _write_scripts(unfinished, output, folder)
    # Slurm reads only the #SBATCH options of the submitted file; the name of the log is our own.
    text = TRAIN_SCRIPT.read_text(encoding="utf-8")
    directives = re.findall(r"^#SBATCH (?!--output)(\S+)$", text, re.MULTILINE)
    tasks = f"0-{len(unfinished) - 1}"
    if max_tasks:
        tasks += f"%{max_tasks}"
    log = f"--output={folder}/%A_%a.out"
    array = _sbatch(*directives, f"--array={tasks}", log, *options, str(script))
    for run in unfinished:
        note_start(output / run.name, f"slurm {array}")
    command = shlex.join([sys.executable, "-m", "anlit", *continue_arguments])
    _sbatch(
        f"--dependency=afterany:{array}",
        "--ntasks=1",
        "--cpus-per-task=1",
        f"--output={folder}/study-%j.out",
        "--job-name=anlit-study",
        f"--wrap={command}",
    )
    return array


def _check_earlier_arrays(runs: Sequence[PlannedRun], output: Path) -> None:
    """Raise UserError if an array still has some of the runs: both would write their folders."""
    if not shutil.which("squeue"):
        return
    starts = set()
    for run in runs:
        launches = read_launches(output / run.name)
        if launches:
            starts.add(launches[-1]["how"])
    for start in starts:
        if not start.startswith("slurm "):
            continue
        array = start.removeprefix("slurm ")
        command = ["squeue", "--noheader", f"--jobs={array}"]
        listing = subprocess.run(command, capture_output=True, encoding="utf-8")
        if listing.returncode == 0 and listing.stdout.strip():
            raise UserError(
                f"job array {array} still has runs of this study: "
                f"wait for it, or end it with scancel {array}"
            )


def _write_scripts(runs: Sequence[PlannedRun], output: Path, folder: Path) -> Path:
    """Write the options of each run and the script of the array; returns the script."""
    number = sum(1 for _ in folder.glob("*.txt"))
    options_file = folder / f"runs-{number}.txt"
    script = folder / f"array-{number}.sbatch"
    lines = [shlex.join(run.options(output / run.name)) for run in runs]
    options_file.write_text("\n".join([*lines, ""]), encoding="utf-8")
    quoted_file = shlex.quote(str(options_file))
    text = ARRAY_SCRIPT.format(options=quoted_file, train=TRAIN_SCRIPT)
    script.write_text(text, encoding="utf-8")
    return script


def _sbatch(*arguments: str) -> str:
    """Submit a job; returns its number."""
    command = ["sbatch", "--parsable", *arguments]
    try:
        submission = subprocess.run(command, capture_output=True, encoding="utf-8")
    except FileNotFoundError as error:
        raise UserError(
            "sbatch is not here: leave --slurm out to run the study on this machine"
        ) from error
    if submission.returncode:
        reason = " ".join(submission.stderr.split())
        raise UserError(
            f"sbatch refused the study's runs ({reason}): correct the options after --slurm"
        )
    return submission.stdout.strip().split(";")[0]
