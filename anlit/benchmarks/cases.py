"""The loop of all benchmarks: the cases of a group are built and checked, then timed in turns. Each becomes a row.

A row has `label` and the facts of its case. If it is not timed it has a `reason`, else `seconds` (by kind: median,
quartiles, values of the rounds, and whether they are steady), `ratio` (by kind: its time over that of the base, paired
by round), `clocks` (MHz and W of a GPU after each of its turns, the median) and `peak_bytes`. The record is written
after every case and every round.
"""

import gc
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch

from anlit.benchmarks.clock import clocks
from anlit.benchmarks.record import Record, Table
from anlit.benchmarks.turns import Seconds, alternate, paired_ratio, quartiles, warm_up
from anlit.reporting.table import NONE
from anlit.reporting.text import say

Row = dict[str, Any]
Column = Callable[[Row], str]

BUILDING = 0.7
"""The share of a group's time in which its cases are built and checked."""
WARMING = 0.5
"""The share of what is left then, in which a GPU warms up; the rest is for the rounds."""
UNSTEADY = "*"
"""Marks a time whose quartiles are far apart."""


class NotTimedError(Exception):
    """A case cannot be timed, or computes something else; the message says why."""


@dataclass
class Ready:
    """A case that is built and has passed its check.

    Args:
        turn: Runs it once, and returns seconds by kind.
        facts: Facts for its row that were found while building it.
        peak: Returns its peak memory in bytes; None if the system does not tell.
    """

    turn: Callable[[], Seconds]
    facts: Mapping[str, Any] = field(default_factory=dict)
    peak: Callable[[], int | None] = lambda: None


@dataclass(frozen=True)
class Case:
    """One thing to be timed.

    Args:
        label: Its name in the tables.
        build: Builds and checks it, given the rows of the group so far; the last one is its own. It raises
            any exception, if it cannot be timed.
        base: The label of the case that its times are compared with (default: the first that was timed).
    """

    label: str
    build: Callable[[list[Row]], Ready]
    facts: Mapping[str, Any] = field(default_factory=dict)
    base: str | None = None


@dataclass(frozen=True)
class Group:
    """Cases that take turns."""

    title: str
    cases: Sequence[Case]
    facts: Mapping[str, Any] = field(default_factory=dict)


def measure(groups: Iterable[Group], record: Record, rounds: int, minutes: float) -> None:
    """Time every group. The record gets `groups`, each with `rows`, and `left_out`: titles of groups without time.

    Args:
        groups: The most important first.
        rounds: The number of rounds of a group.
        minutes: The time limit. After it only the first round of a group that has begun is started.
    """
    deadline = time.monotonic() + 60 * minutes
    record.keep(minutes=minutes, groups=[], left_out=[])
    for group in groups:
        if time.monotonic() >= deadline:
            record.values["left_out"].append(group.title)
            continue
        say(group.title)
        _measure_group(group, record, rounds, deadline)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    record.keep()


def _measure_group(group: Group, record: Record, rounds: int, deadline: float) -> None:
    rows: list[Row] = []
    record.values["groups"].append({"title": group.title, **group.facts, "rows": rows})
    began = time.monotonic()
    running: dict[int, Ready] = {}
    for number, case in enumerate(group.cases):
        rows.append({"label": case.label, **case.facts, "reason": None})
        if time.monotonic() - began > BUILDING * (deadline - began):
            rows[-1]["reason"] = "no time was left to build it"
        elif (ready := _built(case, rows)) is not None:
            running[number] = ready
        if rows[-1]["reason"] is not None:
            say(f"{case.label} is left out: {rows[-1]['reason']}")
        record.keep()

    turns = {number: ready.turn for number, ready in running.items()}
    if record.device.type == "cuda" and turns:
        now = time.monotonic()
        record.values["groups"][-1]["warm"] = warm_up(turns, now + WARMING * (deadline - now))

    def with_clocks(turn: Callable[[], Seconds]) -> tuple[Seconds, dict[str, float]]:
        return turn(), clocks(record.device)

    def after_round(results: dict[int, list[tuple[Seconds, dict[str, float]]]]) -> None:
        for number, values in results.items():
            first, shown = values[0]
            rows[number]["seconds"] = {kind: quartiles([times[kind] for times, _ in values]) for kind in first}
            rows[number]["clocks"] = {name: median(told[name] for _, told in values) for name in shown}
        record.keep()

    alternate({number: partial(with_clocks, turn) for number, turn in turns.items()}, rounds, deadline=deadline,
              after_round=after_round)  # fmt: skip
    for number, ready in running.items():
        rows[number]["peak_bytes"] = ready.peak()
    put_ratios(rows, [case.base for case in group.cases])
    record.keep()


def _built(case: Case, rows: list[Row]) -> Ready | None:
    """The case, ready for its turns. If it cannot be timed: None, and the reason in its row."""
    row, began = rows[-1], time.monotonic()
    say(f"building and checking {case.label}")
    try:
        ready = case.build(rows)
    except NotTimedError as reason:
        row["reason"] = str(reason)
        return None
    except Exception as error:  # kernels, compilers and peers have exceptions of their own
        lines = str(error).splitlines() or [type(error).__name__]
        row["reason"] = f"it fails: {lines[0][:200]}"
        return None
    row |= {**ready.facts, "building_seconds": time.monotonic() - began}
    return ready


def put_ratios(rows: Sequence[Row], bases: Sequence[str | None]) -> None:
    """Give every timed row the ratio of its times to those of its base, by kind."""
    timed = {row["label"]: row["seconds"] for row in rows if "seconds" in row}
    for row, base in zip(rows, bases, strict=True):
        others = timed.get(base or next(iter(timed), ""), {})
        row["ratio"] = {
            kind: paired_ratio(mine["values"], others[kind]["values"])._asdict()
            for kind, mine in row.get("seconds", {}).items()
            if kind in others and min(others[kind]["values"]) > 0
        }


def publish(record: Record, columns: Mapping[str, Column], more: Iterable[Table] = ()) -> None:
    """Finish the record with a table for each group, a row for each case that was timed, and then other tables."""
    groups = record.values["groups"]
    if any(row["clocks"] for group in groups for row in timed(group)):
        columns = {**columns, "MHz, W": _clocks}
    head = ("", *columns)
    tables = [
        Table(group["title"], head, [[row["label"], *(cell(row) for cell in columns.values())]
                                     for row in timed(group)])
        for group in groups
    ]  # fmt: skip
    record.finish([*tables, *more], notes(record))


def timed(group: Mapping[str, Any]) -> list[Row]:
    return [row for row in group["rows"] if "seconds" in row]


def notes(record: Record) -> list[str]:
    """One line for each case that was not timed, with the reason."""
    lines = [
        f"Not timed: {group['title']}: {row['label']}: {row['reason']}."
        for group in record.values["groups"]
        for row in group["rows"]
        if row["reason"] is not None
    ]
    for group in record.values["groups"]:
        if not group.get("warm", True):
            lines.append(f"{group['title']}: the clocks did not settle before the rounds began.")
        if any(not times["steady"] for row in timed(group) for times in row["seconds"].values()):
            lines.append(f"{group['title']}: {UNSTEADY} quartiles more than 5 % apart: rely on the ratios.")
    if left_out := record.values["left_out"]:
        lines.append(f"Left out after {record.values['minutes']:g} minutes: {'; '.join(left_out)}.")
    return lines


def milliseconds(kind: str) -> Column:
    """The median time; marked if it is not steady."""
    return lambda row: _ms(row["seconds"][kind]["median"]) + ("" if row["seconds"][kind]["steady"] else UNSTEADY)


def quartiles_of(kind: str) -> Column:
    """The quartiles of the times, in ms."""
    return lambda row: " – ".join(map(_ms, row["seconds"][kind]["quartiles"]))


def ratio_of(kind: str) -> Column:
    """The time over the base's time, with its 95 % interval."""

    def cell(row: Row) -> str:
        ratio = row["ratio"].get(kind)
        return NONE if ratio is None else f"{ratio['median']:.3f} ({ratio['low']:.3f} – {ratio['high']:.3f})"

    return cell


def of_peak(kind: str, peak: float) -> Column:
    """The rate of `row["flops"]` as a share of the peak."""
    return lambda row: f"{row['flops'][kind] / row['seconds'][kind]['median'] / peak:.1%}"


def megabytes(row: Row) -> str:
    """The peak memory."""
    return NONE if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.0f}"


def _clocks(row: Row) -> str:
    return "{mhz:.0f}, {watts:.0f}".format(**row["clocks"]) if row["clocks"] else NONE


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:.0f}"
