"""Runs of a study on this machine: so many at a time, finished ones skipped, cut ones continued, failures noted."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from anlit.analysis.study.plan import PlannedRun
from anlit.analysis.study.state import LOG, PREEMPTED, State, note_end, note_start, state_of

POLL_SECONDS = 0.2
LOCK = ".lock"
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Local:
    """How runs share this machine.

    Args:
        jobs: Runs at the same time.
        threads: CPU threads of each.
        gpus: Device numbers; each running job has one of them for itself. None leaves the devices to the runs.
    """

    jobs: int = 1
    threads: int = 1
    gpus: tuple[str, ...] | None = None


@dataclass
class _Job:
    """A run that is under way, with the lock it holds."""

    run: PlannedRun
    folder: Path
    process: subprocess.Popen[bytes]
    lock: IO[bytes]
    gpu: str | None
    started: float


class Launcher:
    """The runs that wait and those that are under way."""

    def __init__(self, runs: list[PlannedRun], output: Path, how: Local, tell: Tell) -> None:
        self.waiting, self.output, self.how, self.tell = list(runs), output, how, tell
        self.free: list[str | None] = [*how.gpus] if how.gpus is not None else [None] * how.jobs
        self.jobs: list[_Job] = []
        self.n_done, self.began = 0, time.monotonic()
        self._told: set[str] = set()

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting or self.jobs)

    def start(self) -> None:
        """Give every free place to the next run that needs it and that nobody works on."""
        for run in list(self.waiting):
            folder = self.output / run.name
            if state_of(folder).status in ("finished", "failed"):
                self.waiting.remove(run)
            elif self.free and (lock := try_lock(folder)) is not None:
                self.waiting.remove(run)
                state = state_of(folder)  # the lock's last holder may just have finished it
                if state.status in ("finished", "failed"):
                    lock.close()
                else:
                    self._start(run, folder, lock, state)
            elif self.free and run.name not in self._told:
                self._told.add(run.name)
                self.tell(f"{run.name}: another process trains it, waiting")

    def _start(self, run: PlannedRun, folder: Path, lock: IO[bytes], state: State) -> None:
        gpu = self.free.pop(0)
        environment = os.environ | {"OMP_NUM_THREADS": str(self.how.threads)}
        if gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpu
        note_start(folder, "local")
        with (folder / LOG).open("ab") as log:
            process = subprocess.Popen(
                command(run, folder), stdout=log, stderr=log, env=environment, pass_fds=(lock.fileno(),)
            )
        self.jobs.append(_Job(run, folder, process, lock, gpu, time.monotonic()))
        self.tell(f"{run.name}: {'continued' if state.status == 'cut' else 'started'}")

    def reap(self) -> None:
        """Note the runs that have ended, and free their places."""
        for job in [job for job in self.jobs if job.process.poll() is not None]:
            self.jobs.remove(job)
            note_end(job.folder, job.process.returncode)
            job.lock.close()
            self.free.append(job.gpu)
            self.n_done += 1
            state = state_of(job.folder)
            outcome = "done" if state.status == "finished" else f"{state.status.upper()} {state.reason}".strip()
            minutes = (time.monotonic() - job.started) / 60
            self.tell(f"{job.run.name}: {outcome} after {minutes:.1f} min{self._left()}")

    def _left(self) -> str:
        todo = len(self.jobs) + len(self.waiting)
        hours = (time.monotonic() - self.began) / self.n_done * todo / 3600
        return f"; {todo} to go, about {hours:.1f} h" if todo else ""

    def end(self) -> None:
        """Tell the runs to write their checkpoints and end, and see them do it.

        Whatever code they end with, it was our doing: one that was still starting dies of the signal.
        """
        for job in self.jobs:
            job.process.terminate()
        for job in self.jobs:
            note_end(job.folder, 0 if job.process.wait() == 0 else PREEMPTED)
            job.lock.close()


def launch(runs: list[PlannedRun], output: Path, how: Local, tell: Tell = print) -> None:
    """Train what of `runs` is not finished and has not failed, each in its folder under `output`.

    A run that another launcher works on is waited for. On SIGINT or SIGTERM the runs are told to end, write their
    checkpoints, and KeyboardInterrupt is raised; a SIGKILL leaves them training, and whoever starts the study again
    waits for them: the lock belongs to the training process.
    """
    launcher = Launcher(runs, output, how, tell)
    with _told_to_end() as signals:
        while launcher.is_busy and not signals:
            launcher.reap()
            launcher.start()
            time.sleep(POLL_SECONDS if launcher.is_busy else 0)
        if signals:
            launcher.end()
            raise KeyboardInterrupt


def command(run: PlannedRun, run_dir: Path) -> list[str]:
    """The `anlit fit` that makes this run, or continues it where it was cut."""
    return [sys.executable, "-m", "anlit", "fit", *run.options(run_dir), "--ckpt_path=last"]


def try_lock(folder: Path) -> IO[bytes] | None:
    """The run's lock, held until the returned file and every process that inherited it are gone; None if taken."""
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
    """The signals that came meanwhile. An exception out of a handler could leave a lock inside subprocess taken."""
    seen: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        seen.append(number)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
