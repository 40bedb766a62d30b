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
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import IO

from anlit.compare.comparison import STUDY
from anlit.errors import INTERRUPTED, PREEMPTED, UserError
from anlit.reporting.text import echo
from anlit.runs.folders import Run
from anlit.signals import ENDING, handle_signals, restore_handlers
from anlit.study.plan import Trial
from anlit.study.record import read_record, restore
from anlit.study.state import LOG, note_end, note_start, read_launches, state_of

POLL_SECONDS = 0.2
LOCK, PARTIAL = ".lock", ".partial-"
DIED_OF_SIGNAL = {INTERRUPTED, *(-number for number in ENDING)}
"""Exit codes of a run that a signal ends before it trains."""
TRAIN = Path("docker/slurm/train.sbatch")
SCRIPT = """\
#!/usr/bin/env bash
# One run of a study for each task of the array: the line with its number has the options of `anlit fit`.
set -euo pipefail
line=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {options})
eval "set -- $line"
exec bash {train} "$@"
"""


def launch(runs: list[Trial], output: Path, n_jobs: int, threads: int) -> None:
    """Train those of `runs` that are not finished and have not failed, each in its folder under `output`.

    At most `n_jobs` at a time, with `threads` each. On a signal of `ENDING` the runs are told to end, they write their
    checkpoints, and KeyboardInterrupt is raised. A SIGKILL leaves them training; whoever starts the study again waits
    for them as for those of another launcher, because the lock belongs to the training process.
    """
    pending, stopping, waited = deque(runs), threading.Event(), set[str]()

    def work() -> None:
        while pending and not stopping.is_set():
            try:
                run = pending.popleft()
            except IndexError:  # another thread took the last
                return
            if (lock := try_lock(output / run.name)) is None:
                if run.name not in waited:
                    waited.add(run.name)
                    echo(f"{run.name}: another process trains it, waiting")
                pending.append(run)
                stopping.wait(POLL_SECONDS)
                continue
            with lock:
                if not state_of(output / run.name).has_ended:
                    echo(
                        f"{_train(run, output / run.name, threads, lock, stopping)}; {len(pending)} wait"
                    )

    with ThreadPoolExecutor(n_jobs) as pool:
        before = handle_signals(signal.default_int_handler, *ENDING)
        try:
            for worker in as_completed([pool.submit(work) for _ in range(n_jobs)]):
                worker.result()
        finally:
            stopping.set()
            restore_handlers(before)


def _train(
    run: Trial, folder: Path, threads: int, lock: IO[bytes], stopping: threading.Event
) -> str:
    """Train a run to its end, or until `stopping`; returns how it ended, in words."""
    echo(f"{run.name}: {'continued' if state_of(folder).status == 'interrupted' else 'started'}")
    note_start(folder, "local")
    began, environment = time.monotonic(), os.environ | {"OMP_NUM_THREADS": str(threads)}
    with (folder / LOG).open("ab") as log, subprocess.Popen(
        command(run, folder), stdout=log, stderr=log, env=environment, pass_fds=[lock.fileno()]
    ) as process:  # fmt: skip
        while process.poll() is None and not stopping.wait(POLL_SECONDS):
            pass
        if stopping.is_set():
            process.terminate()
    # A run that is still starting dies of a signal. One to the whole process group may reach it before this process.
    code = process.returncode
    is_interrupted = code in DIED_OF_SIGNAL or (code != 0 and stopping.is_set())
    note_end(folder, PREEMPTED if is_interrupted else code)
    state, minutes = state_of(folder), (time.monotonic() - began) / 60
    ending = (
        "done" if state.status == "finished" else f"{state.status.upper()} {state.reason}".strip()
    )
    return f"{run.name}: {ending} after {minutes:.1f} min"


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


def submit(
    runs: list[Trial], output: Path, again: list[str], options: list[str], at_once: int
) -> str | None:
    """Submit the `runs` that are not done as a job array; returns its number, or None if nothing was left.

    When it has ended, also after failures, `anlit` continues the study with the arguments `again`. At most `at_once`
    tasks run at the same time, 0 for no limit; `options` of sbatch win over those in docker/slurm/train.sbatch.
    UserError if that file is not here, sbatch refuses, or an earlier array with some of the runs has not ended.
    """
    todo = [run for run in runs if not state_of(output / run.name).has_ended]
    if not todo:
        return None
    if not TRAIN.is_file():
        raise UserError(f"{TRAIN} is not here: run anlit study --slurm in anlit's checkout")
    started = {
        launches[-1]["how"] for run in todo if (launches := read_launches(output / run.name))
    }
    for array in (
        how.removeprefix("slurm ")
        for how in started
        if how.startswith("slurm ") and shutil.which("squeue")
    ):
        listed = subprocess.run(
            ["squeue", "--noheader", f"--jobs={array}"], capture_output=True, text=True
        )
        if (
            listed.returncode == 0 and listed.stdout.strip()
        ):  # two arrays would write into the same run folders
            raise UserError(f"job array {array} still has runs of this study: wait for it, or end it with scancel "
                            f"{array}")  # fmt: skip
    folder = output / "slurm"
    folder.mkdir(parents=True, exist_ok=True)
    number = sum(1 for _ in folder.glob("*.txt"))
    listing, script = folder / f"runs-{number}.txt", folder / f"array-{number}.sbatch"
    listing.write_text("".join(shlex.join(run.options(output / run.name)) + "\n" for run in todo))
    script.write_text(SCRIPT.format(options=shlex.quote(str(listing)), train=TRAIN))
    # Slurm reads the #SBATCH options of the submitted file only; the name of the log is our own.
    directives = re.findall(r"^#SBATCH (?!--output)(\S+)$", TRAIN.read_text(), re.MULTILINE)
    tasks = f"0-{len(todo) - 1}" + (f"%{at_once}" if at_once else "")
    array = _sbatch(
        *directives, f"--array={tasks}", f"--output={folder}/%A_%a.out", *options, str(script)
    )
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
        raise UserError(
            "sbatch is not here: leave --slurm out to run the study on this machine"
        ) from error
    if done.returncode:
        said = " ".join(done.stderr.split())
        raise UserError(
            f"sbatch refused the study's runs ({said}): correct the options after --slurm"
        )
    return done.stdout.strip().split(";")[0]


def reusable(
    runs: Sequence[Trial], output: Path, studies: Sequence[Path]
) -> dict[str, tuple[Path, Run | None]]:
    """Name of each run that has not begun → folder, or report.json and its content, of a finished one with its hash."""
    folders = [
        folder
        for study in studies
        for folder in sorted(study.iterdir())
        if not folder.name.startswith(PARTIAL)
    ]
    records = [study / STUDY for study in studies if (study / STUDY).is_file()]
    found: dict[str, tuple[Path, Run | None]] = {
        name.rpartition("-")[2]: (record, run) for record in records
        for name, run in read_record(record.parent)[1].items() if run.complete}  # fmt: skip
    found |= {
        run.name.rpartition("-")[2]: (run, None)
        for run in folders[::-1]
        if state_of(run).status == "finished"
    }
    return {run.name: found[run.name.rpartition("-")[2]] for run in runs
            if run.name.rpartition("-")[2] in found and not (output / run.name).exists()}  # fmt: skip


def reuse(runs: Sequence[Trial], output: Path, studies: Sequence[Path]) -> None:
    """Take over what is `reusable` in folders of studies; files become hard links, or copies across file systems."""
    for name, (source, recorded) in reusable(runs, output, studies).items():
        partial = output / (PARTIAL + name)
        shutil.rmtree(partial, ignore_errors=True)
        output.mkdir(parents=True, exist_ok=True)
        if recorded is None:
            shutil.copytree(source, partial, symlinks=True, copy_function=_link)
        else:
            restore(recorded, partial, source)
        os.utime(partial)  # what comes after the runs is made again
        partial.rename(output / name)  # a kill before it leaves no half of a run
        echo(f"{name}: taken from {source}")


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)
