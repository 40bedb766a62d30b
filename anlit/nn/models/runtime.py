"""How a model runs: compilation, activation checkpointing, late initial values, and float8.

All but float8 leave the results unchanged.
"""

import ctypes
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from anlit.errors import UserError, is_out_of_memory
from anlit.nn.attention.attention import attention_layers
from anlit.nn.kernels import triton
from anlit.nn.kernels.flex import RECOMPILE_LIMIT
from anlit.nn.layers.float8 import Recipe, use_float8
from anlit.nn.models.flops import FORWARD_AND_BACKWARD, flops_per_token, mean_visible_keys

M_TRIM_THRESHOLD = -1
"""glibc's number (malloc.h) for the limit of free memory at the end of the heap."""

M_MMAP_THRESHOLD = -3
"""glibc's number for the size from which on a block of memory lies outside the heap."""

LARGEST_INT = 2**31 - 1
"""No limit: the heap keeps all its free memory."""

LARGEST_HEAP_BLOCK = 2**30
"""Bytes up to which blocks lie in the heap."""

TAKES_RECOMPILE_LIMIT = "recompile_limit" in inspect.signature(torch.compile).parameters
"""Whether torch.compile takes a limit per function. Older versions have one limit in a
configuration that all threads share. Newer versions have a configuration per thread. A GPU
recomputes blocks in another thread than their forward pass (pytorch issue 186537)."""

FLOPS_THAT_REPAY = 2e16
"""Operations of forward passes, about a minute of an H200's eager bfloat16 (estimated). Compiled
blocks save a third of it, and take 10 to 30 s to compile."""

LOGITS_THAT_REPAY = 1e11
"""Attention logits. Eager attention moves them through an H200's memory in a second or two
(estimated). A kernel takes as long to compile."""

_builds_without_values = ContextVar("_builds_without_values", default=False)
_draws_matrices = ContextVar("_draws_matrices", default=True)


@contextmanager
def without_values() -> Iterator[None]:
    """Build networks inside this context without initial values, and without memory for them."""
    token = _builds_without_values.set(True)
    try:
        yield
    finally:
        _builds_without_values.reset(token)


@contextmanager
def without_matrices() -> Iterator[None]:
    """Build networks inside this context without drawing their matrices, for a checkpoint's.

    Other values are as usual. The matrices hold arbitrary numbers until the checkpoint is loaded.
    """
    token = _draws_matrices.set(False)
    try:
        yield
    finally:
        _draws_matrices.reset(token)


def draws_matrices() -> bool:
    """Whether networks that are built now need initial values in their matrices."""
    return _draws_matrices.get()


@dataclass(frozen=True)
class Runtime:
    """Settings of how a model runs.

    Args:
        compile: Whether training compiles each block with torch.compile. All blocks of a kind share
            a compilation. On a GPU this compiles the loss and the restoration of norms too. `auto`
            compiles on CUDA. On CPU `cpu_gradients.py` already brings most of the gain.
            `validate` and `test` compile where that takes less time than it saves
            (`repays_compiled_blocks`). The other tools never do.
        recompute_every: Activation checkpointing. The backward pass recomputes every n-th block
            instead of keeping its activations. 1 recomputes all blocks, 0 none.
        meta_init: Draw the initial weights after sharding. It is for models too large for a copy
            per rank on the host. The weights are the same.
        float8: Matrix products of the blocks in float8 (`tensorwise`, `rowwise`,
            `rowwise_with_gw_hp`, see `anlit.nn.layers.float8`). GPUs need compute capability 8.9. A
            CPU emulates the rounding. Embedding, output layer, norms and optimizer do not change.
            Null for no float8.
    """

    compile: bool | Literal["auto"] = "auto"
    recompute_every: int = 0
    meta_init: bool = False
    float8: Recipe | None = None

    def device(self) -> AbstractContextManager[Any]:
        """The device context in which the network is built."""
        if self.meta_init or _builds_without_values.get():
            return torch.device("meta")
        return nullcontext()

    def compiles_on(self, device_type: str) -> bool:
        """Whether to compile on a device of this type; `auto` does on CUDA with Triton."""
        if self.compile == "auto":
            return device_type == "cuda" and triton.IS_INSTALLED
        return self.compile

    def prepare(self, decoder: Any, device_type: str) -> None:
        """Prepare the device and replace modules, once and before the decoder is sharded."""
        if device_type == "cpu":
            prepare_cpu()
        if self.float8:
            use_float8(decoder.blocks, self.float8, device_type)

    def wrap_blocks(self, decoder: Any, device_type: str, compiles: bool) -> None:
        """Compile the blocks or not, and recompute some of them in the backward pass.

        It may be called again.

        Each block's `forward` is replaced, not the module. So the names in checkpoints do not
        change. The hooks of sharding are neither compiled nor recomputed.
        """
        if compiles:
            _configure_compiler()
        for number, block in enumerate(decoder.blocks):
            vars(block).pop("forward", None)  # the replacement of an earlier call
            recomputes = self.recompute_every > 0 and number % self.recompute_every == 0
            if compiles or recomputes:
                block.forward = WrappedForward(block, compiles, recomputes)
        decoder.compiles_loss = compiles and device_type != "cpu"
        decoder.compiles_norms = compiles and device_type != "cpu"


class WrappedForward:
    """Runs the forward pass of a block, compiled or with its activations recomputed.

    A copy of the block, deep or pickled, gets one that runs the copy. A compiled function alone
    would run the first block, with its weights.
    """

    def __init__(self, block: nn.Module, compiles: bool, recomputes: bool) -> None:
        self.block = block
        self.compiles = compiles
        self.recomputes = recomputes
        self.run = self._wrap()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "run"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.run = self._wrap()

    def _wrap(self) -> Callable[..., Any]:
        run: Callable[..., Any] = MethodType(type(self.block).forward, self.block)
        limit: dict[str, Any] = {}
        if TAKES_RECOMPILE_LIMIT:
            limit = {"recompile_limit": RECOMPILE_LIMIT}
        if self.compiles:
            run = torch.compile(run, dynamic=False, **limit)
        if self.recomputes:
            run = partial(checkpoint, run, use_reentrant=False)
        return run


def _configure_compiler() -> None:
    """Let torch.compile make one graph per block, and one for each kind of block.

    DDP would split each block into several graphs to exchange gradients early. A pattern of layers
    needs a compilation for each kind of layer. Training, validation and the last batch need
    separate compilations. Beyond torch's limit of 8 it would run uncompiled.
    """
    configuration = torch._dynamo.config
    configuration.optimize_ddp = False
    configuration.recompile_limit = max(configuration.recompile_limit, RECOMPILE_LIMIT)


def repays_compiled_blocks(decoder: Any, n_tokens: int, length: int) -> bool:
    """Whether `n_tokens` in sequences of `length` take longer than to compile the blocks."""
    forward = flops_per_token(decoder, length) / FORWARD_AND_BACKWARD
    return n_tokens * forward >= FLOPS_THAT_REPAY


def allow_compiled_kernels(decoder: Any, n_tokens: int, length: int) -> None:
    """Allow kernels that must be compiled if `n_tokens` in sequences of `length` repay it."""
    layers = attention_layers(decoder)
    logits_per_token = 0.0
    for layer in layers:
        mechanism = layer.mechanism
        logits_per_token += mechanism.n_heads * mean_visible_keys(length, mechanism.window)
    for layer in layers:
        layer.allow_compilation(n_tokens * logits_per_token >= LOGITS_THAT_REPAY)


@contextmanager
def uncompiled(decoder: Any) -> Iterator[None]:
    """Run a training decoder inside this context as `wrap_blocks` found it.

    Text of many lengths would need a compilation for each length.
    """
    forwards = {}
    for block in decoder.blocks:
        if "forward" in vars(block):
            forwards[block] = vars(block).pop("forward")
    with ExitStack() as stack:
        for layer in attention_layers(decoder):
            stack.enter_context(layer.uncompiled())
        try:
            yield
        finally:
            for block, forward in forwards.items():
                block.forward = forward


def flush_denormals() -> None:
    """Treat denormal numbers as 0 in this thread and in threads that it starts later.

    A product with a denormal (below 1.2e-38) takes many times as long. Denormals arise from
    vanishing exponentials, such as ALiBi's far weights. They also arise in Adam's averages for rare
    tokens.
    """
    # numpy before 2.4 would warn if it computed these after the change. It remembers them.
    np.finfo(np.float32)
    np.finfo(np.float64)
    torch.set_flush_denormal(True)


def prepare_cpu() -> None:
    """Keep freed memory for the next step (glibc), and flush denormals.

    By default every step returns the memory of its activations to the system. It gets the memory
    back page by page, zeroed.
    """
    with suppress(OSError, AttributeError):  # other C libraries do not have it
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(M_TRIM_THRESHOLD, LARGEST_INT)
        mallopt(M_MMAP_THRESHOLD, LARGEST_HEAP_BLOCK)
    flush_denormals()
    # ATEN_CPU_CAPABILITY hides AVX-512 from torch and not from oneDNN. torch then calls oneDNN's
    # packing for AMX, and attention's backward pass in bfloat16 fails. oneDNN reads its variable at
    # its first call.
    if os.environ.get("ATEN_CPU_CAPABILITY") in ("default", "avx2"):
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")


@contextmanager
def enough_memory(rows: int, length: int, device: torch.device, advice: str) -> Iterator[None]:
    """Raise UserError with `advice` if the code inside has too little memory for its tokens."""
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            message = (
                f"{rows:,} × {length:,} tokens do not fit into the memory of {device}: {advice}"
            )
            raise UserError(message) from error
        raise
