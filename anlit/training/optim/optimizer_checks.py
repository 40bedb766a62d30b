"""Checks of the optimizer that a user sets, and of the errors of its steps."""

import inspect
import traceback
from typing import Any

import torch
from torch.optim import Optimizer

from anlit.config.objects import shown
from anlit.errors import UserError, is_out_of_memory


def check_factory(optimizer: Any) -> None:
    """Raise UserError if the setting `optimizer` is not a function that makes an optimizer."""
    if callable(optimizer):
        return
    if isinstance(optimizer, Optimizer):
        name = type(optimizer).__name__
        cause = f"is an object of {name}, made for other parameters"
    else:
        cause = f"is {shown(optimizer)}"
        name = "AdamW"
    raise UserError(
        f"model.optimizer {cause}: give a function that makes one, lambda groups: {name}(groups)"
    )


def refuse_wrong_kernel(optimizer: Optimizer) -> None:
    """Raise UserError for torch's fused SGD on bfloat16 weights of a CPU.

    Its steps are wrong there (torch 2.13): they differ from the other kernels' by far more than
    rounding, and its momentum has numbers that nothing has written.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        for weight in group["params"]:
            is_wrong = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
            if group["fused"] and is_wrong:
                raise UserError(
                    "model.optimizer.fused=true takes wrong steps in torch's SGD with bfloat16 "
                    "weights on a CPU: set --model.optimizer.fused false"
                )


def explain_failed_step(optimizer: Optimizer, error: Exception) -> None:
    """Raise UserError for an error by which the code of an optimizer states a requirement.

    A mistake in that code, such as a KeyError, keeps its traceback.
    """
    is_statement = isinstance(error, RuntimeError | ValueError) or type(error) is Exception
    if not is_statement or is_out_of_memory(error):
        return
    optimizer_class = type(optimizer)
    source_file = traceback.extract_tb(error.__traceback__)[-1].filename
    if source_file == inspect.getfile(optimizer_class):
        raise UserError(
            f"model.optimizer={optimizer_class.__name__} cannot take its step ({error}): choose "
            "another, such as anlit.AdamW or torch.optim.SGD"
        ) from error
