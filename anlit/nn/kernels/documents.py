"""Packed documents: everything that attention derives from the document ids of a batch."""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor


class Documents:
    """Which keys each query may see: causal and, with document masking, inside its own document.

    With a `window`, a query sees at most that many of the latest keys, its own included; None for all.

    Args:
        ids: (B, T) integers, non-decreasing along T, equal for tokens of one document; None for one document.
        length: T.
        device: The device of the masks.
        cu_seqlens, longest: As in the `Batch`; None to derive them.
    """

    def __init__(
        self, ids: Tensor | None, length: int, device: torch.device, cu_seqlens: Tensor | None = None,
        longest: int | None = None,
    ) -> None:  # fmt: skip
        self.ids, self.length, self.device, self.are_masked = ids, length, device, ids is not None
        self.max_length = length
        """The length of the sequence in tokens; with a cache, its final length."""
        self._cu_seqlens, self._longest = cu_seqlens, longest
        self._packing: tuple[Tensor, Tensor] | None = None
        self._bounds: tuple[Tensor, Tensor] | None = (
            None  # no cached_property, which torch cannot trace
        )
        self._masks: dict[int | None, Tensor] = {}
        self.flex_masks: dict[int | None, Any] = {}
        """Masks for all layers, by window; FlexAttention's own."""
        self.positions = self._positions()
        """Each token's position in its document, (B, T) integers from 0; None if all tokens are one document."""

    @property
    def rotary_positions(self) -> Tensor | None:
        """Positions for RoPE: `positions`, or None for 0, 1 … T−1."""
        return self.positions

    @property
    def _index(self) -> Tensor:
        return torch.arange(self.length, device=self.device)

    def n_visible(self, dtype: torch.dtype, window: int | None = None) -> Tensor:
        """n_i, the number of keys that query i may see, its own included: (B or 1, T)."""
        n = (self._index[None] if self.positions is None else self.positions) + 1
        return (n if window is None else n.clamp_max(window)).to(dtype)

    def _positions(self) -> Tensor | None:
        if self.ids is None:
            return None
        index = self._index
        starts = torch.ones_like(self.ids, dtype=torch.bool)
        starts[:, 1:] = self.ids[:, 1:] != self.ids[:, :-1]
        return index - torch.where(starts, index, 0).cummax(dim=1).values

    @property
    def bounds(self) -> tuple[Tensor, Tensor] | None:
        """Where the document of each token begins and ends (exclusive), each (B, T) int32; None for one document."""
        if self.positions is not None and self._bounds is None:
            index = self._index
            next_starts = torch.where(self.positions == 0, index, self.length).roll(-1, 1)
            next_starts[:, -1] = self.length
            self._bounds = (
                (index - self.positions).int(),
                next_starts.flip(1).cummin(1).values.flip(1).int(),
            )
        return self._bounds

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """Where each document begins in the B·T flattened tokens, then B·T: (documents + 1,) int32; without ids that of
        one row. If the batch has none, made on the host, this waits for the device."""
        if self._cu_seqlens is not None and self.ids is not None:
            return self._cu_seqlens
        positions = self._index if self.positions is None else self.positions
        begins = (positions.flatten() == 0).nonzero().flatten()
        return torch.cat((begins, begins.new_tensor([positions.numel()]))).int()

    def packing(self, n_rows: int) -> tuple[Tensor, Tensor]:
        """`cu_seqlens` of `n_rows` sequences on the device; (n, 0) on the host, where no document is longer than n.
        Computed once per batch. Compiled code fits those of every batch: the sizes are dynamic."""
        if self._packing is None:
            rows = torch.arange(0, n_rows * self.length + 1, self.length, dtype=torch.int32)
            starts = self.cu_seqlens if self.are_masked else rows
            longest = (
                self._longest if self.are_masked and self._longest is not None else self.length
            )
            sizes = starts.to(self.device, non_blocking=True), torch.empty(max(2, longest), 0)
            if self.are_masked:
                for size in sizes:
                    torch._dynamo.mark_dynamic(size, 0)
            self._packing = sizes
        return self._packing

    def sees(self, first: int, distances: Tensor, window: int | None) -> Tensor:
        """Whether queries from token number `first` on see keys at `distances` (rows, K) back: (B or 1, 1, rows, K)."""
        near = distances >= 0 if window is None else (distances >= 0) & (distances < window)
        if self.positions is None:
            return near[None, None]
        return near & (distances <= self.positions[:, None, first : first + len(distances), None])

    def mask(self, window: int | None = None) -> Tensor:
        """Whether queries see keys, (B or 1, 1, T, T); computed once per batch and shared by the layers.

        A compiled layer reads it but does not store it: to store it would give the next layer another graph.
        """
        mask = self._masks.get(window)
        if mask is None:
            mask = self.sees(0, self._index[:, None] - self._index, window)
            if not torch.compiler.is_compiling():
                self._masks[window] = mask
        return mask
