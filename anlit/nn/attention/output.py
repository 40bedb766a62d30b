"""Between the attention kernel and W_o: a norm and a gate on the heads' averages of values.

A head's average is Σ_j w_ij v_j, what the kernel returns for query i.

Shape letters: B batch, T tokens, d model width, H heads, D head width.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from anlit.nn.layers.linear import ScaledLinear

Gate = Literal["none", "per_head", "per_element"]
"""What learned gates multiply: nothing, each head's average, or each element of the averages."""


class GateMap(ScaledLinear):
    """The map W_g of the gates. It starts at 0. So all gates 2σ(W_g x) start at 1."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


class AttentionOutput(nn.Module):
    """The input of W_o: the heads' averages with norm and gates 2σ(W_g x) (arXiv 2505.06708).

    Args:
        d_model: d, the width of x.
        n_heads: H.
        d_head: D.
        gate: What the gates multiply.
        gate_factor: Constant factor of W_g x. An x of norm 1 needs √d, so that the gates see a root
            mean square of 1. A normalised x (root mean square 1) needs 1.
        norm: Normalises each head's average over its D elements. None for no norm.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        d_head: int,
        gate: Gate,
        gate_factor: float,
        norm: nn.Module | None,
    ) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.norm = norm or nn.Identity()
        self.W_g = None
        if gate == "per_head":
            self.W_g = GateMap(d_model, n_heads, gate_factor)
        elif gate == "per_element":
            self.W_g = GateMap(d_model, n_heads * d_head, gate_factor)

    def forward(self, attended: Tensor, x: Tensor) -> Tensor:
        """attended (B, H, T, D) and x (B, T, d), the input of attention → (B, T, H·D)."""
        attended = self.norm(attended.transpose(1, 2))
        if self.W_g is not None:
            gate = 2 * torch.sigmoid(self.W_g(x))  # (B, T, H) or (B, T, H·D)
            attended = attended * gate.unflatten(-1, (self.n_heads, -1))  # × (B, T, H, 1 or D)
        return attended.flatten(2)
