"""`anlit benchmark loss`: peak memory, time and gradients of the vocabulary projection with its cross-entropy.

Each way runs in a process of its own, forward and backward once for its memory and once for its time. Memory is what
the process takes beside the hidden states and the projection: logits, whatever is made of them, and the two gradients,
which every way leaves behind.
"""

import argparse
from functools import partial
from typing import Any

import numpy as np
import torch

from anlit.benchmarks.cases import (
    Case,
    Group,
    NotTimedError,
    Ready,
    Row,
    measure,
    megabytes,
    milliseconds,
    notes,
    tables,
)
from anlit.benchmarks.loss.ways import WAYS
from anlit.benchmarks.options import MINUTES, add_device_options, device_of, parser_of
from anlit.benchmarks.process import measure_once
from anlit.benchmarks.record import Record
from anlit.benchmarks.size import Size, add_size_options, changed_size
from anlit.reporting.table import NONE

SIZE = Size(768, 1, 12, 50_304, 2048, 8, torch.float32)
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
"""‖gradient − that of the full logits‖/‖…‖ at most."""
MODULE = "anlit.benchmarks.loss.ways"

Gradients = list[list[float]]


def build(settings: dict[str, Any], full: dict[str, Any], rows: list[Row]) -> Ready:
    """One way, measured; `full` keeps the result of the first, the full logits, for the others.

    Raises:
        NotTimedError: Its gradients are not those of the full logits.
    """
    result = measure_once(MODULE, "measure", way=rows[-1]["label"], **settings)
    if len(rows) == 1:
        full |= result
    facts = {"loss": result["loss"]}
    if full:
        facts["error"] = relative_error(result["gradients"], full["gradients"])
        if not facts["error"] <= TOLERANCE[settings["dtype"]]:
            raise NotTimedError(f"it is wrong: relative error {facts['error']:.1e} of its gradients")
        if result["peak_bytes"] and full["peak_bytes"]:
            facts["part_of_full"] = result["peak_bytes"] / full["peak_bytes"]
    return Ready(lambda: {"step": result["seconds"]}, facts, lambda: result["peak_bytes"])


def relative_error(found: Gradients, expected: Gradients) -> float:
    """The largest of the gradients' ‖found − expected‖/‖expected‖."""
    pairs = zip(map(np.asarray, found), map(np.asarray, expected), strict=True)
    return max(float(np.linalg.norm(mine - its) / np.linalg.norm(its)) for mine, its in pairs)


def main(argv: list[str]) -> int:
    """`anlit benchmark loss`; returns the exit status and raises UserError for the user's mistakes."""
    given = _parser().parse_args(argv)
    device = device_of(given)
    if device.type == "cuda" and not given.dtype:
        given.dtype = "bfloat16"
    size = changed_size(SIZE, given)
    settings = {
        "batch": size.batch, "length": size.length, "width": size.d_model, "vocab_size": size.vocab_size,
        "device": str(device), "dtype": size.as_json()["dtype"], "threads": given.threads or 0,
    }  # fmt: skip
    record = Record("loss", argv, given.output, device, settings=settings)
    one = partial(build, settings, {})
    title = f"{size.batch} × {size.length} tokens, d {size.d_model}, V {size.vocab_size}, {settings['dtype']}"
    measure([Group(title, [Case(way, one) for way in WAYS])], record, 1, MINUTES)
    columns = {
        "MB": megabytes,
        "of full": lambda row: f"{row['part_of_full']:.1%}" if "part_of_full" in row else NONE,
        "ms": milliseconds("step"),
        "loss": lambda row: f"{row['loss']:.5f}",
        "gradients' error": lambda row: f"{row['error']:.1e}" if "error" in row else NONE,
    }
    record.finish(tables(record, columns), notes(record))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("loss", __doc__, "--threads 2 (12 GB of memory)")
    add_device_options(parser)
    add_size_options(parser)
    return parser
