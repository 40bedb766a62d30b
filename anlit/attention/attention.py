"""Attention as the models call it: a mechanism, and the back end that computes it."""

from typing import Literal

import torch
from torch import Tensor, nn

from anlit.attention import cache
from anlit.attention.backends import BACKENDS, BackendName, choose, prepare, unsupported_reason
from anlit.attention.backends.eager import QUERIES_PER_BLOCK, distances, masked_bias
from anlit.attention.documents import Documents
from anlit.attention.groups import grouped_product
from anlit.attention.mechanism import Mechanism
from anlit.attention.qk_clip import QKClip
from anlit.attention.selection import Selections, mechanism_name
from anlit.layers.linear import computing_dtype

Backend = Literal["auto", BackendName]


class Attention(nn.Module):
    """softmax(a·g·S + m) v per head, for q and k of unit root mean square.

    Args:
        mechanism: The functions g, a, m of this layer, and its window.
        backend: The kernel that computes it; see `anlit.attention.backends`.
        dropout: Share of attention weights dropped in training.
        qk_clip: Record each head's largest score in training, for QK-clip with this threshold; None for no QK-clip.

    Raises:
        UserError: There is no such back end, or it cannot compute the mechanism on any device.
    """

    def __init__(
        self, mechanism: Mechanism, backend: str, dropout: float = 0.0, qk_clip: float | None = None
    ) -> None:
        super().__init__()
        choose(backend, mechanism, dropout=dropout)
        self.mechanism, self.backend, self.dropout = mechanism, backend, dropout
        self.clip = QKClip(qk_clip, mechanism.n_heads) if qk_clip is not None else None
        self._selections: Selections | None = None
        self._backends: dict[tuple[str, torch.dtype, bool, int], str] = {}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
        """q (B, H, T, D); k, v (B, G, T, D), where query head h uses key head h // (H/G) → (B, H, T, D)."""
        if self.clip is not None and self.training:
            self._observe_scores(self.clip, q, k, documents)
        dtype = computing_dtype(q)
        return self.attend(q.to(dtype), k.to(dtype), v.to(dtype), documents)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
        """As `forward`, in the precision to compute in: the kernel alone."""
        if isinstance(documents, cache.Continuation):
            k, v = documents.cache.extend(self, k, v, self.mechanism.window)
            if documents.n_before:
                return cache.attend(q, k, v, self.mechanism, documents)
        dropout = self.dropout if self.training else 0.0
        return BACKENDS[self.backend_for(q)].attend(q, k, v, self.mechanism, documents, dropout)

    def use_selections(self, selections: Selections | None) -> None:
        """Let `auto` run on what was selected for this mechanism on this device, wherever that can compute it."""
        self._selections, self._backends = selections, {}

    def backend_for(self, q: Tensor) -> str:
        """The name of the back end for queries like `q`, (B, H, T, D), looked up once for each kind of queries.

        Raises UserError if the back end that the settings name cannot compute this on its device or in its precision.
        """
        case = (q.device.type, q.dtype, q.requires_grad, q.shape[-2])
        if case not in self._backends:
            names: list[str] = []
            if self.backend == "auto" and self._selections is not None:
                names += self._selections.nearest(mechanism_name(self.mechanism), q.shape[-2])
            supported = (
                name
                for name in names
                if not unsupported_reason(name, self.mechanism, q, self.dropout)
            )
            self._backends[case] = next(supported, None) or choose(
                self.backend, self.mechanism, q, self.dropout
            )
        return self._backends[case]

    @torch.no_grad()
    def prepare(self, documents: Documents, h: Tensor) -> None:
        """Choose the back end for hidden states h, (B, T, d), and let it derive from `documents` what all layers share.

        The decoder calls this before the first block, outside of compiled code.
        """
        if isinstance(documents, cache.Continuation) and documents.n_before:
            return
        q = example_query(self.mechanism, h.shape[1], computing_dtype(h), h.device, h.requires_grad)
        prepare(BACKENDS[self.backend_for(q)], self.mechanism, documents, h.shape[0])

    @torch.no_grad()
    def _observe_scores(self, clip: QKClip, q: Tensor, k: Tensor, documents: Documents) -> None:
        """Pass the scores q·k/√D of all visible keys to `clip`, 512 queries at a time."""
        for first in range(0, q.shape[-2], QUERIES_PER_BLOCK):
            end = min(first + QUERIES_PER_BLOCK, q.shape[-2])
            scores = grouped_product(q[..., first:end, :], k[..., :end, :].mT) * q.shape[-1] ** -0.5
            t = distances(end - first, end, q.device)
            clip.observe(
                scores + masked_bias(None, t, documents, self.mechanism.window, first, scores.dtype)
            )


def attention_layers(model: nn.Module) -> list[Attention]:
    """The attention of each block, first to last."""
    return [module for module in model.modules() if isinstance(module, Attention)]


def example_query(
    mechanism: Mechanism, length: int, dtype: torch.dtype, device: torch.device, requires_grad: bool
) -> Tensor:
    """Queries (1, H, T, D) of one number's memory, by which back ends tell whether they can compute the mechanism."""
    shape = (1, mechanism.n_heads, length, mechanism.d_head)
    return torch.empty_strided(
        shape, (0, 0, 0, 0), dtype=dtype, device=device, requires_grad=requires_grad
    )
