"""Counts the bytes that tensors hold while code runs, by what they are for; also of fake tensors, which hold none."""

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
"""Weight copies: what is made from parameters alone, such as their bf16 casts and W times a scale. Blocks: what a
block leaves for its backward pass. Rest: hidden states and logits outside blocks, and what lives for a moment."""

Bytes = Counter[Role]


class LiveMemory(TorchDispatchMode):
    """While active, knows the bytes of every storage that an operator made and something still holds.

    Args:
        weights: What a byte of a role counts; 1 where not named. Sharding over n ranks is 1/n.

    Attributes:
        bytes: Live bytes by role, weighted.
        peaks: The same at the moment of their largest sum, for each phase that was set.
        phase: A name for what runs now.
        default: The role of what is made now, if from more than weights.
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
        """What the tensor's storage is for; None if it is older than this."""
        known = self._live.get(id(tensor.untyped_storage()))
        return known[1] if known else None

    def assign(self, tensors: Iterable[Tensor], role: Role) -> None:
        """Give the tensors' storages this role, whether they were counted before or not."""
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
        """What is made inside, has no role of its own and is still there at the end gets `role`."""
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
    """Under FakeTensorMode: put fake tensors on the CPU in place of a model's parameters and buffers.

    Args:
        model: Built on the meta device.
        dtype: Of the floating-point ones.
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
