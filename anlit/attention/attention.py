"""Attention as the models call it: a mechanism, the back end that computes it, and whose keys a query may see."""

from typing import Literal

from torch import Tensor, nn

from anlit.attention.backends import choose
from anlit.attention.documents import Documents
from anlit.attention.mechanism import Mechanism

Backend = Literal["auto", "eager", "sdpa"]


class Attention(nn.Module):
    """softmax(a·g·S + m) v per head, for q and k of unit root mean square.

    Args:
        mechanism: The functions g, a, m of this layer.
        backend: Which kernel computes it; see `anlit.attention.backends`.
        dropout: Share of attention weights dropped in training.
    """

    def __init__(self, mechanism: Mechanism, backend: str, dropout: float) -> None:
        super().__init__()
        self.mechanism = mechanism
        self.dropout = dropout
        self._attend = choose(backend, mechanism).attend

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
        """q, k, v: (B, H, T, D) → (B, H, T, D)."""
        return self._attend(q, k, v, self.mechanism, documents, self.dropout if self.training else 0.0)
