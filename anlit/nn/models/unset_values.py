"""Finds parameters and buffers that got memory and no initial values."""

import math

import torch
from torch import Tensor, nn

from anlit.errors import UserError
from anlit.nn.layers.sharded import full_tensor

UNSET_BYTE = 0xA5
"""Fills the memory of integers and booleans, which have no NaN."""


@torch.no_grad()
def mark_unset(module: nn.Module) -> None:
    """Fill all parameters and buffers with a mark that no initial value has.

    The mark is NaN. Integers and booleans have `UNSET_BYTE` in each byte.
    """
    for _, tensor in _named_tensors(module):
        if _has_nan(tensor):
            tensor.fill_(math.nan)
        else:
            tensor.untyped_storage().fill_(UNSET_BYTE)  # type: ignore[attr-defined]


def refuse_unset(module: nn.Module) -> None:
    """Raise UserError with the first parameter or buffer that still has the mark.

    All ranks must call this if parameters are sharded.
    """
    for name, tensor in _named_tensors(module):
        if _is_unset(tensor):
            owner_name, _, _ = name.rpartition(".")
            owner = type(module.get_submodule(owner_name)).__name__
            raise UserError(
                f"model.runtime.meta_init=true leaves {name} without initial values: set them in "
                f"{owner}.reset_parameters, or leave meta_init out"
            )


def _named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _has_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _is_unset(tensor: Tensor) -> bool:
    """Whether some number is NaN, or all bytes of integers and booleans are `UNSET_BYTE`."""
    if _has_nan(tensor):
        return bool(full_tensor(tensor.detach().isnan().any()))
    values = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    values.set_(tensor.untyped_storage())  # type: ignore[call-overload]
    return tensor.numel() > 0 and bool((values == UNSET_BYTE).all())
