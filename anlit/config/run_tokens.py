"""The tokens of a micro-batch and of a whole run, from the run's settings; without torch."""

from collections.abc import Mapping
from typing import Any

from anlit.config.batch_ramp import configured_ramp
from anlit.config.labels import mapping
from anlit.config.trainer_defaults import TRAINER_DEFAULTS
from anlit.io.yaml_text import parse_scalar

DEFAULT_BATCH_SIZE = 8
"""Sequences in a micro-batch, if the data have no such setting."""


def tokens_per_micro_batch(length: int, data: Mapping[str, Any], n_devices: int) -> int:
    """Return the tokens of a micro-batch on all devices together.

    Args:
        length: The model's context length; the data may have another.
        data: Settings of the data.
        n_devices: Devices on all nodes.
    """
    batch_size = data.get("batch_size") or DEFAULT_BATCH_SIZE
    return int((data.get("context_length") or length) * batch_size * n_devices)


def planned_tokens(
    config: Mapping[str, Any], micro_batch_tokens: int, n_parameters: int
) -> float | None:
    """Return the training tokens of a run; None without a number of tokens or steps."""
    max_tokens = _number(config.get("max_tokens"))
    if max_tokens is not None:
        return max_tokens
    tokens_per_parameter = _number(config.get("tokens_per_parameter"))
    if tokens_per_parameter is not None:
        return tokens_per_parameter * n_parameters
    trainer = mapping(config.get("trainer"))
    max_steps = trainer.get("max_steps", TRAINER_DEFAULTS["max_steps"])
    if max_steps <= 0:
        return None
    return float(micro_batch_tokens * configured_ramp(trainer).total(max_steps))


def _number(value: Any) -> float | None:
    """Return the number in a setting, also in a text such as `2M`; None without a number."""
    number = parse_scalar(value) if isinstance(value, str) else value
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    return float(number) if is_number else None
