"""`anlit size`: estimates the needs of a run from the configuration of `anlit fit`, without starting it."""

import argparse
import logging
import warnings
from pathlib import Path
from typing import Any

from anlit.commands.support.parser import RunParser, model_of, origin, read_command
from anlit.errors import UserError
from anlit.options import CommandParser
from anlit.reporting.files import write_json
from anlit.reporting.table import console
from anlit.sizing.estimate import DENSE_BF16, Plan, estimate
from anlit.sizing.report import show, show_table
from anlit.sizing.table import sizing_table

CHECKPOINTING = {"none": None, "full": 1}


class SizingParser(RunParser):
    """Parses what `anlit fit` parses and makes the model only, on the meta device."""

    def instantiate_classes(self) -> None:
        self.model = model_of(self.parser_of("fit"), self.config["fit"])


def main(argv: list[str]) -> int:
    parser = _parser()
    options, fit_arguments = parser.parse_known_args(argv)
    for noise in (
        ".*is an instance of `nn.Module`.*",
        ".*trying to `self.log\\(\\)`.*",
        ".*args parameter is intended.*",
    ):
        warnings.filterwarnings("ignore", noise)
    logging.getLogger("lightning").setLevel(logging.WARNING)
    _check(options)
    screen = console()
    if options.table:
        if fit_arguments:
            raise UserError(
                f"anlit size --table takes no {fit_arguments[0]}, its models are fixed: leave one of them out"
            )
        rows = sizing_table(options.gpu, options.mfu)
        show_table(screen, rows)
        record: Any = [row.record() for row in rows]
    elif fit_arguments:
        cli = parse(["fit", *fit_arguments])
        result = estimate(cli.model, plan_of(options, cli.config["fit"]))
        show(screen, result)
        record = result.record()
    else:
        raise UserError("anlit size needs a model: give the options of anlit fit, such as --config FILE, or --table")
    if options.json is not None:
        try:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            write_json(options.json, record)
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
    parser.add_argument("--precision", choices=["32-true", "bf16-mixed", "bf16-true"])
    parser.add_argument("--gather_dtype", choices=["float32", "bfloat16"], help="under fsdp; see FullySharded")
    parser.add_argument("--activation_checkpointing", help="none, full, or every-2, every-3 …")
    parser.add_argument("--batch_size", type=int, help="sequences in a micro-batch on one GPU")
    parser.add_argument("--tokens", type=float, help="training tokens of the whole run, such as 300e9")
    parser.add_argument("--gpu", choices=sorted(DENSE_BF16), default="H100")
    parser.add_argument("--mfu", type=float, default=0.4, help="expected share of the dense bf16 peak")
    parser.add_argument("--json", type=Path, help="write the numbers to this file too")
    parser.add_argument("--table", action="store_true", help="the table of sizes on 1, 4, 8 and 64 GPUs")
    return parser


def _check(options: argparse.Namespace) -> None:
    """Raises:
    UserError: An option is out of range.
    """
    for name in ("gpus", "batch_size", "tokens"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"--{name} {value:g} must be at least 1")
    if not 0 < options.mfu <= 1:
        raise UserError(f"--mfu {options.mfu:g} must be a share of the peak in (0, 1]")


def parse(arguments: list[str]) -> SizingParser:
    """The configuration as `anlit fit` reads it, and its model.

    Raises:
        UserError: The configuration is wrong.
    """
    try:
        return read_command(SizingParser, arguments)
    except ValueError as error:
        raise UserError(str(origin(error))) from error


def plan_of(options: argparse.Namespace, settings: Any) -> Plan:
    """The plan from the command's options, and from the configuration for options that are left out.

    Raises:
        UserError: An option is out of range.
    """
    trainer, model = settings.trainer, settings.model.init_args
    data = settings.data.init_args if "init_args" in settings.data else settings.data
    devices = trainer.devices if isinstance(trainer.devices, int) and trainer.devices > 0 else 1
    gpus = options.gpus or devices * trainer.num_nodes
    name = str(trainer.strategy.get("class_path", "")) if not isinstance(trainer.strategy, str) else trainer.strategy
    sharded = "fsdp" in name.lower() or "modelparallel" in name.lower() or "shard" in name.lower()
    strategy: Any = options.strategy or ("1gpu" if gpus == 1 else "fsdp" if sharded else "ddp")
    batch_size = options.batch_size or data.get("batch_size") or 8
    accumulate = trainer.accumulate_grad_batches
    if strategy == "1gpu" and gpus > 1:
        raise UserError(f"--strategy 1gpu is for one GPU, not {gpus}: choose ddp or fsdp, or set --gpus 1")
    tokens = options.tokens
    if tokens is None and trainer.max_steps > 0:
        tokens = float(trainer.max_steps) * batch_size * accumulate * gpus * model.context_length
    return Plan(
        gpus=gpus,
        strategy=strategy,
        precision=options.precision or _precision(trainer.precision),
        gather=options.gather_dtype or _gather_dtype(trainer.strategy),
        checkpoint_every=_checkpointing(options.activation_checkpointing, model),
        batch_size=batch_size,
        length=model.context_length,
        accumulate=accumulate,
        gpu=options.gpu,
        mfu=options.mfu,
        tokens=tokens,
    )


def _precision(precision: Any) -> Any:
    known = {"bf16-mixed": "bf16-mixed", "bf16": "bf16-mixed", "bf16-true": "bf16-true"}
    return known.get(str(precision), "32-true")


def _gather_dtype(strategy: Any) -> Any:
    return "float32" if isinstance(strategy, str) else strategy.get("init_args.gather_dtype") or "float32"


def _checkpointing(text: str | None, model: Any) -> int | None:
    if text is None:
        return model.get("runtime.recompute_every") or None
    if text in CHECKPOINTING:
        return CHECKPOINTING[text]
    number = text.removeprefix("every-")
    if number.isdecimal() and int(number) > 0:
        return int(number)
    raise UserError(f"--activation_checkpointing {text} is unknown: choose none, full or every-2, every-3 …")
