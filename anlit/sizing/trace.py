"""Traces a training step of the real model on fake tensors, and counts the live bytes by purpose.

The decoder is the one that trains. Only its attention kernels are replaced, because fused kernels need a GPU, by an
operator that saves the same tensors for the backward pass: q, k, v, the output, and one number per query. So the count
follows the code for all settings, without formulas.
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

Role = Literal["parameters", "gradients", "optimizer", "weight copies", "blocks", "rest"]
"""Weight copies: tensors that are made from parameters alone, such as bf16 casts and W times a scale. Blocks: tensors
that a block saves for its backward pass. Rest: hidden states and logits outside blocks, and temporary tensors."""


class LiveMemory(TorchDispatchMode):
    """While active, tracks the live storages that operators made: their `bytes` by role, and `peak`, these when their
    sum was largest. `default` is the role of new tensors that are not made from weights alone. `weights` are those of a
    byte by role, 1 by default; 1/n for sharding over n ranks."""

    def __init__(self, weights: Mapping[Role, float]) -> None:
        super().__init__()
        self.weights = weights
        self.bytes: Counter[Role] = Counter()
        self.peak: Counter[Role] = Counter()
        self.default: Role = "rest"
        self._live: dict[int, tuple[int, Role]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {self._role(x) for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)}
        made_of_weights = (
            self.default == "rest" and inputs and inputs <= {"parameters", "weight copies"}
        )
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor) and self._role(tensor) is None:
                self.assign([tensor], "weight copies" if made_of_weights else self.default)
        return result

    def _role(self, tensor: Tensor) -> Role | None:
        """The role of the tensor's storage; None if it was made earlier."""
        return self._live.get(id(tensor.untyped_storage()), (0, None))[1]

    def assign(self, tensors: Iterable[Tensor], role: Role) -> None:
        """Set the role of the tensors' storages, whether they were counted before or not."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = id(storage)
            if key in self._live:
                self._forget(key)
            else:
                weakref.finalize(storage, self._forget, key)
            self._live[key] = round(storage.nbytes() * self.weights.get(role, 1)), role
            self.bytes[role] += self._live[key][0]
        if self.bytes.total() > self.peak.total():
            self.peak = self.bytes.copy()

    def _forget(self, key: int) -> None:
        size, role = self._live.pop(key)
        self.bytes[role] -= size

    def keeping(self, role: Role, call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`call`, with `role` for tensors that it makes, that have the role `rest` and are live at its end."""

        def watched(*arguments: Any) -> Tensor:
            before = set(self._live)
            result = call(*arguments)
            for key, (size, former) in self._live.items():
                if key not in before and former == "rest":
                    self._live[key] = size, role
                    self.bytes[former] -= size
                    self.bytes[role] += size
            return result

        return watched


def step_memory(model: LanguageModel, plan: Plan) -> Counter[Role]:
    """Bytes by role at the peak of a training step on one GPU, gathered parameters left out.

    The step is Lightning's: forward (with gradients of earlier micro-batches if it accumulates), backward, clipping,
    optimizer. A copy of the model, which is on the meta device, is traced.
    """
    weight = plan.kept_bytes / plan.gathered_bytes / (plan.gpus if plan.is_sharded else 1)
    memory = LiveMemory({"parameters": weight, "gradients": weight, "optimizer": weight})
    model = copy.deepcopy(model)
    decoder = model.model.to(
        {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[plan.gathered_bytes]
    )

    def record_gradient(parameter: Tensor) -> None:
        memory.assign([parameter.grad], "gradients")  # type: ignore[list-item]

    def optimize() -> None:
        memory.default = "optimizer"
        optimizer.step()
        memory.default = "rest"

    # Tables of positions from earlier use are not fake, and the loss takes the chunks of a GPU.
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        mock.patch.dict(CHUNK_NUMBERS, clear=True),
        memory,
    ):
        decoder.to_empty(device="cpu")
        decoder._tie()
        parameters = list(decoder.parameters())
        memory.assign(parameters, "parameters")
        _stand_in_for_kernels(decoder, plan)
        for number, block in enumerate(decoder.blocks):
            recompute = plan.checkpoint_every is not None and number % plan.checkpoint_every == 0
            run = (
                partial(checkpoint, block.forward, use_reentrant=False)
                if recompute
                else block.forward
            )
            block.forward = memory.keeping("blocks", run)
        optimizer = model.make_optimizer(parameter_groups(decoder))
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(record_gradient)
            parameter.grad = torch.empty_like(parameter)
            record_gradient(parameter)
        optimize()  # creates the optimizer's state
        tokens = torch.empty(plan.batch_size, plan.length, dtype=torch.int64)
        targets, ids = tokens.clone(), tokens.clone()
        if plan.accumulate == 1:
            optimizer.zero_grad()
        memory.peak.clear()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=plan.precision == "bf16-mixed"):
            loss = decoder(tokens, ids, targets=targets, z_loss=model.z_loss)[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimize()
    return memory.peak


class _FusedAttention(torch.autograd.Function):
    """Uses the memory of a fused kernel, but computes nothing: q (B, H, T, D), k and v (B, G or H, T, D)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        B, H, T, D = q.shape
        out = v.new_empty(B, T, H, D).transpose(1, 2)  # the layout in which kernels write
        ctx.save_for_backward(q, k, v, out, q.new_empty(B, H, T, dtype=torch.float32), mask)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return *map(torch.empty_like, ctx.saved_tensors[:3]), None


def _stand_in_for_kernels(decoder: Any, plan: Plan) -> None:
    """Replace every kernel except the eager one, which is plain operators, by one with a fused kernel's memory.

    In float64 no kernel is fused, and sdpa too keeps all weights.
    """
    for layer in attention_layers(decoder):
        attention: Any = layer
        if plan.precision == "64-true":
            attention.kernel = "eager"
        name = attention.kernel
        if name == "auto":  # a(t) is traced by the CPU's own kernel, whatever the precision
            is_packed = decoder.document_masking
            mechanism, dropout = attention.mechanism, attention.dropout
            name = kernels.default_kernel(mechanism, "cuda", is_packed, dropout=dropout)
            attention.kernel = kernels.default_kernel(mechanism, "cpu", is_packed, dropout=dropout)
        if name != "eager":
            rows = plan.batch_size if decoder.document_masking else 1
            attention.attend = partial(_fused, attention.mechanism, rows, name == "sdpa")
            attention.prepare = lambda documents, h: None


def _fused(
    mechanism: Mechanism,
    rows: int,
    is_sdpa: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents,
) -> Tensor:
    """For sdpa, m, a window and documents are a mask (B, H or 1, 512, T), which every layer makes for each block."""
    length, (_, m) = q.shape[-2], distance_tables(mechanism, q.shape[-2], q)
    q = with_gain(q, mechanism, documents)
    if torch.is_autocast_enabled("cpu"):
        q, k, v = (x.to(torch.get_autocast_dtype("cpu")) for x in (q, k, v))
    is_masked = is_sdpa and (documents.are_masked or m is not None or mechanism.window is not None)
    if is_sdpa and (is_masked or q.element_size() > 2):  # see `sdpa.reads_groups`
        k, v = repeat_kv(k, q.shape[1]), repeat_kv(v, q.shape[1])
    if not is_masked:
        return _FusedAttention.apply(q, k, v, None)
    n_heads = m.shape[0] if m is not None and m.dim() == 2 else 1

    def block(first: int, q: Tensor) -> Tensor:
        return _FusedAttention.apply(q, k, v, q.new_empty(rows, n_heads, q.shape[-2], length))

    return by_blocks(block, q)
