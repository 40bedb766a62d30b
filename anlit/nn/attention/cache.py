"""A cache of keys and values. Generating a token then costs a pass over the new tokens alone.

    cache = KeyValueCache(max_length=len(prompt) + 100)
    logits = decoder(prompt, cache=cache)            # the whole prompt at once
    logits = decoder(next_token, cache=cache)        # (B, 1) tokens, and so on

The rows of a batch are padded on the left. So they all end at the same slot, an index along a row.
Rows differ in the slot at which the current document began. Positions, counts n and distances
follow from it. No token sees the padding.

Shapes: B rows, H heads of queries, G heads of keys and values, Q new tokens, K keys, D head width.
"""

import torch
from torch import Tensor, nn

from anlit.nn.kernels import eager, sdpa
from anlit.nn.kernels.documents import Documents
from anlit.nn.kernels.formula import distance_tables, distances, masked_bias, with_gain
from anlit.nn.mechanisms.mechanism import Mechanism


class KeyValueCache:
    """The keys and values of all attention layers of one decoder.

    A layer with a window keeps the keys that the next query may see. Other layers have room for all
    tokens from the start.

    Args:
        max_length: The final length of the rows in tokens, for which positions are from the
            beginning (`DynamicNTK`).
        padding: (B,) integers, the number of padded slots at the beginning of each row. None for no
            padding.
    """

    def __init__(self, max_length: int, padding: Tensor | None = None) -> None:
        self.max_length = max_length
        self.n_filled = 0
        """Slots that are filled so far."""
        self._padding = padding
        self._begin: Tensor | None = None
        """(B or 1, 1): the slot at which each row's current document began."""
        self._last_ids: Tensor | None = None
        """(B, 1): the id of each row's current document."""
        self._layers: dict[nn.Module, list[Tensor]] = {}
        """Keys and values, (B, G, max_length, D), or with a window the latest, (B, G, K, D)."""

    def read(
        self, n_tokens: int, document_ids: Tensor | None, device: torch.device
    ) -> "Continuation":
        """The documents of the next Q tokens, after which each layer calls `extend` once.

        `document_ids`, (B, Q), continue the ids of earlier tokens. None for one document.
        """
        n_earlier = self.n_filled
        assert n_earlier + n_tokens <= self.max_length, (n_earlier, n_tokens, self.max_length)
        begins = self._find_begins(n_tokens, document_ids, device)
        self._begin = None if begins is None else begins[:, -1:]
        self._last_ids = None if document_ids is None else document_ids[:, -1:]
        self.n_filled += n_tokens
        return Continuation(self, begins, n_earlier, n_tokens, device)

    def extend(self, layer: nn.Module, k: Tensor, v: Tensor, window: int | None) -> list[Tensor]:
        """Add a layer's new keys and values, (B, G, Q, D).

        Return the keys and values that its new queries may see, (B, G, K, D).
        """
        if window is not None:
            return self._extend_window(layer, k, v, window)
        if layer not in self._layers:
            self._layers[layer] = [self._make_buffer(k), self._make_buffer(v)]
        first = self.n_filled - k.shape[-2]  # `read` has counted the new tokens
        visible = []
        for buffer, new in zip(self._layers[layer], (k, v), strict=True):
            buffer[..., first : self.n_filled, :] = new
            visible.append(buffer[..., : self.n_filled, :])
        return visible

    def _make_buffer(self, like: Tensor) -> Tensor:
        batch_size, n_heads, _, d_head = like.shape
        return like.new_empty(batch_size, n_heads, self.max_length, d_head)

    def _extend_window(self, layer: nn.Module, k: Tensor, v: Tensor, window: int) -> list[Tensor]:
        visible = [k, v]
        if layer in self._layers:
            older_k, older_v = self._layers[layer]
            visible = [torch.cat((older_k, k), -2), torch.cat((older_v, v), -2)]
        begin = max(0, visible[0].shape[-2] - window + 1)
        latest = [tensor[..., begin:, :] for tensor in visible]
        if k.shape[-2] > 1:  # a view would hold the memory of a whole prompt
            latest = [tensor.clone() for tensor in latest]
        self._layers[layer] = latest
        return visible

    def _find_begins(
        self, n_tokens: int, document_ids: Tensor | None, device: torch.device
    ) -> Tensor | None:
        """(B or 1, Q): the slot at which the document of each new token begins.

        None if all begin at slot 0.
        """
        if document_ids is None and self._padding is None:
            return None
        slots = torch.arange(self.n_filled, self.n_filled + n_tokens, device=device)
        is_start = slots == 0 if self._padding is None else slots == self._padding[:, None]
        if document_ids is not None:
            last_ids = document_ids[:, :1] if self._last_ids is None else self._last_ids
            previous_ids = torch.cat((last_ids, document_ids[:, :-1]), 1)
            is_start = is_start | (document_ids != previous_ids)
        current_begin = 0 if self._begin is None else self._begin
        return torch.where(is_start, slots, current_begin).cummax(dim=1).values


class Continuation(Documents):
    """The documents of Q = `length` tokens that follow `n_earlier` slots in a cache.

    `begins`, (B or 1, Q), is the slot at which each new token's document begins. None for 0.
    """

    def __init__(
        self,
        cache: KeyValueCache,
        begins: Tensor | None,
        n_earlier: int,
        length: int,
        device: torch.device,
    ) -> None:
        self.begins = begins
        self.n_earlier = n_earlier
        # The tokens of a document have the same beginning, which so serves as its id.
        super().__init__(begins, length, device)
        self.cache = cache
        self.max_length = cache.max_length

    def _find_positions(self) -> Tensor | None:
        if self.begins is None and not self.n_earlier:
            return None
        return self._index[None] + self.n_earlier - (0 if self.begins is None else self.begins)

    @property
    def rotary_positions(self) -> Tensor:
        return self._index[None] if self.positions is None else self.positions


def attend(
    q: Tensor, k: Tensor, v: Tensor, mechanism: Mechanism, documents: Continuation
) -> Tensor:
    """softmax(a·g·S + m) v of new queries q (B, H, Q, D) over k and v (B, G, K, D) from `extend`.

    A fused kernel computes a single query, without an a(t) and without a copy of the keys.
    """
    if q.shape[-2] == 1 and not mechanism.scales_with_distance:
        mask = _single_query_mask(q, k.shape[-2], mechanism, documents)
        if k.shape[1] == q.shape[1] or sdpa.reads_groups(q, mask):
            return sdpa.fused(with_gain(q, mechanism, documents), k, v, mask)
    return eager.attend(q, k, v, mechanism, documents, 0.0)


def _single_query_mask(
    q: Tensor, n_keys: int, mechanism: Mechanism, documents: Continuation
) -> Tensor | None:
    """m(t) of one query, −∞ at keys of other documents: (B or 1, H or 1, 1, K).

    None if it is 0 everywhere.
    """
    _, m = distance_tables(mechanism, n_keys, q)
    if m is None and not documents.are_masked:
        return None
    return masked_bias(m, distances(1, n_keys, q.device), documents, None, 0, q.dtype)
