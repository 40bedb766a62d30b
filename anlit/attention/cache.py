"""A cache of keys and values, so that generating a token costs one pass over the new tokens alone.

    cache = KeyValueCache(max_length=len(prompt) + 100)
    logits = decoder(prompt, cache=cache)            # the whole prompt at once
    logits = decoder(next_token, cache=cache)        # (B, 1) tokens, and so on

The rows of a batch are padded on the left, so they all end at the same slot. No token sees the padding. Rows differ in
one number only: the slot at which the current document began. Positions, the counts n and the distances follow from
this number and the slot.

Shape letters: B rows, H heads of queries, G heads of keys, Q new tokens, K keys, D head width. A slot is an index along
a row, from 0.
"""

import torch
from torch import Tensor, nn

from anlit.attention.backends import sdpa
from anlit.attention.backends.eager import QUERIES_PER_BLOCK, distance_tables, with_gain
from anlit.attention.documents import Documents
from anlit.attention.groups import grouped_product
from anlit.attention.mechanism import Mechanism

SMALLEST_BUFFER = 64


class KeyValueCache:
    """The keys and values of all attention layers of one decoder.

    A layer with a window keeps at most twice its width. Other layers keep everything, in buffers that double.

    Args:
        max_length: The final length of the rows in tokens. Positions that depend on the length of the sequence
            (`DynamicNTK`) use this length from the beginning, so the result equals one pass over the whole sequence.
        padding: (B,) integers, the number of padded slots at the beginning of each row; None for no padding.
    """

    def __init__(self, max_length: int, padding: Tensor | None = None) -> None:
        self.max_length, self._padding = max_length, padding
        self.n_read = 0
        """Slots that are filled so far."""
        self._begin: Tensor | None = None  # (B or 1, 1) the slot at which each row's current document began
        self._last_ids: Tensor | None = None  # (B, 1) the id of that document
        self._layers: dict[nn.Module, LayerCache] = {}

    @property
    def bytes(self) -> int:
        """Memory of the buffers, in bytes."""
        return sum(buffer.nbytes for store in self._layers.values() for buffer in store.buffers)

    def read(self, n_tokens: int, document_ids: Tensor | None, device: torch.device) -> "Continuation":
        """The documents of the next tokens, for the layers' forward pass. Each layer then calls `extend` once.

        Args:
            n_tokens: Q.
            document_ids: (B, Q) integers that continue those of the tokens before; None for one document.
            device: Where the tokens are.
        """
        assert self.n_read + n_tokens <= self.max_length, (self.n_read, n_tokens, self.max_length)
        begins = self._begins(n_tokens, document_ids, device)
        documents = Continuation(self, begins, self.n_read, n_tokens, device)
        self._begin = None if begins is None else begins[:, -1:]
        self._last_ids = None if document_ids is None else document_ids[:, -1:]
        self.n_read += n_tokens
        return documents

    def extend(self, layer: nn.Module, k: Tensor, v: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
        """Add the new keys and values of a layer. Returns all that its new queries may see, in order.

        Args:
            layer: The attention layer.
            k, v: (B, G, Q, D).
            window: The layer's window in keys, or None.

        Returns:
            Keys and values (B, G, K, D), the new ones last. The first call returns its arguments.
        """
        return self._layers.setdefault(layer, LayerCache(window, self.max_length)).append(k, v)

    def _begins(self, n_tokens: int, document_ids: Tensor | None, device: torch.device) -> Tensor | None:
        """(B or 1, Q): the slot at which the document of each new token begins; None if all begin at slot 0."""
        if document_ids is None and self._padding is None:
            return None
        slots = torch.arange(self.n_read, self.n_read + n_tokens, device=device)
        starts = slots == 0 if self._padding is None else slots == self._padding[:, None]
        if document_ids is not None:
            before = document_ids[:, :1] if self._last_ids is None else self._last_ids
            starts = starts | (document_ids != torch.cat((before, document_ids[:, :-1]), 1))
        begins = torch.where(starts, slots, 0 if self._begin is None else self._begin)
        return begins.cummax(dim=1).values


class Continuation(Documents):
    """The documents of tokens that follow those in a cache.

    Args:
        cache: The cache of the layers' keys and values.
        begins: (B or 1, Q), the slot at which each new token's document begins; None for 0.
        n_before: Number of slots before the new tokens.
        length: Q.
        device: The device of the masks.
    """

    def __init__(
        self, cache: KeyValueCache, begins: Tensor | None, n_before: int, length: int, device: torch.device
    ) -> None:
        self.begins, self.n_before = begins, n_before
        super().__init__(begins, length, device)  # tokens of one document are those with one beginning
        self.cache, self.max_length = cache, cache.max_length

    def _positions(self) -> Tensor | None:
        if self.begins is None and not self.n_before:
            return None
        slots = torch.arange(self.n_before, self.n_before + self.length, device=self.device)[None]
        return slots if self.begins is None else slots - self.begins

    @property
    def rotary_positions(self) -> Tensor:
        return torch.arange(self.length, device=self.device)[None] if self.positions is None else self.positions

    def sees(self, first: int, distances: Tensor, window: int | None) -> Tensor:
        """Whether new tokens see keys: (B or 1, 1, rows, K) booleans.

        Args:
            first: The index of the first row among the new tokens.
            distances: (rows, K), slots from each query back to each key; negative if the key is ahead.
            window: How many of the latest keys a query may see; None for all.
        """
        near = distances >= 0 if window is None else (distances >= 0) & (distances < window)
        if self.begins is None:
            return near[None, None]
        assert self.positions is not None
        positions = self.positions[:, first : first + len(distances), None]
        return (near & (distances <= positions))[:, None]


def attend(q: Tensor, k: Tensor, v: Tensor, mechanism: Mechanism, documents: Continuation) -> Tensor:
    """softmax(a·g·S + m) v of new queries over cached keys, 512 queries at a time.

    A fused kernel computes one query, if the mechanism has no a(t) and the kernel needs no copy of the keys.

    Args:
        q: (B, H, Q, D).
        k, v: (B, G, K, D); the last Q belong to the new tokens.
        mechanism: The functions a, g, m, and the window.
        documents: The documents of the new tokens.

    Returns:
        (B, H, Q, D).
    """
    length, n_keys = q.shape[-2], k.shape[-2]
    a, m = distance_tables(mechanism, n_keys, q)
    if length == 1 and a is None:
        mask = _mask_of_one(documents, n_keys, m, q.dtype)
        if k.shape[1] == q.shape[1] or sdpa.reads_groups(q, mask):
            return sdpa.fused(with_gain(q, mechanism, documents), k, v, mask)
    q = with_gain(q * q.shape[-1] ** -0.5, mechanism, documents)
    keys = torch.arange(n_keys, device=q.device)
    parts = []
    for first in range(0, length, QUERIES_PER_BLOCK):
        rows = q[..., first : first + QUERIES_PER_BLOCK, :]
        begin = n_keys - length + first
        distances = keys[begin : begin + rows.shape[-2], None] - keys
        scores = grouped_product(rows, k.mT).to(torch.promote_types(q.dtype, torch.float32))
        if a is not None:
            scores = scores * a[..., distances.clamp_min(0)]
        if m is not None:
            scores = scores + m[..., distances.clamp_min(0)]
        scores = scores.masked_fill(~documents.sees(first, distances, mechanism.window), float("-inf"))
        parts.append(grouped_product(scores.softmax(-1).to(v.dtype), v))
    return parts[0] if len(parts) == 1 else torch.cat(parts, -2)


def _mask_of_one(documents: Continuation, n_keys: int, m: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The additive mask of one query, (B or 1, H or 1, 1, K); None if it sees all keys.

    The cache returns no key from before the window.
    """
    if m is None and documents.begins is None:
        return None
    distances = torch.arange(n_keys - 1, -1, -1, device=documents.device)[None]
    visible = documents.sees(0, distances, None)
    return torch.where(visible, 0.0 if m is None else m[..., distances], float("-inf")).to(dtype)


class LayerCache:
    """The keys and values of one layer: two buffers (B, G, capacity, D), filled up to `size`."""

    def __init__(self, window: int | None, longest: int) -> None:
        self.window, self.longest = window, longest
        self.buffers: tuple[Tensor, ...] = ()
        self.size = 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        n_new = k.shape[-2]
        if not self.buffers:  # the first tokens: no key beyond the window will be needed again
            kept = n_new if self.window is None else min(n_new, self.window - 1)
            self._write(k[..., n_new - kept :, :], v[..., n_new - kept :, :])
            return k, v
        n_older = self.size if self.window is None else min(self.size, self.window - 1)
        self._write(k, v)
        begin = self.size - n_new - n_older
        keys, values = (buffer[..., begin : self.size, :] for buffer in self.buffers)
        return keys, values

    def _write(self, *new: Tensor) -> None:
        n_new = new[0].shape[-2]
        if not self.buffers or self.size + n_new > self.buffers[0].shape[-2]:
            self._move(new[0], new[1])
        for buffer, part in zip(self.buffers, new, strict=True):
            buffer[..., self.size : self.size + n_new, :] = part
        self.size += n_new

    def _move(self, *new: Tensor) -> None:
        """Copy to new buffers with room for `new`, without keys that have left the window."""
        n_new = new[0].shape[-2]
        kept = self.size if self.window is None else min(self.size, self.window - 1)
        room = 2 * (kept + n_new if self.window is None else self.window)
        room = max(kept + n_new, min(max(room, SMALLEST_BUFFER), self.longest))
        buffers = tuple(part.new_empty(*part.shape[:2], room, part.shape[3]) for part in new)
        for buffer, old in zip(buffers, self.buffers, strict=bool(self.buffers)):
            buffer[..., :kept, :] = old[..., self.size - kept : self.size, :]
        self.buffers, self.size = buffers, kept
