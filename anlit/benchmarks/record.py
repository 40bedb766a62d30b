"""What every benchmark needs: trials in fresh processes, and medians with their spread."""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from anlit.errors import UserError

ERROR_LINES = 15


def run_trial(command: Sequence[str], name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Run one measurement in a fresh process, so that none finds what another left in memory.

    Args:
        command: what starts the program; it gets `name` and the arguments as JSON, and prints its result
            as the last line of its output.

    Returns:
        The result, with `process_seconds`, the processor time of the process and of those it started.

    Raises:
        UserError: the program failed.
    """
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    before = os.times()
    process = subprocess.run(
        [*command, name, json.dumps(arguments)], capture_output=True, text=True, env=environment, check=False
    )
    after = os.times()
    lines = process.stdout.strip().splitlines()
    if process.returncode or not lines:
        what = "\n".join([*lines, *process.stderr.strip().splitlines()][-ERROR_LINES:])
        raise UserError(f"The measurement `{' '.join(command)} {name}` ended with {process.returncode}:\n{what}")
    user, system = after.children_user - before.children_user, after.children_system - before.children_system
    return {**json.loads(lines[-1]), "process_seconds": user + system}


def this_python(module: str) -> list[str]:
    """The command that runs one of our modules with the Python that runs now."""
    return [sys.executable, "-m", module]


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, least and greatest of the repetitions."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "values": list(values)}
