"""Traces a training step of the real model on fake tensors, to find its peak memory by purpose.

The decoder is the one that trains. Only its attention kernels are replaced, because fused kernels need a GPU, by an
operator that saves the same tensors for the backward pass: q, k, v, the output, and one number per query. So the count
follows the code for all settings, without formulas.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from anlit.attention import backends
from anlit.attention.attention import attention_layers
from anlit.attention.backends.eager import QUERIES_PER_BLOCK
from anlit.attention.documents import Documents
from anlit.attention.groups import repeat_kv
from anlit.attention.mechanism import Mechanism
from anlit.layers.cross_entropy import CHUNK_NUMBERS
from anlit.models.language_model import LanguageModel
from anlit.optim.optimizers import parameter_groups
from anlit.sizing.live_memory import Bytes, LiveMemory, fake_parameters


@dataclass(frozen=True)
class Setting:
    """How a step is computed.

    Args:
        batch_size: B, sequences in a micro-batch.
        length: T.
        autocast: Whether products run in bfloat16.
        parameters: The dtype of the parameters that a block computes with.
        checkpoint_every: Recompute every n-th block in the backward pass; None for none.
        accumulates: Whether there are gradients of earlier micro-batches.
        shards: Number of ranks that share parameters, gradients and optimizer state.
        keeps_float32: Whether parameters of another dtype are gathered copies of float32 parameters.
    """

    batch_size: int
    length: int
    autocast: bool = False
    parameters: torch.dtype = torch.float32
    checkpoint_every: int | None = None
    accumulates: bool = False
    shards: int = 1
    keeps_float32: bool = False


@lru_cache(maxsize=64)
def step_memory(model: LanguageModel, setting: Setting) -> Bytes:
    """Bytes by role at the peak of a training step on one GPU.

    If all layers are alike, two shallow models are traced and the result is extrapolated linearly to the model's depth,
    phase by phase: within a phase the peak is at the same point at every depth.

    Args:
        model: A model on the meta device; a copy of it is traced.
    """
    depth, period = len(model.model.blocks), max(2, setting.checkpoint_every or 1)
    kinds = {(type(a.mechanism), a.mechanism.window, a.backend) for a in attention_layers(model)}
    if len(kinds) > 1 or depth <= 2 * period:
        return max(trace_step(model, depth, setting).values(), key=Bytes.total)
    shallow, deep = (trace_step(model, n, setting) for n in (period, 2 * period))
    steps = depth / period - 1
    extended = (
        Bytes({role: low[role] + round(steps * (high[role] - low[role])) for role in low | high})
        for low, high in ((shallow[phase], deep[phase]) for phase in shallow)
    )
    return max(extended, key=Bytes.total)


def trace_step(model: LanguageModel, n_blocks: int, setting: Setting) -> dict[str, Bytes]:
    """The peak of each phase of a step of the model's first `n_blocks` blocks, in Lightning's order: forward (with
    gradients of earlier micro-batches if it accumulates), backward, clipping, optimizer."""
    # If sharding gathers bfloat16 copies of float32 parameters, the traced parameters are half as large.
    weight = (4 / setting.parameters.itemsize if setting.keeps_float32 else 1) / setting.shards
    memory = LiveMemory({"parameters": weight, "gradients": weight, "optimizer": weight})
    model = copy.deepcopy(model)
    decoder = model.model
    decoder.blocks = decoder.blocks[:n_blocks]
    # Tables of positions from earlier use are not fake.
    with FakeTensorMode(allow_non_fake_inputs=True), chunks_of_a_gpu(), memory:
        fake_parameters(decoder, setting.parameters)
        parameters = list(decoder.parameters())
        memory.assign(parameters, "parameters")
        stand_in_for_kernels(decoder, setting.batch_size)
        watch_blocks(decoder, memory, setting.checkpoint_every)
        optimizer = model.make_optimizer(parameter_groups(decoder))
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(partial(_record_gradient, memory))
            parameter.grad = torch.empty_like(parameter)
            _record_gradient(memory, parameter)
        _optimize(optimizer, memory)  # creates the optimizer's state
        tokens = torch.empty(setting.batch_size, setting.length, dtype=torch.int64)
        targets, ids = tokens.clone(), tokens.clone()
        if not setting.accumulates:
            optimizer.zero_grad()
        memory.phase = "forward"
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=setting.autocast):
            loss = decoder(tokens, ids, targets=targets, z_loss=model.z_loss)[1]
        memory.phase = "backward of the upper half"
        middle = next(decoder.blocks[n_blocks // 2].parameters())
        middle.register_post_accumulate_grad_hook(lambda _: setattr(memory, "phase", "backward of the lower half"))
        loss.backward()
        memory.phase = "optimizer"
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        _optimize(optimizer, memory)
    del memory.peaks[""]
    return memory.peaks


@contextmanager
def chunks_of_a_gpu() -> Iterator[None]:
    """Make the loss use the chunk size of a GPU, although the traced tensors are on the CPU."""
    cpu_size = CHUNK_NUMBERS.pop("cpu")
    try:
        yield
    finally:
        CHUNK_NUMBERS["cpu"] = cpu_size


def _optimize(optimizer: torch.optim.Optimizer, memory: LiveMemory) -> None:
    memory.default = "optimizer"
    optimizer.step()
    memory.default = "rest"


def _record_gradient(memory: LiveMemory, parameter: Tensor) -> None:
    assert parameter.grad is not None
    memory.assign([parameter.grad], "gradients")


def watch_blocks(decoder: nn.Module, memory: LiveMemory, checkpoint_every: int | None) -> None:
    """Wrap every block's forward: tensors that stay live after it have the role `blocks`."""

    def watched(forward: Callable[..., Tensor], recompute: bool, *arguments: Any) -> Tensor:
        with memory.keeping("blocks"):
            return checkpoint(forward, *arguments, use_reentrant=False) if recompute else forward(*arguments)

    blocks: Any = decoder.blocks
    for number, block in enumerate(blocks):
        recompute = checkpoint_every is not None and number % checkpoint_every == 0
        block.forward = partial(watched, block.forward, recompute)


class _FusedAttention(torch.autograd.Function):
    """Uses the memory of a fused kernel, but computes nothing.

    q and the output are (B, H, T, D), k and v (B, G or H, T, D), and there are B·H·T numbers in float32. The mask has
    the shape `mask_shape`, if any. It is kept if it is for all queries, else it is made again for each block of them.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask_shape: tuple[int, ...] | None) -> Tensor:
        B, H, T, D = q.shape
        mask = None if mask_shape is None else q.new_empty(mask_shape)
        out = v.new_empty(B, T, H, D).transpose(1, 2)  # the layout in which kernels write
        kept = mask if mask is not None and mask.shape[-2] == T else None
        ctx.save_for_backward(q, k, v, out, q.new_empty(B, H, T, dtype=torch.float32), kept)
        ctx.again = mask_shape if kept is None else None
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, *_ = ctx.saved_tensors
        _mask = None if ctx.again is None else q.new_empty(ctx.again)
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None


def stand_in_for_kernels(decoder: Any, batch_size: int) -> None:
    """Replace every kernel except the eager one, which is plain operators, by one with a fused kernel's memory."""
    for layer in attention_layers(decoder):
        attention: Any = layer
        name = attention.backend
        if name == "auto":
            name = backends.default_backend(attention.mechanism, "cuda", dropout=attention.dropout)
        if name != "eager":
            rows = batch_size if decoder.document_masking else 1
            attention.attend = partial(_fused, attention.mechanism, rows, name == "sdpa")
            attention.prepare = _prepare_nothing


def _prepare_nothing(documents: Documents, h: Tensor) -> None:
    pass


def _fused(
    mechanism: Mechanism, rows: int, is_sdpa: bool, q: Tensor, k: Tensor, v: Tensor, documents: Documents
) -> Tensor:
    """For sdpa, m, a window and documents are a mask (B, H or 1, 512, T), which every layer makes for each block."""
    length = q.shape[-2]
    gain = mechanism.gain(documents.n_visible(torch.float32, mechanism.window)[:, None])
    q = q if gain is None else q * gain[..., None].to(q.dtype)
    if torch.is_autocast_enabled("cpu"):
        q, k, v = (x.to(torch.get_autocast_dtype("cpu")) for x in (q, k, v))
    mask_shape = None
    bias = mechanism.distance_bias(torch.arange(length, dtype=torch.float32))
    masked = documents.are_masked or bias is not None or mechanism.window is not None
    if is_sdpa and masked:
        heads = bias.shape[0] if bias is not None and bias.dim() == 2 else 1
        mask_shape = (rows, heads, min(length, QUERIES_PER_BLOCK), length)
    if is_sdpa and (masked or q.element_size() > 2):  # see `sdpa.reads_groups`
        k, v = repeat_kv(k, q.shape[1]), repeat_kv(v, q.shape[1])
    return _FusedAttention.apply(q, k, v, mask_shape)  # type: ignore[no-any-return,no-untyped-call]
