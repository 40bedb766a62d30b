"""`anlit size`: estimates the needs of a run from the configuration of `anlit fit`, without starting it."""

import argparse
from pathlib import Path
from typing import Any

from anlit.config.labels import n_devices
from anlit.config.options import ToolParser, at_least
from anlit.config.schema import check_precision
from anlit.errors import UserError
from anlit.io.write import write_json
from anlit.reporting.table import console
from anlit.sizing.plan import GPU_BYTES, Plan


def main(argv: list[str]) -> int:
    options, fit_arguments = parser().parse_known_args(argv)
    if not fit_arguments:
        raise UserError(
            "anlit size needs a model: give the options of anlit fit, such as --config FILE"
        )
    if not 0 < options.mfu <= 1:
        raise UserError(f"--mfu {options.mfu:g} must be a share of the peak in (0, 1]")

    from anlit.commands.parser import ConfigurationParser, read_command  # torch
    from anlit.sizing.estimate import estimate, show

    cli = read_command(ConfigurationParser, ["fit", *fit_arguments])
    settings = cli.config["fit"]
    result = estimate(cli.model_of(settings), plan_of(options, settings))
    show(console(), result)
    if options.json is not None:
        try:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            write_json(options.json, result)
        except OSError as error:
            raise UserError(
                f"--json {options.json} cannot be written ({error.strerror}): name another file"
            ) from error
    return 0


def parser() -> ToolParser:
    """The options of the command; all others are those of `anlit fit`."""
    parser = ToolParser(
        prog="anlit size",
        description="Parameters, memory per GPU, FLOPs and days of a run. All other options are those of anlit fit, "
        "whose configuration gives the values of options that are left out here.",
    )
    add = parser.add_argument
    add("--gpus", type=at_least(1), help="number of GPUs on all nodes")
    add("--strategy", choices=["1gpu", "ddp", "fsdp"])
    add("--batch_size", type=at_least(1), help="sequences in a micro-batch on one GPU")
    add("--tokens", type=at_least(1, float), help="training tokens of the whole run, such as 300e9")
    add("--gpu", choices=sorted(GPU_BYTES), default="H100")
    add(
        "--mfu",
        type=float,
        default=0.4,
        help="expected share of the data sheet's dense peak at the configuration's precision (0.4; an H200 "
        "had 0.40 to 0.45 at 0.5B parameters, docs/results/gpu.md)",
    )
    add("--json", type=Path, help="write the numbers to this file too")
    return parser


def plan_of(options: argparse.Namespace, settings: Any) -> Plan:
    """The plan from the command's options, and from the configuration for what they leave out.

    UserError if strategy and number of GPUs contradict each other, or nothing trains so in this precision.
    """
    trainer, model, data = (
        settings.trainer,
        settings.model.init_args,
        settings.data.get("init_args", settings.data),
    )
    gpus = options.gpus or n_devices(trainer.devices) * trainer.num_nodes
    configured: Any = (
        {"class_path": trainer.strategy} if isinstance(trainer.strategy, str) else trainer.strategy
    )
    name = str(configured.get("class_path")).lower()
    shards = any(word in name for word in ("fsdp", "modelparallel", "shard"))
    strategy: Any = options.strategy or ("1gpu" if gpus == 1 else "fsdp" if shards else "ddp")
    if strategy == "1gpu" and gpus > 1:
        raise UserError(
            f"--strategy 1gpu is for one GPU, not {gpus}: choose ddp or fsdp, or set --gpus 1"
        )
    precision = check_precision(trainer.precision)
    if (strategy, precision) == ("fsdp", "64-true"):
        raise UserError(
            "trainer.precision=64-true does not go with fsdp, as Lightning has it: set 32-true"
        )
    batch_size, accumulate = (
        options.batch_size or data.get("batch_size") or 8,
        trainer.accumulate_grad_batches,
    )
    tokens = options.tokens
    if tokens is None and trainer.max_steps > 0:
        tokens = float(trainer.max_steps) * batch_size * accumulate * gpus * model.context_length
    return Plan(
        gpus, strategy, precision,
        gather=configured.get("init_args.gather_dtype") or "float32",
        checkpoint_every=model.get("runtime.recompute_every") or None, batch_size=batch_size,
        length=model.context_length, accumulate=accumulate, gpu=options.gpu, mfu=options.mfu, tokens=tokens,
    )  # fmt: skip
