"""`make gpu`: runs the plan of docker/gpu_items.py on a GPU (docs/benchmarks.md).

A call ends after --minutes, and the next call continues with the unfinished items. The state folder
has a folder of files and a NAME.json with the result for each item. It also has the compilers'
caches, and a virtual environment with the wheels over the packages of this Python.
"""

import argparse
import fcntl
import glob
import os
import re
import runpy
import shlex
import shutil
import signal
import site
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

from gpu_items import Item, Phase
from gpu_results import ROOT, Results, query_gpu

BENCHMARK_RESERVE = 18
"""Seconds of a benchmark's time for its start, its last round and its page."""
MEMORY_SHARE = 0.9
"""The share of the GPU's memory for items beside each other."""
CORES_PER_ITEM = 3
UNFINISHED = 75
"""The exit code of a call that another call has to follow."""


@dataclass(frozen=True)
class Running:
    """An item's process, its start by the monotonic clock, and the seconds until it is killed."""

    item: Item
    process: subprocess.Popen[bytes]
    start: float
    seconds: int


class Call:
    """A call of `make gpu`: runs phases while they fit into its time."""

    def __init__(self, results: Results, sizes: dict[str, str], deadline: float, lock: int) -> None:
        self.results = results
        self.sizes = sizes
        self.deadline = deadline
        self.lock = lock
        self.start_time = time.monotonic()
        self.signal = 0
        """The signal that ends this call; an exception anywhere could lose a started process."""
        self.running: dict[str, Running] = {}
        memory = query_gpu("memory.total")
        self.has_gpu = bool(memory)
        self.gigabytes = float(memory[0]) * 2**20 / 1e9 if memory else float("inf")
        self.max_items = max(2, len(os.sched_getaffinity(0)) // CORES_PER_ITEM)

    def listen(self) -> None:
        """End this call, after the present step of the loop, at a signal."""
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, self.note_signal)

    def note_signal(self, number: int, frame: object) -> None:
        self.signal = number

    def run(self, phases: Sequence[Phase]) -> None:
        """Run every phase that fits into the remaining time, in the plan's order."""
        for phase in phases:
            if self.signal:
                return
            waiting = [item for item in phase.items if self.results.can_run_again(item)]
            names = {item.name for item in waiting}
            inputs = {name for item in waiting for name in item.inputs}
            is_ready = all(self.results.status(name) for name in inputs - names)
            fits = time.monotonic() + phase.seconds <= self.deadline
            if waiting and is_ready and fits:
                self.run_phase(list(waiting), time.monotonic() + phase.seconds)
                if len(waiting) > 1:
                    self.forget_choices()

    def run_phase(self, waiting: list[Item], end: float) -> None:
        """Run the items beside each other until `end` at most, or until a signal."""
        while (waiting or self.running) and not self.signal:
            for name in list(self.running):
                self.collect(name)
            for item in list(waiting):
                unfinished = {waiting_item.name for waiting_item in waiting} | set(self.running)
                if unfinished.intersection(item.inputs):
                    continue
                if time.monotonic() > end - 1:
                    obstacle = "no time was left"
                elif self.has_room(item):
                    obstacle = self.obstacle(item)
                else:
                    continue
                waiting.remove(item)
                if obstacle:
                    self.say(f"{item.name}: {obstacle}")
                    self.results.end(item, obstacle)
                else:
                    self.start(item, end)
            time.sleep(0.05)

    def forget_choices(self) -> None:
        """Remove the compiler's choices among variants of a kernel, which it has timed.

        Beside other items it chooses wrong: on an H200 a kernel of 201 µs in place of one of 80.
        The variants themselves remain compiled.
        """
        for choice in (self.results.state / "caches" / "inductor").rglob("*.best_config"):
            choice.unlink()

    def obstacle(self, item: Item) -> str | None:
        """Return the result of an item that cannot run; None if it can."""
        for need in item.needs:
            if need == "device":
                if not self.has_gpu:
                    return "no device"
            elif not (shutil.which(need) or has_package(self.results.state, need)):
                return f"left out: {need} is not here"
        for name in item.inputs:
            if self.results.result(name) != "finished":
                return f"left out: {name} is not finished"
        return None

    def has_room(self, item: Item) -> bool:
        if not self.running:
            return True
        used = sum(running.item.gigabytes for running in self.running.values())
        fits = used + item.gigabytes <= MEMORY_SHARE * self.gigabytes
        return fits and len(self.running) < self.max_items

    def start(self, item: Item, end: float) -> None:
        self.say(f"{item.name}: {item.finds}")
        folder = self.results.folder(item.name)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        self.results.forget(item.name)
        start = time.monotonic()
        seconds = int(end - start)
        command = command_of(item, self.sizes, self.results.state, seconds)
        # `timeout` ends the item's processes even if this call was killed. They hold the lock.
        limited = ["timeout", "--signal=KILL", str(seconds), "bash", "-c", command]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                limited,
                cwd=ROOT,
                env=environment(self.results.state, self.has_gpu),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
                pass_fds=[self.lock],
            )
        self.running[item.name] = Running(item, process, start, seconds)

    def collect(self, name: str) -> None:
        """Record the item's result if its process has ended."""
        running = self.running[name]
        code = running.process.poll()
        if code is None:
            return
        del self.running[name]
        seconds = time.monotonic() - running.start
        was_killed = code in (-signal.SIGKILL, 128 + signal.SIGKILL)
        if code == 0:
            result = "finished"
        elif was_killed and seconds >= running.seconds:
            result = "over its time"
        else:
            result = f"failed ({code})"
        self.say(f"{name}: {result}, {seconds:.0f} s")
        self.results.end(running.item, result, round(seconds), code)

    def kill(self) -> None:
        for running in self.running.values():
            os.killpg(running.process.pid, signal.SIGKILL)

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.start_time:4.0f} s  {text}", flush=True)


def command_of(item: Item, sizes: dict[str, str], state: Path, seconds: int) -> str:
    """Return the item's command with its sizes and folders; a benchmark ends by itself."""
    command = Template(item.command).safe_substitute(sizes)
    folder = shlex.quote(str(state / item.name))
    minutes = max(0, seconds - BENCHMARK_RESERVE) / 60
    options = f"--output $OUT --minutes {minutes:.2f}"
    command = re.sub(r"(anlit benchmark \w+)", rf"\1 {options}", command)
    return Template(command).safe_substitute(OUT=folder, STATE=shlex.quote(str(state)))


def has_package(state: Path, name: str) -> bool:
    code = f"import importlib.util as util; exit(util.find_spec({name!r}) is None)"
    return subprocess.run([str(python_of(state)), "-c", code]).returncode == 0


def corpus() -> str:
    """Return the corpus for `anlit prepare`: texts/english if it exists, else Python's sources."""
    english = ROOT / "texts" / "english"
    if not any(english.glob("*.jsonl*")):
        return "PythonSources"
    return f"TextFiles --source {shlex.quote(str(english))} --pattern '*.jsonl*' --tokenizer bpe"


def environment(state: Path, has_gpu: bool) -> dict[str, str]:
    """Return the environment of the items."""
    caches = state / "caches"
    variables = os.environ | {
        "PATH": f"{python_of(state).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "CUDA_CACHE_PATH": str(caches / "cuda"),
        "XDG_CACHE_HOME": str(caches / "other"),
        # The page names one GPU. A run would take all.
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0"),
    }
    if not has_gpu:
        variables["OMP_NUM_THREADS"] = "1"
    return variables


def python_of(state: Path) -> Path:
    return state / "venv" / "bin" / "python"


def make_virtual_environment(state: Path, wheels: Sequence[str]) -> None:
    """Install the wheels in front of the packages of this Python."""
    stamp = state / "venv" / "wheels"
    text = "\n".join([sys.executable, *wheels])
    if stamp.exists() and stamp.read_text() == text:
        return
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", "--clear", str(stamp.parent)], check=True
    )
    (packages,) = stamp.parent.glob("lib/python3*/site-packages")
    # addsitedir also reads the .pth files in those folders.
    lines = [f"import site; site.addsitedir({folder!r})\n" for folder in site.getsitepackages()]
    (packages / "beneath.pth").write_text("".join(lines))
    if wheels:
        pip = [sys.executable, "-m", "pip", "--python", str(python_of(state)), "install", "--quiet"]
        command = [*pip, "--no-index", "--no-deps", "--no-compile", *wheels]
        if subprocess.run(command).returncode:
            sys.exit(
                "make gpu: the wheels do not fit this Python. `make gpu-wheels` collects them for "
                "Python 3.12 on 64-bit x86 Linux: set GPU_PYTHON to that Python, or WHEELS to an "
                "empty folder if this Python has all packages"
            )
    stamp.write_text(text)


def wait_for_lock(lock: int, deadline: float) -> None:
    """Wait until no other call, and no item of a killed call, runs in the state folder."""
    has_printed = False
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                sys.exit("make gpu: another call still runs: wait for its end")
            if not has_printed:
                print("Another call or its item still runs: waiting for its end.")
                sys.stdout.flush()
            has_printed = True
            time.sleep(0.2)


def print_plan(phases: list[Phase], minutes: float) -> None:
    total = sum(phase.seconds for phase in phases)
    print(f"The plan: {total} s at most, in calls of {60 * minutes:.0f} s.")
    end = 0
    for phase in phases:
        names = ", ".join(item.name for item in phase.items)
        print(f"{end:4}–{end + phase.seconds} s  {names}")
        end += phase.seconds


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make gpu")
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument(
        "--again", default="", help="items to run again, or `failed`: all that are not finished"
    )
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--wheels", required=True)
    parser.add_argument("--plan", type=Path, default=ROOT / "docker" / "gpu_items.py")
    return parser.parse_args()


def main() -> int:
    options = parse_options()
    deadline = time.monotonic() + 60 * options.minutes
    has_gpu = bool(query_gpu("name"))
    suffix = "" if has_gpu else "-dry"
    state = options.state.with_name(options.state.name + suffix).resolve()
    output = options.output.with_name(options.output.name + suffix).resolve()
    plan = runpy.run_path(str(options.plan))
    phases = plan["PLAN"]

    state.mkdir(parents=True, exist_ok=True)
    lock = os.open(state / ".lock", os.O_CREAT | os.O_RDWR)
    wait_for_lock(lock, deadline)
    make_virtual_environment(state, sorted(glob.glob(f"{options.wheels}*/*.whl")))
    peer = "litgpt" if has_package(state, "litgpt") else "none"
    sizes = {"CORPUS": corpus(), "PEER": peer} | plan["SIZES" if has_gpu else "TOY_SIZES"]
    results = Results(state, output, phases)
    for item in results.items:
        is_repeated = options.again == "failed" and results.is_unfinished(item)
        if is_repeated or item.name in options.again.split():
            results.forget(item.name)
    results.write()  # an output folder may be new, and this call may be killed

    print_plan(phases, options.minutes)
    call = Call(results, sizes, deadline, lock)
    call.listen()
    if not has_gpu:  # times mean nothing, so all items run beside each other
        phases = [Phase(int(deadline - time.monotonic()), results.items)]
    try:
        call.run(phases)
    finally:
        call.kill()
    if call.signal:
        return 128 + call.signal
    return close(results)


def close(results: Results) -> int:
    """Print where the results are and whether another call must follow. Return the exit code."""
    open_items = [item.name for item in results.items if not results.status(item.name)]
    unfinished = [item.name for item in results.items if results.is_unfinished(item)]
    page = results.output / "gpu.md"
    if unfinished:
        print(f"Not finished: {', '.join(unfinished)}. AGAIN=failed repeats them.")
    if not open_items:
        print(f"All items have a result, see {page}.")
        return 0
    print(f"See {page}. Call make gpu again for: {', '.join(open_items)}.")
    return UNFINISHED


if __name__ == "__main__":
    sys.exit(main())
