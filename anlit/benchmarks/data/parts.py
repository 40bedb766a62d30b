"""The parts of `anlit benchmark data`: which trials take turns, each in a fresh process, and what is kept of them."""

import argparse
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from anlit.benchmarks.data import material
from anlit.benchmarks.options import say
from anlit.benchmarks.process import measure_once
from anlit.benchmarks.record import Record
from anlit.benchmarks.turns import alternate, paired_ratio, quartiles
from anlit.reporting.provenance import cores

OURS, LITGPT = "anlit.benchmarks.data.trials", "litgpt_data"
SHAPE = {"batch_size": 8, "context_length": 2048}
WARM_UP_SECONDS = 1.0
STREAMING_WORKERS = (0, 1, 2)
MOMENTS = 10
WAITING_WORKERS = 4
DEMANDS = (600_000, 5_000_000)
"""Tokens/s that a device asks for: an H200 with a model of 125M parameters at 55 % of its peak; and eight of them."""
RESUMED_AT = 0.9  # of an epoch
BARE = "encode_batch"

Measurement = dict[str, Any]
"""A row of the table: `part`, `program`, `workers`, `rounds` with what each trial returned, and what follows of it."""


@dataclass(frozen=True)
class Entrant:
    """One program with one number of workers."""

    program: str
    workers: int
    trial: str
    arguments: dict[str, Any]
    python: str | None = None
    """The Python of litgpt's environment, for a trial of litgpt's."""
    before: Callable[[], None] | None = None
    """Run before each of its trials, outside of what is measured."""

    def run(self) -> dict[str, Any]:
        say(f"{self.trial}: {self.program}, workers: {self.workers}")
        if self.before is not None:
            self.before()
        module = OURS if self.python is None else LITGPT
        found: dict[str, Any] = measure_once(module, self.trial, self.python, **self.arguments)
        return found


def _take_turns(part: str, entrants: list[Entrant], given: argparse.Namespace, record: Record) -> list[Measurement]:
    """A measurement for each entrant; after each round they are in the record."""
    done: list[Measurement] = record.values["measurements"]
    mine: list[Measurement] = [
        {"part": part, "program": entrant.program, "workers": entrant.workers, "rounds": []} for entrant in entrants
    ]
    done += mine

    def after_round(results: dict[int, list[dict[str, Any]]]) -> None:
        for measurement, rounds in zip(mine, results.values(), strict=True):
            measurement["rounds"] = rounds
            measurement["tokens_per_second"] = quartiles([one.get("tokens", 0) / one["seconds"] for one in rounds])
        record.keep()

    trials = {number: entrant.run for number, entrant in enumerate(entrants)}
    alternate(trials, given.rounds, after_round=after_round)
    return mine


def _faster(mine: Measurement, other: Measurement, clock: str = "seconds") -> dict[str, float]:
    """How many times as many tokens a second as the other, round by round."""
    seconds_per_token = {
        name: [one[clock] / one["tokens"] for one in measurement["rounds"]]
        for name, measurement in (("mine", mine), ("other", other))
    }
    return paired_ratio(seconds_per_token, "other", "mine")._asdict()


def prepare(given: argparse.Namespace, record: Record) -> None:
    """Text to tokens: ours, litgpt's, and the tokenizers library alone."""
    text, folder = material.text(given), given.folder / "prepared"
    inputs = {"input": str(text), "tokenizer": str(material.tokenizer_folder(given, text))}

    def clear() -> None:
        shutil.rmtree(folder, ignore_errors=True)

    entrants = [Entrant(BARE, 1, "bare", inputs)]
    for workers in sorted({1, cores()}):
        arguments = {**inputs, "output": str(folder / "shards"), "workers": workers}
        entrants.append(Entrant("anlit", workers, "prepare", arguments, before=clear))
        if given.peer_python:
            entrants.append(Entrant("litgpt", workers, "prepare", arguments, given.peer_python, clear))
    measurements = _take_turns("prepare", entrants, given, record)
    clear()
    for measurement in measurements:
        by_clock = _faster(measurement, measurements[0])
        measurement["beside_bare"] = {
            "per_worker": {key: value / measurement["workers"] for key, value in by_clock.items()},
            "per_cpu_second": _faster(measurement, measurements[0], "cpu_seconds"),
        }


def stream(given: argparse.Namespace, record: Record) -> None:
    """Shards to batches: ours, litgpt's data module, a mapped file.

    litgpt is measured twice: with the inputs and targets that its training loop makes of each batch, as ours has them,
    and without.
    """
    path = material.shards(given)
    material.read_all(path)
    shape = {**SHAPE, **_durations(given)}
    entrants = [Entrant("memmap", 0, "memmap", {**shape, "path": str(path)})]
    for workers in STREAMING_WORKERS:
        entrants.append(Entrant("anlit", workers, "stream", {**shape, "path": str(path), "workers": workers}))
        for name, as_trained in (("litgpt", True), ("litgpt, raw blocks", False)) if given.peer_python else ():
            arguments = {**shape, "path": str(path / "train"), "workers": workers, "as_trained": as_trained}
            entrants.append(Entrant(name, workers, "stream", arguments, given.peer_python))
    measurements = _take_turns("stream", entrants, given, record)
    theirs = {one["workers"]: one for one in measurements if one["program"] == "litgpt"}
    for measurement in measurements:
        if measurement["workers"] in theirs:
            measurement["beside_litgpt"] = _faster(measurement, theirs[measurement["workers"]])


def memory(given: argparse.Namespace, record: Record) -> None:
    """What each loader process holds while two of them stream without pause."""
    if not Path("/proc/self/smaps_rollup").exists():
        say("memory: left out, this system does not tell a process's own memory (/proc/PID/smaps_rollup)")
        return
    workers = STREAMING_WORKERS[-1]
    arguments = {**SHAPE, "path": str(material.shards(given)), "workers": workers, "moments": MOMENTS}
    result = Entrant("anlit", workers, "memory", {**arguments, "seconds": given.memory_seconds}).run()
    series = list(result["megabytes"].values())
    record.values["measurements"].append(
        {
            "part": "memory",
            "program": "anlit",
            "workers": workers,
            "rounds": [result],
            "megabytes": series,
            "growth_megabytes": [_growth(values) for values in series],
        }
    )


def _growth(values: list[float]) -> float:
    """From the mean of the moments in the first third to that of those in the last, without the very first."""
    third = max(1, (len(values) - 1) // 3)
    first, last = values[1:][:third] or values, values[-third:]
    return sum(last) / len(last) - sum(first) / len(first)


def wait(given: argparse.Namespace, record: Record) -> None:
    """What share of its time a device would wait for batches, if it asked for so many tokens a second."""
    path = material.shards(given)
    material.read_all(path)
    arguments = {**SHAPE, "path": str(path), "workers": WAITING_WORKERS, **_durations(given)}
    entrants = [
        Entrant(f"anlit, {demand / 1e6:g}M/s", WAITING_WORKERS, "wait", {**arguments, "tokens_per_second": demand})
        for demand in DEMANDS
    ]
    for measurement, demand in zip(_take_turns("wait", entrants, given, record), DEMANDS, strict=True):
        measurement["demand"] = demand
        measurement["wait_share"] = quartiles([one["waited"] / one["seconds"] for one in measurement["rounds"]])


def first_batch(given: argparse.Namespace, record: Record) -> None:
    """From a fresh process to a batch, with the shards' files not in the system's cache."""
    path = material.shards(given)
    for done, name in ((0.0, "first batch"), (RESUMED_AT, f"first batch at {RESUMED_AT:.0%}")):
        entrants = [
            Entrant(
                "anlit",
                workers,
                "first_batch",
                {**SHAPE, "path": str(path), "workers": workers, "part": done},
                before=partial(material.forget_all, path),
            )
            for workers in (STREAMING_WORKERS[0], STREAMING_WORKERS[-1])
        ]
        for measurement in _take_turns(name, entrants, given, record):
            del measurement["tokens_per_second"]
            for key in ("seconds", "import_seconds"):
                measurement[key] = quartiles([one[key] for one in measurement["rounds"]])


def _durations(given: argparse.Namespace) -> dict[str, float]:
    return {"warm_up": min(WARM_UP_SECONDS, given.seconds), "seconds": given.seconds}


PARTS: Mapping[str, Callable[[argparse.Namespace, Record], None]] = {
    "prepare": prepare,
    "stream": stream,
    "memory": memory,
    "wait": wait,
    "first-batch": first_batch,
}
