"""Refuses a run that could not start, before its data are prepared, which may take hours.

For `anlit fit`, and for each run of a study.
"""

import warnings

import lightning as L
import torch
from jsonargparse import Namespace
from lightning.fabric.plugins.environments import LightningEnvironment

from anlit.commands.budget import check_length, count_ranks
from anlit.commands.learning_rate import set_rate_by_width
from anlit.commands.parser import ConfigurationParser, explain_constructor_errors
from anlit.commands.trainer_objects import training_callbacks
from anlit.config.value_checks import check_precision
from anlit.nn.attention.attention import attention_layers, example_query
from anlit.nn.kernels import check_kernel
from anlit.nn.layers.float8 import check_shapes, check_torchao
from anlit.training.callbacks.run_record import RunRecord
from anlit.training.language_model import LanguageModel
from anlit.training.support import check_ranks, check_steps

DTYPES = {
    "bf16-mixed": torch.bfloat16,
    "bf16-true": torch.bfloat16,
    "64-true": torch.float64,
}
"""Precisions in which attention does not compute in float32."""


def check_run(parser: ConfigurationParser, config: Namespace) -> LanguageModel | None:
    """Check the length, the model, its products in float8 and the optimizer of a run.

    `config` stays as it is. A missing vocabulary is the default.

    Returns:
        The model on the meta device. None if its class needs memory for the weights.

    Raises:
        UserError: The run could not start.
    """
    n_steps = check_length(config)
    if n_steps is not None:
        check_steps(config.trainer.as_dict(), n_steps)
    config = config.clone()
    set_rate_by_width(config.model)
    try:
        model = parser.model_of(config)
        model.new_optimizer()
        if model.runtime.float8:
            check_shapes(model.model.blocks)
    except RuntimeError:  # a class that needs memory for the weights
        return None
    return model


def check_machine(config: Namespace, model: LanguageModel | None, device_type: str) -> None:
    """Check the number of ranks, what float8 needs, and the kernels on a CPU.

    A GPU is not asked, because data are prepared by forked processes.

    Raises:
        UserError: The run could not start on devices of this type.
    """
    check_ranks(config.trainer.as_dict(), count_ranks(config.trainer))
    if model is not None and model.runtime.float8:
        check_torchao(model.runtime.float8)
    if model is None or device_type != "cpu":
        return
    dtype = DTYPES.get(check_precision(config.trainer.precision), torch.float32)
    device = torch.device(device_type)
    for layer in attention_layers(model.model):
        q = example_query(layer.mechanism, model.context_length, dtype, device, requires_grad=True)
        check_kernel(layer.kernel, layer.mechanism, q, layer.dropout)


def try_trainer(parser: ConfigurationParser, config: Namespace) -> None:
    """Make the Trainer of a run and its callbacks, and discard them.

    `anlit fit` makes them anyway. A study makes them once for runs with equal settings. Its runs
    may have another machine, so devices and strategy count on a CPU only.

    Raises:
        UserError: The Trainer or a callback refuses a setting.
    """
    settings = config.trainer.clone()
    settings.logger = False  # some loggers begin a record when they are made
    settings.plugins = LightningEnvironment()  # this job of a cluster may not be the run's
    settings.deterministic = settings.benchmark = None  # they would change this process
    if settings.accelerator != "cpu":
        settings.accelerator = "cpu"
        settings.devices = 1
        settings.strategy = "auto"
    subcommand_parser = parser.parser_of(str(parser.subcommand))
    with explain_constructor_errors(), warnings.catch_warnings(action="ignore"):
        objects = subcommand_parser.instantiate(Namespace(trainer=settings)).trainer
        record = RunRecord(config.run_dir)
        objects.callbacks = training_callbacks(objects, record, config.checkpoint_every_n_steps)
        L.Trainer(**objects)
