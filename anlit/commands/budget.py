"""`anlit fit --max_tokens` and `--tokens_per_parameter`: a run's length in tokens, as steps."""

from collections.abc import Callable

import torch
from jsonargparse import Namespace
from lightning.pytorch.utilities import rank_zero_only

from anlit.config.batch_ramp import configured_ramp
from anlit.config.labels import class_name, n_devices
from anlit.config.trainer_defaults import TRAINER_DEFAULTS
from anlit.errors import UserError
from anlit.reporting.text import echo


def set_steps(config: Namespace, count_parameters: Callable[[], int]) -> None:
    """Set `trainer.max_steps` to the steps that the budget of tokens allows, and print it.

    The recorded configuration has the steps alone, so a run is continued with the same number.

    Args:
        config: The configuration of `fit`, with a vocabulary and a budget.
        count_parameters: Called if the budget is a number of tokens per parameter.

    Raises:
        UserError: The budget is less than a step.
    """
    n_tokens = config.max_tokens
    if n_tokens is None:
        n_tokens = config.tokens_per_parameter * count_parameters()
    n_steps = _steps_within(config, n_tokens)
    config.trainer.max_steps = n_steps
    config.max_tokens = config.tokens_per_parameter = None
    smallest = _step_tokens(config, 0)
    largest = _step_tokens(config, n_steps - 1)
    sizes = f"{smallest:,}" if smallest == largest else f"{smallest:,} to {largest:,}"
    rank_zero_only(echo)(f"{n_tokens:,.0f} tokens: {n_steps:,} steps of {sizes} tokens")


def has_budget(config: Namespace) -> bool:
    """Whether a configuration of `fit` gives the length of the run in tokens."""
    return bool(_budgets(config))


def _budgets(config: Namespace) -> dict[str, float]:
    """Return the settings that give the length of the run in tokens, by name."""
    budgets = {name: config[name] for name in ("max_tokens", "tokens_per_parameter")}
    return {name: value for name, value in budgets.items() if value is not None}


def check_length(config: Namespace) -> int | None:
    """Return the most steps that a run may take; None if they depend on its model or data.

    Raises UserError if two settings give the length or none does, if the budget is less than a
    step, or if the data do not tell their batches.
    """
    budgets = _budgets(config)
    if not budgets:
        _refuse_endless(config.trainer)
        return config.trainer.max_steps if config.trainer.max_steps > 0 else None
    lengths = budgets | configured_lengths(config)
    if len(lengths) > 1:
        listed = " and ".join(f"{name}={value:g}" for name, value in lengths.items())
        raise UserError(
            f"{listed} both give the length of the run: leave one out, or give "
            "--trainer.max_steps -1 if it is in a file"
        )
    batch_shape(config)
    return _steps_within(config, config.max_tokens) if config.max_tokens is not None else None


def _steps_within(config: Namespace, n_tokens: float) -> int:
    """The number of whole steps that these tokens allow. Raises UserError if it is 0."""
    ramp = configured_ramp(config.trainer.as_dict())
    n_steps = ramp.steps_within(int(n_tokens // _micro_batch_tokens(config)))
    if n_steps < 1:
        raise UserError(
            f"{n_tokens:,.0f} tokens are less than a step of {_step_tokens(config, 0):,}: give "
            "more tokens, or lower data.batch_size"
        )
    return n_steps


def _step_tokens(config: Namespace, step: int) -> int:
    """The tokens of optimizer step `step`, from 0."""
    ramp = configured_ramp(config.trainer.as_dict())
    return _micro_batch_tokens(config) * ramp.micro_batches(step)


def _refuse_endless(trainer: Namespace) -> None:
    """Raise UserError where Lightning would train 1,000 epochs, because nothing gives a length."""
    if trainer.max_steps == -1 and trainer.max_epochs is None and not trainer.fast_dev_run:
        raise UserError(
            "trainer.max_steps=-1 gives the run no length: set trainer.max_epochs, max_tokens or "
            "tokens_per_parameter, also beside trainer.max_time"
        )


def configured_lengths(config: Namespace) -> dict[str, int]:
    """Return the settings of the Trainer that give the length of a run, by name.

    The default number of steps is left out: it may be that nobody wrote it.
    """
    lengths = {}
    for name in ("max_steps", "max_epochs"):
        value = config.trainer[name]
        is_default = value == TRAINER_DEFAULTS.get(name)
        if value is not None and value > 0 and not is_default:
            lengths[f"trainer.{name}"] = value
    return lengths


def _micro_batch_tokens(config: Namespace) -> int:
    batch_size, length = batch_shape(config)
    return batch_size * length * count_ranks(config.trainer)


def batch_shape(config: Namespace) -> tuple[int, int]:
    """Return sequences and tokens of a micro-batch.

    Raises UserError if the class of the data has no setting batch_size. `LanguageModel` compares
    the first batch.
    """
    data = config.data.get("init_args", config.data)
    length = data.get("context_length") or config.model.init_args.context_length
    batch_size = data.get("batch_size")
    if not isinstance(batch_size, int):
        name = class_name(config.data.class_path)
        raise UserError(
            f"{name} has no setting batch_size, by which a budget of tokens becomes steps: set "
            "trainer.max_steps in place of the budget"
        )
    return batch_size, length


def count_ranks(trainer: Namespace) -> int:
    """Return the devices on all nodes; `auto` and -1 are all GPUs of a node, or one CPU process."""
    devices = n_devices(trainer.devices)
    takes_all = str(trainer.devices) in ("auto", "-1")
    if takes_all and trainer.accelerator != "cpu" and torch.cuda.is_available():
        devices = torch.cuda.device_count()
    return devices * trainer.num_nodes
