"""Starts the runs of a study. Finished ones are skipped, interrupted ones continue.

On this machine `launch` trains several at a time. On a cluster `submit` makes them a Slurm job array of
docker/slurm/train.sbatch, which starts and continues a run with its signals, requeues and images: the array only
chooses the options of each task. (submitit starts Python functions instead.)
"""

import fcntl
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from anlit.analysis.study.plan import Trial
from anlit.analysis.study.state import LOG, PREEMPTED, note_end, note_start, read_launches, state_of
from anlit.errors import UserError
from anlit.reporting.text import echo

POLL_SECONDS = 0.2
LOCK, PARTIAL = ".lock", ".partial-"
TRAIN = Path("docker/slurm/train.sbatch")
SCRIPT = """\
#!/usr/bin/env bash
# One run of a study for each task of the array: the line with its number has the options of `anlit fit`.
set -euo pipefail
line=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {options})
eval "set -- $line"
exec bash {train} "$@"
"""


class _Job(NamedTuple):
    """A run that is under way, with the lock it holds."""

    folder: Path
    process: subprocess.Popen[bytes]
    lock: IO[bytes]
    started: float

    def end(self, code: int) -> str:
        """Note the exit code and release the lock; returns how the run ended, in words."""
        note_end(self.folder, code)
        self.lock.close()
        state, minutes = state_of(self.folder), (time.monotonic() - self.started) / 60
        ending = "done" if state.status == "finished" else f"{state.status.upper()} {state.reason}".strip()
        return f"{self.folder.name}: {ending} after {minutes:.1f} min"


def launch(runs: list[Trial], output: Path, n_jobs: int, threads: int) -> None:
    """Train those of `runs` that are not finished and have not failed, each in its folder under `output`.

    At most `n_jobs` at a time, with `threads` each. On SIGINT or SIGTERM the runs are told to end, they write their
    checkpoints, and KeyboardInterrupt is raised. A SIGKILL leaves them training; whoever starts the study again waits
    for them as for those of another launcher, because the lock belongs to the training process.
    """
    pending, jobs, waited = list(runs), list[_Job](), set[str]()
    n_done, began, environment = 0, time.monotonic(), os.environ | {"OMP_NUM_THREADS": str(threads)}
    with _signals() as signals:
        while (pending or jobs) and not signals:
            for job in [job for job in jobs if job.process.poll() is not None]:
                jobs.remove(job)
                n_done, n_left = n_done + 1, len(jobs) + len(pending)
                hours = (time.monotonic() - began) / n_done * n_left / 3600
                echo(job.end(job.process.returncode) + (f"; {n_left} to go, about {hours:.1f} h" if n_left else ""))
            for run in list(pending):
                folder = output / run.name
                if state_of(folder).has_ended:
                    pending.remove(run)
                elif len(jobs) < n_jobs and (lock := try_lock(folder)) is not None:
                    state = state_of(folder)
                    if state.has_ended:  # the lock's last holder has just finished it
                        lock.close()
                        continue
                    pending.remove(run)
                    echo(f"{run.name}: {'continued' if state.status == 'interrupted' else 'started'}")
                    note_start(folder, "local")
                    with (folder / LOG).open("ab") as log:
                        options: Any = {"stdout": log, "stderr": log, "env": environment, "pass_fds": [lock.fileno()]}
                        process = subprocess.Popen(command(run, folder), **options)
                    jobs.append(_Job(folder, process, lock, time.monotonic()))
                elif len(jobs) < n_jobs and run.name not in waited:
                    waited.add(run.name)
                    echo(f"{run.name}: another process trains it, waiting")
            time.sleep(POLL_SECONDS if pending or jobs else 0)
        for job in jobs:
            job.process.terminate()
        for job in jobs:  # interrupted whatever the exit code is: a run that is still starting dies of the signal
            job.end(0 if job.process.wait() == 0 else PREEMPTED)
        if signals:
            raise KeyboardInterrupt


def command(run: Trial, run_dir: Path) -> list[str]:
    """The `anlit fit` that starts this run, or continues it from its last checkpoint."""
    return [sys.executable, "-m", "anlit", "fit", *run.options(run_dir), "--ckpt_path=last"]


def try_lock(folder: Path) -> IO[bytes] | None:
    """Take the run's lock; None if it is taken. It is held until all processes with the returned file close it."""
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / LOCK).open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects signals. An exception in a handler could leave a lock inside `subprocess` taken."""
    seen: list[int] = []
    before = {number: signal.signal(number, lambda number, _: seen.append(number))
              for number in (signal.SIGINT, signal.SIGTERM)}  # fmt: skip
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def submit(runs: list[Trial], output: Path, again: list[str], options: list[str], at_once: int) -> str | None:
    """Submit the `runs` that are not done as a job array; returns its number, or None if nothing was left.

    When it has ended, also after failures, `anlit` continues the study on one core with the arguments `again`. Scripts
    and logs go to the folder `slurm` of `output`. At most `at_once` tasks run at the same time, 0 for no limit;
    `options` of sbatch win over those in docker/slurm/train.sbatch.

    Raises:
        UserError: That file is not here, sbatch refuses, or an earlier array with some of the runs has not ended.
    """
    todo = [run for run in runs if not state_of(output / run.name).has_ended]
    if not todo:
        return None
    if not TRAIN.is_file():
        raise UserError(f"{TRAIN} is not here: run anlit study --slurm in anlit's checkout")
    started = {launches[-1]["how"] for run in todo if (launches := read_launches(output / run.name))}
    for array in (how.removeprefix("slurm ") for how in started if how.startswith("slurm ") and shutil.which("squeue")):
        listed = subprocess.run(["squeue", "--noheader", f"--jobs={array}"], capture_output=True, text=True)
        if listed.returncode == 0 and listed.stdout.strip():  # two arrays would write into the same run folders
            raise UserError(f"job array {array} still has runs of this study: wait for it, or end it with scancel "
                            f"{array}")  # fmt: skip
    folder = output / "slurm"
    folder.mkdir(parents=True, exist_ok=True)
    number = sum(1 for _ in folder.glob("*.txt"))
    listing, script = folder / f"runs-{number}.txt", folder / f"array-{number}.sbatch"
    listing.write_text("".join(shlex.join(run.options(output / run.name)) + "\n" for run in todo))
    script.write_text(SCRIPT.format(options=shlex.quote(str(listing)), train=TRAIN))
    # Slurm reads the #SBATCH options of the submitted file only; the name of the log is our own.
    directives = [option for option in re.findall(r"^#SBATCH (\S+)$", TRAIN.read_text(), re.MULTILINE)
                  if not option.startswith("--output")]  # fmt: skip
    tasks = f"0-{len(todo) - 1}" + (f"%{at_once}" if at_once else "")
    array = _sbatch(*directives, f"--array={tasks}", f"--output={folder}/%A_%a.out", *options, str(script))
    for run in todo:
        note_start(output / run.name, f"slurm {array}")
    _sbatch(
        f"--dependency=afterany:{array}", "--ntasks=1", "--cpus-per-task=1", f"--output={folder}/study-%j.out",
        "--job-name=anlit-study", f"--wrap={shlex.join([sys.executable, '-m', 'anlit', *again])}",
    )  # fmt: skip
    return array


def _sbatch(*arguments: str) -> str:
    try:
        done = subprocess.run(["sbatch", "--parsable", *arguments], capture_output=True, text=True)
    except FileNotFoundError as error:
        raise UserError("sbatch is not here: leave --slurm out to run the study on this machine") from error
    if done.returncode:
        said = " ".join(done.stderr.split())
        raise UserError(f"sbatch refused the study's runs ({said}): correct the options after --slurm")
    return done.stdout.strip().split(";")[0]


def reuse(runs: Sequence[Trial], output: Path, studies: Sequence[Path]) -> None:
    """Give each run that has not begun the finished run with its hash from one of `studies`, folders of studies.

    The hash is of all settings and configuration files, not of the code, whose commit the report lists for each run.
    Files become hard links, or copies on another file system.
    """
    finished: dict[str, Path] = {}
    for folder in (folder for study in studies for folder in sorted(study.iterdir())):
        if not folder.name.startswith(PARTIAL) and state_of(folder).status == "finished":
            finished.setdefault(settings_hash(folder.name), folder)
    for run in runs:
        source, folder, partial = (
            finished.get(settings_hash(run.name)),
            output / run.name,
            output / (PARTIAL + run.name),
        )
        if source is not None and not folder.exists():
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(source, partial, symlinks=True, copy_function=_link)
            partial.rename(folder)  # a kill before it leaves no half of a run
            echo(f"{run.name}: taken from {source}")


def settings_hash(name: str) -> str:
    """The end of `Trial.name`."""
    return name.rpartition("-")[2]


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)
