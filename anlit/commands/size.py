"""`anlit size`: estimates the needs of a run from its configuration, without starting it."""

import argparse
from pathlib import Path
from typing import Any

from anlit.commands.garbage_collection import collector_paused
from anlit.config.labels import CONFIG, n_devices
from anlit.config.options import ToolParser, at_least
from anlit.config.run_tokens import DEFAULT_BATCH_SIZE, planned_tokens, tokens_per_micro_batch
from anlit.config.value_checks import check_precision
from anlit.errors import UserError
from anlit.io.write import write_json
from anlit.reporting.table import console
from anlit.sizing.plan import GPU_BYTES, Plan


def main(argv: list[str]) -> int:
    options, fit_arguments = parser().parse_known_args(argv)
    if not fit_arguments:
        fix = "give the options of anlit fit, such as --config FILE"
        raise UserError(f"anlit size needs a model: {fix}")
    if not fit_arguments[0].startswith("-"):
        name = fit_arguments[0]
        fix = f"give --config FILE, such as {name}/{CONFIG} of a run"
        raise UserError(f"anlit size does not know what to do with {name}: {fix}")
    if not 0 < options.mfu <= 1:
        raise UserError(f"--mfu {options.mfu:g} must be a share of the peak in (0, 1]")

    with collector_paused():  # torch takes seconds
        from anlit.commands.parser import ConfigurationParser, read_command
        from anlit.sizing.estimate import estimate, show
        from anlit.training.support import averages_on_device

    command = read_command(ConfigurationParser, ["fit", *fit_arguments])
    configuration = command.config["fit"]
    model = command.model_of(configuration)
    has_average = averages_on_device(configuration.trainer.as_dict())
    plan = plan_of(options, configuration, model.model.n_parameters(), has_average)
    result = estimate(model, plan)
    show(console(), result)
    if options.json is not None:
        _write_result(options.json, result)
    return 0


def _write_result(file: Path, result: Any) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, result)
    except OSError as error:
        cause = f"--json {file} cannot be written ({error.strerror})"
        raise UserError(f"{cause}: name another file") from error


def parser() -> ToolParser:
    """Return the command's options. All other options belong to `anlit fit`."""
    parser = ToolParser(
        prog="anlit size",
        description="Parameters, memory per GPU, FLOPs and days of a run. All other options belong "
        "to anlit fit, such as --trainer.strategy, --data.batch_size and --max_tokens.",
    )
    add = parser.add_argument
    add(
        "--gpus",
        type=at_least(1),
        help="number of GPUs on all nodes (default: the configuration's)",
    )
    add(
        "--gpu",
        choices=sorted(GPU_BYTES),
        default="H100",
        help="kind of the GPUs, for their memory and peak (default: %(default)s)",
    )
    add(
        "--mfu",
        type=float,
        default=0.4,
        help="expected share of the data sheet's dense peak at the configuration's precision "
        "(0.4; an H200 had 0.41 to 0.42 at 0.5B parameters, docs/results/gpu.md)",
    )
    add("--json", type=Path, help="write the numbers to this file too")
    return parser


def plan_of(
    options: argparse.Namespace, configuration: Any, n_parameters: int, has_average: bool
) -> Plan:
    """Return the plan of a run by the command's options and the run's configuration.

    Raises UserError if the strategy does not train in the precision.
    """
    from anlit.training.strategies import FullySharded  # torch takes seconds

    trainer = configuration.trainer
    model = configuration.model.init_args
    data = configuration.data.get("init_args", configuration.data)
    gpus = options.gpus or n_devices(trainer.devices) * trainer.num_nodes
    strategy = _strategy(trainer.as_dict()["strategy"], gpus)
    precision = check_precision(trainer.precision)
    if strategy == "fsdp" and precision == "64-true":
        cause = "trainer.precision=64-true does not go with fsdp, as Lightning has it"
        raise UserError(f"{cause}: set 32-true")
    spec = _strategy_spec(trainer.strategy)
    replicas = spec.get("init_args.replicas") or 1
    if strategy == "fsdp":
        FullySharded.check_replicas(replicas, gpus)
    micro_batch_tokens = tokens_per_micro_batch(model.context_length, data, gpus)
    return Plan(
        gpus,
        strategy,
        precision,
        replicas=replicas,
        reshard=spec.get("init_args.reshard_after_forward") is not False,
        gather=spec.get("init_args.gather_dtype") or "float32",
        checkpoint_every=model.get("runtime.recompute_every") or None,
        batch_size=data.get("batch_size") or DEFAULT_BATCH_SIZE,
        length=model.context_length,
        accumulate=trainer.accumulate_grad_batches,
        gpu=options.gpu,
        mfu=options.mfu,
        tokens=planned_tokens(configuration.as_dict(), micro_batch_tokens, n_parameters),
        has_average=has_average,
    )


def _strategy(configured: Any, gpus: int) -> Any:
    """Return `1gpu`, `ddp` or `fsdp`."""
    from anlit.training.strategies import FullySharded  # torch takes seconds
    from anlit.training.support import class_of_strategy

    if gpus == 1:
        return "1gpu"
    strategy_class = class_of_strategy(configured)
    is_sharded = strategy_class is not None and issubclass(strategy_class, FullySharded)
    return "fsdp" if is_sharded else "ddp"


def _strategy_spec(configured: Any) -> Any:
    """Return the configured strategy with a class_path, also for a name such as `ddp`."""
    return {"class_path": configured} if isinstance(configured, str) else configured
