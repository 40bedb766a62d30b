"""Times the steps of runs in a separate process, for comparisons, which do not import torch."""

import os
import subprocess
import sys
from pathlib import Path

from anlit.analysis.wall_clock import BUSY, FILE
from anlit.configuration import IMPORTED
from anlit.errors import UserError
from anlit.reporting.text import echo
from anlit.runs.groups import Group

WAITING = "OMP_WAIT_POLICY"
"""How threads wait for each other, if the user says so."""


def time_steps(groups: list[Group], folder: Path) -> None:
    """Time steps of every group's configuration in turns and write `FILE` into `folder`.

    Threads wait as in training, that is, they spin. On a busy machine the steps are timed with threads that sleep.

    Raises:
        UserError: A configuration cannot be built; the message was printed.
    """
    runs = [str(group.counted[0].folder) for group in groups]
    options = [f"--import={module}" for module in IMPORTED]
    command = [sys.executable, "-m", "anlit.benchmarks.runs", *runs, "--output", str(folder / FILE), *options]
    status = BUSY
    if WAITING not in os.environ:
        status = subprocess.run([*command, "--unless_busy"], check=False).returncode
        if status == BUSY:
            echo("Other work takes the processors: timing again with threads that sleep while they wait.")
    if status == BUSY:
        status = subprocess.run(command, check=False, env={WAITING: "passive", **os.environ}).returncode
    if status:
        raise UserError("the steps of the runs could not be timed, see above: leave out --measure_steps")
