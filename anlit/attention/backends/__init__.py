"""The attention kernels, with one interface, and the choice among them.

A back end is a module, one file or a folder, with

    unsupported_reason(mechanism, q=None) -> str | None
        why it cannot compute `mechanism`, None if it can. `q` is an example of queries, (B, H, T, D): its device,
        precision, head width and need of a gradient matter too. Without `q`, only reasons that hold on every device.
    attend(q, k, v, mechanism, documents, dropout) -> Tensor
        q and the result are (B, H, T, D), k and v (B, G, T, D): query head h uses key head h // (H/G). q and k have
        unit root mean square; q·k is scaled by 1/√D. `dropout` is 0 but for those that are in `DROP_WEIGHTS`.
    prepare(mechanism, documents, n_rows)                                        (optional)
        derives what all layers share from the documents of `n_rows` sequences, and stores it in `documents`. It is
        called before the first layer, outside of compiled code.

To add one, write a module, name it in `BackendName` and `BACKENDS`, and in `CANDIDATES` for `backend: auto` to try it.
"""

from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from anlit.attention.backends import blockwise, eager, flash, flex, sdpa, triton
from anlit.attention.documents import Documents
from anlit.attention.mechanism import Mechanism
from anlit.errors import UserError

BackendName = Literal["eager", "sdpa", "blockwise", "flash", "flex", "triton"]
BACKENDS: dict[str, ModuleType] = {
    "flash": flash, "triton": triton, "flex": flex, "blockwise": blockwise, "sdpa": sdpa, "eager": eager
}  # fmt: skip

DROP_WEIGHTS = ("sdpa", "eager")
DEFAULTS: tuple[BackendName, ...] = ("sdpa", "eager")
"""What auto takes without a trial: the first that can compute it; where logits change by distance or there is a window
on a CPU, `blockwise`, because sdpa needs a T × T mask there. These were within 2 % of the fastest in all 20 cells of
docs/results/speed.md, in float32. Training in bfloat16 on a CPU takes `eager` up to one block of its queries: sdpa's
backward pass is slow there, and blockwise computes in float32."""

CANDIDATES: dict[str, tuple[BackendName, ...]] = {
    "g(n)": ("sdpa", "flash", "flex", "triton", "eager"),
    "m(t)": ("flash", "flex", "triton", "sdpa", "eager"),
    "a(t)": ("triton", "flex", "eager"),
}
"""What a trial on a GPU tries, by what a mechanism has: the first three that can compute it. m(t) stands for a window
and for packed documents too."""
MOST_CANDIDATES = 3
LONGEST_EAGER = 2048
"""Tokens up to which eager attention is a candidate. Its tracing takes a second for every 1024 tokens."""


def unsupported_reason(
    name: str, mechanism: Mechanism, q: Tensor | None, dropout: float
) -> str | None:
    """Why the back end `name` cannot compute `mechanism` for queries like `q` with this dropout, None if it can."""
    if dropout and name not in DROP_WEIGHTS:
        return f"it does not drop attention weights, and dropout is {dropout:g}"
    return BACKENDS[name].unsupported_reason(mechanism, q)


def prepare(backend: ModuleType, mechanism: Mechanism, documents: Documents, n_rows: int) -> None:
    """Let a back end derive from the documents what all layers share, if it does."""
    if hasattr(backend, "prepare"):
        backend.prepare(mechanism, documents, n_rows)


def choose(name: str, mechanism: Mechanism, q: Tensor | None = None, dropout: float = 0.0) -> str:
    """The back end for queries like `q`: `name`, or for auto the default. Without `q`, for some device and queries.

    UserError, which names those that can, if the back end `name` is unknown or cannot compute it.
    """
    if name == "auto":
        return default_backend(mechanism, "cpu" if q is None else q.device.type, q, dropout)
    if name not in BACKENDS:
        raise UserError(f"backend={name!r} is unknown: choose auto, {', '.join(BACKENDS)}")
    if reason := unsupported_reason(name, mechanism, q, dropout):
        others = ", ".join(
            key for key in BACKENDS if unsupported_reason(key, mechanism, q, dropout) is None
        )
        label = type(mechanism).__name__
        raise UserError(
            f"backend={name!r} cannot do attention {label}: {reason}; choose auto or {others}"
        )
    return name


def default_backend(
    mechanism: Mechanism, device_type: str, q: Tensor | None = None, dropout: float = 0.0
) -> BackendName:
    """What auto takes without a trial on a device of this type, for queries like `q` or in a common precision."""
    if device_type == "cpu" and q is not None and _trains_short_in_bfloat16(q):
        return "eager"
    if device_type == "cpu" and mechanism.depends_on_distance and not dropout:
        return "blockwise"
    return next(
        name for name in DEFAULTS if unsupported_reason(name, mechanism, q, dropout) is None
    )


def _trains_short_in_bfloat16(q: Tensor) -> bool:
    return q.requires_grad and q.dtype == torch.bfloat16 and q.shape[-2] <= eager.QUERIES_PER_BLOCK


def candidates(mechanism: Mechanism, q: Tensor, is_packed: bool) -> list[BackendName]:
    """The back ends to try for queries like `q` on a GPU, in the order of preference; none on other devices.

    FlexAttention sums the gradients of learned tables by contended atomics, slowly and never in the same order. So it
    is left out where they are learned and the Triton kernels, which reduce them to the learned number, can do it.
    """
    if q.device.type != "cuda":
        return []
    by_distance = "a(t)" if mechanism.scales_with_distance else "m(t)"
    names = CANDIDATES[by_distance if is_packed or mechanism.depends_on_distance else "g(n)"]
    supported = [name for name in names if BACKENDS[name].unsupported_reason(mechanism, q) is None]
    left_out = {"flex"} if "triton" in supported and eager.tables_are_learned(mechanism) else set()
    left_out |= {"eager"} if q.shape[-2] > LONGEST_EAGER else set()
    return [name for name in supported if name not in left_out][:MOST_CANDIDATES]
