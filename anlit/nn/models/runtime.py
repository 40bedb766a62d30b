"""How a model runs: compilation, activation checkpointing and late initial values, which change no result; float8."""

import ctypes
import inspect
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from anlit.errors import UserError
from anlit.nn.attention.attention import attention_layers
from anlit.nn.kernels import triton
from anlit.nn.kernels.flex import RECOMPILE_LIMIT
from anlit.nn.layers.float8 import Recipe, use_float8
from anlit.nn.models.flops import FORWARD_AND_BACKWARD, flops_per_token, mean_visible_keys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, LARGEST_INT, KEPT_BLOCK = -1, -3, 2**31 - 1, 2**30
"""From glibc's malloc.h: limits of the free memory at the end of the heap, and of the size of blocks inside it."""
TAKES_RECOMPILE_LIMIT = "recompile_limit" in inspect.signature(torch.compile).parameters
"""Whether a compiled function has a limit of its own. Where it has none, the limit in torch's configuration holds in
every thread. Newer versions of torch keep their configuration per thread, and a GPU recomputes blocks in another
thread than the one that ran them forward (pytorch issue 186537)."""


WITHOUT_VALUES = ContextVar("WITHOUT_VALUES", default=False)


@contextmanager
def without_values() -> Iterator[None]:
    """Networks that are built inside get no initial values, and no memory for them."""
    token = WITHOUT_VALUES.set(True)
    try:
        yield
    finally:
        WITHOUT_VALUES.reset(token)


FLOPS_THAT_REPAY = 2e16
"""Operations of forward passes, about a minute of an H200's eager bfloat16 (estimated): compiled blocks save a third of
it, and take 10 to 30 s to compile."""
LOGITS_THAT_REPAY = 1e11
"""Attention logits, which eager attention moves through an H200's memory in a second or two (estimated): as long as a
kernel takes to compile."""


@dataclass(frozen=True)
class Runtime:
    """Settings of how a model runs.

    Args:
        compile: Whether training compiles each block with torch.compile; all blocks of a kind share one compilation.
            On a GPU this compiles the loss and the restoration of norms too. `auto` compiles on CUDA. On CPU
            `cpu_gradients.py` already brings most of the gain. `validate` and `test` compile where that takes
            less time than it saves (`repays_compiled_blocks`); the other tools never do.
        recompute_every: Activation checkpointing: recompute every n-th block in the backward pass instead of keeping
            its activations; 1 recomputes all blocks, 0 none.
        meta_init: Draw the initial weights after sharding, for models of which the host cannot hold one copy per rank.
            The weights are the same.
        float8: Matrix products of the blocks in float8 (`tensorwise`, `rowwise`, `rowwise_with_gw_hp`, see
            `anlit.nn.layers.float8`). GPUs need compute capability 8.9. A CPU emulates the rounding. Embedding, output
            layer, norms and optimizer stay as they are.
    """

    compile: bool | Literal["auto"] = "auto"
    recompute_every: int = 0
    meta_init: bool = False
    float8: Recipe | None = None

    def device(self) -> AbstractContextManager[Any]:
        """The device context in which the network is built."""
        is_late = self.meta_init or WITHOUT_VALUES.get()
        return torch.device("meta") if is_late else nullcontext()

    def compiles_on(self, device_type: str) -> bool:
        """Whether to compile on a device of this type; `auto` does on CUDA with Triton."""
        if self.compile == "auto":
            return device_type == "cuda" and triton.IS_INSTALLED
        return self.compile

    def apply(self, decoder: Any, device_type: str) -> None:
        """Prepare a `Decoder` to train on a device of this type, before it is sharded."""
        self.prepare(decoder, device_type)
        self.wrap_blocks(decoder, device_type, self.compiles_on(device_type))

    def prepare(self, decoder: Any, device_type: str) -> None:
        """Prepare the device and replace modules, once."""
        if device_type == "cpu":
            prepare_cpu()
        if self.float8:
            use_float8(decoder.blocks, self.float8, device_type)

    def wrap_blocks(self, decoder: Any, device_type: str, compiles: bool) -> None:
        """Compile the blocks or not, and recompute some of them in the backward pass. It may be called again.

        Each block's `forward` is replaced, not the module. So the names in checkpoints do not change, and the hooks of
        sharding are neither compiled nor recomputed.
        """
        if compiles:
            # DDP would split each block into several graphs to exchange gradients early. A pattern of layers needs a
            # compilation for each kind of layer, in training, in validation and for the last batch: beyond torch's
            # limit of 8 it would run uncompiled.
            torch._dynamo.config.optimize_ddp = False
            torch._dynamo.config.recompile_limit = max(
                torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT
            )
        for number, block in enumerate(decoder.blocks):
            vars(block).pop("forward", None)  # of an earlier call
            if compiles:
                limit: dict[str, Any] = {}
                if TAKES_RECOMPILE_LIMIT:
                    limit = {"recompile_limit": RECOMPILE_LIMIT}
                block.forward = torch.compile(block.forward, dynamic=False, **limit)
            if self.recompute_every and number % self.recompute_every == 0:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        decoder.compiles_loss = decoder.compiles_norms = compiles and device_type != "cpu"


def repays_compiled_blocks(decoder: Any, n_tokens: int, length: int) -> bool:
    """Whether evaluating `n_tokens` in sequences of `length` takes longer than to compile the blocks for it."""
    forward = flops_per_token(decoder, length) / FORWARD_AND_BACKWARD
    return n_tokens * forward >= FLOPS_THAT_REPAY


def allow_compiled_kernels(decoder: Any, n_tokens: int, length: int) -> None:
    """Let attention take kernels that are compiled if `n_tokens` in sequences of `length` repay that; else not."""
    layers = attention_layers(decoder)
    logits = n_tokens * sum(
        layer.mechanism.n_heads * mean_visible_keys(length, layer.mechanism.window)
        for layer in layers
    )
    for layer in layers:
        layer.allow_compilation(logits >= LOGITS_THAT_REPAY)


def flush_denormals() -> None:
    """Treat denormal numbers as 0 in this thread and in threads that start from now on.

    A product with a denormal (below 1.2e-38) takes many times as long. Denormals arise from vanishing exponentials,
    such as ALiBi's far weights, and in Adam's averages for rare tokens.
    """
    for dtype in (np.float32, np.float64):
        np.finfo(dtype)  # kept from now on: numpy before 2.4 warns if it asks for it later
    torch.set_flush_denormal(True)


def prepare_cpu() -> None:
    """Keep freed memory for the next step (glibc), and flush denormals.

    By default every step returns the memory of its activations to the kernel, and gets it back page by page, zeroed.
    """
    with suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(M_TRIM_THRESHOLD, LARGEST_INT)
        mallopt(M_MMAP_THRESHOLD, KEPT_BLOCK)
    flush_denormals()
    # ATEN_CPU_CAPABILITY hides AVX-512 from torch and not from oneDNN. torch then calls oneDNN's packing for AMX, and
    # attention's backward pass in bfloat16 fails. oneDNN reads its variable at its first call.
    if os.environ.get("ATEN_CPU_CAPABILITY") in ("default", "avx2"):
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")


@contextmanager
def enough_memory(rows: int, length: int, device: torch.device, advice: str) -> Iterator[None]:
    """Raise UserError that ends with `advice` if what runs inside, on `rows` × `length` tokens, has no memory."""
    try:
        yield
    except (
        RuntimeError
    ) as error:  # of which torch.OutOfMemoryError is one; a CPU has none of its own
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(
            error
        ):
            raise
        raise UserError(
            f"{rows:,} × {length:,} tokens do not fit into the memory of {device}: {advice}"
        ) from error
