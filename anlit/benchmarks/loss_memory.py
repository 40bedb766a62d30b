"""`anlit benchmark loss`: peak memory, time and gradients of the vocabulary projection with its cross-entropy.

Each way runs in a process of its own, forward and backward once. Memory is what the process takes beside the hidden
states and the projection: logits, whatever is made of them, and the two gradients, which every way leaves behind.
"""

import argparse
import shlex
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from rich.console import Console

from anlit.benchmarks.record import run_trial, this_python
from anlit.benchmarks.step_options import DTYPES, names, say
from anlit.benchmarks.step_table import TARGET_HEADINGS, WIDTH, print_table
from anlit.errors import UserError
from anlit.evaluation.report import device_name
from anlit.reporting.files import output_folder, write_json
from anlit.reporting.provenance import environment

PART_OF_FULL = 0.25
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
"""‖gradient − that of the full logits‖/‖…‖ at most."""
PROGRAM = this_python("anlit.benchmarks.loss_trials")


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


def benchmark(given: argparse.Namespace, command: str) -> dict[str, Any]:
    """Measure every way, print the table and write loss.json; returns the record."""
    folder = output_folder(given.output)
    device = torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"--device {given.device} needs a CUDA device, and there is none: choose --device cpu")
    dtype = given.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    record: dict[str, Any] = {"benchmark": "loss", "command": command, "environment": environment()}
    record["environment"]["hardware"]["device"] = device_name(device)
    shape = {"batch": given.batch, "length": given.length, "width": given.d_model, "vocab_size": given.vocab_size}
    setting = {**shape, "device": str(device), "dtype": dtype, "threads": given.threads or 0}
    results: dict[str, dict[str, Any]] = {}
    for way in dict.fromkeys(("full", *given.ways)):
        say(f"{way}: {given.batch * given.length} tokens × {given.vocab_size} logits")
        try:
            results[way] = run_trial(PROGRAM, "run", {"way": way, **setting})
        except UserError as error:  # not installed, or out of memory
            results[way] = {"reason": str(error).splitlines()[-1]}
    record |= {"settings": setting, "rows": compare(results, dtype)}
    record["targets"] = targets(record["rows"])
    write_json(folder / "loss.json", record)
    columns = ("way", "memory, MB", "of the full logits'", "seconds", "loss", "gradients' error")
    print_table(Console(width=WIDTH), f"{shape}, {dtype}, {device}", columns, map(_line, record["rows"]))
    if record["targets"]:
        lines = [[t["what"], t["wanted"], t["measured"], "yes" if t["met"] else "no"] for t in record["targets"]]
        print_table(Console(width=WIDTH), "Targets", TARGET_HEADINGS, lines)
    print(f"Written to {folder / 'loss.json'}.")
    return record


def targets(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ours, where it was measured: its part of the memory, with the same gradients."""
    return [
        {
            "what": "loss: peak memory beside full logits, same gradients",
            "wanted": f"≤ {PART_OF_FULL:.0%}",
            "measured": f"{row['part_of_full']:.1%}, gradients' error {row['error']:.0e}",
            "met": row["part_of_full"] <= PART_OF_FULL and row["right"],
        }
        for row in rows
        if row["way"] == "anlit" and "part_of_full" in row
    ]


def _line(row: Mapping[str, Any]) -> list[str]:
    if "reason" in row:
        return [row["way"], f"– ({row['reason'][:100]})", "", "", "", ""]
    memory = "–" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.0f}"
    part = f"{row['part_of_full']:.1%}" if "part_of_full" in row else "–"
    error = f"{row['error']:.1e}{'' if row['right'] else ' (wrong)'}" if "error" in row else "–"
    return [row["way"], memory, part, f"{row['seconds']:.3g}", f"{row['loss']:.5f}", error]


def main(argv: list[str]) -> int:
    """`anlit benchmark loss`; returns the exit status and raises UserError for the user's mistakes."""
    parser = argparse.ArgumentParser(
        prog="anlit benchmark loss",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Example: anlit benchmark loss --threads 2 (12 GB of memory)",
    )
    add = parser.add_argument
    add("--ways", type=names, default=("anlit", "torch"), metavar="A,…",
        help="beside full: of anlit, torch (its own, from 2.13), liger, or MODULE:FUNCTION (anlit,torch)")  # fmt: skip
    for name, value in (("batch", 8), ("length", 2048), ("d-model", 768), ("vocab-size", 50_304)):
        add(f"--{name}", type=int, default=value, metavar="N", help="(%(default)s)")
    add("--dtype", choices=list(DTYPES), help="bfloat16 under autocast (on a GPU), or float32 (on CPU)")
    add("--device", help="a torch device (a GPU where there is one)")
    add("--threads", type=int, help="processor threads (torch's own number)")
    add("--output", default="runs/benchmark", help="folder for loss.json (%(default)s)")
    benchmark(parser.parse_args(argv), shlex.join(["anlit", "benchmark", "loss", *argv]))
    return 0
