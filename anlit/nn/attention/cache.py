"""A cache of keys and values, so that generating a token costs one pass over the new tokens alone.

    cache = KeyValueCache(max_length=len(prompt) + 100)
    logits = decoder(prompt, cache=cache)            # the whole prompt at once
    logits = decoder(next_token, cache=cache)        # (B, 1) tokens, and so on

The rows of a batch are padded on the left, so they all end at the same slot, an index along a row. Rows differ in one
number only: the slot at which the current document began. Positions, counts n and distances follow from it; no token
sees the padding. Shape letters: B rows, H heads of queries, G of keys, Q new tokens, K keys, D head width.
"""

import torch
from torch import Tensor, nn

from anlit.nn.kernels import eager, sdpa
from anlit.nn.kernels.documents import Documents
from anlit.nn.kernels.formula import distance_tables, distances, masked_bias, with_gain
from anlit.nn.mechanisms.mechanism import Mechanism


class KeyValueCache:
    """The keys and values of all attention layers of one decoder.

    A layer with a window keeps at most twice its width. Other layers have room for everything from the beginning.

    Args:
        max_length: The final length of the rows in tokens, for which positions are from the beginning (`DynamicNTK`).
        padding: (B,) integers, the number of padded slots at the beginning of each row; None for no padding.
    """

    def __init__(self, max_length: int, padding: Tensor | None = None) -> None:
        self.max_length, self._padding = max_length, padding
        self.n_read = 0  # slots that are filled so far
        self._begin: Tensor | None = (
            None  # (B or 1, 1) the slot at which each row's current document began
        )
        self._last_ids: Tensor | None = None  # (B, 1) the id of that document
        self._layers: dict[nn.Module, LayerCache] = {}

    def read(
        self, n_tokens: int, document_ids: Tensor | None, device: torch.device
    ) -> "Continuation":
        """The documents of the next Q tokens, after which each layer calls `extend` once.

        `document_ids`, (B, Q), continue those of the tokens before; None for one document.
        """
        assert self.n_read + n_tokens <= self.max_length, (self.n_read, n_tokens, self.max_length)
        begins = self._begins(n_tokens, document_ids, device)
        self._begin = None if begins is None else begins[:, -1:]
        self._last_ids = None if document_ids is None else document_ids[:, -1:]
        self.n_read += n_tokens
        return Continuation(self, begins, self.n_read - n_tokens, n_tokens, device)

    def extend(self, layer: nn.Module, k: Tensor, v: Tensor, window: int | None) -> list[Tensor]:
        """Add a layer's new keys and values, (B, G, Q, D); returns what its new queries may see, (B, G, K, D)."""
        return self._layers.setdefault(layer, LayerCache(window, self.max_length)).append(k, v)

    def _begins(
        self, n_tokens: int, document_ids: Tensor | None, device: torch.device
    ) -> Tensor | None:
        """(B or 1, Q): the slot at which the document of each new token begins; None if all begin at slot 0."""
        if document_ids is None and self._padding is None:
            return None
        slots = torch.arange(self.n_read, self.n_read + n_tokens, device=device)
        starts = slots == 0 if self._padding is None else slots == self._padding[:, None]
        if document_ids is not None:
            before = document_ids[:, :1] if self._last_ids is None else self._last_ids
            starts = starts | (document_ids != torch.cat((before, document_ids[:, :-1]), 1))
        return (
            torch.where(starts, slots, 0 if self._begin is None else self._begin)
            .cummax(dim=1)
            .values
        )


class Continuation(Documents):
    """The documents of Q = `length` tokens that follow `n_before` slots in a cache.

    `begins`, (B or 1, Q), is the slot at which each new token's document begins; None for 0.
    """

    def __init__(
        self,
        cache: KeyValueCache,
        begins: Tensor | None,
        n_before: int,
        length: int,
        device: torch.device,
    ) -> None:
        self.begins, self.n_before = begins, n_before
        super().__init__(
            begins, length, device
        )  # tokens of one document are those with one beginning
        self.cache, self.max_length = cache, cache.max_length

    def _positions(self) -> Tensor | None:
        if self.begins is None and not self.n_before:
            return None
        return self._index[None] + self.n_before - (0 if self.begins is None else self.begins)

    @property
    def rotary_positions(self) -> Tensor:
        return self._index[None] if self.positions is None else self.positions


def attend(
    q: Tensor, k: Tensor, v: Tensor, mechanism: Mechanism, documents: Continuation
) -> Tensor:
    """softmax(a·g·S + m) v of new queries q, (B, H, Q, D), over k and v, (B, G, K, D), as `extend` returns them. A
    fused kernel computes one query, if the mechanism has no a(t) and the kernel needs no copy of the keys."""
    if q.shape[-2] == 1 and not mechanism.scales_with_distance:
        _, m = distance_tables(mechanism, k.shape[-2], q)
        is_masked, t = m is not None or documents.are_masked, distances(1, k.shape[-2], q.device)
        mask = masked_bias(m, t, documents, None, 0, q.dtype) if is_masked else None
        if k.shape[1] == q.shape[1] or sdpa.reads_groups(q, mask):
            return sdpa.fused(with_gain(q, mechanism, documents), k, v, mask)
    return eager.attend(q, k, v, mechanism, documents, 0.0)


class LayerCache:
    """The keys and values of one layer: two buffers (B, G, capacity, D), filled up to `size`."""

    def __init__(self, window: int | None, max_length: int) -> None:
        self.window, self.size = window, 0
        self.capacity = max_length if window is None else min(max_length, 2 * window)
        self.buffers: tuple[Tensor, ...] = ()

    def append(self, *new: Tensor) -> list[Tensor]:
        """As `KeyValueCache.extend`; what was added stands last."""
        if not self.buffers:
            self.buffers = tuple(x.new_empty(*x.shape[:2], self.capacity, x.shape[3]) for x in new)
        n_new = new[0].shape[-2]
        n_older = self.size if self.window is None else min(self.size, self.window - 1)
        older = [buffer[..., self.size - n_older : self.size, :] for buffer in self.buffers]
        if self.size + n_new <= self.capacity:
            begin, self.size = self.size - n_older, self.size + n_new
            for buffer, part in zip(self.buffers, new, strict=True):
                buffer[..., self.size - n_new : self.size, :] = part
            return [buffer[..., begin : self.size, :] for buffer in self.buffers]
        assert self.window is not None
        whole = [torch.cat(parts, -2) for parts in zip(older, new, strict=True)]
        self.size = min(
            self.window - 1, n_older + n_new
        )  # what later queries may see moves to the front
        for buffer, part in zip(self.buffers, whole, strict=True):
            buffer[..., : self.size, :] = part[..., n_older + n_new - self.size :, :]
        return whole
