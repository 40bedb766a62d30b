"""The attention kernels, with one interface, and the choice among them.

A back end is a module, one file or a folder, with

    reason_against(mechanism, q=None, dropout=0.0) -> str | None
        why it cannot compute `mechanism`, None if it can. `q` is an example of queries, (B, H, T, D): its device,
        precision, head width and need of a gradient matter too. Without `q`, only reasons that hold on every device.
    attend(q, k, v, mechanism, documents, dropout) -> Tensor
        q and the result are (B, H, T, D); q and k have unit root mean square; q·k is scaled by 1/√D. k and v are
        (B, G, T, D) if the module says `GROUPED = True`: query head h uses key head h // (H/G). Other modules get them
        repeated, (B, H, T, D).
    prepare(mechanism, documents, n_rows)                                        (optional)
        derives what all layers share from the documents of `n_rows` sequences, and stores it in `documents`. It is
        called before the first layer, outside of compiled code.

To add one, write a module and enter it in `BACKENDS` and `PREFERRED`.
"""

import logging
from types import ModuleType

import torch
from torch import Tensor

from anlit.attention.backends import blockwise, eager, flash, flex, sdpa, triton
from anlit.attention.mechanism import Mechanism
from anlit.errors import UserError
from anlit.reporting.once import say_once

BACKENDS: dict[str, ModuleType] = {
    "flash": flash,
    "triton": triton,
    "flex": flex,
    "blockwise": blockwise,
    "sdpa": sdpa,
    "eager": eager,
}

# `auto` tries the back ends in this order, by type of device.
PREFERRED: dict[str, tuple[str, ...]] = {
    # flash, triton and flex have not run on a GPU yet, so `auto` does not take them. `anlit benchmark attention
    # --preset h200` checks and times them; its results should order this list.
    "cuda": ("sdpa", "eager"),
    # Measured by `anlit benchmark attention --preset cpu`: docs/results/attention_cpu. flex has no backward pass here.
    "cpu": ("sdpa", "eager"),
}
# On a CPU, for mechanisms that change logits by distance or have a window: sdpa would need a T × T mask for them. With
# several threads this list is for sequences of at least LONG tokens; shorter ones are too little work to share.
PREFERRED_BY_DISTANCE = ("blockwise", "sdpa", "eager")
LONG = 1024
PREFERRED_OTHERWISE = ("sdpa", "eager")

_log = logging.getLogger("anlit.attention")


def check(name: str, mechanism: Mechanism, dropout: float = 0.0) -> None:
    """Refuse a back end that cannot compute `mechanism` on any device.

    Raises:
        ValueError: `name` is unknown, or that back end cannot compute it. The message names those that can.
    """
    if name == "auto":
        return
    if name not in BACKENDS:
        raise ValueError(f"backend={name!r} is unknown: choose auto, {', '.join(BACKENDS)}")
    if (reason := _reason_against(name, mechanism, None, dropout)) is not None:
        raise ValueError(_refusal(name, mechanism, reason, None, dropout))


def choose(name: str, mechanism: Mechanism, q: Tensor, dropout: float = 0.0) -> str:
    """The back end for queries like `q`: `name`, or for auto the first of `PREFERRED` that can compute `mechanism`.

    The choice of auto, and the reasons against the back ends before it, are logged once.

    Raises:
        UserError: The back end `name` cannot compute it for such queries. The message names those that can.
    """
    if name != "auto":
        if (reason := _reason_against(name, mechanism, q, dropout)) is not None:
            raise UserError(_refusal(name, mechanism, reason, q, dropout))
        return name
    candidate, reasons = _first_possible(q.device.type, mechanism, q, dropout)
    where = f"{q.device.type}, {str(q.dtype).removeprefix('torch.')}"
    why = f" ({'; '.join(reasons)})" if reasons else ""
    say_once(_log, f"attention {type(mechanism).__name__} runs on the back end '{candidate}' ({where}){why}")
    return candidate


def likely(name: str, mechanism: Mechanism, device_type: str, dropout: float = 0.0) -> str:
    """What `choose` returns on a device of this type, for a precision and head width that suit every back end."""
    return name if name != "auto" else _first_possible(device_type, mechanism, None, dropout)[0]


def _first_possible(device_type: str, mechanism: Mechanism, q: Tensor | None, dropout: float) -> tuple[str, list[str]]:
    """The first preferred back end that can compute it (there always is one), and why those before it cannot."""
    reasons = []
    preferred = PREFERRED.get(device_type, PREFERRED_OTHERWISE)
    is_long = q is not None and q.shape[-2] >= LONG
    if device_type == "cpu" and mechanism.depends_on_distance and (is_long or torch.get_num_threads() == 1):
        preferred = PREFERRED_BY_DISTANCE
    for name in preferred:
        if (reason := _reason_against(name, mechanism, q, dropout)) is None:
            break
        reasons.append(f"not {name}: {reason}")
    return name, reasons


def _reason_against(name: str, mechanism: Mechanism, q: Tensor | None, dropout: float) -> str | None:
    reason: str | None = BACKENDS[name].reason_against(mechanism, q, dropout)
    return reason


def _refusal(name: str, mechanism: Mechanism, reason: str, q: Tensor | None, dropout: float) -> str:
    able = [key for key in BACKENDS if _reason_against(key, mechanism, q, dropout) is None]
    label = type(mechanism).__name__
    return f"backend={name!r} cannot do attention {label}: {reason}; choose auto or {', '.join(able)}"
