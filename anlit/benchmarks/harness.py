"""The harness of all benchmarks: the cases of a group are built and checked, then timed in turns. Each becomes a row.

A row has `label` and the facts of its case. If it is not timed it has a `reason`, else `seconds` (by kind: median,
quartiles, values of the rounds, and whether they are steady), `ratio` (by kind: its time over that of the base, paired
by round), `clocks` (MHz and W of a GPU after each of its turns, the median) and `peak_bytes`. The record is written
after every case and every round.
"""

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
from anlit.benchmarks.timing import (
    Seconds,
    alternate,
    clocks,
    paired_ratio,
    peak_bytes,
    quartiles,
    warm_up,
)
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


@dataclass(frozen=True)
class Group:
    """Cases that take turns, and share a table."""

    title: str
    cases: Sequence[Case]
    facts: Mapping[str, Any] = field(default_factory=dict)


class Record:
    """The environment and what was measured so far, in OUTPUT/STEM.json.

    `keep` replaces the complete file, so that a killed run leaves its measurements.

    Args:
        output: The folder, made where missing.
        device: What is measured.
        stem: The name of its files (default: the benchmark's).
        values: More to keep.

    Raises:
        UserError: The folder cannot be made.
    """

    def __init__(
        self, name: str, argv: Sequence[str], output: str, device: torch.device, stem: str = "", **values: Any
    ) -> None:
        self.device = device
        self._file, self._began = output_folder(output) / (stem or name), time.monotonic()
        machine = environment()
        model = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
        machine["hardware"] |= {"device": model, "threads": torch.get_num_threads()}
        command = shlex.join(["anlit", "benchmark", name, *argv])
        self.values: dict[str, Any] = {"benchmark": name, "command": command, "environment": machine}
        self.keep(finished=False, **values)

    def keep(self, **values: Any) -> None:
        """Add these values and write the file."""
        self.values |= values
        write_json(self._file.with_name(f"{self._file.name}.json"), self.values)

    def finish(self, tables: Sequence[Table], notes: Sequence[str]) -> None:
        """Write the complete record, and the tables as Markdown; print the tables."""
        self.values["environment"]["load_after"] = os.getloadavg()[0]
        self.keep(finished=True, seconds=time.monotonic() - self._began)
        hardware = self.values["environment"]["hardware"]
        on_cpu = hardware["device"] == "cpu"
        machine = f"{hardware['cpu']}, {hardware['threads']} threads" if on_cpu else hardware["device"]
        lines = [f"# anlit benchmark {self.values['benchmark']}: {machine}", f"`{self.values['command']}`"]
        for table in tables:
            lines += [f"## {table.title}", table.markdown()]
        write_text(self._file.with_name(f"{self._file.name}.md"), "\n\n".join([*lines, *notes]) + "\n")
        screen = console()
        for part in (*tables, *notes):
            screen.print(part)
        screen.print(f"Written to {self._file}.json and .md.", soft_wrap=True)


def prepare_compiler() -> None:
    """Raise the limits of compilations, once before a benchmark begins.

    Blocks of several models share their code, and each model, shape and kind of pass is a separate compilation. Beyond
    the limit code would run uncompiled and be timed, so it fails instead.
    """
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 256
    torch._dynamo.config.accumulated_recompile_limit = 1024
    torch._dynamo.config.fail_on_recompile_limit_hit = True


def measure(groups: Iterable[Group], record: Record, rounds: int, minutes: float) -> None:
    """Time every group. The record gets `groups`, each with `rows`, and `left_out`: titles of groups without time.

    Args:
        groups: The most important first.
        rounds: The number of rounds of a group.
        minutes: The time limit. After it only the first round of a group that has begun is started.
    """
    prepare_compiler()
    deadline = time.monotonic() + 60 * minutes
    record.keep(minutes=minutes, groups=[], left_out=[])
    for group in groups:
        if time.monotonic() >= deadline:
            record.values["left_out"].append(group.title)
            continue
        say(group.title)
        _measure_group(group, record, rounds, deadline)
        gc.collect()
        if record.device.type == "cuda":
            torch.cuda.empty_cache()
    record.keep()


def _measure_group(group: Group, record: Record, rounds: int, deadline: float) -> None:
    rows: list[Row] = []
    values: dict[str, Any] = {"title": group.title, **group.facts, "rows": rows}
    record.values["groups"].append(values)
    began, device = time.monotonic(), record.device
    ready: dict[int, Ready] = {}
    turns: dict[int, Callable[[], Seconds]] = {}
    for number, case in enumerate(group.cases):
        row = {"label": case.label, **case.facts, "reason": None}
        if time.monotonic() - began > BUILDING * (deadline - began):
            row["reason"] = "no time was left to build it"
        else:
            say(f"building and checking {case.label}")
            start = time.monotonic()
            try:
                ready[number] = case.build(row, rows)
                turns[number] = _turn(ready[number], device)
                row["building_seconds"] = time.monotonic() - start
            except NotTimedError as reason:
                row["reason"] = str(reason)
            except Exception as error:  # kernels, compilers and peers have exceptions of their own
                lines = str(error).splitlines() or [type(error).__name__]
                row["reason"] = f"it fails: {lines[0][:200]}"
        rows.append(row)
        if row["reason"] is not None:
            say(f"{case.label} is left out: {row['reason']}")
        record.keep()

    if device.type == "cuda" and turns:
        now = time.monotonic()
        values["warm"] = warm_up(turns, now + WARMING * (deadline - now))

    def with_clocks(turn: Callable[[], Seconds]) -> tuple[Seconds, dict[str, float]]:
        return turn(), clocks(device)

    def after_round(results: dict[int, list[tuple[Seconds, dict[str, float]]]]) -> None:
        for number, rounds in results.items():
            (first, shown), *_ = rounds
            rows[number]["seconds"] = {kind: quartiles([times[kind] for times, _ in rounds]) for kind in first}
            rows[number]["clocks"] = {name: median(clock[name] for _, clock in rounds) for name in shown}
        record.keep()

    alternate({number: partial(with_clocks, turn) for number, turn in turns.items()}, rounds, deadline=deadline,
              after_round=after_round)  # fmt: skip
    for number in turns:
        *_, last = ready[number].calls.values()
        rows[number]["peak_bytes"] = peak_bytes(last, ready[number].kept(), device)
    put_ratios(rows, [case.base for case in group.cases])
    record.keep()


def _turn(ready: Ready, device: torch.device) -> Callable[[], Seconds]:
    """A turn of all calls, each repeated as often as it takes for the turn's length."""
    repeats = {kind: max(1, math.ceil(ready.turn_seconds / max(seconds_of_calls(call, device), 1e-6)))
               for kind, call in ready.calls.items()}  # fmt: skip
    return lambda: {kind: seconds_of_calls(call, device, repeats[kind]) for kind, call in ready.calls.items()}


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


def publish(record: Record, base: str, more: Mapping[str, Column] = {}, notes: Sequence[str] = ()) -> None:
    """Finish the record with a table for each group, a row for each case that was timed.

    Args:
        base: The name of what times are compared with.
        more: More columns.
        notes: Paragraphs for the end.
    """
    peak = record.values.get("peak_flops_per_second")
    record.finish([_table(group, base, peak, more) for group in record.values["groups"]], [*_notes(record), *notes])


def _table(group: Mapping[str, Any], base: str, peak: float | None, more: Mapping[str, Column]) -> Table:
    rows = [row for row in group["rows"] if "seconds" in row]
    kinds = list(rows[0]["seconds"]) if rows else []
    last = kinds[-1] if kinds else ""
    columns: dict[str, Column] = {f"{kind}, ms": partial(_milliseconds, kind) for kind in kinds}
    columns["quartiles"] = lambda row: " – ".join(map(_ms, row["seconds"][last]["quartiles"]))
    if peak is not None:
        columns["of peak"] = lambda row: of_peak(row, last, peak)
    columns[f"÷ {base} (95 %)"] = partial(_ratio, last)
    columns["MB"] = lambda row: NONE if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.0f}"
    columns |= more
    if any(row["clocks"] for row in rows):
        columns["MHz, W"] = lambda row: "{mhz:.0f}, {watts:.0f}".format(**row["clocks"]) if row["clocks"] else NONE
    return Table(group["title"], ("", *columns),
                 [[row["label"], *(cell(row) for cell in columns.values())] for row in rows])  # fmt: skip


def _notes(record: Record) -> list[str]:
    """One line for each case that was not timed, with the reason, and for each group that is to be read with care."""
    lines = []
    for group in record.values["groups"]:
        title = group["title"]
        lines += [f"Not timed: {title}: {row['label']}: {row['reason']}." for row in group["rows"] if row["reason"]]
        if not group.get("warm", True):
            lines.append(f"{title}: the clocks did not settle before the rounds began.")
        if not all(times["steady"] for row in group["rows"] for times in row.get("seconds", {}).values()):
            lines.append(f"{title}: {UNSTEADY} quartiles more than 5 % apart: rely on the ratios.")
    if left_out := record.values["left_out"]:
        lines.append(f"Left out after {record.values['minutes']:g} minutes: {'; '.join(left_out)}.")
    return lines


def of_peak(row: Row, kind: str, peak: float) -> str:
    """The rate of `row["flops"]` as a share of the peak."""
    return f"{row['flops'][kind] / row['seconds'][kind]['median'] / peak:.1%}"


def _milliseconds(kind: str, row: Row) -> str:
    return _ms(row["seconds"][kind]["median"]) + ("" if row["seconds"][kind]["steady"] else UNSTEADY)


def _ratio(kind: str, row: Row) -> str:
    ratio = row["ratio"].get(kind)
    return NONE if ratio is None else f"{ratio['median']:.3f} ({ratio['low']:.3f} – {ratio['high']:.3f})"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:.0f}"
