"""Runs of a study as a Slurm job array: docker/slurm/train.sbatch for each, with its signals, requeues and images.

A run is a multi-process `srun` in an image, and that script starts and continues it. So the array only chooses the
options of each task. (submitit starts Python functions instead.)
"""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from anlit.analysis.study.plan import Trial
from anlit.analysis.study.state import note_start, read_launches, state_of
from anlit.errors import UserError

TRAIN = Path("docker/slurm/train.sbatch")
SCRIPT = """\
#!/usr/bin/env bash
# One run of a study for each task of the array: the line with its number has the options of `anlit fit`.
set -euo pipefail
line=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {options})
eval "set -- $line"
exec bash {train} "$@"
"""


def submit(runs: list[Trial], output: Path, again: list[str], options: list[str], at_once: int) -> str | None:
    """Submit the `runs` that are not done as a job array, and after it a command that continues the study.

    Args:
        output: The study's folder; scripts and logs go to its folder `slurm`.
        again: The arguments of `anlit`, which runs on one core when the array has ended, also after failures.
        options: Options of sbatch; they win over those in docker/slurm/train.sbatch.
        at_once: Most tasks that run at the same time; 0 for no limit.

    Returns:
        The array's job number; None if nothing was left to submit.

    Raises:
        UserError: docker/slurm/train.sbatch is not here, sbatch refuses, or an earlier array with some of the runs has
            not ended.
    """
    todo = [run for run in runs if not state_of(output / run.name).has_ended]
    if not todo:
        return None
    if not TRAIN.is_file():
        raise UserError(f"{TRAIN} is not here: run anlit study --slurm in anlit's checkout")
    _require_ended({launches[-1]["how"] for run in todo if (launches := read_launches(output / run.name))})
    folder = output / "slurm"
    folder.mkdir(parents=True, exist_ok=True)
    number = sum(1 for _ in folder.glob("*.txt"))
    listed, script = folder / f"runs-{number}.txt", folder / f"array-{number}.sbatch"
    listed.write_text("".join(shlex.join(run.options(output / run.name)) + "\n" for run in todo))
    script.write_text(SCRIPT.format(options=shlex.quote(str(listed)), train=TRAIN))
    # Slurm reads the #SBATCH options of the submitted file only; the name of the log is our own.
    directives = [option for option in re.findall(r"^#SBATCH (\S+)$", TRAIN.read_text(), re.MULTILINE)
                  if not option.startswith("--output")]  # fmt: skip
    limit = f"%{at_once}" if at_once else ""
    array = _sbatch(
        *directives, f"--array=0-{len(todo) - 1}{limit}", f"--output={folder}/%A_%a.out", *options, str(script)
    )
    for run in todo:
        note_start(output / run.name, f"slurm {array}")
    _sbatch(
        f"--dependency=afterany:{array}", "--ntasks=1", "--cpus-per-task=1", f"--output={folder}/study-%j.out",
        "--job-name=anlit-study", f"--wrap={shlex.join([sys.executable, '-m', 'anlit', *again])}",
    )  # fmt: skip
    return array


def _require_ended(launches: set[str]) -> None:
    """Two arrays would write into the same run folders."""
    for job in (how.removeprefix("slurm ") for how in launches if how.startswith("slurm ") and shutil.which("squeue")):
        listed = subprocess.run(["squeue", "--noheader", f"--jobs={job}"], capture_output=True, text=True)
        if listed.returncode == 0 and listed.stdout.strip():
            raise UserError(f"job array {job} still has runs of this study: wait for it, or end it with scancel {job}")


def _sbatch(*arguments: str) -> str:
    try:
        done = subprocess.run(["sbatch", "--parsable", *arguments], capture_output=True, text=True)
    except FileNotFoundError as error:
        raise UserError("sbatch is not here: leave --slurm out to run the study on this machine") from error
    if done.returncode:
        raise UserError(
            f"sbatch refused the study's runs ({' '.join(done.stderr.split())}): correct the options after --slurm"
        )
    return done.stdout.strip().split(";")[0]
