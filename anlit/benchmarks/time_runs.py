"""Times the steps of runs in a separate process, for comparisons, which do not import torch."""

import subprocess
import sys
from pathlib import Path

from anlit.analysis.wall_clock import FILE
from anlit.configuration import IMPORTED
from anlit.errors import UserError
from anlit.runs.groups import Group


def time_steps(groups: list[Group], folder: Path) -> None:
    """Time steps of every group's configuration in turns and write `FILE` into `folder`.

    Raises:
        UserError: A configuration cannot be built; the message was printed.
    """
    runs = [str(group.counted[0].folder) for group in groups]
    options = [f"--import={module}" for module in IMPORTED]
    command = [sys.executable, "-m", "anlit.benchmarks.runs", *runs, "--output", str(folder / FILE), *options]
    if subprocess.run(command, check=False).returncode:
        raise UserError("the steps of the runs could not be timed, see above: leave out --measure_steps")
