"""Runs of a study on this machine: several at a time. Finished ones are skipped, interrupted ones continue."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, NamedTuple

from anlit.analysis.study.plan import Trial
from anlit.analysis.study.state import LOG, PREEMPTED, State, note_end, note_start, state_of

POLL_SECONDS = 0.2
LOCK = ".lock"
Tell = Callable[[str], None]


class _Job(NamedTuple):
    """A run that is under way, with the lock it holds."""

    run: Trial
    folder: Path
    process: subprocess.Popen[bytes]
    lock: IO[bytes]
    started: float


class Launcher:
    """The runs that wait and those that are under way, at most `n_jobs` at a time with `threads` each."""

    def __init__(self, runs: list[Trial], output: Path, n_jobs: int, threads: int, tell: Tell) -> None:
        self.pending, self.output, self.n_jobs, self.threads, self.tell = list(runs), output, n_jobs, threads, tell
        self.jobs: list[_Job] = []
        self.n_done, self.began = 0, time.monotonic()
        self._told: set[str] = set()

    @property
    def is_busy(self) -> bool:
        return bool(self.pending or self.jobs)

    def start(self) -> None:
        """Start the next runs that nobody works on, as long as there is room."""
        for run in list(self.pending):
            folder, has_room = self.output / run.name, len(self.jobs) < self.n_jobs
            if state_of(folder).status in ("finished", "failed"):
                self.pending.remove(run)
            elif has_room and (lock := try_lock(folder)) is not None:
                self.pending.remove(run)
                state = state_of(folder)  # the lock's last holder may just have finished it
                if state.status in ("finished", "failed"):
                    lock.close()
                else:
                    self._start(run, folder, lock, state)
            elif has_room and run.name not in self._told:
                self._told.add(run.name)
                self.tell(f"{run.name}: another process trains it, waiting")

    def _start(self, run: Trial, folder: Path, lock: IO[bytes], state: State) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": str(self.threads)}
        note_start(folder, "local")
        with (folder / LOG).open("ab") as log:
            process = subprocess.Popen(
                command(run, folder), stdout=log, stderr=log, env=environment, pass_fds=(lock.fileno(),)
            )
        self.jobs.append(_Job(run, folder, process, lock, time.monotonic()))
        self.tell(f"{run.name}: {'continued' if state.status == 'interrupted' else 'started'}")

    def reap(self) -> None:
        """Note the runs that have ended."""
        for job in [job for job in self.jobs if job.process.poll() is not None]:
            self.jobs.remove(job)
            note_end(job.folder, job.process.returncode)
            job.lock.close()
            self.n_done += 1
            state = state_of(job.folder)
            results = "done" if state.status == "finished" else f"{state.status.upper()} {state.reason}".strip()
            minutes = (time.monotonic() - job.started) / 60
            self.tell(f"{job.run.name}: {results} after {minutes:.1f} min{self._left()}")

    def _left(self) -> str:
        todo = len(self.jobs) + len(self.pending)
        hours = (time.monotonic() - self.began) / self.n_done * todo / 3600
        return f"; {todo} to go, about {hours:.1f} h" if todo else ""

    def end(self) -> None:
        """Tell the runs to write their checkpoints and end, and wait for them.

        They count as interrupted whatever their exit code is, because a run that is still starting dies of the signal.
        """
        for job in self.jobs:
            job.process.terminate()
        for job in self.jobs:
            note_end(job.folder, 0 if job.process.wait() == 0 else PREEMPTED)
            job.lock.close()


def launch(runs: list[Trial], output: Path, n_jobs: int, threads: int, tell: Tell) -> None:
    """Train those of `runs` that are not finished and have not failed, each in its folder under `output`.

    A run that another launcher works on is waited for. On SIGINT or SIGTERM the runs are told to end, they write their
    checkpoints, and KeyboardInterrupt is raised. A SIGKILL leaves them training. Whoever starts the study again waits
    for them, because the lock belongs to the training process.
    """
    launcher = Launcher(runs, output, n_jobs, threads, tell)
    with _told_to_end() as signals:
        while launcher.is_busy and not signals:
            launcher.reap()
            launcher.start()
            time.sleep(POLL_SECONDS if launcher.is_busy else 0)
        if signals:
            launcher.end()
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
def _told_to_end() -> Iterator[list[int]]:
    """Collects signals. An exception in a handler could leave a lock inside `subprocess` taken."""
    seen: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        seen.append(number)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
