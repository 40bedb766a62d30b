"""Traces a training step of the real model on fake tensors, and counts the live bytes by role.

The decoder is the one that trains. Only its attention kernels are replaced, because fused kernels
need a GPU. The replacement saves the same tensors for the backward pass: q, k, v and the output. It
also saves a number per query. So the count follows the code for all settings, without formulas.
"""

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import checkpoint

from anlit.nn import kernels
from anlit.nn.attention.attention import attention_layers
from anlit.nn.kernels.documents import Documents
from anlit.nn.kernels.eager import by_blocks
from anlit.nn.kernels.formula import distance_tables, with_gain
from anlit.nn.kernels.grouped_heads import repeat_kv
from anlit.nn.layers.cross_entropy import CHUNK_NUMBERS
from anlit.nn.mechanisms.mechanism import Mechanism
from anlit.sizing.plan import Plan
from anlit.training.language_model import LanguageModel
from anlit.training.optim.optimizers import parameter_groups

Role = Literal["parameters", "gradients", "optimizer", "weight copies", "blocks", "workspace"]
"""The role of a tensor in a step.

- weight copies: made from parameters alone, such as bf16 casts and W times a scale.
- blocks: saved by a block for its backward pass.
- workspace: hidden states and logits outside blocks, and temporary tensors.
"""
DTYPE_BY_BYTES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
"""dtypes by bytes of a number."""


class LiveMemory(TorchDispatchMode):
    """While active, tracks the live storages that operators make.

    Args:
        shares: The share of a storage that counts, by role. By default 1. It is 1/n for sharding
            over n ranks.

    Attributes:
        bytes: Live bytes by role.
        peak: `bytes` when their sum was largest.
        default: The role of new tensors that are not made from weights alone.
    """

    def __init__(self, shares: Mapping[Role, float]) -> None:
        super().__init__()
        self.shares = shares
        self.bytes: Counter[Role] = Counter()
        self.peak: Counter[Role] = Counter()
        self.default: Role = "workspace"
        self._live: dict[int, tuple[int, Role]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        input_roles = {self._role(x) for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)}
        is_weight_copy = (
            self.default == "workspace"
            and len(input_roles) > 0
            and input_roles <= {"parameters", "weight copies"}
        )
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor) and self._role(tensor) is None:
                self.assign([tensor], "weight copies" if is_weight_copy else self.default)
        return result

    def _role(self, tensor: Tensor) -> Role | None:
        """Return the role of the tensor's storage, None if it is not counted."""
        _, role = self._live.get(id(tensor.untyped_storage()), (0, None))
        return role

    def assign(self, tensors: Iterable[Tensor], role: Role) -> None:
        """Set the role of the tensors' storages, counted or not."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = id(storage)
            if key in self._live:
                self._forget(key)
            else:
                weakref.finalize(storage, self._forget, key)
            size = round(storage.nbytes() * self.shares.get(role, 1))
            self._live[key] = size, role
            self.bytes[role] += size
        if self.bytes.total() > self.peak.total():
            self.peak = self.bytes.copy()

    def _forget(self, key: int) -> None:
        size, role = self._live.pop(key)
        self.bytes[role] -= size

    def with_role(self, role: Role, call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return `call` such that the workspace which outlives it gets this role."""

        def tracked(*arguments: Any) -> Tensor:
            earlier = set(self._live)
            result = call(*arguments)
            for key, (size, former_role) in self._live.items():
                if key not in earlier and former_role == "workspace":
                    self._live[key] = size, role
                    self.bytes[former_role] -= size
                    self.bytes[role] += size
            return result

        return tracked


def step_memory(model: LanguageModel, plan: Plan) -> Counter[Role]:
    """Return bytes by role at the peak of a training step on one GPU, without gathered parameters.

    The step is Lightning's: forward (with gradients of earlier micro-batches if it accumulates),
    backward, clipping, optimizer. It runs on a copy of the model, which is on the meta device.
    """
    share = plan.stored_bytes / plan.gathered_bytes / plan.n_shards
    memory = LiveMemory({"parameters": share, "gradients": share, "optimizer": share})
    model = copy.deepcopy(model)
    decoder = model.model.to(DTYPE_BY_BYTES[plan.gathered_bytes])
    with (
        FakeTensorMode(allow_non_fake_inputs=True),  # tables of positions from earlier use are real
        mock.patch.dict(CHUNK_NUMBERS, clear=True),  # the loss takes the chunks of a GPU
        memory,
    ):
        _prepare_decoder(decoder, memory, plan)
        parameters = list(decoder.parameters())
        optimizer = model.make_optimizer(parameter_groups(decoder))
        _make_gradients(parameters, memory)
        _take_optimizer_step(optimizer, memory)  # makes the optimizer's state
        tokens = torch.empty(plan.batch_size, plan.length, dtype=torch.int64)
        targets = tokens.clone()
        ids = tokens.clone()
        if plan.accumulate == 1:
            optimizer.zero_grad()
        memory.peak.clear()
        is_mixed = plan.precision == "bf16-mixed"
        # Lightning has no cache of casts, which would keep those of recomputed blocks.
        with torch.autocast("cpu", torch.bfloat16, is_mixed, cache_enabled=False):
            loss = decoder(tokens, ids, targets=targets, z_loss=model.z_loss)[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        _take_optimizer_step(optimizer, memory)
    return memory.peak


def _prepare_decoder(decoder: Any, memory: LiveMemory, plan: Plan) -> None:
    """Make the weights, and let each block report the tensors that it saves."""
    decoder.to_empty(device="cpu")
    decoder.tie_head()
    memory.assign(decoder.parameters(), "parameters")
    _replace_kernels(decoder, plan)
    for number, block in enumerate(decoder.blocks):
        forward = block.forward
        if plan.recomputes(number):
            forward = partial(checkpoint, forward, use_reentrant=False)
        block.forward = memory.with_role("blocks", forward)


def _make_gradients(parameters: Iterable[Tensor], memory: LiveMemory) -> None:
    """Make all gradients, and record each again when the backward pass makes it."""

    def record_gradient(parameter: Tensor) -> None:
        memory.assign([parameter.grad], "gradients")  # type: ignore[list-item]

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(record_gradient)
        parameter.grad = torch.empty_like(parameter)
        record_gradient(parameter)


def _take_optimizer_step(optimizer: torch.optim.Optimizer, memory: LiveMemory) -> None:
    memory.default = "optimizer"
    optimizer.step()
    memory.default = "workspace"


class _FusedAttention(torch.autograd.Function):
    """Takes the memory of a fused kernel, and computes nothing.

    The shapes are q (B, H, T, D), k and v (B, G or H, T, D).
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        B, H, T, D = q.shape
        out = v.new_empty(B, T, H, D).transpose(1, 2)  # the layout in which kernels write
        log_sums = q.new_empty(B, H, T, dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, log_sums, mask)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *_ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None


def _replace_kernels(decoder: Any, plan: Plan) -> None:
    """Give every kernel except the eager one the memory of a fused kernel.

    The eager kernel is plain operators. In float64 no kernel is fused, and sdpa saves all weights
    too.
    """
    is_packed = decoder.document_masking
    for layer in attention_layers(decoder):
        attention: Any = layer
        if plan.precision == "64-true":
            attention.kernel = "eager"
        name = attention.kernel
        if name == "auto":
            mechanism = attention.mechanism
            dropout = attention.dropout
            name = kernels.default_kernel(mechanism, "cuda", is_packed, dropout=dropout)
            # The CPU's own kernel traces a(t), whatever the precision.
            attention.kernel = kernels.default_kernel(mechanism, "cpu", is_packed, dropout=dropout)
        if name != "eager":
            rows = plan.batch_size if is_packed else 1
            attention.attend = partial(_attend_fused, attention.mechanism, rows, name == "sdpa")
            attention.prepare = lambda documents, h: None


def _attend_fused(
    mechanism: Mechanism,
    rows: int,
    is_sdpa: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents,
) -> Tensor:
    """Take the memory of a fused kernel, or of sdpa with a mask.

    For sdpa m, a window and documents are a mask (B, H or 1, 512, T). Every layer makes it for each
    block of queries.
    """
    length = q.shape[-2]
    _, m = distance_tables(mechanism, length, q)
    q = with_gain(q, mechanism, documents)
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        q = q.to(dtype)
        k = k.to(dtype)
        v = v.to(dtype)
    has_mask = documents.are_masked or m is not None or mechanism.window is not None
    is_masked = is_sdpa and has_mask
    if is_sdpa and (is_masked or q.element_size() > 2):  # see `sdpa.reads_groups`
        k = repeat_kv(k, q.shape[1])
        v = repeat_kv(v, q.shape[1])
    if not is_masked:
        return _FusedAttention.apply(q, k, v, None)
    n_masks = 1
    if m is not None and m.dim() == 2:
        n_masks = m.shape[0]  # a mask for each head

    def attend_block(first: int, q: Tensor) -> Tensor:
        mask = q.new_empty(rows, n_masks, q.shape[-2], length)
        return _FusedAttention.apply(q, k, v, mask)

    return by_blocks(attend_block, q)
