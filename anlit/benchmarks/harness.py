"""Builds and checks the cases of a benchmark, then times them in turns.

Each case becomes a row with its `label` and facts. A row that is not timed has a `reason`. The
others have:

- `seconds` by kind: median, quartiles, the value of each round, and whether they are steady.
- `ratio` by kind: the time over the base's time, paired by round.
- `clocks`: median MHz and W of a GPU after the case's turns.
- `peak_bytes`.
"""

import argparse
import gc
import math
import os
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anlit.benchmarks.tables import (
    Row,
    benchmark_page,
    benchmark_table,
    benchmark_warnings,
)
from anlit.benchmarks.timing import (
    Results,
    Seconds,
    alternate,
    clocks,
    matrix_peak,
    paired_ratio,
    peak_bytes,
    seconds_of_calls,
    summarize_times,
    warm_up,
)
from anlit.errors import first_line
from anlit.io.provenance import environment
from anlit.io.write import output_folder, write_json, write_text
from anlit.reporting.table import console
from anlit.reporting.text import say
from anlit.training.callbacks.throughput import peak_flops
from anlit.training.load_model import device_name

LONGEST_REASON = 200
"""Characters of an error in a row."""
BUILDING_SHARE = 0.7
"""The share of a group's time in which cases may be built and checked."""
WARM_UP_SHARE = 0.5
"""The share of the remaining time in which a GPU may warm up."""
TURN_SECONDS = 0.02
"""A turn repeats a call for about this long. A shorter turn would measure the clock."""

STEPS_TURN_SECONDS = 0.5
"""A GPU's turn has several steps. So the host is ahead of the GPU as in a run."""
STEPS_RUN_IN_SECONDS = 1.0
"""Untimed steps before a GPU's turn. Without them the same step took 115 ms after anGPT's steps and
122 ms after litgpt's, which had used an H200's limit of power."""

TimedTurn = tuple[Seconds, dict[str, float]]
"""The seconds of a turn by kind, and the clocks after it."""


class NotTimedError(Exception):
    """A case cannot be timed, or computes something else. The message is the reason."""


class Ready(NamedTuple):
    """A case that is built and has passed its check.

    Attributes:
        calls: The timed functions by kind. The peak memory belongs to the last.
        permanent: Returns the tensors that exist between calls, which count as memory too.
        turn_seconds: The least duration of a turn.
        run_in_seconds: The least duration of untimed calls before each turn. There a GPU takes the
            clock that its power limit allows for them.
        facts_after: Returns further entries of the row. It is called after all times, which a
            profiler would disturb. NotTimedError if the times are wrong.
    """

    calls: Mapping[str, Callable[[], Any]]
    permanent: Callable[[], Iterable[Tensor]] = tuple
    turn_seconds: float = TURN_SECONDS
    run_in_seconds: float = 0.0
    facts_after: Callable[[], Row] = dict

    def of_steps(self, device: torch.device) -> "Ready":
        """Return the case with the turns of training steps."""
        if device.type != "cuda":
            return self
        return self._replace(turn_seconds=STEPS_TURN_SECONDS, run_in_seconds=STEPS_RUN_IN_SECONDS)

    def make_turn(self, device: torch.device) -> Callable[[], Seconds]:
        """Return a function that times all calls, each repeated for the duration of a turn."""
        repeats = {}
        run_ins = {}
        for kind, call in self.calls.items():
            call()  # compiles
            seconds = max(seconds_of_calls(call, device), 1e-6)
            repeats[kind] = max(1, math.ceil(self.turn_seconds / seconds))
            run_ins[kind] = math.ceil(self.run_in_seconds / seconds)

        def take_turn() -> Seconds:
            seconds = {}
            for kind, call in self.calls.items():
                for _ in range(run_ins[kind]):
                    call()
                seconds[kind] = seconds_of_calls(call, device, repeats[kind])
            return seconds

        return take_turn


class CaseGroup(NamedTuple):
    """Cases that take turns and share a table.

    Attributes:
        title: The title of the table.
        build: Builds and checks a case. It gets the case's row, to which it adds facts, and the
            earlier rows. It raises an exception if the case cannot be timed.
        cases: The first entries of each row: `label`, and `base`, the label of the case whose times
            are the divisor. Without `base` it is the first case that was timed.
    """

    title: str
    build: Callable[[Row, list[Row]], Ready]
    cases: Sequence[Row]


class Benchmark:
    """Measures groups of cases, and keeps the record in OUTPUT/STEM.json.

    The complete file is replaced after every case and every round. A killed benchmark leaves its
    measurements.

    Args:
        name: The benchmark's name on the command line.
        argv: Its options as the user typed them.
        options: The parsed options.
        stem: The file's name without its ending, by default `name`.

    Raises:
        UserError: The folder cannot be made.
    """

    def __init__(
        self, name: str, argv: Sequence[str], options: argparse.Namespace, stem: str = ""
    ) -> None:
        self.device = options.device
        self.options = options
        self._file = output_folder(options.output) / (stem or name)
        self._start = time.monotonic()
        self.record: dict[str, Any] = {
            "benchmark": name,
            "command": shlex.join(["anlit", "benchmark", name, *argv]),
            "environment": _environment(self.device),
        }
        self.save(finished=False, settings=vars(options), groups=[], left_out=[])

    def save(self, **values: Any) -> None:
        """Add these values to the record and write the file."""
        self.record |= values
        write_json(self._file.with_name(f"{self._file.name}.json"), self.record)

    def record_peaks(self, dtype: torch.dtype) -> None:
        """Measure the device's peak in matrix products, and look up its data sheet's peak.

        A benchmark measures the peak before and after its rows. The greater counts: other work of
        the machine lowers a measured peak, and would raise the rows' shares of it.
        """
        precision = "bf16-mixed" if dtype == torch.bfloat16 else "32-true"
        earlier = self.record.get("peak_flops_per_second", 0.0)
        self.save(
            peak_flops_per_second=max(earlier, matrix_peak(self.device, dtype)),
            data_sheet_flops_per_second=peak_flops(self.device, precision),
        )

    def measure(self, groups: Iterable[CaseGroup]) -> None:
        """Time every group, the most important first.

        After --minutes no group starts, and a group that has started ends after its first round.
        `left_out` records the titles of groups that did not start.
        """
        _fail_on_recompile_limit()
        deadline = time.monotonic() + 60 * self.options.minutes
        for group in groups:
            if time.monotonic() >= deadline:
                self.record["left_out"].append(group.title)
                continue
            say(group.title)
            self._measure_group(group, deadline)
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        self.save()

    def _measure_group(self, group: CaseGroup, deadline: float) -> None:
        rows: list[Row] = []
        record: dict[str, Any] = {"title": group.title, "rows": rows}
        self.record["groups"].append(record)
        cases, turns = self._build_cases(group, rows, deadline)
        has_run_ins = any(case.run_in_seconds for case in cases.values())
        if self.device.type == "cuda" and turns and not has_run_ins:
            start = time.monotonic()
            warm_up_deadline = start + WARM_UP_SHARE * (deadline - start)
            # A single round is for its compilations.
            record["warm"] = self.options.rounds > 1 and warm_up(turns, warm_up_deadline)

        def save_round(results: Results[int, TimedTurn]) -> None:
            for number, rounds in results.items():
                rows[number] |= summarize_rounds(rounds)
            self.save()

        timed = {number: partial(self._timed_turn, turn) for number, turn in turns.items()}
        alternate(timed, self.options.rounds, deadline, save_round)
        for number, case in cases.items():
            *_, last_call = case.calls.values()
            rows[number]["peak_bytes"] = peak_bytes(last_call, case.permanent(), self.device)
            try:
                rows[number] |= case.facts_after()
            except NotTimedError as error:
                rows[number]["reason"] = str(error)
                del rows[number]["seconds"]
                say(f"{rows[number]['label']} is left out: {error}")
        put_ratios(rows)

    def _build_cases(
        self, group: CaseGroup, rows: list[Row], deadline: float
    ) -> tuple[dict[int, Ready], dict[int, Callable[[], Seconds]]]:
        """Build and check the cases, and append a row for each.

        Returns:
            The cases that can be timed, and their turns, by number of their row.
        """
        start = time.monotonic()
        limit = start + BUILDING_SHARE * (deadline - start)
        cases: dict[int, Ready] = {}
        turns: dict[int, Callable[[], Seconds]] = {}
        for number, facts in enumerate(group.cases):
            row = {**facts, "reason": None}
            say(f"building and checking {row['label']}")
            start = time.monotonic()
            try:
                if start > limit:
                    raise NotTimedError("no time was left to build it")
                cases[number] = group.build(row, rows)
                turns[number] = cases[number].make_turn(self.device)
                row["building_seconds"] = time.monotonic() - start
            except NotTimedError as error:
                row["reason"] = str(error)
            except Exception as error:  # kernels, compilers and peers raise many classes
                row["reason"] = f"it fails: {first_line(error)[:LONGEST_REASON]}"
            if row["reason"] is not None:
                cases.pop(number, None)
                say(f"{row['label']} is left out: {row['reason']}")
            rows.append(row)
            self.save()
        return cases, turns

    def _timed_turn(self, turn: Callable[[], Seconds]) -> TimedTurn:
        return turn(), clocks(self.device)

    def publish(
        self,
        base: str,
        columns: Mapping[str, Callable[[Row], str]] = {},
        notes: Sequence[str] = (),
    ) -> None:
        """Write the complete record, and a table for each group as Markdown; print the tables.

        Args:
            base: The name of the model or kernel whose times are the divisor.
            columns: Further columns: their head, and the cell of a row.
            notes: Paragraphs for the end.
        """
        self.record["environment"]["load_after"] = os.getloadavg()[0]
        self.save(finished=True, seconds=time.monotonic() - self._start)
        groups = self.record["groups"]
        tables = [benchmark_table(self.record, group, base, columns) for group in groups]
        paragraphs = [*benchmark_warnings(self.record), *notes]
        page = benchmark_page(self.record, tables, paragraphs)
        write_text(self._file.with_name(f"{self._file.name}.md"), page)
        screen = console()
        for table in tables:
            screen.print(table)
        for paragraph in paragraphs:
            screen.print(paragraph)
        screen.print(f"Written to {self._file}.json and .md.", soft_wrap=True)


def _environment(device: torch.device) -> dict[str, Any]:
    record = environment()
    record["hardware"] |= {"device": device_name(device), "threads": torch.get_num_threads()}
    return record


def _fail_on_recompile_limit() -> None:
    """Raise torch's limits of compilations, and let a call fail at them.

    Each model, shape and kind of pass is a compilation. At a limit torch would silently run the
    code uncompiled, and the benchmark would time that.
    """
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 256
    torch._dynamo.config.accumulated_recompile_limit = 1024
    torch._dynamo.config.fail_on_recompile_limit_hit = True


def summarize_rounds(rounds: Sequence[TimedTurn]) -> Row:
    """Return `seconds` and `clocks` of a row from its rounds so far."""
    first_seconds, first_clocks = rounds[0]
    times = {}
    for kind in first_seconds:
        times[kind] = summarize_times([seconds[kind] for seconds, _ in rounds])
    medians = {}
    for name in first_clocks:
        medians[name] = median(values[name] for _, values in rounds)
    return {"seconds": times, "clocks": medians}


def put_ratios(rows: Sequence[Row]) -> None:
    """Add `ratio` to every row, by kind, as far as its base was timed too."""
    times_by_label = {row["label"]: row["seconds"] for row in rows if "seconds" in row}
    first_label = next(iter(times_by_label), "")
    for row in rows:
        base_times = times_by_label.get(row.get("base", first_label), {})
        row["ratio"] = {}
        for kind, times in row.get("seconds", {}).items():
            if kind in base_times and min(base_times[kind]["values"]) > 0:
                ratio = paired_ratio(times["values"], base_times[kind]["values"])
                row["ratio"][kind] = ratio._asdict()
