"""Coefficients of a mechanism, constant or learned: for the model, per layer or per head."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch
from torch import Tensor, nn

Learned = Literal["never", "globally", "per_layer", "per_head"]
"""Whether a coefficient is constant, or learned for all layers, per layer, or per layer and
head."""


class Coefficient(nn.Module):
    """A constant or learned factor of a mechanism.

    If it is learned, it is a parameter of shape (1,) or (H,) that starts at `initial`. Parameters
    of 0 dimensions cannot be sharded. Like all parameters that are not matrices it has no weight
    decay.
    """

    def __init__(self, initial: float, learned: Learned = "never", n_heads: int = 1) -> None:
        super().__init__()
        if learned not in get_args(Learned):
            raise ValueError(
                f"learned={learned!r} is unknown: choose {', '.join(get_args(Learned))}"
            )
        self.initial = initial
        self.learned = learned
        size = n_heads if learned == "per_head" else 1
        self.value = None
        if learned != "never":
            self.value = nn.Parameter(torch.full((size,), float(initial)))
        self._replacement: Tensor | None = None

    def reset_parameters(self) -> None:
        if self.value is not None:
            nn.init.constant_(self.value, self.initial)

    def for_layer(self, n_heads: int) -> nn.Module:
        """The coefficient of one layer: a new one, or a reference if all layers share it."""
        if self.learned == "globally":
            return Reference(self)
        return Coefficient(self.initial, self.learned, n_heads)

    def forward(self) -> Tensor | float:
        """The constant, or the parameter as (H or 1, 1).

        It broadcasts with counts (B, 1, T) and distances (T,).
        """
        value = self.value if self._replacement is None else self._replacement
        return self.initial if value is None else value[:, None]

    @contextmanager
    def replaced_by(self, value: Tensor) -> Iterator[None]:
        """Let the coefficient be `value`, (H or 1,), inside this context, for derivatives by it."""
        self._replacement = value
        try:
            yield
        finally:
            self._replacement = None


class Reference(nn.Module):
    """A layer's reference to a coefficient that all layers share.

    The decoder owns the coefficient (`shared_coefficients`): checkpoint, optimizer and outermost
    shard have it once.
    """

    def __init__(self, coefficient: Coefficient) -> None:
        super().__init__()
        self._hidden = (coefficient,)  # a module in a tuple is not registered as a submodule

    @property
    def coefficient(self) -> Coefficient:
        return self._hidden[0]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Reference":
        """Move the coefficient too, so that a mechanism goes to a device or a dtype as a whole."""
        self.coefficient._apply(fn, recurse)
        return super()._apply(fn, recurse)  # type: ignore[return-value]

    def forward(self) -> Tensor | float:
        return self.coefficient()


def shared_coefficients(model: nn.Module) -> list[Coefficient]:
    """The coefficients that layers of `model` share, each once, in order of first appearance."""
    coefficients: list[Coefficient] = []
    for module in model.modules():
        if isinstance(module, Reference) and module.coefficient not in coefficients:
            coefficients.append(module.coefficient)
    return coefficients


def learned_coefficients(model: nn.Module) -> list[Coefficient]:
    """The learned coefficients in `model` and behind its references, each once."""
    coefficients: list[Coefficient] = []
    for module in (*model.modules(), *shared_coefficients(model)):
        if not isinstance(module, Coefficient) or module in coefficients:
            continue
        if module.value is not None:
            coefficients.append(module)
    return coefficients
