"""The parts of `anlit benchmark data`: which trials are run, in which order, and what is kept of them.

The programs take turns inside every round, so that whatever else the machine does hits all of them; what is
compared are medians over rounds, and medians of ratios inside rounds.
"""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from anlit.benchmarks import data_material as material
from anlit.benchmarks.data_material import Say, Settings
from anlit.benchmarks.record import run_trial, spread, this_python
from anlit.errors import UserError
from anlit.reporting.provenance import cores

OURS = this_python("anlit.benchmarks.data_trials")
SHAPE = {"batch_size": 8, "context_length": 2048}
WARM_UP_SECONDS = 1.0
STREAMING_WORKERS = (0, 1, 2)
MOMENTS = 10
START_MEGABYTES = 0.01
WAITING_WORKERS = 4
DEMANDS = (600_000, 5_000_000)
"""Tokens/s that a device asks for: an H200 with a model of 125M parameters at 55 % of its peak; and eight of them."""
RESUMED_AT = 0.9  # of an epoch


@dataclass(frozen=True)
class Entrant:
    """One program with one number of workers: a row of the table."""

    program: str
    command: list[str]
    trial: str
    arguments: dict[str, Any]
    workers: int = 1
    before: Callable[[], None] | None = None
    """Run before each of its trials, outside of what is measured."""

    def run(self) -> dict[str, Any]:
        if self.before is not None:
            self.before()
        return run_trial(self.command, self.trial, self.arguments)


def prepare(settings: Settings, say: Say) -> list[dict[str, Any]]:
    """Text to tokens: ours, the bare tokenizers library, litgpt."""
    text, folder = material.text(settings, say), settings.folder / "prepared"
    inputs = {"input": str(text), "tokenizer": str(material.tokenizer_folder(settings, text, say))}
    entrants = [
        Entrant(f"tokenizers {method}", OURS, "bare", {**inputs, "method": method})
        for method in ("encode_batch", "encode_batch_fast")
    ]

    def clear() -> None:
        shutil.rmtree(folder, ignore_errors=True)

    for workers in sorted({1, cores()}):
        arguments = {**inputs, "output": str(folder / "shards"), "workers": workers}
        for program, command in _programs(settings).items():
            entrants.append(Entrant(program, command, "prepare", arguments, workers, clear))
    starts = [_start_seconds(settings, entrant, say) for entrant in entrants]
    measurements = _take_turns("prepare", entrants, settings.rounds, say)
    clear()
    bare = measurements[0]
    for measurement, start in zip(measurements, starts, strict=True):
        after_start = [{**result, "seconds": result["seconds"] - start} for result in measurement["rounds"]]
        measurement["start_seconds"] = start
        measurement["tokens_per_second_after_start"] = spread(_per_second(after_start, "seconds"))
        measurement["tokens_per_cpu_second"] = spread(_per_second(measurement["rounds"], "cpu_seconds"))
    for measurement in measurements:
        measurement["beside_encode_batch"] = {
            "per_worker": _ratio(measurement, bare, "tokens_per_second", measurement["workers"]),
            "per_cpu_second": _ratio(measurement, bare, "tokens_per_cpu_second"),
        }
    return measurements


def _start_seconds(settings: Settings, entrant: Entrant, say: Say) -> float:
    """How long a preparation takes that has next to nothing to encode: starting workers, and ending them."""
    if entrant.trial != "prepare":
        return 0.0
    say(f"prepare: starting {entrant.program}, workers: {entrant.workers}")
    almost_nothing = material.text(replace(settings, megabytes=START_MEGABYTES), say)
    return replace(entrant, arguments={**entrant.arguments, "input": str(almost_nothing)}).run()["seconds"]


def stream(settings: Settings, say: Say) -> list[dict[str, Any]]:
    """Shards to batches: ours, litgpt's data module, a mapped file.

    litgpt is measured twice: with the inputs and targets that its training loop makes of each batch, as ours
    has them, and without.
    """
    path = material.shards(settings, say)
    material.read_all(path)
    warm_up = min(WARM_UP_SECONDS, settings.stream_seconds)
    shape = {**SHAPE, "warm_up": warm_up, "seconds": settings.stream_seconds}
    entrants = [Entrant("memmap", OURS, "memmap", {**shape, "path": str(path)}, workers=0)]
    for workers in STREAMING_WORKERS:
        for program, command in _programs(settings).items():
            if program == "anlit":
                entrants.append(
                    Entrant(program, command, "stream", {**shape, "path": str(path), "workers": workers}, workers)
                )
                continue
            for name, as_trained in (("litgpt", True), ("litgpt, raw blocks", False)):
                arguments = {**shape, "path": str(path / "train"), "workers": workers, "as_trained": as_trained}
                entrants.append(Entrant(name, command, "stream", arguments, workers))
    measurements = _take_turns("stream", entrants, settings.rounds, say)
    theirs = {measurement["workers"]: measurement for measurement in measurements if measurement["program"] == "litgpt"}
    for measurement in measurements:
        if measurement["workers"] in theirs:
            measurement["beside_litgpt"] = _ratio(measurement, theirs[measurement["workers"]], "tokens_per_second")
    return measurements


def memory(settings: Settings, say: Say) -> list[dict[str, Any]]:
    """What each loader process holds while two of them stream without pause."""
    if not Path("/proc/self/smaps_rollup").exists():
        say("memory: left out, this system does not tell a process's own memory (/proc/PID/smaps_rollup)")
        return []
    workers, path = STREAMING_WORKERS[-1], material.shards(settings, say)
    say(f"memory: {workers} workers for {settings.memory_seconds:g} s")
    arguments = {"path": str(path), "workers": workers, "seconds": settings.memory_seconds, "moments": MOMENTS}
    result = run_trial(OURS, "memory", {**SHAPE, **arguments})
    pids = [process["pid"] for process in result["samples"][0]["processes"]]
    series = {
        kind: [
            [found[kind] for sample in result["samples"] for found in sample["processes"] if found.get("pid") == pid]
            for pid in pids
        ]
        for kind in ("unique", "proportional")
    }
    return [
        {
            "part": "memory",
            "program": "anlit",
            "workers": workers,
            "tokens": result["tokens"],
            "seconds": [sample["second"] for sample in result["samples"]],
            "megabytes": series,
            "growth_megabytes": {kind: [_growth(values) for values in of_one] for kind, of_one in series.items()},
        }
    ]


def wait(settings: Settings, say: Say) -> list[dict[str, Any]]:
    """What share of its time a device would wait for batches, if it asked for so many tokens a second."""
    path = material.shards(settings, say)
    material.read_all(path)
    shape = {**SHAPE, "path": str(path), "workers": WAITING_WORKERS}
    shape |= {"warm_up": min(WARM_UP_SECONDS, settings.stream_seconds), "seconds": settings.stream_seconds}
    entrants = [
        Entrant(f"anlit, {demand / 1e6:g}M/s", OURS, "wait", {**shape, "tokens_per_second": demand}, WAITING_WORKERS)
        for demand in DEMANDS
    ]
    measurements = _take_turns("wait", entrants, settings.rounds, say)
    for measurement, demand in zip(measurements, DEMANDS, strict=True):
        measurement["demand"] = demand
        measurement["wait_share"] = spread([result["waited"] / result["seconds"] for result in measurement["rounds"]])
    return measurements


def first_batch(settings: Settings, say: Say) -> list[dict[str, Any]]:
    """From a fresh process to a batch, with the shards' files not in the system's cache."""
    path = material.shards(settings, say)
    measurements = []
    for done, name in ((0.0, "first batch"), (RESUMED_AT, f"first batch at {RESUMED_AT:.0%}")):
        entrants = [
            Entrant(
                "anlit",
                OURS,
                "first_batch",
                {**SHAPE, "path": str(path), "workers": workers, "part": done},
                workers,
                partial(material.forget_all, path),
            )
            for workers in (STREAMING_WORKERS[0], STREAMING_WORKERS[-1])
        ]
        for measurement in _take_turns(name, entrants, settings.rounds, say):
            del measurement["tokens_per_second"]
            for key in ("seconds", "import_seconds"):
                measurement[key] = spread([result[key] for result in measurement["rounds"]])
            measurements.append(measurement)
    return measurements


def _programs(settings: Settings) -> dict[str, list[str]]:
    """Ours and, if its Python is given, litgpt; isolated, so that it finds only what is installed for it."""
    programs = {"anlit": OURS}
    if settings.peer_python is not None:
        programs["litgpt"] = [settings.peer_python, "-I", str(Path(__file__).with_name("litgpt_data.py"))]
    return programs


def _take_turns(part: str, entrants: list[Entrant], rounds: int, say: Say) -> list[dict[str, Any]]:
    """Every entrant once in each round; each round begins with another one."""
    results: list[list[dict[str, Any]]] = [[] for _ in entrants]
    for turn in range(rounds):
        for place in range(len(entrants)):
            number = (turn + place) % len(entrants)
            entrant = entrants[number]
            say(f"{part}: round {turn + 1} of {rounds}, {entrant.program}, workers: {entrant.workers}")
            results[number].append(entrant.run())
    return [
        {
            "part": part,
            "program": entrant.program,
            "workers": entrant.workers,
            "tokens_per_second": spread(_per_second(of_one, "seconds")),
            "rounds": of_one,
        }
        for entrant, of_one in zip(entrants, results, strict=True)
    ]


def _per_second(rounds: list[dict[str, Any]], kind: str) -> list[float]:
    return [result.get("tokens", 0) / max(result[kind], 1e-9) for result in rounds]


def _ratio(mine: Mapping[str, Any], other: Mapping[str, Any], key: str, per: int = 1) -> dict[str, Any]:
    """Round by round how many times as fast, per worker."""
    pairs = zip(mine[key]["values"], other[key]["values"], strict=True)
    return spread([value / per / its for value, its in pairs])


def _growth(values: list[float]) -> float:
    """From the mean of the moments in the first third to that of those in the last, without the very first."""
    third = max(1, (len(values) - 1) // 3)
    first, last = values[1:][:third] or values, values[-third:]
    return sum(last) / len(last) - sum(first) / len(first)


PARTS: dict[str, Callable[[Settings, Say], list[dict[str, Any]]]] = {
    "prepare": prepare,
    "stream": stream,
    "memory": memory,
    "wait": wait,
    "first-batch": first_batch,
}


def check_peer(python: str) -> None:
    """Raises UserError where the peer's Python or its packages are missing."""
    try:
        run_trial([python, "-I", "-c", "import litgpt, litdata; print('{}')"], "", {})
    except (OSError, UserError) as error:
        raise UserError(f"--peer-python {python} cannot import litgpt and litdata: {error}") from error
