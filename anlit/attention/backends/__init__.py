"""The attention kernels, with one interface, and the choice among them.

A back end is a module, one file or a folder, with

    unsupported_reason(mechanism, q=None, dropout=0.0) -> str | None
        why it cannot compute `mechanism`, None if it can. `q` is an example of queries, (B, H, T, D): its device,
        precision, head width and need of a gradient matter too. Without `q`, only reasons that hold on every device.
    attend(q, k, v, mechanism, documents, dropout) -> Tensor
        q and the result are (B, H, T, D), k and v (B, G, T, D): query head h uses key head h // (H/G). q and k have
        unit root mean square; q·k is scaled by 1/√D.
    prepare(mechanism, documents, n_rows)                                        (optional)
        derives what all layers share from the documents of `n_rows` sequences, and stores it in `documents`. It is
        called before the first layer, outside of compiled code.

To add one, write a module and enter it in `BACKENDS`, and in `CANDIDATES` for `backend: auto` to try it.
"""

from types import ModuleType

from torch import Tensor

from anlit.attention.backends import blockwise, eager, flash, flex, sdpa, triton
from anlit.attention.documents import Documents
from anlit.attention.mechanism import Mechanism
from anlit.errors import UserError

BACKENDS: dict[str, ModuleType] = {
    "flash": flash,
    "triton": triton,
    "flex": flex,
    "blockwise": blockwise,
    "sdpa": sdpa,
    "eager": eager,
}

DEFAULTS = ("sdpa", "eager")
DEFAULTS_BY_DISTANCE_ON_CPU = ("blockwise", "sdpa", "eager")
"""What auto takes without a trial: the first that can compute it. On a CPU sdpa needs a T × T mask where logits change
by distance or there is a window. These were within 2 % of the fastest in all 20 cells of docs/results/speed.md."""

CANDIDATES = {
    "g(n)": ("sdpa", "flash", "flex", "triton", "eager"),
    "g(n), packed": ("flash", "flex", "triton", "sdpa", "eager"),
    "m(t)": ("flash", "flex", "triton", "sdpa", "eager"),
    "a(t)": ("triton", "flex", "eager"),
}
"""What a trial on a GPU tries, by what a mechanism has and whether documents are packed: the first three that can
compute it. m(t) stands for a window too."""
MOST_CANDIDATES = 3
LONGEST_EAGER = 2048
"""Tokens up to which eager attention is a candidate. Its tracing takes a second for every 1024 tokens."""


def prepare(backend: ModuleType, mechanism: Mechanism, documents: Documents, n_rows: int) -> None:
    """Let a back end derive from the documents what all layers share, if it does."""
    derive = getattr(backend, "prepare", None)
    if derive is not None:
        derive(mechanism, documents, n_rows)


def choose(name: str, mechanism: Mechanism, q: Tensor | None = None, dropout: float = 0.0) -> str:
    """The back end for queries like `q`: `name`, or for auto the default. Without `q`, for some device and queries.

    Raises:
        UserError: The back end `name` is unknown, or cannot compute it. The message names those that can.
    """
    if name == "auto":
        return default_backend(mechanism, "cpu" if q is None else q.device.type, q, dropout)
    if name not in BACKENDS:
        raise UserError(f"backend={name!r} is unknown: choose auto, {', '.join(BACKENDS)}")
    if (reason := _unsupported_reason(name, mechanism, q, dropout)) is not None:
        supported = [key for key in BACKENDS if _unsupported_reason(key, mechanism, q, dropout) is None]
        label = type(mechanism).__name__
        raise UserError(
            f"backend={name!r} cannot do attention {label}: {reason}; choose auto or {', '.join(supported)}"
        )
    return name


def default_backend(mechanism: Mechanism, device_type: str, q: Tensor | None = None, dropout: float = 0.0) -> str:
    """What auto takes without a trial on a device of this type, for queries like `q` or in a common precision."""
    by_distance_on_cpu = device_type == "cpu" and mechanism.depends_on_distance
    names = DEFAULTS_BY_DISTANCE_ON_CPU if by_distance_on_cpu else DEFAULTS
    return next(name for name in names if _unsupported_reason(name, mechanism, q, dropout) is None)


def candidates(mechanism: Mechanism, q: Tensor, is_packed: bool) -> dict[str, ModuleType]:
    """The back ends to try for queries like `q` on a GPU, in the order of preference; none on other devices.

    FlexAttention sums the gradients of learned tables by contended atomics, slowly and never in the same order. So it
    is left out where they are learned and the Triton kernels, which reduce them to the learned number, can do it.
    """
    if q.device.type != "cuda":
        return {}
    form = "a(t)" if mechanism.scales_with_distance else "m(t)" if mechanism.depends_on_distance else "g(n)"
    names = CANDIDATES["g(n), packed" if form == "g(n)" and is_packed else form]
    supported = [name for name in names if _unsupported_reason(name, mechanism, q, 0.0) is None]
    if "triton" in supported and eager.tables_are_learned(mechanism):
        supported = [name for name in supported if name != "flex"]
    if q.shape[-2] > LONGEST_EAGER:
        supported = [name for name in supported if name != "eager"]
    return {name: BACKENDS[name] for name in supported[:MOST_CANDIDATES]}


def _unsupported_reason(name: str, mechanism: Mechanism, q: Tensor | None, dropout: float) -> str | None:
    reason: str | None = BACKENDS[name].unsupported_reason(mechanism, q, dropout)
    return reason
