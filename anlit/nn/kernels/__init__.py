"""The attention kernels, with one interface, and the table by which `kernel: auto` chooses.

A kernel is a module, a file or a folder, with

    unsupported_reason(mechanism, q=None) -> str | None
        The reason why it cannot compute `mechanism`, None if it can. `q` is an example of queries,
        (B, H, T, D). Its device, precision, head width and need of a gradient matter. Without `q`,
        only reasons that hold on all devices.
    attend(q, k, v, mechanism, documents, dropout) -> Tensor
        q and the result are (B, H, T, D). k and v are (B, G, T, D). Query head h uses key head h //
        (H/G). q and k have unit root mean square. q·k is scaled by 1/√D. `dropout` is 0, except for
        kernels in `DROP_WEIGHTS`.
    batch_limit(mechanism, q, documents, n_rows, dropout) -> str | None          (optional)
        The reason why it cannot compute a batch of `n_rows` sequences with these documents, though
        it can compute other batches of `mechanism` and `q`.
    prepare(mechanism, documents, n_rows)                                        (optional)
        Store in `documents` what all layers share of the documents of `n_rows` sequences. It is
        called before the first layer, outside of compiled code.

To add a kernel, write a module. Name it in `KernelName` and `KERNELS`, and in `GPU_KERNELS` for
`kernel: auto`.
"""

from collections.abc import Collection
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from anlit.errors import UserError
from anlit.nn.kernels import blockwise, eager, flash, flex, sdpa, triton
from anlit.nn.kernels.documents import Documents
from anlit.nn.mechanisms.mechanism import Mechanism

KernelName = Literal["eager", "sdpa", "blockwise", "flash", "flex", "triton"]
"""The names of the kernels in YAML."""

KERNELS: dict[str, ModuleType] = {
    "flash": flash,
    "triton": triton,
    "flex": flex,
    "blockwise": blockwise,
    "sdpa": sdpa,
    "eager": eager,
}
"""The modules of the kernels, in the order in which messages list them."""

Row = Literal["g(n)", "g(n), hidden keys", "m(t)", "a(t)"]
"""A row of the table: the function that decides, and whether documents or a window hide keys."""

DROP_WEIGHTS = ("sdpa", "eager")
"""Kernels that can drop attention weights in training."""

GPU_KERNELS: dict[Row, tuple[KernelName, ...]] = {
    # Whole rows: the causal mask is enough. Milliseconds, T 4096, D 64: sdpa 2.50 (cuDNN's kernel),
    # flex 3.89, flash 3.98, triton 4.03.
    "g(n)": ("sdpa", "flash", "triton", "flex", "eager"),
    # Packed documents, T 16,384, D 128, documents of 2,048 tokens: flex 2.49, after 10 s of
    # compilation, flash 2.65, triton 3.02, sdpa 129, because it computes masked keys too.
    "g(n), hidden keys": ("flash", "triton", "flex", "sdpa", "eager"),
    # T 4096, D 64: triton 5.90, and 8.01 with a learned coefficient. With documents as above 3.64
    # and 4.57. Flex fits into shared memory, but has not been timed. Triton cannot do two learned
    # coefficients.
    "m(t)": ("triton", "flex", "flash", "sdpa", "eager"),
    "a(t)": ("triton", "flex", "eager"),
}
"""The order in which `auto` tries kernels on a GPU. Times are forward and backward pass on an H200
in bfloat16, for 16,384 tokens of H·D = 2048 (docs/results/gpu.md)."""

COMPILED_WHEN_USED = ("triton", "flex")
"""Kernels that are compiled for each kind of queries that they get, in 2 to 10 seconds each."""

COST_OF_FALLBACK: dict[str, str] = {
    "sdpa": "computes hidden keys too, up to 50 times slower",
    "eager": "writes all logits to memory, many times slower",
}
"""The cost of kernels that `auto` takes on a GPU if no faster kernel can compute the mechanism."""


def row_of(mechanism: Mechanism, is_packed: bool) -> Row:
    """The row of the table for a mechanism."""
    if mechanism.scales_with_distance:
        return "a(t)"
    if mechanism.shifts_with_distance:
        return "m(t)"
    hides_keys = is_packed or mechanism.window is not None
    return "g(n), hidden keys" if hides_keys else "g(n)"


def unsupported_reason(
    name: str, mechanism: Mechanism, q: Tensor | None, dropout: float
) -> str | None:
    """The reason why a kernel cannot compute `mechanism` for queries like `q`, None if it can."""
    if dropout and name not in DROP_WEIGHTS:
        return f"it does not drop attention weights, and dropout is {dropout:g}"
    return KERNELS[name].unsupported_reason(mechanism, q)


def batch_limit(
    name: str, mechanism: Mechanism, q: Tensor, documents: Documents, n_rows: int, dropout: float
) -> str | None:
    """The reason why a kernel cannot compute a batch of many sequences, None if it can."""
    kernel = KERNELS[name]
    if not hasattr(kernel, "batch_limit"):
        return None
    reason: str | None = kernel.batch_limit(mechanism, q, documents, n_rows, dropout)
    return reason


def prepare(kernel: ModuleType, mechanism: Mechanism, documents: Documents, n_rows: int) -> None:
    """Store in `documents` what all layers share. Compiled code reads it, and stores nothing."""
    _ = documents.bounds
    if hasattr(kernel, "prepare"):
        kernel.prepare(mechanism, documents, n_rows)


def check_kernel(
    name: str, mechanism: Mechanism, q: Tensor | None = None, dropout: float = 0.0
) -> None:
    """Check that a kernel exists and can compute `mechanism`, without `q` on some device.

    Raises:
        UserError: It cannot.
    """
    if name == "auto":
        return
    if name not in KERNELS:
        raise UserError(f"kernel={name!r} is unknown: choose auto, {', '.join(KERNELS)}")
    reason = unsupported_reason(name, mechanism, q, dropout)
    if reason is not None:
        raise UserError(
            f"kernel={name!r} cannot do attention {type(mechanism).__name__}: {reason}; choose auto"
        )


def default_kernel(
    mechanism: Mechanism,
    device_type: str,
    is_packed: bool,
    q: Tensor | None = None,
    dropout: float = 0.0,
    may_compile: bool = True,
    excluded: Collection[str] = (),
) -> KernelName:
    """The kernel that `auto` takes on a device, for queries like `q` or in a common precision.

    Without `may_compile`, it leaves out kernels that a GPU would first compile. It always leaves
    out `excluded`, kernels that cannot compute this batch (`batch_limit`).
    """
    if device_type == "cuda":
        candidates = GPU_KERNELS[row_of(mechanism, is_packed)]
    elif device_type == "cpu":
        candidates = _cpu_kernels(mechanism, q, dropout)
    else:
        candidates = ("sdpa", "eager")
    for name in candidates:
        must_compile = device_type == "cuda" and name in COMPILED_WHEN_USED
        if name in excluded or (must_compile and not may_compile):
            continue
        if unsupported_reason(name, mechanism, q, dropout) is None:
            return name
    return "eager"


def _cpu_kernels(mechanism: Mechanism, q: Tensor | None, dropout: float) -> tuple[KernelName, ...]:
    """The order on a CPU: within 2 % of the fastest in all float32 cells of docs/results/speed.md.

    sdpa needs a T × T mask where logits change by distance. Training in bfloat16 takes `eager` up
    to a block of its queries. sdpa's backward pass is slow there, and blockwise computes in
    float32.
    """
    if q is not None and _trains_short_in_bfloat16(q):
        return ("eager",)
    if mechanism.depends_on_distance and not dropout:
        return ("blockwise",)
    return ("sdpa", "eager")


def _trains_short_in_bfloat16(q: Tensor) -> bool:
    return q.requires_grad and q.dtype == torch.bfloat16 and q.shape[-2] <= eager.QUERIES_PER_BLOCK


def fallback_warning(
    name: str, mechanism: Mechanism, is_packed: bool, q: Tensor, dropout: float
) -> str | None:
    """Return a sentence if a GPU gets a kernel much slower than the table's first, else None."""
    row = row_of(mechanism, is_packed)
    is_cheap = name == "sdpa" and row == "g(n)"
    if q.device.type != "cuda" or is_cheap or name not in COST_OF_FALLBACK:
        return None
    first = GPU_KERNELS[row][0]
    reason = unsupported_reason(first, mechanism, q, dropout) or "the batch has too many sequences"
    return (
        f"attention {type(mechanism).__name__} runs on '{name}' on this GPU, which "
        f"{COST_OF_FALLBACK[name]} than '{first}': {reason}"
    )
