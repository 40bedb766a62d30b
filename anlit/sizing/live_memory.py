"""Counts the bytes of live tensors by purpose while code runs, also of fake tensors, which have no memory."""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

Role = Literal["parameters", "gradients", "optimizer", "weight copies", "blocks", "rest"]
"""Weight copies: tensors that are made from parameters alone, such as bf16 casts and W times a scale. Blocks: tensors
that a block saves for its backward pass. Rest: hidden states and logits outside blocks, and temporary tensors."""

Bytes = Counter[Role]


class LiveMemory(TorchDispatchMode):
    """While active, tracks the bytes of every live storage that an operator made.

    Args:
        weights: The weight of a byte by role, 1 by default; 1/n for sharding over n ranks.

    Attributes:
        bytes: Live bytes by role, weighted.
        peaks: The live bytes by role when their sum was largest, for each phase.
        phase: The name of the current phase.
        default: The role of new tensors that are not made from weights alone.
    """

    def __init__(self, weights: Mapping[Role, float]) -> None:
        super().__init__()
        self.weights = weights
        self.bytes = Bytes()
        self.peaks: dict[str, Bytes] = {}
        self.phase = ""
        self.default: Role = "rest"
        self._live: dict[int, tuple[int, Role]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
        made_of_weights = (
            bool(inputs)
            and self.default == "rest"
            and all(self.role(x) in ("parameters", "weight copies") for x in inputs)
        )
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor) and id(tensor.untyped_storage()) not in self._live:
                self.assign([tensor], "weight copies" if made_of_weights else self.default)
        return result

    def role(self, tensor: Tensor) -> Role | None:
        """The role of the tensor's storage; None if it was made earlier."""
        known = self._live.get(id(tensor.untyped_storage()))
        return known[1] if known else None

    def assign(self, tensors: Iterable[Tensor], role: Role) -> None:
        """Set the role of the tensors' storages, whether they were counted before or not."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key, size = id(storage), storage.nbytes()
            if key in self._live:
                self._forget(key)
            else:
                weakref.finalize(storage, self._forget, key)
            self._live[key] = size, role
            self.bytes[role] += self._weighted(size, role)
        if self.phase not in self.peaks or self.bytes.total() > self.peaks[self.phase].total():
            self.peaks[self.phase] = self.bytes.copy()

    @contextmanager
    def keeping(self, role: Role) -> Iterator[None]:
        """Give `role` to tensors that are made inside, have the role `rest` and are live at the end."""
        before = set(self._live)
        yield
        for key, (size, former) in self._live.items():
            if key not in before and former == "rest":
                self._live[key] = size, role
                self.bytes[former] -= self._weighted(size, former)
                self.bytes[role] += self._weighted(size, role)

    def _weighted(self, size: int, role: Role) -> int:
        return round(size * self.weights.get(role, 1))

    def _forget(self, key: int) -> None:
        size, role = self._live.pop(key)
        self.bytes[role] -= self._weighted(size, role)


def fake_parameters(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Under FakeTensorMode, replace a model's parameters and buffers by fake tensors on the CPU.

    Args:
        model: A model on the meta device.
        dtype: The dtype of floating-point tensors.
    """
    new: dict[int, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, old in tensors.items():
                if old is not None:
                    if id(old) not in new:
                        wanted = dtype if old.is_floating_point() else old.dtype
                        fresh = torch.empty(old.shape, dtype=wanted)
                        new[id(old)] = torch.nn.Parameter(fresh) if isinstance(old, torch.nn.Parameter) else fresh
                    tensors[name] = new[id(old)]  # type: ignore[assignment]
