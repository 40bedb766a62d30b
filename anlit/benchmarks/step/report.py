"""What the timings of `anlit benchmark step` say: spread, rates, share of the peak, paired ratios."""

from collections.abc import Iterable, Mapping
from typing import Any

from anlit.benchmarks.record import Record, Table
from anlit.benchmarks.step.plan import BASE
from anlit.benchmarks.turns import Interval, paired_ratio, quartiles

HEADINGS = ("variant", "step, ms", "quartiles", "MFU", "÷ GPT+ (95 %)", "MB", "inference")

Row = dict[str, Any]


def finish(rows: Iterable[Row], tokens: int, peak: float) -> None:
    """Add to every row that was timed its spread, rate, share of the peak, and its time beside GPT+'s in its mode.

    For float8 that is GPT+ compiled without it.
    """
    done = timed(rows)
    for row in done:
        row["spread"] = {kind: quartiles(values) for kind, values in row["seconds"].items()}
        row["tokens_per_second"] = tokens / row["spread"]["train"]["median"]
        row["mfu"] = row["tokens_per_second"] * row["flops_per_token"] / peak
        like = "compiled" if row["mode"] == "float8" else row["mode"]
        of_base = (BASE, "plain", like)
        base = next((one for one in done if (one["model"], one["mechanism"], one["mode"]) == of_base), None)
        kinds = [] if base is None else [kind for kind in row["seconds"] if kind in base["seconds"]]
        row["beside_base"] = {kind: ratio(row, base, kind)._asdict() for kind in kinds} if base is not None else {}


def timed(rows: Iterable[Row]) -> list[Row]:
    """The rows without a reason against them, that took their turns."""
    return [row for row in rows if row["reason"] is None and "seconds" in row]


def ratio(row: Mapping[str, Any], other: Mapping[str, Any], kind: str = "train") -> Interval:
    """How many times the other's time a row took, round by round."""
    return paired_ratio({"a": row["seconds"][kind], "b": other["seconds"][kind]}, "a", "b")


def table(record: Record, title: str) -> Table:
    """The rows that were timed."""
    peak = f"peak {record.values['peak_flops_per_second'] / 1e12:.3g} TFLOP/s"
    heading = f"{title}, {record.values['rounds']} rounds, {peak}"
    return Table(heading, HEADINGS, [_cells(row) for row in timed(record.values["rows"])])


def notes(rows: Iterable[Row]) -> list[str]:
    """Why the others were not."""
    return [f"not timed: {row['label']}: {row['reason']}" for row in rows if row["reason"] is not None]


def _cells(row: Mapping[str, Any]) -> list[str]:
    spread, step = row["spread"], row["spread"]["train"]
    beside = row["beside_base"].get("train")
    return [
        row["label"],
        _milliseconds(step["median"]),
        " – ".join(map(_milliseconds, step["quartiles"])),
        f"{row['mfu']:.1%}",
        "–" if beside is None else f"{beside['median']:.3f} ({beside['low']:.3f} – {beside['high']:.3f})",
        "–" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.0f}",
        _milliseconds(spread["infer"]["median"]) if "infer" in spread else "–",
    ]


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:.0f}"
