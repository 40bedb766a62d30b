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
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anlit.benchmarks.timing import (
    Seconds,
    alternate,
    clocks,
    matrix_peak,
    paired_ratio,
    peak_bytes,
    quartiles,
    seconds_of_calls,
    warm_up,
)
from anlit.io.provenance import environment
from anlit.io.write import output_folder, write_json, write_text
from anlit.reporting.table import NONE, Table, console
from anlit.reporting.text import say
from anlit.training.callbacks.throughput import peak_flops

Row = dict[str, Any]

BUILDING, WARMING = 0.7, 0.5
"""The share of a group's time for building and checking; of what is left then, for a GPU to warm up."""
TURN_SECONDS = 0.02
"""A turn repeats a call until it has about this long; a shorter one would measure the clock."""
UNSTEADY = "*"
"""Marks a time whose quartiles are far apart."""


def first_line(error: Exception) -> str:
    """What an exception of a kernel or a compiler says first, or its type if it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


class NotTimedError(Exception):
    """A case cannot be timed, or computes something else; the message says why."""


class Ready(NamedTuple):
    """A case that is built and has passed its check.

    `calls` are timed by kind, for `turn_seconds` at least in a turn. The peak memory is that of the last one and of the
    tensors `kept` between calls.
    """

    calls: Mapping[str, Callable[[], Any]]
    kept: Callable[[], Iterable[Tensor]] = tuple
    turn_seconds: float = TURN_SECONDS

    def turn(self, device: torch.device) -> Callable[[], Seconds]:
        """A turn of all calls, each repeated as often as it takes for the turn's length."""
        repeats = {}
        for kind, call in self.calls.items():
            call()  # compiles what this kind of call needs
            repeats[kind] = max(
                1, math.ceil(self.turn_seconds / max(seconds_of_calls(call, device), 1e-6))
            )
        return lambda: {
            kind: seconds_of_calls(call, device, repeats[kind]) for kind, call in self.calls.items()
        }


class Group(NamedTuple):
    """Cases that take turns and share a table.

    `build` builds and checks a case, given its row, to which it adds facts, and the rows before; it raises if the case
    cannot be timed. `cases` are what rows begin with: `label`, and `base`, the label of the case that its times are
    compared with (default: the first that was timed).
    """

    title: str
    build: Callable[[Row, list[Row]], Ready]
    cases: Sequence[Row]


class Benchmark:
    """The environment, the options and what was measured so far, in OUTPUT/STEM.json.

    The complete file is replaced after every case and every round, so that a killed run leaves its measurements.
    `given` are the options `argv`, parsed. Raises UserError if the folder cannot be made.
    """

    def __init__(
        self, name: str, argv: Sequence[str], given: argparse.Namespace, stem: str = ""
    ) -> None:
        self.device, self.given = given.device, given
        self._file, self._began = output_folder(given.output) / (stem or name), time.monotonic()
        machine, is_gpu = environment(), self.device.type == "cuda"
        model = torch.cuda.get_device_name(self.device) if is_gpu else str(self.device)
        machine["hardware"] |= {"device": model, "threads": torch.get_num_threads()}
        command = shlex.join(["anlit", "benchmark", name, *argv])
        self.record: dict[str, Any] = {
            "benchmark": name,
            "command": command,
            "environment": machine,
        }
        self.keep(finished=False, settings=vars(given), groups=[], left_out=[])

    def keep(self, **values: Any) -> None:
        """Add these values and write the file."""
        self.record |= values
        write_json(self._file.with_name(f"{self._file.name}.json"), self.record)

    def keep_peaks(self, dtype: torch.dtype) -> None:
        """Measure the device's peak in matrix products, and look up its data sheet's, as `train/mfu` does."""
        precision = "bf16-mixed" if dtype == torch.bfloat16 else "32-true"
        self.keep(
            peak_flops_per_second=matrix_peak(self.device, dtype),
            data_sheet_flops_per_second=peak_flops(self.device, precision),
        )

    def measure(self, groups: Iterable[Group]) -> None:
        """Time every group, the most important first. `left_out` are the titles of those for which there was no time.

        After --minutes only the first round of a group that has begun is started. Each model, shape and kind of pass is
        a compilation of its own; beyond torch's limit of them code would be timed uncompiled, so there it fails.
        """
        torch._dynamo.reset()
        torch._dynamo.config.recompile_limit = 256
        torch._dynamo.config.accumulated_recompile_limit = 1024
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        deadline = time.monotonic() + 60 * self.given.minutes
        for group in groups:
            if time.monotonic() >= deadline:
                self.record["left_out"].append(group.title)
                continue
            say(group.title)
            self._measure_group(group, deadline)
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        self.keep()

    def _measure_group(self, group: Group, deadline: float) -> None:
        rows: list[Row] = []
        record: dict[str, Any] = {"title": group.title, "rows": rows}
        self.record["groups"].append(record)
        limit = time.monotonic() + BUILDING * (deadline - time.monotonic())
        ready: dict[int, Ready] = {}
        turns: dict[int, Callable[[], Seconds]] = {}
        for number, case in enumerate(group.cases):
            row, start = {**case, "reason": None}, time.monotonic()
            say(f"building and checking {row['label']}")
            try:
                if start > limit:
                    raise NotTimedError("no time was left to build it")
                ready[number] = group.build(row, rows)
                turns[number] = ready[number].turn(self.device)
                row["building_seconds"] = time.monotonic() - start
            except Exception as error:  # kernels, compilers and peers have exceptions of their own
                row["reason"] = (
                    str(error)
                    if isinstance(error, NotTimedError)
                    else f"it fails: {first_line(error)}"
                )
                say(f"{row['label']} is left out: {row['reason']}")
            rows.append(row)
            self.keep()

        if self.device.type == "cuda" and turns:
            now = time.monotonic()
            record["warm"] = warm_up(turns, now + WARMING * (deadline - now))

        def after_round(results: dict[int, list[tuple[Seconds, dict[str, float]]]]) -> None:
            for number, rounds in results.items():
                seconds, states = zip(*rounds, strict=True)
                rows[number]["seconds"] = {
                    kind: quartiles([each[kind] for each in seconds]) for kind in seconds[0]
                }
                rows[number]["clocks"] = {
                    name: median(each[name] for each in states) for name in states[0]
                }
            self.keep()

        timed = {
            number: lambda turn=turn: (turn(), clocks(self.device))
            for number, turn in turns.items()
        }
        alternate(timed, self.given.rounds, deadline, after_round)
        for number in turns:
            *_, last = ready[number].calls.values()
            rows[number]["peak_bytes"] = peak_bytes(last, ready[number].kept(), self.device)
        put_ratios(rows)

    def publish(
        self, base: str, more: Mapping[str, Callable[[Row], str]] = {}, notes: Sequence[str] = ()
    ) -> None:
        """Write the complete record, and a table for each group as Markdown; print the tables.

        `base` is the name of what times are compared with; `more` are more columns, `notes` paragraphs for the end.
        """
        self.record["environment"]["load_after"] = os.getloadavg()[0]
        self.keep(finished=True, seconds=time.monotonic() - self._began)
        peaks = {
            "of measured peak": self.record.get("peak_flops_per_second"),
            "MFU": self.record.get("data_sheet_flops_per_second"),
        }
        tables = [_table(group, base, peaks, more) for group in self.record["groups"]]
        notes = [*self._notes(), *notes]
        hardware = self.record["environment"]["hardware"]
        on_cpu = hardware["device"] == "cpu"
        machine = (
            f"{hardware['cpu']}, {hardware['threads']} threads" if on_cpu else hardware["device"]
        )
        lines = [
            f"# anlit benchmark {self.record['benchmark']}: {machine}",
            f"`{self.record['command']}`",
        ]
        lines += [part for table in tables for part in (f"## {table.title}", table.markdown())]
        write_text(
            self._file.with_name(f"{self._file.name}.md"), "\n\n".join([*lines, *notes]) + "\n"
        )
        screen = console()
        for part in (*tables, *notes):
            screen.print(part)
        screen.print(f"Written to {self._file}.json and .md.", soft_wrap=True)

    def _notes(self) -> list[str]:
        """One line for each case that was not timed, and for each group that is to be read with care."""
        lines = []
        for group in self.record["groups"]:
            title, rows = group["title"], group["rows"]
            lines += [
                f"Not timed: {title}: {row['label']}: {row['reason']}."
                for row in rows
                if row["reason"]
            ]
            if not group.get("warm", True):
                lines.append(f"{title}: the clocks did not settle before the rounds began.")
            if not all(
                times["steady"] for row in rows for times in row.get("seconds", {}).values()
            ):
                lines.append(
                    f"{title}: {UNSTEADY} quartiles more than 5 % apart: rely on the ratios."
                )
        if left_out := self.record["left_out"]:
            lines.append(f"Left out after {self.given.minutes:g} minutes: {'; '.join(left_out)}.")
        return lines


def put_ratios(rows: Sequence[Row]) -> None:
    """Give every row the ratio of its times to those of its base, by kind, as far as both were timed."""
    timed = {row["label"]: row["seconds"] for row in rows if "seconds" in row}
    for row in rows:
        others = timed.get(row.get("base", next(iter(timed), "")), {})
        row["ratio"] = {
            kind: paired_ratio(mine["values"], others[kind]["values"])._asdict()
            for kind, mine in row.get("seconds", {}).items()
            if kind in others and min(others[kind]["values"]) > 0
        }


def _table(
    group: Mapping[str, Any],
    base: str,
    peaks: Mapping[str, float | None],
    more: Mapping[str, Callable[[Row], str]],
) -> Table:
    body = []
    for row in group["rows"]:
        if "seconds" not in row:
            continue
        cells = {"": row["label"]}
        for kind, times in row["seconds"].items():
            cells[f"{kind}, ms"] = _ms(times["median"]) + ("" if times["steady"] else UNSTEADY)
        ratio, clock = row["ratio"].get(kind), row["clocks"]  # of the last kind
        cells["quartiles"] = " – ".join(map(_ms, times["quartiles"]))
        for name, peak in peaks.items():
            if peak is not None:
                cells[name] = f"{row['flops'][kind] / times['median'] / peak:.1%}"
        cells[f"÷ {base} (95 %)"] = _ratio(**ratio) if ratio else NONE
        cells["MB"] = NONE if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.0f}"
        cells |= {name: cell(row) for name, cell in more.items()}
        cells |= {"MHz, W": "{mhz:.0f}, {watts:.0f}".format(**clock)} if clock else {}
        body.append(cells)
    return Table(group["title"], [*(body or [{"": ""}])[0]], [[*cells.values()] for cells in body])


def _ratio(median: float, low: float, high: float) -> str:
    return f"{median:.3f} " + (
        f"({low:.3f} – {high:.3f})" if math.isfinite(low) else "(fewer than 6 rounds)"
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:.0f}"
