"""The results of `anlit benchmark data` as one table, and beside the targets."""

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

WIDTH = 130  # where the output is no terminal
BARE = "tokenizers encode_batch"
PART_OF_BARE = 0.85
STREAM_TOKENS = 5e6
FIRST_BATCH_SECONDS = 5.0
WAIT_SHARE = 0.01
BUSY_LOAD = 0.25  # per core
FLAT_MEGABYTES, FLAT_PART = 5.0, 0.05  # a process's memory may grow by the greater of the two and still count as flat


def targets(measurements: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each target with what was measured; `met` is None where that was not measured."""
    found = list(measurements)
    ours = [measurement for measurement in found if measurement["program"] == "anlit"]
    rows = []
    for measurement in _of(ours, "prepare"):
        beside = measurement["beside_encode_batch"]
        by_clock, by_processor = (beside[kind]["median"] for kind in ("per_worker", "per_cpu_second"))
        what = f"prepare, {_workers(measurement)}: rate per worker beside {BARE}"
        measured = f"{by_clock:.0%}, by processor time {by_processor:.0%}"
        rows.append(_target(what, f"≥ {PART_OF_BARE:.0%}", measured, min(by_clock, by_processor) >= PART_OF_BARE))
    for measurement in _of(ours, "stream"):
        what = f"stream, {_workers(measurement)}: beside litgpt"
        if "beside_litgpt" in measurement:
            ratio = measurement["beside_litgpt"]["median"]
            rows.append(_target(what, "> 100%", f"{ratio:.0%}", ratio > 1))
        else:
            rows.append(_target(what, "> 100%", "not measured: give --peer-python", None))
        if measurement["workers"] == 2:
            rate = measurement["tokens_per_second"]["median"]
            measured = f"{rate / 1e6:.1f}M tokens/s"
            rows.append(_target("stream, 2 workers", "≥ 5M tokens/s", measured, rate >= STREAM_TOKENS))
    for measurement in _of(ours, "memory"):
        grown = max(measurement["growth_megabytes"]["unique"])
        level = max(values[0] for values in measurement["megabytes"]["unique"])
        limit = max(FLAT_MEGABYTES, FLAT_PART * level)
        measured = f"{grown:+.1f} MB of {level:.0f} MB in {measurement['seconds'][-1]:.0f} s"
        rows.append(_target("memory of a worker, growth", f"≤ {limit:.0f} MB", measured, grown <= limit))
    for measurement in _of(found, "wait"):
        share = measurement["wait_share"]["median"]
        what = f"wait for data, {measurement['demand'] / 1e6:g}M tokens/s asked for, {_workers(measurement)}"
        rows.append(_target(what, f"< {WAIT_SHARE:.0%} of the time", f"{share:.2%}", share < WAIT_SHARE))
    for measurement in ours:
        if measurement["part"].startswith("first batch"):
            seconds = measurement["seconds"]["median"]
            measured = f"{seconds:.2f} s, after {measurement['import_seconds']['median']:.1f} s of imports"
            what = f"{measurement['part']}, {_workers(measurement)}"
            rows.append(_target(what, f"< {FIRST_BATCH_SECONDS:g} s", measured, seconds < FIRST_BATCH_SECONDS))
    return rows


def show(record: Mapping[str, Any]) -> None:
    """Print the measurements and the targets."""
    hardware = record["environment"]["hardware"]
    table = Table(title=f"anlit benchmark data: {hardware['cpu']}, {hardware['cores']} cores", title_justify="left")
    for heading in ("part", "program", "workers", "median", "least – greatest", "beside"):
        table.add_column(heading, justify="right" if heading in ("workers", "median", "least – greatest") else "left")
    part = None
    for measurement in record["measurements"]:
        if part not in (None, measurement["part"]):
            table.add_section()
        repeated = measurement["part"] == part
        part = measurement["part"]
        cells = _cells(measurement)
        table.add_row("" if repeated else part, measurement["program"], str(measurement["workers"]), *cells)
    aims = Table(title="Targets", title_justify="left")
    for heading in ("target", "wanted", "measured", "met"):
        aims.add_column(heading)
    for row in record["targets"]:
        met = {True: "yes", False: "no", None: "–"}[row["met"]]
        aims.add_row(row["what"], row["wanted"], row["measured"], met)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(table)
    console.print(aims)
    if (load := record["environment"]["load_before"]) > BUSY_LOAD * hardware["cores"]:
        console.print(f"The machine was busy before this began (load {load:.1f}): do not rely on the rates.")


def _cells(measurement: Mapping[str, Any]) -> tuple[str, str, str]:
    """Median, spread and what it is to be compared with."""
    if measurement["part"] == "memory":
        unique, proportional = (measurement["megabytes"][kind] for kind in ("unique", "proportional"))
        least, greatest = min(map(min, unique)), max(map(max, unique))
        grown = ", ".join(f"{value:+.1f}" for value in measurement["growth_megabytes"]["unique"])
        rate = measurement["tokens"] / measurement["seconds"][-1] / 1e6
        beside = f"growth {grown} MB; with its part of shared memory {max(map(max, proportional)):.0f} MB; "
        beside += f"{rate:.1f} M tokens/s meanwhile"
        return f"{unique[0][-1]:.0f} MB", f"{least:.0f} – {greatest:.0f}", beside
    if "seconds" in measurement:
        beside = f"and {measurement['import_seconds']['median']:.2f} s for imports"
        return (*_spread(measurement["seconds"], 1.0, "s", 2), beside)
    beside = ""
    if "wait_share" in measurement:
        longest = max(result["longest"] for result in measurement["rounds"])
        beside = (
            f"device idle {measurement['wait_share']['median']:.2%} of the time, a batch {1e3 * longest:.1f} ms at most"
        )
    elif "beside_encode_batch" in measurement:
        ratio = measurement["beside_encode_batch"]
        beside = (
            f"encode_batch per worker: {ratio['per_worker']['median']:.0%}, "
            f"by processor time: {ratio['per_cpu_second']['median']:.0%}"
        )
        if measurement["start_seconds"] >= 1:
            rate = measurement["tokens_per_second_after_start"]["median"] / 1e6
            beside += f"; after {measurement['start_seconds']:.0f} s of starting up {rate:.2f} M tokens/s"
    elif "beside_litgpt" in measurement:
        beside = f"{measurement['beside_litgpt']['median']:.2f} × litgpt"
    return (*_spread(measurement["tokens_per_second"], 1e6, "M tokens/s", 2), beside)


def _spread(values: Mapping[str, Any], unit: float, name: str, digits: int) -> tuple[str, str]:
    median, least, greatest = (f"{values[key] / unit:,.{digits}f}" for key in ("median", "min", "max"))
    return f"{median} {name}", f"{least} – {greatest}"


def _of(measurements: Iterable[Mapping[str, Any]], part: str) -> list[Mapping[str, Any]]:
    return [measurement for measurement in measurements if measurement["part"] == part]


def _workers(measurement: Mapping[str, Any]) -> str:
    return f"{measurement['workers']} worker{'' if measurement['workers'] == 1 else 's'}"


def _target(what: str, wanted: str, measured: str, met: bool | None) -> dict[str, Any]:
    return {"what": what, "wanted": wanted, "measured": measured, "met": met}
