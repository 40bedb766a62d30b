"""From the configuration of `anlit fit` to the plan whose needs `anlit size` estimates."""

import argparse
from typing import Any

from anlit.commands.support.parser import RunParser, model_of, origin, read_command
from anlit.errors import UserError
from anlit.sizing.estimate import Plan


class SizingParser(RunParser):
    """Parses what `anlit fit` parses and makes the model only, on the meta device."""

    def instantiate_classes(self) -> None:
        self.model = model_of(self.parser_of("fit"), self.config["fit"])


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
    """The plan from the command's options, and from the configuration for what they leave out.

    Raises:
        UserError: Strategy and number of GPUs contradict each other.
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
        precision=_precision(trainer.precision),
        gather=_gather_dtype(trainer.strategy),
        checkpoint_every=model.get("runtime.recompute_every") or None,
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
