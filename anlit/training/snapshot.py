"""A copy of weights and optimizer state in host memory."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Snapshot:
    """Weights, persistent buffers and optimizer states after an optimizer step.

    Each rank keeps a copy, or a copy of its part if they are sharded; nothing is sent. Parameter groups (learning
    rates) are not in it, because the schedule continues.

    Attributes:
        step: Number of optimizer steps after which it was taken.
        sharded: Whether each rank has only a part.
    """

    def __init__(self) -> None:
        self.step, self.sharded = 0, False
        self.weights: dict[str, Tensor] = {}
        self.states: dict[int, dict[str, Any]] = {}

    @torch.no_grad()
    def take(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Copy the state of `model` and `optimizer`, into the memory of an earlier copy if there is one."""
        self.step, self.sharded = step, is_sharded(model)
        self.weights = {name: _copied(tensor, self.weights.get(name)) for name, tensor in model.state_dict().items()}
        self.states = {
            number: _copied_state(state, self.states.get(number, {})) for number, state in _states(optimizer)
        }

    @torch.no_grad()
    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Write the copy back to `model` and `optimizer`, in place."""
        for name, tensor in model.state_dict().items():
            _local(tensor).copy_(self.weights[name])
        for number, parameter in enumerate(_parameters(optimizer)):
            if number not in self.states:  # taken before the first step, when there was no state
                optimizer.state.pop(parameter, None)
                continue
            state = optimizer.state[parameter]
            for key, value in self.states[number].items():
                if isinstance(value, Tensor):
                    _local(state[key]).copy_(value)
                else:
                    state[key] = value

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "weights": self.weights, "states": self.states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step, self.weights, self.states = state_dict["step"], state_dict["weights"], state_dict["states"]


def is_sharded(model: nn.Module) -> bool:
    """Whether this rank has only a part of the weights."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


@torch.no_grad()
def n_non_finite(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    """How many of this rank's weights and optimizer states have a NaN or infinite entry: a 0-d tensor."""
    tensors = list(model.state_dict().values())
    tensors += [value for _, state in _states(optimizer) for value in state.values() if isinstance(value, Tensor)]
    weights = [_local(tensor) for tensor in tensors if tensor.is_floating_point()]
    device = weights[0].device  # unless fused, AdamW counts steps on the host
    return torch.stack([(~torch.isfinite(tensor).all()).to(device) for tensor in weights]).sum()


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _states(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, dict[str, Any]]]:
    """The running number and state of each parameter that has a state."""
    for number, parameter in enumerate(_parameters(optimizer)):
        if parameter in optimizer.state:
            yield number, optimizer.state[parameter]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _copied(tensor: Tensor, into: Tensor | None) -> Tensor:
    local = _local(tensor).detach()
    return local.to("cpu", copy=True) if into is None else into.copy_(local)


def _copied_state(state: dict[str, Any], into: dict[str, Any]) -> dict[str, Any]:
    return {key: _copied(value, into.get(key)) if isinstance(value, Tensor) else value for key, value in state.items()}
