"""`anlit size`: estimates the needs of a run from the configuration of `anlit fit`, without starting it."""

import argparse
from pathlib import Path

from anlit.commands.support.quiet import quiet
from anlit.errors import UserError
from anlit.options import CommandParser
from anlit.reporting.files import write_json
from anlit.reporting.table import console
from anlit.sizing.gpus import DENSE_BF16


def main(argv: list[str]) -> int:
    parser = _parser()
    options, fit_arguments = parser.parse_known_args(argv)
    quiet()
    _check(options, fit_arguments)

    from anlit.commands.support.sizing import parse, plan_of  # torch takes seconds: wrong options do not wait for it
    from anlit.sizing.estimate import estimate
    from anlit.sizing.report import show

    cli = parse(["fit", *fit_arguments])
    result = estimate(cli.model, plan_of(options, cli.config["fit"]))
    show(console(), result)
    if options.json is not None:
        try:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            write_json(options.json, result.record())
        except OSError as error:
            raise UserError(f"--json {options.json} cannot be written ({error.strerror}): name another file") from error
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="anlit size",
        description="Parameters, memory per GPU, FLOPs and days of a run. All other options are those of anlit fit, "
        "whose configuration gives the values of options that are left out here.",
    )
    parser.add_argument("--gpus", type=int, help="number of GPUs on all nodes")
    parser.add_argument("--strategy", choices=["1gpu", "ddp", "fsdp"])
    parser.add_argument("--batch_size", type=int, help="sequences in a micro-batch on one GPU")
    parser.add_argument("--tokens", type=float, help="training tokens of the whole run, such as 300e9")
    parser.add_argument("--gpu", choices=sorted(DENSE_BF16), default="H100")
    parser.add_argument("--mfu", type=float, default=0.4, help="expected share of the dense bf16 peak")
    parser.add_argument("--json", type=Path, help="write the numbers to this file too")
    return parser


def _check(options: argparse.Namespace, fit_arguments: list[str]) -> None:
    """Raises:
    UserError: An option is out of range or missing.
    """
    if not fit_arguments:
        raise UserError("anlit size needs a model: give the options of anlit fit, such as --config FILE")
    for name in ("gpus", "batch_size", "tokens"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"--{name} {value:g} must be at least 1")
    if not 0 < options.mfu <= 1:
        raise UserError(f"--mfu {options.mfu:g} must be a share of the peak in (0, 1]")
