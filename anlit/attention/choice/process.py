"""A trial in a process of its own: a kernel may hang, and one that writes where it may not ruins its process's GPU.

python -m anlit.attention.choice.process        reads pickled requests, writes a line of JSON for each thing it does
"""

import json
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from importlib import import_module
from types import ModuleType
from typing import IO, Any

import torch

from anlit.attention.choice import trial
from anlit.attention.choice.trial import Outcome, Request

SILENCE = 90.0
"""Seconds for one thing, such as a check with its compilations, or a turn, before the process counts as hanging."""
STARTING = 120.0
"""Seconds for its start: it imports torch, and registers a GPU."""
LONGEST = 300.0
"""Seconds for all trials of a run. Other ranks wait meanwhile; their collective ends after 10 minutes."""


class DiedError(Exception):
    """The process ended or was ended: `name` is the back end that it worked on, and the message says why."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(reason)
        self.name = name


class TrialProcess:
    """Runs requests one after another, in processes that are replaced when they hang or die.

    Args:
        silence: See `SILENCE`.
        longest: See `LONGEST`.
    """

    def __init__(self, silence: float | None = None, longest: float | None = None) -> None:
        self._silence = SILENCE if silence is None else silence
        self._deadline = time.monotonic() + (LONGEST if longest is None else longest)
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed at the end

    def __enter__(self) -> "TrialProcess":
        return self

    def __exit__(self, *_: Any) -> None:
        self._end()
        self._errors.close()

    def run(self, request: Request, backends: Mapping[str, ModuleType]) -> Outcome:
        """As `trial.run`; a back end that hangs or takes its process with it is left out, and the rest tried again."""
        left, lost = {name: backend.__name__ for name, backend in backends.items()}, {}
        while left:
            try:
                found = self._ask(request, left)
            except DiedError as error:
                self._end()
                for name in [error.name] if error.name in left else list(left):
                    lost[name] = str(error)
                    del left[name]
            else:
                return Outcome(found.seconds, found.left_out | lost)
        return Outcome({}, lost)

    def _ask(self, request: Request, backends: dict[str, str]) -> Outcome:
        """Send the request and read what the process says until it is done.

        Raises:
            DiedError: It hangs, or has ended.
        """
        try:
            sent = pickle.dumps((request, backends, torch.get_num_threads()))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise DiedError("", f"its mechanism cannot be sent to another process ({error})") from error
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        name = ""
        try:
            process.stdin.write(len(sent).to_bytes(8, "big") + sent)
            process.stdin.flush()
            while "seconds" not in (said := json.loads(self._line(process, name))):
                name = said["next"]
        except (BrokenPipeError, json.JSONDecodeError) as error:
            raise DiedError(name, f"it fails: {self._last_words(process)}") from error
        return Outcome(**said)

    def _line(self, process: subprocess.Popen[bytes], name: str) -> bytes:
        """The next line, empty if the process has ended; `name` is of the back end that it works on, "" for none."""
        assert process.stdout is not None
        seconds = min(self._silence if name else STARTING, self._deadline - time.monotonic())
        if seconds <= 0:
            raise DiedError("", f"no time was left to try it (all trials: {LONGEST:g} s)")
        ready, _, _ = select.select([process.stdout], [], [], seconds)
        if not ready:
            what = "it hangs" if name else "a process to try it in does not start"
            raise DiedError(name, f"{what}: nothing for {seconds:.0f} s")
        return process.stdout.readline()

    def _start(self) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(part or os.getcwd() for part in sys.path)
        return subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "PYTHONPATH": path},
            bufsize=0,
        )

    def _last_words(self, process: subprocess.Popen[bytes]) -> str:
        status = process.wait(self._silence)
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        said = [line.strip() for line in lines if line.strip()]
        return said[-1][:200] if said else f"its process ended with status {status}"

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
            self._process = None


def main() -> None:
    """Answer requests from standard input until it ends, as it does when the parent has."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    signal.alarm(round(LONGEST) + 60)  # if the parent was killed, nobody ends a kernel that hangs
    while len(size := sys.stdin.buffer.read(8)) == 8:
        request, names, threads = pickle.loads(sys.stdin.buffer.read(int.from_bytes(size, "big")))
        torch.set_num_threads(threads)
        if request.device.type == "cuda":
            torch.cuda.set_device(request.device)
        backends = {name: import_module(module) for name, module in names.items()}
        outcome = trial.run(request, backends, lambda name: print(json.dumps({"next": name}), file=out, flush=True))
        print(json.dumps(asdict(outcome)), file=out, flush=True)


if __name__ == "__main__":
    main()
