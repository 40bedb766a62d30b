"""The harness of all benchmarks: the cases of a group are built and checked, then timed in turns. Each becomes a row.

A row has `label` and the facts of its case. If it is not timed it has a `reason`, else `seconds` (by kind: median,
quartiles, values of the rounds, and whether they are steady), `ratio` (by kind: its time over that of the base, paired
by round), `clocks` (MHz and W of a GPU after each of its turns, the median) and `peak_bytes`.
"""

import argparse
import gc
import math
import os
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from anlit.attention.trial import seconds_of_calls
from anlit.benchmarks.timing import Seconds, alternate, clocks, paired_ratio, peak_bytes, quartiles, warm_up
from anlit.reporting.files import output_folder, write_json, write_text
from anlit.reporting.provenance import environment
from anlit.reporting.table import NONE, Table, console
from anlit.reporting.text import say

Row = dict[str, Any]
Column = Callable[[Row], str]

BUILDING = 0.7
"""The share of a group's time in which its cases are built and checked."""
WARMING = 0.5
"""The share of what is left then, in which a GPU warms up; the rest is for the rounds."""
TURN_SECONDS = 0.02
"""A turn repeats a call until it has about this long; a shorter one would measure the clock."""
UNSTEADY = "*"
"""Marks a time whose quartiles are far apart."""


class NotTimedError(Exception):
    """A case cannot be timed, or computes something else; the message says why."""


@dataclass
class Ready:
    """A case that is built and has passed its check.

    Args:
        calls: What is timed, by kind. The peak memory is that of the last one.
        kept: Tensors that stay between calls and count as memory of the case.
        turn_seconds: The time that a turn of each call takes at least.
    """

    calls: Mapping[str, Callable[[], Any]]
    kept: Callable[[], Iterable[Tensor]] = tuple
    turn_seconds: float = TURN_SECONDS

    def turn(self, device: torch.device) -> Callable[[], Seconds]:
        """A turn of all calls, each repeated as often as it takes for the turn's length."""
        repeats = {}
        for kind, call in self.calls.items():
            call()  # compiles what this kind of call needs
            repeats[kind] = max(1, math.ceil(self.turn_seconds / max(seconds_of_calls(call, device), 1e-6)))
        return lambda: {kind: seconds_of_calls(call, device, repeats[kind]) for kind, call in self.calls.items()}


@dataclass(frozen=True)
class Case:
    """One thing to be timed.

    Args:
        label: Its name in the tables.
        build: Builds and checks it, given its row, to which it adds facts, and the rows before. It raises any exception
            if it cannot be timed.
        facts: What its row begins with.
        base: The label of the case that its times are compared with (default: the first that was timed).
    """

    label: str
    build: Callable[[Row, list[Row]], Ready]
    facts: Mapping[str, Any] = field(default_factory=dict)
    base: str | None = None


Group = tuple[str, Sequence[Case]]
"""A title, and cases that take turns and share a table."""


class Benchmark:
    """The environment, the options and what was measured so far, in OUTPUT/STEM.json.

    The complete file is replaced after every case and every round, so that a killed run leaves its measurements.

    Args:
        name: What follows `anlit benchmark`.
        argv: The options as they were given.
        given: The same, parsed.
        device: What is measured.
        stem: The name of its files (default: the benchmark's).

    Raises:
        UserError: The folder cannot be made.
    """

    def __init__(
        self, name: str, argv: Sequence[str], given: argparse.Namespace, device: torch.device, stem: str = ""
    ) -> None:
        self.device, self.given = device, given
        self._file, self._began = output_folder(given.output) / (stem or name), time.monotonic()
        machine = environment()
        model = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
        machine["hardware"] |= {"device": model, "threads": torch.get_num_threads()}
        command = shlex.join(["anlit", "benchmark", name, *argv])
        self.record: dict[str, Any] = {"benchmark": name, "command": command, "environment": machine}
        self.keep(finished=False, settings=vars(given), groups=[], left_out=[])

    def keep(self, **values: Any) -> None:
        """Add these values and write the file."""
        self.record |= values
        write_json(self._file.with_name(f"{self._file.name}.json"), self.record)

    def measure(self, groups: Iterable[Group]) -> None:
        """Time every group, the most important first. `left_out` are the titles of those for which there was no time.

        After --minutes only the first round of a group that has begun is started.
        """
        prepare_compiler()
        deadline = time.monotonic() + 60 * self.given.minutes
        for title, cases in groups:
            if time.monotonic() >= deadline:
                self.record["left_out"].append(title)
                continue
            say(title)
            self._measure_group(title, cases, deadline)
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        self.keep()

    def _measure_group(self, title: str, cases: Sequence[Case], deadline: float) -> None:
        rows: list[Row] = []
        group: dict[str, Any] = {"title": title, "rows": rows}
        self.record["groups"].append(group)
        began = time.monotonic()
        ready: dict[int, Ready] = {}
        turns: dict[int, Callable[[], Seconds]] = {}
        for number, case in enumerate(cases):
            row, start = {"label": case.label, **case.facts, "reason": None}, time.monotonic()
            if start - began > BUILDING * (deadline - began):
                row["reason"] = "no time was left to build it"
            else:
                say(f"building and checking {case.label}")
                try:
                    ready[number] = case.build(row, rows)
                    turns[number] = ready[number].turn(self.device)
                    row["building_seconds"] = time.monotonic() - start
                except NotTimedError as reason:
                    row["reason"] = str(reason)
                except Exception as error:  # kernels, compilers and peers have exceptions of their own
                    lines = str(error).splitlines() or [type(error).__name__]
                    row["reason"] = f"it fails: {lines[0][:200]}"
            rows.append(row)
            if row["reason"] is not None:
                say(f"{case.label} is left out: {row['reason']}")
            self.keep()

        if self.device.type == "cuda" and turns:
            now = time.monotonic()
            group["warm"] = warm_up(turns, now + WARMING * (deadline - now))

        def with_clocks(turn: Callable[[], Seconds]) -> tuple[Seconds, dict[str, float]]:
            return turn(), clocks(self.device)

        def after_round(results: dict[int, list[tuple[Seconds, dict[str, float]]]]) -> None:
            for number, rounds in results.items():
                (first, shown), *_ = rounds
                rows[number]["seconds"] = {kind: quartiles([times[kind] for times, _ in rounds]) for kind in first}
                rows[number]["clocks"] = {name: median(clock[name] for _, clock in rounds) for name in shown}
            self.keep()

        alternate({number: partial(with_clocks, turn) for number, turn in turns.items()}, self.given.rounds,
                  deadline=deadline, after_round=after_round)  # fmt: skip
        for number in turns:
            *_, last = ready[number].calls.values()
            rows[number]["peak_bytes"] = peak_bytes(last, ready[number].kept(), self.device)
        put_ratios(rows, [case.base for case in cases])

    def publish(self, base: str, more: Mapping[str, Column] = {}, notes: Sequence[str] = ()) -> None:
        """Write the complete record, and a table for each group as Markdown; print the tables.

        Args:
            base: The name of what times are compared with.
            more: More columns.
            notes: Paragraphs for the end.
        """
        self.record["environment"]["load_after"] = os.getloadavg()[0]
        self.keep(finished=True, seconds=time.monotonic() - self._began)
        tables = [
            _table(group, base, self.record.get("peak_flops_per_second"), more) for group in self.record["groups"]
        ]
        notes = [*self._notes(), *notes]
        hardware = self.record["environment"]["hardware"]
        on_cpu = hardware["device"] == "cpu"
        machine = f"{hardware['cpu']}, {hardware['threads']} threads" if on_cpu else hardware["device"]
        lines = [f"# anlit benchmark {self.record['benchmark']}: {machine}", f"`{self.record['command']}`"]
        for table in tables:
            lines += [f"## {table.title}", table.markdown()]
        write_text(self._file.with_name(f"{self._file.name}.md"), "\n\n".join([*lines, *notes]) + "\n")
        screen = console()
        for part in (*tables, *notes):
            screen.print(part)
        screen.print(f"Written to {self._file}.json and .md.", soft_wrap=True)

    def _notes(self) -> list[str]:
        """One line for each case that was not timed, and for each group that is to be read with care."""
        lines = []
        for group in self.record["groups"]:
            title = group["title"]
            lines += [f"Not timed: {title}: {row['label']}: {row['reason']}." for row in group["rows"] if row["reason"]]
            if not group.get("warm", True):
                lines.append(f"{title}: the clocks did not settle before the rounds began.")
            if not all(times["steady"] for row in group["rows"] for times in row.get("seconds", {}).values()):
                lines.append(f"{title}: {UNSTEADY} quartiles more than 5 % apart: rely on the ratios.")
        if left_out := self.record["left_out"]:
            lines.append(f"Left out after {self.given.minutes:g} minutes: {'; '.join(left_out)}.")
        return lines


def prepare_compiler() -> None:
    """Raise the limits of compilations, once before a benchmark begins.

    Blocks of several models share their code, and each model, shape and kind of pass is a separate compilation. Beyond
    the limit code would run uncompiled and be timed, so it fails instead.
    """
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 256
    torch._dynamo.config.accumulated_recompile_limit = 1024
    torch._dynamo.config.fail_on_recompile_limit_hit = True


def put_ratios(rows: Sequence[Row], bases: Sequence[str | None]) -> None:
    """Give every row the ratio of its times to those of its base, by kind, as far as both were timed."""
    timed = {row["label"]: row["seconds"] for row in rows if "seconds" in row}
    for row, base in zip(rows, bases, strict=True):
        others = timed.get(base or next(iter(timed), ""), {})
        row["ratio"] = {
            kind: paired_ratio(mine["values"], others[kind]["values"])._asdict()
            for kind, mine in row.get("seconds", {}).items()
            if kind in others and min(others[kind]["values"]) > 0
        }


def _table(group: Mapping[str, Any], base: str, peak: float | None, more: Mapping[str, Column]) -> Table:
    rows = [row for row in group["rows"] if "seconds" in row]
    kinds = list(rows[0]["seconds"]) if rows else []
    last = kinds[-1] if kinds else ""
    columns: dict[str, Column] = {f"{kind}, ms": partial(_milliseconds, kind) for kind in kinds}
    columns["quartiles"] = lambda row: " – ".join(map(_ms, row["seconds"][last]["quartiles"]))
    if peak is not None:
        columns["of peak"] = lambda row: f"{row['flops'][last] / row['seconds'][last]['median'] / peak:.1%}"
    columns[f"÷ {base} (95 %)"] = partial(_ratio, last)
    columns["MB"] = lambda row: NONE if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.0f}"
    columns |= more
    if any(row["clocks"] for row in rows):
        columns["MHz, W"] = lambda row: "{mhz:.0f}, {watts:.0f}".format(**row["clocks"]) if row["clocks"] else NONE
    return Table(group["title"], ("", *columns),
                 [[row["label"], *(cell(row) for cell in columns.values())] for row in rows])  # fmt: skip


def _milliseconds(kind: str, row: Row) -> str:
    return _ms(row["seconds"][kind]["median"]) + ("" if row["seconds"][kind]["steady"] else UNSTEADY)


def _ratio(kind: str, row: Row) -> str:
    ratio = row["ratio"].get(kind)
    return NONE if ratio is None else f"{ratio['median']:.3f} ({ratio['low']:.3f} – {ratio['high']:.3f})"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:.0f}"
