"""Runs of a study on this machine: several at a time. Finished ones are skipped, interrupted ones continue."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

from anlit.analysis.study.plan import Trial
from anlit.analysis.study.state import LOG, PREEMPTED, note_end, note_start, state_of

POLL_SECONDS = 0.2
LOCK, PARTIAL = ".lock", ".partial-"
Tell = Callable[[str], None]


class _Job(NamedTuple):
    """A run that is under way, with the lock it holds."""

    folder: Path
    process: subprocess.Popen[bytes]
    lock: IO[bytes]
    started: float

    def end(self, code: int) -> None:
        note_end(self.folder, code)
        self.lock.close()


def launch(runs: list[Trial], output: Path, n_jobs: int, threads: int, tell: Tell) -> None:
    """Train those of `runs` that are not finished and have not failed, each in its folder under `output`.

    At most `n_jobs` at a time, with `threads` each. A run that another launcher works on is waited for. On SIGINT or
    SIGTERM the runs are told to end, they write their checkpoints, and KeyboardInterrupt is raised. A SIGKILL leaves
    them training. Whoever starts the study again waits for them, because the lock belongs to the training process.
    """
    pending, jobs, waited = list(runs), list[_Job](), set[str]()
    n_done, began = 0, time.monotonic()
    with _signals() as signals:
        while (pending or jobs) and not signals:
            for job in [job for job in jobs if job.process.poll() is not None]:
                jobs.remove(job)
                job.end(job.process.returncode)
                n_done, n_left = n_done + 1, len(jobs) + len(pending)
                hours = (time.monotonic() - began) / n_done * n_left / 3600
                tell(_ending(job) + (f"; {n_left} to go, about {hours:.1f} h" if n_left else ""))
            for run in list(pending):
                folder = output / run.name
                if state_of(folder).has_ended:
                    pending.remove(run)
                elif len(jobs) < n_jobs and (lock := try_lock(folder)) is not None:
                    pending.remove(run)
                    state = state_of(folder)
                    if state.has_ended:  # the lock's last holder has just finished it
                        lock.close()
                    else:
                        tell(f"{run.name}: {'continued' if state.status == 'interrupted' else 'started'}")
                        jobs.append(_start(run, folder, lock, threads))
                elif len(jobs) < n_jobs and run.name not in waited:
                    waited.add(run.name)
                    tell(f"{run.name}: another process trains it, waiting")
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


def _start(run: Trial, folder: Path, lock: IO[bytes], threads: int) -> _Job:
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    note_start(folder, "local")
    with (folder / LOG).open("ab") as log:
        process = subprocess.Popen(
            command(run, folder), stdout=log, stderr=log, env=environment, pass_fds=(lock.fileno(),)
        )
    return _Job(folder, process, lock, time.monotonic())


def _ending(job: _Job) -> str:
    state = state_of(job.folder)
    ending = "done" if state.status == "finished" else f"{state.status.upper()} {state.reason}".strip()
    return f"{job.folder.name}: {ending} after {(time.monotonic() - job.started) / 60:.1f} min"


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


def reuse(runs: Sequence[Trial], output: Path, studies: Sequence[Path], tell: Tell) -> None:
    """Give each run that has not begun the finished run with its settings from one of `studies`, folders of studies.

    Two runs are the same if the hashes in their folders' names are equal. The hash is of all settings and configuration
    files. It does not include the code, whose commit the report lists for each run. Files become hard links, or copies
    on another file system.
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
            tell(f"{run.name}: taken from {source}")


def settings_hash(name: str) -> str:
    """The end of `Trial.name`."""
    return name.rpartition("-")[2]


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)
