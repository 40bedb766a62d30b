"""Packed documents: from the ids in a batch to everything that attention derives from them, in one place."""

from functools import cached_property

import torch
from torch import Tensor


class Documents:
    """Which keys each query may see: causal, and inside its own document where documents are masked.

    Args:
        ids: (B, T) integers, non-decreasing along T, equal for tokens of one document; None for one document.
        length: T.
        device: Where the masks are to be.
    """

    def __init__(self, ids: Tensor | None, length: int, device: torch.device) -> None:
        self.ids, self.length, self.device = ids, length, device
        self._mask: Tensor | None = None

    @property
    def are_masked(self) -> bool:
        return self.ids is not None

    def n_visible(self, dtype: torch.dtype) -> Tensor:
        """n_i, the number of keys that query i may see, itself included: (B or 1, T), restarts with each document."""
        index = torch.arange(self.length, device=self.device)
        return ((index[None] if self.positions is None else self.positions) + 1).to(dtype)

    @cached_property
    def positions(self) -> Tensor | None:
        """Each token's place in its document, (B, T) integers from 0; None where all tokens are one document."""
        if self.ids is None:
            return None
        index = torch.arange(self.length, device=self.device)
        starts = torch.ones_like(self.ids, dtype=torch.bool)
        starts[:, 1:] = self.ids[:, 1:] != self.ids[:, :-1]
        return index - torch.where(starts, index, 0).cummax(dim=1).values

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """Where each document begins in the B·T flattened tokens, and B·T: (documents + 1,) int32, none spans rows.

        Waits for the device; `Batch.cu_seqlens` is the same, made on the host. Without ids, for one row.
        """
        places = torch.arange(self.length, device=self.device) if self.positions is None else self.positions
        begins = (places.flatten() == 0).nonzero().flatten()
        return torch.cat((begins, begins.new_tensor([places.numel()]))).int()

    def visible(self, first_query: int, end_query: int) -> Tensor:
        """True where query i in [first_query, end_query) sees key j < end_query: (B or 1, 1, queries, end_query)."""
        queries = torch.arange(first_query, end_query, device=self.device)
        keys = torch.arange(end_query, device=self.device)
        causal = (keys <= queries[:, None])[None, None]
        if self.ids is None:
            return causal
        ids = self.ids[:, :end_query]
        return causal & (ids[:, None, first_query:, None] == ids[:, None, None, :])

    def mask(self) -> Tensor:
        """`visible` for all queries at once, (B or 1, 1, T, T); computed once per batch and shared by the layers."""
        if self._mask is None:
            self._mask = self.visible(0, self.length)
        return self._mask
