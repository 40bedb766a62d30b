"""`anlit benchmark attention`: mechanisms and kernels compared, over head width, length and documents.

For each shape every entrant is first checked against the formula in float64, output and gradients; what is wrong is not
timed. Then they take turns in this one process.
"""

import argparse
from dataclasses import replace

from anlit.attention.backends import BACKENDS
from anlit.benchmarks.attention import blocks
from anlit.benchmarks.attention.measure import group_of
from anlit.benchmarks.attention.shapes import LAYOUTS, PRESETS, Entrant, entrants
from anlit.benchmarks.cases import measure, megabytes, milliseconds, of_peak, publish, quartiles_of, ratio_of
from anlit.benchmarks.clock import matrix_peak, prepare_compiler
from anlit.benchmarks.mechanisms import MECHANISMS
from anlit.benchmarks.options import add_loop_options, check_names, device_of, names, numbers, parser_of
from anlit.benchmarks.record import Record
from anlit.errors import UserError
from anlit.models.runtime import flush_denormals


def main(argv: list[str]) -> int:
    """`anlit benchmark attention`; returns the exit status and raises UserError for the user's mistakes."""
    given = _parser().parse_args(argv)
    check_names("layouts", given.layouts, LAYOUTS)
    changes = {key: value for key in ("widths", "lengths", "rounds", "layouts") if (value := getattr(given, key))}
    if given.entrants:
        changes["entrants"] = checked_entrants(given.entrants)
    plan = replace(PRESETS[given.preset], **changes)
    device = device_of(given)
    if device.type == "cpu":
        flush_denormals()  # as a run does
    prepare_compiler()
    settings = {**vars(plan), "dtype": str(plan.dtype)}
    stem = "blocks" if given.blocks else ""
    record = Record("attention", argv, given.output, device, stem, settings=settings)
    peak = matrix_peak(device, plan.dtype)
    record.keep(peak_flops_per_second=peak)
    groups = blocks.groups(plan, device) if given.blocks else (group_of(one, plan, device) for one in plan.shapes())
    measure(groups, record, plan.rounds, given.minutes)
    columns = {
        "fwd, ms": milliseconds("forward"),
        "both, ms": milliseconds("both"),
        "quartiles": quartiles_of("both"),
        "of peak": of_peak("both", peak),
        "÷ first (95 %)": ratio_of("both"),
        "MB": megabytes,
        "error": lambda row: f"{max(row['error'].values()):.0e}",
    }
    publish(record, columns)
    return 0


def checked_entrants(text: str) -> tuple[Entrant, ...]:
    """From `mechanism,kernel mechanism,kernel …`.

    Raises:
        UserError: One of them is not known.
    """
    found = entrants(text)
    for mechanism, kernel in found:
        for kind, name, known in (("mechanism", mechanism, MECHANISMS), ("kernel", kernel, BACKENDS)):
            if name not in known:
                raise UserError(f"--entrants {mechanism},{kernel}: no {kind} {name!r}; choose {', '.join(known)}")
    return found


def _parser() -> argparse.ArgumentParser:
    example = "--entrants 'plain,sdpa scale-invariant,eager' --widths 64 --lengths 1024"
    parser = parser_of("attention", __doc__, example, PRESETS)
    add = parser.add_argument
    add("--entrants", metavar="LIST", help="mechanism,kernel pairs between spaces, in place of the preset's")
    add("--blocks", action="store_true", help="block sizes of our Triton kernels, compared with those they take")
    add("--widths", type=numbers, metavar="D,…", help="head widths")
    add("--lengths", type=numbers, metavar="T,…", help="tokens in a sequence")
    add("--layouts", type=names, metavar="A,…", help=f"of {', '.join(LAYOUTS)} (both)")
    add_loop_options(parser)
    return parser
