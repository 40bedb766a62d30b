"""What follows attention's kernel: a norm and a gate on the heads' averages, before W_o."""

from typing import Literal

import torch
from torch import Tensor, nn

from anlit.layers.linear import ScaledLinear

Gate = Literal["none", "per_head", "per_element"]
"""Whether the heads' averages are multiplied with a learned function of the block's input, and with how many."""


class GateMap(ScaledLinear):
    """The map W_g of a gate; starts at 0, where every gate is 1."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


class AttentionOutput(nn.Module):
    """From the heads' averages to the input of W_o: their norm, their gates 2σ(W_g x), side by side.

    Args:
        d_model: d.
        n_heads: H.
        gate: How many gates (arXiv 2505.06708).
        gate_factor: Brings the gate's input x to a root mean square of 1: W_g x is this factor larger.
        norm: Norm over the last axis, applied to each head's average; None for none.
    """

    def __init__(self, d_model: int, n_heads: int, gate: Gate, gate_factor: float, norm: nn.Module | None) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.norm = norm or nn.Identity()
        outputs = {"none": 0, "per_head": n_heads, "per_element": d_model}[gate]
        self.W_g = GateMap(d_model, outputs, gate_factor) if outputs else None

    def forward(self, attended: Tensor, x: Tensor) -> Tensor:
        """attended (B, H, T, D), and the block's input to attention x (B, T, d) → (B, T, d)."""
        attended = self.norm(attended)
        if self.W_g is not None:
            gate = 2 * torch.sigmoid(self.W_g(x))  # (B, T, H) or (B, T, d)
            attended = attended * gate.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
        return attended.transpose(1, 2).flatten(2)
