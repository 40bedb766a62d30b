"""`anlit benchmark gpu`: the first hour on a GPU. Call it again until it is done.

It checks the kernels, then times attention, training steps and peers, in the order of their worth. Each item is
a process with its own time limit. Finished items are skipped in the next call, a failure is recorded and the next item
runs, and all results are written after each item.

Exit status: 0 when every item is finished, also if some failed; 75 if items are left for the next call.
"""

import argparse
import shlex

from filelock import FileLock, Timeout

from anlit.benchmarks.gpu.items import ITEMS
from anlit.benchmarks.gpu.runner import Runner, is_gpu_here
from anlit.errors import UserError
from anlit.options import CommandParser
from anlit.reporting.files import output_folder
from anlit.reporting.text import echo

CALL_AGAIN = 75
LEAST_MINUTES = 2.0


def main(argv: list[str]) -> int:
    """Run what is left and has time; returns the exit status and raises UserError for the user's mistakes."""
    given = _parser().parse_args(argv)
    if given.minutes < LEAST_MINUTES:
        raise UserError(f"--minutes {given.minutes:g} is too short for any item: give at least {LEAST_MINUTES:g}")
    if not given.rehearse and not is_gpu_here():
        raise UserError("anlit benchmark gpu needs a CUDA device, and there is none: add --rehearse to try it on a CPU")
    state, output = output_folder(given.state), output_folder(given.output)
    if state.resolve() == output.resolve():
        raise UserError(f"--state and --output are both {given.output}: the state needs a folder of its own")
    lock = FileLock(state / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise UserError(f"--state {given.state} is used by another call: wait for its end") from error
    with lock:
        command = shlex.join(["anlit", "benchmark", "gpu", *argv])
        runner = Runner(ITEMS, state, output, 60 * given.minutes, command, given.rehearse, given.again)
        done = runner.run()
    left = [item.name for item in ITEMS if not runner.is_finished(item)]
    echo(f"{len(ITEMS) - len(left)} of {len(ITEMS)} items are finished, see {output / 'gpu.md'}.")
    if left:
        echo(f"Call it again for: {', '.join(left)}.")
    return 0 if done else CALL_AGAIN


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="anlit benchmark gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Example: anlit benchmark gpu --minutes 9 --state runs/gpu-state --output runs/gpu",
    )
    add = parser.add_argument
    add("--minutes", type=float, default=9.0, help="how long this call may take (%(default)s)")
    add("--state", default="runs/gpu-state", help="folder kept between calls: progress and caches (%(default)s)")
    add("--output", default="runs/gpu", help="folder for the results (%(default)s)")
    add("--again", nargs="+", default=[], metavar="ITEM", help="items, or a status such as failed, to run anew")
    add("--rehearse", action="store_true", help="toy sizes, on a CPU too")
    return parser
