"""The numbers of an attention mechanism that may be learned: for the model, for each layer or for each head."""

from typing import Literal, get_args

import torch
from torch import Tensor, nn

Learned = Literal["never", "globally", "per_layer", "per_head"]
"""Whether a coefficient stays as given, or is learned: one for all layers, one per layer, one per layer and head."""


class Coefficient(nn.Module):
    """A number that a mechanism multiplies with.

    A learned one is a parameter of shape (1,) or (H,), for sharding takes no 0-d parameters; like every parameter
    that is no matrix it is in the group without weight decay.

    Args:
        initial: Its value, or the value from which it is learned.
        learned: By how many parameters.
        n_heads: H, where it is learned per head.
    """

    def __init__(self, initial: float, learned: Learned = "never", n_heads: int = 1) -> None:
        super().__init__()
        if learned not in get_args(Learned):
            raise ValueError(f"learned={learned!r} is unknown: choose {', '.join(get_args(Learned))}")
        self.initial, self.learned = initial, learned
        size = n_heads if learned == "per_head" else 1
        self.value = None if learned == "never" else nn.Parameter(torch.full((size,), float(initial)))

    def reset_parameters(self) -> None:
        if self.value is not None:
            nn.init.constant_(self.value, self.initial)

    def for_layer(self, n_heads: int) -> nn.Module:
        """What one layer uses: a coefficient of its own, or a reference to this one where that serves all layers."""
        return Reference(self) if self.learned == "globally" else Coefficient(self.initial, self.learned, n_heads)

    def forward(self) -> Tensor | float:
        """The number, or (H or 1, 1): it broadcasts with counts (B, 1, T) and with distances (T,)."""
        return self.initial if self.value is None else self.value[:, None]


class Reference(nn.Module):
    """Stands in a layer for a coefficient that all layers share, without being its owner.

    The decoder owns it (`shared_coefficients`). So it is one entry of the checkpoint and of the optimizer, and where
    the blocks are sharded one by one it is in the outermost unit, which is gathered whenever a block runs.
    """

    def __init__(self, coefficient: Coefficient) -> None:
        super().__init__()
        self._hidden = (coefficient,)  # a module in a tuple is not registered as a part

    @property
    def coefficient(self) -> Coefficient:
        return self._hidden[0]

    def forward(self) -> Tensor | float:
        return self.coefficient()


def shared_coefficients(model: nn.Module) -> list[Coefficient]:
    """The coefficients that parts of `model` refer to, each once, in order of first appearance."""
    found = [part.coefficient for part in model.modules() if isinstance(part, Reference)]
    return list(dict.fromkeys(found))
