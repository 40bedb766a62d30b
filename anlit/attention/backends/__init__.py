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

To add one, write a module and enter it in `BACKENDS`. `anlit.attention.choice` then tries it for `backend: auto`.
"""

import logging
from types import ModuleType

from torch import Tensor

from anlit.attention.backends import blockwise, cudnn, cute, eager, flash, flex, sdpa, triton
from anlit.attention.documents import Documents
from anlit.attention.groups import repeat_heads
from anlit.attention.mechanism import Mechanism
from anlit.errors import UserError

BACKENDS: dict[str, ModuleType] = {
    "flash": flash,
    "cudnn": cudnn,
    "cute": cute,
    "triton": triton,
    "flex": flex,
    "blockwise": blockwise,
    "sdpa": sdpa,
    "eager": eager,
}

HARMLESS = ("sdpa", "blockwise", "eager")
"""Made of PyTorch's own operations, which neither hang nor write where they may not."""
BY_DISTANCE = ("blockwise", "sdpa", "eager")
"""Without a trial, on a CPU: there sdpa needs a T × T mask for one document and a mechanism that changes logits by
distance or has a window."""

_log = logging.getLogger("anlit.attention")


def attend_by(
    backend: ModuleType, q: Tensor, k: Tensor, v: Tensor, mechanism: Mechanism, documents: Documents, dropout: float
) -> Tensor:
    """A back end on q, (B, H, T, D), and k and v, (B, G, T, D), which are repeated for it if it needs that."""
    if not getattr(backend, "GROUPED", False):
        k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    return backend.attend(q, k, v, mechanism, documents, dropout)  # type: ignore[no-any-return]


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
    """The back end for queries like `q`: `name`, or for auto what is taken without a trial, see `untimed`.

    What auto takes, and the reasons against the back ends before it, are logged for debugging.

    Raises:
        UserError: The back end `name` cannot compute it for such queries. The message names those that can.
    """
    if name != "auto":
        if (reason := _reason_against(name, mechanism, q, dropout)) is not None:
            raise UserError(_refusal(name, mechanism, reason, q, dropout))
        return name
    candidate, reasons = _first_harmless(q.device.type, mechanism, q, dropout)
    where = f"{q.device.type}, {str(q.dtype).removeprefix('torch.')}"
    why = f" ({'; '.join(reasons)})" if reasons else ""
    _log.debug(f"attention {type(mechanism).__name__} runs on the back end '{candidate}' ({where}){why}")
    return candidate


def untimed(mechanism: Mechanism, q: Tensor, dropout: float = 0.0) -> str:
    """What auto takes where nothing was tried: the first harmless back end that can compute it. There always is one."""
    return _first_harmless(q.device.type, mechanism, q, dropout)[0]


def likely(name: str, mechanism: Mechanism, device_type: str, dropout: float = 0.0) -> str:
    """`name`, or for auto what is taken without a trial on a device of this type, in a precision that suits all.

    A trial may find one that needs less memory.
    """
    return name if name != "auto" else _first_harmless(device_type, mechanism, None, dropout)[0]


def _first_harmless(device_type: str, mechanism: Mechanism, q: Tensor | None, dropout: float) -> tuple[str, list[str]]:
    """The first harmless back end that can compute it, and why those before it cannot."""
    reasons = []
    on_cpu = device_type == "cpu"
    order = BY_DISTANCE if mechanism.depends_on_distance else HARMLESS
    for name in order if on_cpu else (name for name in order if name != "blockwise"):  # it is made for CPUs
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
