"""`anlit benchmark loss`: peak memory, time and gradients of the vocabulary projection with its cross-entropy.

Each way runs in a process of its own, forward and backward once for its memory and once for its time. Memory is what
the process takes beside the hidden states and the projection: logits, whatever is made of them, and the two gradients,
which every way leaves behind.
"""

import argparse
from collections.abc import Mapping
from typing import Any

import numpy as np

from anlit.benchmarks.loss.ways import WAYS
from anlit.benchmarks.options import DTYPES, add_device_options, check_names, device_of, names, parser_of, say
from anlit.benchmarks.process import ProcessError, measure_once
from anlit.benchmarks.record import Record, Table

TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
"""‖gradient − that of the full logits‖/‖…‖ at most."""
MODULE = "anlit.benchmarks.loss.ways"
HEADINGS = ("way", "MB", "of full", "seconds", "loss", "gradients' error")


def main(argv: list[str]) -> int:
    """`anlit benchmark loss`; returns the exit status and raises UserError for the user's mistakes."""
    given = _parser().parse_args(argv)
    check_names("ways", given.ways, WAYS)
    device = device_of(given)
    dtype = given.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    shape = {"batch": given.batch, "length": given.length, "width": given.d_model, "vocab_size": given.vocab_size}
    settings = {**shape, "device": str(device), "dtype": dtype, "threads": given.threads or 0}
    record = Record("loss", argv, given.output, device, settings=settings)
    results: dict[str, dict[str, Any]] = {}
    for way in dict.fromkeys(("full", *given.ways)):
        say(f"{way}: {given.batch * given.length} tokens × {given.vocab_size} logits")
        try:
            results[way] = measure_once(MODULE, "measure", way=way, **settings)
        except ProcessError as error:  # not installed, or out of memory
            results[way] = {"reason": str(error)}
        record.keep(rows=compare(results, dtype))
    rows = record.values["rows"]
    title = f"{given.batch} × {given.length} tokens, d {given.d_model}, V {given.vocab_size}, {dtype}"
    notes = [f"not measured: {row['way']}: {row['reason']}" for row in rows if "reason" in row]
    lines = [_cells(row) for row in rows if "reason" not in row]
    record.finish([Table(title, HEADINGS, lines)], notes)
    return 0


def compare(results: Mapping[str, dict[str, Any]], dtype: str) -> list[dict[str, Any]]:
    """A row for each way: bytes, seconds and, beside the full logits, its part of their bytes and its errors."""
    full = results.get("full", {})
    rows = []
    for way, result in results.items():
        row: dict[str, Any] = {"way": way, **{key: value for key, value in result.items() if key != "gradients"}}
        if "gradients" in result and "gradients" in full:
            pairs = zip(result["gradients"], full["gradients"], strict=True)
            arrays = [(np.asarray(mine), np.asarray(its)) for mine, its in pairs]
            row["error"] = max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in arrays)
            row["right"] = row["error"] <= TOLERANCE[dtype]
            if result["peak_bytes"] and full["peak_bytes"]:
                row["part_of_full"] = result["peak_bytes"] / full["peak_bytes"]
        rows.append(row)
    return rows


def _cells(row: Mapping[str, Any]) -> list[str]:
    memory = "–" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.0f}"
    part = f"{row['part_of_full']:.1%}" if "part_of_full" in row else "–"
    error = f"{row['error']:.1e}{'' if row['right'] else ' (wrong)'}" if "error" in row else "–"
    return [row["way"], memory, part, f"{row['seconds']:.3g}", f"{row['loss']:.5f}", error]


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("loss", __doc__, "--threads 2 (12 GB of memory)")
    add_device_options(parser)
    add = parser.add_argument
    add("--ways", type=names, default=("anlit", "torch"), metavar="A,…", help=f"of {', '.join(WAYS)} (anlit,torch)")
    for name, value in (("batch", 8), ("length", 2048), ("d_model", 768), ("vocab_size", 50_304)):
        add(f"--{name}", type=int, default=value, metavar="N", help="(%(default)s)")
    add("--dtype", choices=list(DTYPES), help="bfloat16 under autocast (on a GPU), or float32 (on CPU)")
    return parser
