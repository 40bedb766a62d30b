"""Packed documents: all that attention derives from the document ids of a batch."""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor


class Documents:
    """The keys that a query may see: earlier keys and, with document masking, keys of its document.

    With a `window`, a query sees at most that many keys, the latest and its own. None is for all.

    Args:
        ids: (B, T) integers, non-decreasing along T, equal for tokens of one document. None for one
            document.
        length: T.
        device: The device of the masks.
        cu_seqlens, longest: As in the `Batch`. None to derive them.
    """

    def __init__(
        self,
        ids: Tensor | None,
        length: int,
        device: torch.device,
        cu_seqlens: Tensor | None = None,
        longest: int | None = None,
    ) -> None:
        self.ids = ids
        self.length = length
        self.device = device
        self.are_masked = ids is not None
        self.max_length = length
        """The length of the sequence in tokens. With a cache, its final length."""
        self.flex_masks: dict[int | None, Any] = {}
        """The masks of FlexAttention for all layers, by window."""
        self._cu_seqlens = cu_seqlens
        self._longest = longest
        self._packing: tuple[Tensor, Tensor] | None = None
        self._bounds: tuple[Tensor, Tensor] | None = None
        self.positions = self._find_positions()
        """Each token's position in its document, (B, T) integers from 0. None if all tokens are one
        document."""

    @property
    def rotary_positions(self) -> Tensor | None:
        """Positions for RoPE: `positions`, or None for 0, 1 … T−1."""
        return self.positions

    @property
    def _index(self) -> Tensor:
        return torch.arange(self.length, device=self.device)

    def n_visible(self, dtype: torch.dtype, window: int | None = None) -> Tensor:
        """n_i, the number of keys that query i may see, with its own: (B or 1, T)."""
        n = (self._index[None] if self.positions is None else self.positions) + 1
        if window is not None:
            n = n.clamp_max(window)
        return n.to(dtype)

    def _find_positions(self) -> Tensor | None:
        if self.ids is None:
            return None
        index = self._index
        is_start = torch.ones_like(self.ids, dtype=torch.bool)
        is_start[:, 1:] = self.ids[:, 1:] != self.ids[:, :-1]
        return index - torch.where(is_start, index, 0).cummax(dim=1).values

    @property
    def bounds(self) -> tuple[Tensor, Tensor] | None:
        """The begin and the end (exclusive) of each token's document, each (B, T) int32.

        None for one document.

        Not a cached_property, because torch cannot trace it.
        """
        if self.positions is not None and self._bounds is None:
            index = self._index
            begins = index - self.positions
            next_starts = torch.where(self.positions == 0, index, self.length).roll(-1, 1)
            next_starts[:, -1] = self.length
            ends = next_starts.flip(1).cummin(1).values.flip(1)
            self._bounds = (begins.int(), ends.int())
        return self._bounds

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """The begin of each document in the B·T flattened tokens, then B·T: (documents + 1,) int32.

        Without ids, for a single row. If the batch did not bring it, this waits for the device.
        """
        if self._cu_seqlens is not None and self.ids is not None:
            return self._cu_seqlens
        positions = self._index if self.positions is None else self.positions
        begins = (positions.flatten() == 0).nonzero().flatten()
        return torch.cat((begins, begins.new_tensor([positions.numel()]))).int()

    def packing(self, n_rows: int) -> tuple[Tensor, Tensor]:
        """`cu_seqlens` of `n_rows` sequences on the device, and an empty (n, 0) on the host.

        n is a length that no document exceeds. Both are computed once per batch. Compiled code
        serves all batches, because the sizes are dynamic.
        """
        if self._packing is None:
            rows = torch.arange(0, n_rows * self.length + 1, self.length, dtype=torch.int32)
            starts = self.cu_seqlens if self.are_masked else rows
            longest = self.length
            if self.are_masked and self._longest is not None:
                longest = self._longest
            starts = starts.to(self.device, non_blocking=True)
            size_of_longest = torch.empty(max(2, longest), 0)
            if self.are_masked:
                torch._dynamo.mark_dynamic(starts, 0)
                torch._dynamo.mark_dynamic(size_of_longest, 0)
            self._packing = (starts, size_of_longest)
        return self._packing

    def sees(self, first: int, distances: Tensor, window: int | None) -> Tensor:
        """Whether queries from `first` on see keys at `distances` (Q, K): (B or 1, 1, Q, K)."""
        is_near = distances >= 0
        if window is not None:
            is_near = is_near & (distances < window)
        if self.positions is None:
            return is_near[None, None]
        positions = self.positions[:, None, first : first + len(distances), None]
        return is_near & (distances <= positions)
