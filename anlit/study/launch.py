"""Train the runs of a study on this machine, several at a time.

Finished runs are skipped, interrupted runs continue.
"""

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import takewhile
from pathlib import Path
from typing import IO

from anlit.config.labels import mapping, n_devices
from anlit.errors import INTERRUPTED, PREEMPTED
from anlit.reporting.text import echo
from anlit.signals import ENDING_SIGNALS, handle_signals, restore_handlers
from anlit.study.estimate import merge_configuration
from anlit.study.plan import PlannedRun
from anlit.study.state import LOG, note_end, note_start, read_state

POLL_SECONDS = 0.2
"""Seconds between two looks at a run or its lock."""
LOCK = ".lock"
"""The file in a run's folder that the process holds that trains it."""
DIED_OF_SIGNAL = {INTERRUPTED, *(-number for number in ENDING_SIGNALS)}
"""Exit codes of a run that a signal ends before it trains."""


def launch(runs: Sequence[PlannedRun], output: Path, n_jobs: int, threads: int) -> None:
    """Train the runs that have not ended, each in its folder under `output`.

    At most `n_jobs` run at a time, with `threads` each. Runs of one GPU take the GPUs in turn. At
    one of the `ENDING_SIGNALS` the runs write their checkpoints and end, and KeyboardInterrupt is
    raised.

    After a SIGKILL of this process the runs go on training. The next launcher waits for them,
    because each run holds its lock.
    """
    queue = _Queue(runs, output, threads)
    with ThreadPoolExecutor(n_jobs) as pool:
        handlers = handle_signals(signal.default_int_handler, *ENDING_SIGNALS)
        try:
            workers = [pool.submit(queue.work, number) for number in range(n_jobs)]
            for worker in as_completed(workers):
                worker.result()
        finally:
            queue.stopping.set()
            restore_handlers(handlers)


class _Queue:
    """The runs that wait for a worker."""

    def __init__(self, runs: Sequence[PlannedRun], output: Path, threads: int) -> None:
        self.runs = deque(runs)
        self.output = output
        self.threads = threads
        self.stopping = threading.Event()
        self.announced: set[str] = set()
        """Names of the runs of other processes for which a message was printed."""

    def work(self, number: int) -> None:
        """Train runs until none is left, or until `stopping`. Each worker is a thread."""
        while not self.stopping.is_set():
            try:
                run = self.runs.popleft()
            except IndexError:
                return
            folder = self.output / run.name
            lock = try_lock(folder)
            if lock is None:
                self._wait_for_other_process(run)
                continue
            with lock:
                if not read_state(folder).has_ended:
                    environment = _environment(run, self.threads, number)
                    ending = _train(run, folder, environment, lock, self.stopping)
                    echo(f"{ending}; {len(self.runs)} wait")

    def _wait_for_other_process(self, run: PlannedRun) -> None:
        """Put the run at the end of the queue."""
        if run.name not in self.announced:
            self.announced.add(run.name)
            echo(f"{run.name}: another process trains it, waiting")
        self.runs.append(run)
        self.stopping.wait(POLL_SECONDS)


def _environment(run: PlannedRun, threads: int, worker: int) -> dict[str, str]:
    """The environment of a run: a rank's threads, and the worker's GPU if the run takes one GPU."""
    trainer = mapping(merge_configuration(run).get("trainer"))
    threads_of_rank = max(1, threads // n_devices(trainer.get("devices", 1)))
    environment = os.environ | {"OMP_NUM_THREADS": str(threads_of_rank)}
    gpus = _visible_gpus()
    if gpus and str(trainer.get("devices")) == "1":
        # Otherwise all runs would take the first.
        environment["CUDA_VISIBLE_DEVICES"] = gpus[worker % len(gpus)]
    return environment


def _visible_gpus() -> list[str]:
    """The names of NVIDIA's GPUs for CUDA_VISIBLE_DEVICES. CUDA reads up to the first -1."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is not None:
        before_end = takewhile(lambda name: name.strip() not in ("", "-1"), names.split(","))
        return list(before_end)
    n_gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    return list(map(str, range(n_gpus)))


def _train(
    run: PlannedRun,
    folder: Path,
    environment: dict[str, str],
    lock: IO[bytes],
    stopping: threading.Event,
) -> str:
    """Train a run to its end, or until `stopping`; returns a sentence on how it ended."""
    verb = "continued" if read_state(folder).status == "interrupted" else "started"
    echo(f"{run.name}: {verb}")
    note_start(folder, "local")
    start = time.monotonic()
    with (
        (folder / LOG).open("ab") as log,
        subprocess.Popen(
            fit_command(run, folder),
            stdout=log,
            stderr=log,
            env=environment,
            # The run keeps its lock if this process is killed.
            pass_fds=[lock.fileno()],
        ) as process,
    ):
        while process.poll() is None and not stopping.wait(POLL_SECONDS):
            pass
        if stopping.is_set():
            process.terminate()
    # A run that is still starting dies of a signal. A signal to the whole process group may reach
    # the run before this process.
    code = process.returncode
    is_interrupted = code in DIED_OF_SIGNAL or (code != 0 and stopping.is_set())
    note_end(folder, PREEMPTED if is_interrupted else code)
    state = read_state(folder)
    minutes = (time.monotonic() - start) / 60
    ending = "done"
    if state.status != "finished":
        ending = f"{state.status.upper()} {state.reason}".strip()
    return f"{run.name}: {ending} after {minutes:.1f} min"


def fit_command(run: PlannedRun, run_dir: Path) -> list[str]:
    """The `anlit fit` that starts this run, or continues it from its last checkpoint."""
    return [sys.executable, "-m", "anlit", "fit", *run.options(run_dir), "--ckpt_path=last"]


def try_lock(folder: Path) -> IO[bytes] | None:
    """Take the run's lock; None if it is taken.

    The lock is held until all processes with the returned file close it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / LOCK).open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file
