"""Attention as the models call it: a mechanism, the back end that computes it, and whose keys a query may see."""

from typing import Literal

import torch
from torch import Tensor, nn

from anlit.attention.around import AroundAttention, QKClip
from anlit.attention.backends import choose
from anlit.attention.documents import Documents
from anlit.attention.gaussian import nu_att
from anlit.attention.mechanism import Mechanism

Backend = Literal["auto", "eager", "sdpa"]

QUERIES_PER_BLOCK = 512


class Attention(nn.Module):
    """softmax(a·g·S + m) v per head, for q and k of unit root mean square.

    Args:
        mechanism: The functions g, a, m of this layer, and its window.
        backend: Which kernel computes it; see `anlit.attention.backends`.
        dropout: Share of attention weights dropped in training.
        around: Whether to watch the scores (`qk_clip`) and to scale the averages (`output_scaling`).
    """

    def __init__(self, mechanism: Mechanism, backend: str, dropout: float, around: AroundAttention) -> None:
        super().__init__()
        self.mechanism = mechanism
        self.dropout = dropout
        self.scales_output = around.output_scaling == "gaussian"
        self.clip = QKClip(around.qk_clip, mechanism.n_heads) if around.qk_clip is not None else None
        self._attend = choose(backend, mechanism).attend

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
        """q, k, v: (B, H, T, D) → (B, H, T, D)."""
        if self.clip is not None and self.training:
            self._watch(self.clip, q, k, documents)
        attended = self._attend(q, k, v, self.mechanism, documents, self.dropout if self.training else 0.0)
        if not self.scales_output:
            return attended
        wide = torch.promote_types(q.dtype, torch.float32)
        n = documents.n_visible(wide, self.mechanism.window)[:, None]
        return attended * nu_att(self.mechanism, n, documents.length)[..., None].to(attended.dtype)

    @torch.no_grad()
    def _watch(self, clip: QKClip, q: Tensor, k: Tensor, documents: Documents) -> None:
        """Show the scores q·k/√D of all visible keys to `clip`, 512 queries at a time."""
        for first in range(0, q.shape[-2], QUERIES_PER_BLOCK):
            end = min(first + QUERIES_PER_BLOCK, q.shape[-2])
            scores = q[..., first:end, :] @ k[..., :end, :].mT * q.shape[-1] ** -0.5
            visible = documents.visible(first, end, self.mechanism.window)
            clip.observe(scores.masked_fill(~visible, float("-inf")))
