"""`anlit benchmark attention`: mechanisms and kernels beside each other, over head width, length and documents.

For each shape every entrant is first checked against the eager back end in float32 (float64 where it computes in
float32 itself), output and gradients; what is wrong is not timed. Then they take turns in this one process.
"""

import argparse
import time
from dataclasses import replace
from itertools import chain

from anlit.attention.backends import BACKENDS
from anlit.benchmarks.attention.cases import COMPARED, MECHANISMS, PRESETS, Entrant
from anlit.benchmarks.attention.measure import measure
from anlit.benchmarks.attention.report import notes, table
from anlit.benchmarks.options import MINUTES, add_device_options, device_of, numbers, parser_of, preset_of, say
from anlit.benchmarks.rates import matrix_peak, prepare_compiler
from anlit.benchmarks.record import Record
from anlit.errors import UserError
from anlit.models.runtime import flush_denormals


def main(argv: list[str]) -> int:
    """`anlit benchmark attention`; returns the exit status and raises UserError for the user's mistakes."""
    given = _parser().parse_args(argv)
    changes = {
        "widths": given.widths,
        "lengths": given.lengths,
        "rounds": given.rounds,
        "entrants": given.entrants and entrants_of(given.entrants),
    }
    plan = replace(PRESETS[preset_of(given)], **{name: value for name, value in changes.items() if value})
    began, device = time.monotonic(), device_of(given)
    if device.type == "cpu":
        flush_denormals()  # as a run does
    prepare_compiler()
    settings = {**vars(plan), "dtype": str(plan.dtype), "entrants": [entrant.label for entrant in plan.entrants]}
    record = Record("attention", argv, given.output, device, settings=settings, shapes=[], left_out=[])
    shapes, left_out = record.values["shapes"], record.values["left_out"]
    peak = matrix_peak(device, plan.dtype)
    record.keep(peak_flops_per_second=peak)
    say(f"{record.machine}, {plan.dtype}: {peak / 1e12:.3g} TFLOP/s in a product of matrices")
    for shape in plan.shapes():
        if time.monotonic() - began > 60 * given.minutes:
            left_out.append(shape.label)
            continue
        say(shape.label)
        shapes.append(measure(shape, plan, device, peak))
        record.keep()
    lines = list(chain.from_iterable(map(notes, shapes)))
    lines += [f"Left out after {given.minutes:g} minutes: {'; '.join(left_out)}."] if left_out else []
    record.finish(map(table, shapes), lines)
    return 0


def entrants_of(text: str) -> tuple[Entrant, ...]:
    """From `mechanism,kernel mechanism,kernel …`.

    Raises:
        UserError: One of them is not known.
    """
    found = []
    for entry in text.split():
        mechanism, _, kernel = entry.partition(",")
        if mechanism not in MECHANISMS:
            raise UserError(f"--entrants {entry}: no mechanism {mechanism!r}; choose {', '.join(MECHANISMS)}")
        if kernel not in {**BACKENDS, **COMPARED}:
            raise UserError(f"--entrants {entry}: no kernel {kernel!r}; choose {', '.join({**BACKENDS, **COMPARED})}")
        found.append(Entrant(mechanism, kernel))
    return tuple(found)


def _parser() -> argparse.ArgumentParser:
    example = "--entrants 'plain,sdpa scale-invariant,eager' --widths 64 --lengths 1024"
    parser = parser_of("attention", __doc__, example)
    add_device_options(parser, PRESETS)
    add = parser.add_argument
    add("--entrants", metavar="LIST", help="mechanism,kernel pairs between spaces, in place of the preset's")
    add("--widths", type=numbers, metavar="D,…", help="head widths")
    add("--lengths", type=numbers, metavar="T,…", help="tokens in a sequence")
    add("--rounds", type=int, help="how often the entrants take turns")
    add("--minutes", type=float, default=MINUTES, help="begin no further shape after so long (%(default)s)")
    return parser
