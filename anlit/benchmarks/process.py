"""Runs a measurement in a separate process, with this Python or that of another environment."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from anlit.errors import UserError

ERROR_LINES = 15
PATIENCE = 10
"""Seconds until a process must have ended after the end of its input."""
START = "import runpy, sys; sys.path.append({folder!r}); runpy.run_module({module!r}, run_name='__main__')"


class ProcessError(UserError):
    """The process could not be started, or it ended before it answered."""


class Process:
    """A program that answers questions, see `anlit.benchmarks.peers.serve`.

    Args:
        module: One of our modules; with `python`, a module of `anlit.benchmarks.peers`, such as `training_step`.
        python: Its Python; that of another environment can import that folder only (default: this Python).

    Raises:
        ProcessError: It cannot be started.
    """

    def __init__(self, module: str, python: str | None = None) -> None:
        command = [sys.executable, "-m", module]
        if python is not None:
            start = START.format(folder=str(Path(__file__).parent), module=f"peers.{module}")
            isolated = ["-I"] if python != sys.executable else []  # this Python may have its packages by PYTHONPATH
            command = [python, *isolated, "-c", start]
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed with the process
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=self._errors, text=True, env=environment
            )
        except OSError as error:
            raise ProcessError(f"{command[0]} cannot be started ({error.strerror}): give another Python") from error

    def ask(self, do: str, **arguments: Any) -> Any:
        """What the function `do` returns for these arguments.

        Raises:
            ProcessError: The process ended instead. The message is its last line of output; the lines before it go to
                standard error.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            *before, last = self._last_words()
            print(*before, sep="\n", file=sys.stderr)
            raise ProcessError(f"the process that measures `{do}` ended: {last}")
        return json.loads(line)

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(PATIENCE)
        except (OSError, subprocess.TimeoutExpired):  # it has ended with a question unread, or it does not end
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def _last_words(self) -> list[str]:
        self._process.wait()
        self._errors.seek(0)
        return self._errors.read().strip().splitlines()[-ERROR_LINES:] or ["it said nothing"]


def measure_once(module: str, do: str, python: str | None = None, **arguments: Any) -> Any:
    """The answer of a new process, whose memory holds nothing of earlier measurements.

    Raises:
        ProcessError: It ended before it answered.
    """
    process = Process(module, python)
    try:
        return process.ask(do, **arguments)
    finally:
        process.close()


def python_of_peer(package: str, python: str | None) -> str:
    """The Python that has a peer's package: this one, else that of --peer_python.

    Raises:
        UserError: Neither has it.
    """
    if is_installed(package):
        return sys.executable
    if python is None:
        raise UserError(
            f"{package} is not installed here: give --peer_python, the Python of an environment that has it, "
            "or leave it out"
        )
    try:
        subprocess.run([python, "-I", "-c", f"import {package}"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError(f"--peer_python {python} cannot import {package}: install it there") from error
    return python


def is_installed(package: str) -> bool:
    """Whether this Python has the package."""
    return importlib.util.find_spec(package) is not None
