"""Runs a list of items in calls of a few minutes. Each item is a process with its own time limit.

STATE/results.json says what became of each item. It is written before and after every item, so a call that is killed
loses one attempt, and the next call goes on. STATE also holds the compilers' caches and each item's files. The result
folder is written anew after each item, from STATE alone: gpu.json, gpu.md and log.txt.
"""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anlit
from anlit.benchmarks.gpu.report import publish
from anlit.errors import UserError
from anlit.reporting.files import TEMPORARY, write_json
from anlit.reporting.provenance import environment, now
from anlit.reporting.text import echo

ROOT = Path(anlit.__file__).resolve().parents[1]
"""What PYTHONPATH needs; in a clone it holds tests/ too."""
RESULTS = "results.json"
LOG = "log.txt"
MARK = "ANLIT_GPU_STATE"
"""In the environment of every process of an item, so that those of a call that was killed are found."""
ATTEMPTS = 3
"""An item during which so many calls were killed is given up."""
LEAST_SECONDS = 15
"""No item begins with less time than this."""
SHARE = 0.8
"""Of its limit, after which a benchmark begins nothing more, so that it can write its tables."""
FINAL = ("done", "failed", "over its time", "given up", "left out")


@dataclass(frozen=True)
class Item:
    """One thing to be run.

    Args:
        name: Of its folder, in letters, digits and `-`.
        what: What it finds out, for a heading.
        minutes: Its limit.
        command: Program and arguments; `{folder}` is its folder, `{minutes}` what a benchmark gets as --minutes.
        rehearsal: Arguments that make it small enough for a CPU; they follow the others.
        needs: Programs, packages and folders of the clone without which it is left out.
    """

    name: str
    what: str
    minutes: float
    command: tuple[str, ...]
    rehearsal: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    def arguments(self, folder: Path, rehearse: bool) -> list[str]:
        inside = folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder  # the records name it
        values = {"{folder}": str(inside), "{minutes}": f"{SHARE * self.minutes:g}"}
        return [values.get(part, part) for part in (*self.command, *(self.rehearsal if rehearse else ()))]

    def missing(self) -> list[str]:
        """What it needs and what is not here."""
        return [
            name
            for name in self.needs
            if not (shutil.which(name) or importlib.util.find_spec(name) or (ROOT / name).is_dir())
        ]


class Runner:
    """One call.

    Args:
        items: In the order of their worth.
        state: A folder that is kept between calls.
        output: The result folder.
        seconds: How long this call may take.
        command: What the user typed, for the record.
        rehearse: Run the items at toy sizes.
        again: Items, or statuses of items, that are run anew.

    Raises:
        UserError: The state is one of a rehearsal and this is none, or the other way round.
    """

    def __init__(
        self,
        items: Sequence[Item],
        state: Path,
        output: Path,
        seconds: float,
        command: str,
        rehearse: bool = False,
        again: Sequence[str] = (),
    ) -> None:
        self.items, self.state, self.output, self.rehearse = items, state.resolve(), output, rehearse
        self.seconds, self.deadline = seconds, time.monotonic() + seconds
        _stop(self.state)
        for folder in (self.state, output):
            for half_written in folder.glob(f".*{TEMPORARY}*"):
                half_written.unlink(missing_ok=True)
        file = self.state / RESULTS
        known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        if known.get("rehearsal", rehearse) != rehearse:
            raise UserError(f"--state {state} is {'no' if rehearse else 'of a'} rehearsal: give another folder")
        self.results: dict[str, dict[str, Any]] = {
            name: result
            for name, result in known.get("items", {}).items()
            if not {name, result["status"]} & {"waiting", *again}
        }
        self.calls = [*known.get("calls", []), {"command": command, **environment()}]
        self._write()

    def run(self) -> bool:
        """Run what is not finished while there is time; returns whether all items are finished."""
        for item in self.items:
            if self.is_finished(item):
                continue
            if missing := item.missing():
                self._keep(item, status="left out", reason=f"{', '.join(missing)} is not here")
            elif self._killed(item) >= ATTEMPTS:
                self._keep(item, status="given up", reason=f"{ATTEMPTS} calls were killed while it ran")
            elif self.deadline - time.monotonic() >= LEAST_SECONDS:
                self._run(item)
        return all(self.is_finished(item) for item in self.items)

    def is_finished(self, item: Item) -> bool:
        """Whether the item is not to be run any more."""
        status = self.results.get(item.name, {}).get("status")
        return status in FINAL and (status != "left out" or bool(item.missing()))

    def _killed(self, item: Item) -> int:
        """During how many attempts the call was killed."""
        before = self.results.get(item.name, {})
        return int(before.get("killed", 0)) + (before.get("status") == "running")

    def _run(self, item: Item) -> None:
        folder = self.state / "items" / item.name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        arguments = item.arguments(folder, self.rehearse)
        program = [Path(arguments[0]).name, *arguments[1:]]
        self._keep(item, status="running", killed=self._killed(item), arguments=program, when=now())
        echo(f"{time.strftime('%H:%M:%S')}  {item.name}: {item.what}")
        longest = min(60 * item.minutes, self.seconds)
        allowed = min(longest, self.deadline - time.monotonic())
        began = time.monotonic()
        with open(folder / LOG, "wb") as log:
            process = subprocess.Popen(
                arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT, env=self._environment(),
                start_new_session=True,
            )  # fmt: skip
            try:
                code: int | None = process.wait(allowed)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _stop(self.state)
                process.kill()
                process.wait()
        # It is run again in the next call if this call had less time left than the item may take.
        late = "over its time" if allowed >= longest - LEAST_SECONDS else "cut"
        status = late if code is None else "failed" if code else "done"
        self._keep(item, status=status, exit_code=code, seconds=time.monotonic() - began, **_written(folder))
        echo(f"{time.strftime('%H:%M:%S')}  {item.name}: {status}")

    def _environment(self) -> dict[str, str]:
        caches = self.state / "caches"
        folders = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor", "CUDA_CACHE_PATH": "cuda",
                   "XDG_CACHE_HOME": "other"}  # fmt: skip
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        ours = {name: str(caches / folder) for name, folder in folders.items()}
        return {**os.environ, **ours, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", MARK: str(self.state)}

    def _keep(self, item: Item, **result: Any) -> None:
        before = self.results.get(item.name, {})
        self.results[item.name] = {**before, **result, "what": item.what}
        self._write()

    def _write(self) -> None:
        ordered = {item.name: self.results.get(item.name, {"status": "waiting", "what": item.what})
                   for item in self.items}  # fmt: skip
        content = {"benchmark": "gpu", "rehearsal": self.rehearse, "calls": self.calls, "items": ordered}
        write_json(self.state / RESULTS, content)
        publish(content, self.state / "items", self.output)


def is_gpu_here() -> bool:
    """Whether there is an NVIDIA driver, asked without torch."""
    return Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None


def _written(folder: Path) -> dict[str, Any]:
    """The record and the tables that an item wrote into its folder, also if it did not come to its end."""
    found: dict[str, Any] = {"record": None, "tables": ""}
    for file in folder.glob("*.json"):
        with suppress(json.JSONDecodeError, OSError):
            found["record"] = json.loads(file.read_text(encoding="utf-8"))
    for file in folder.glob("*.md"):
        found["tables"] = file.read_text(encoding="utf-8")
    return found


def _stop(state: Path) -> None:
    """Kill every process of an item of this state; a call that was killed may have left some behind."""
    end = time.monotonic() + 10
    while (processes := list(_processes(state))) and time.monotonic() < end:
        for number in processes:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        time.sleep(0.02)


def _processes(state: Path) -> Iterator[int]:
    mark = f"{MARK}={state}".encode()
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark in file.read_bytes().split(b"\0") and int(file.parent.name) != os.getpid():
                yield int(file.parent.name)
