"""Position encodings: rotations of q and k, chosen apart from the attention mechanism.

Half-split pairing as in Qwen3 and GPT-NeoX: of the R rotated dimensions, dimension i is paired with i + R/2. The other
dimensions pass through. Every class here gives a true rotation, so scores depend on the distance alone.

Shape letters: B batch, H heads, T time, D = d_head, R = rotated width.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from anlit.layers.cpu_gradients import Rotate, is_trained_eagerly_on_cpu

Rotation = tuple[Tensor, Tensor]
"""cos and sin of each token's angles, each (T, R/2), or (B, 1, T, R/2) if positions restart with each document."""


class Positions(nn.Module):
    """Base class. A subclass gives the angular frequency of each rotated pair, in radians per token."""

    def check(self, d_head: int) -> None:
        """Raise ValueError unless these positions can be used at head width `d_head`."""

    def for_context(self, context_length: int) -> "Positions":
        """The positions of a model that trains on sequences of `context_length` tokens."""
        return self

    def for_layer(self, layer: int) -> "Positions":
        """The positions of layer number `layer`, from 0."""
        return self

    def frequencies(self, d_head: int, length: int) -> Tensor:
        """Angular frequencies in radians per token, shape (R/2,), float64, for sequences of `length` tokens."""
        raise NotImplementedError

    def tables(self, d_head: int, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of position × frequency, each (T, R/2), on the device of `like`, in float32 at least.

        Computed in float64, because at 64k tokens a float32 product of position and frequency is off by 0.004 rad.
        Computed outside inference mode, so that training can use tables that were made in validation.
        """
        key = (d_head, length, like.device, like.dtype == torch.float64)
        if getattr(self, "_key", None) != key:
            with torch.inference_mode(False):
                angles = torch.outer(torch.arange(length, dtype=torch.float64), self.frequencies(d_head, length))
                dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
                self._tables = angles.cos().to(like.device, dtype), angles.sin().to(like.device, dtype)
            self._key = key
        return self._tables

    def rotation(self, d_head: int, length: int, index: Tensor | None, like: Tensor) -> Rotation | None:
        """The rotation of a batch's queries and keys, for all layers with these positions; None for no rotation.

        Args:
            d_head: D.
            length: Tokens of the whole sequence.
            index: (B or 1, T) integers, each token's position in its document; None for 0, 1 … length−1.
            like: A tensor of the device and precision that the result is to have.
        """
        cos, sin = self.tables(d_head, length, like)
        if index is not None:
            cos, sin = cos[index][:, None], sin[index][:, None]
        return cos, sin

    def forward(self, *vectors: Tensor, index: Tensor | None = None) -> tuple[Tensor, ...]:
        """Rotate each (B, H, T, D) tensor by its positions along T; `index` as in `rotation`. Norms are kept."""
        length, d_head = vectors[0].shape[-2:]
        return rotate(self.rotation(d_head, length, index, vectors[0]), *vectors)


def rotate(rotation: Rotation | None, *vectors: Tensor) -> tuple[Tensor, ...]:
    """Rotate the pairs (i, i + R/2) of the first R dimensions of each (B, H, T, D) tensor. Norms are kept."""
    if rotation is None:
        return vectors
    cos, sin = rotation
    if all(is_trained_eagerly_on_cpu(x) and x.dtype == cos.dtype for x in vectors):
        ones = cos.new_ones(*cos.shape[:-1], vectors[0].shape[-1] - 2 * cos.shape[-1])
        factors = torch.cat((cos, cos, ones), dim=-1)
        return tuple(Rotate.apply(x, factors, sin) for x in vectors)
    return tuple(_rotate(x, cos, sin) for x in vectors)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


class RoPE(Positions):
    """Rotary positions (arXiv 2104.09864) on a fraction of the head width.

    Args:
        fraction: Share of the head width that rotates, in (0, 1]; fraction × d_head must be an even number.
            [anGPT] uses 0.5; 1.0 is Qwen3's.
        base: Pair i of the R/2 rotated pairs turns by base^(−2i/R) radians per token.
    """

    def __init__(self, fraction: float = 0.5, base: float = 10_000.0) -> None:
        super().__init__()
        if not 0 < fraction <= 1:
            raise ValueError(f"RoPE's fraction must be in (0, 1], not {fraction}")
        self.fraction, self.base = fraction, base

    def check(self, d_head: int) -> None:
        width = self.fraction * d_head
        if round(width) < 2 or round(width) % 2 or not math.isclose(width, round(width)):
            raise ValueError(
                f"positions.fraction={self.fraction:g} of d_head={d_head} rotates {width:g} dimensions, but the "
                "rotary width must be an even number of at least 2: choose another fraction, d_model or n_heads"
            )

    def frequencies(self, d_head: int, length: int) -> Tensor:
        width = round(self.fraction * d_head)
        return self.base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)


class DynamicNTK(RoPE):
    """RoPE whose base grows with the sequence: base·(T/T_train)^{R/(R−2)} for a sequence of T > T_train tokens.

    The fastest pair turns as in training. The slowest pair turns as far over T tokens as it did over T_train, so a
    longer sequence has no angle that the model was not trained on. Up to T_train this is RoPE exactly.

    T is the length of the whole sequence, also where it packs several documents: positions restart with each masked
    document, but the frequencies do not change. So beyond T_train a document's logits depend on the length of the
    sequence that it is packed into.

    Args:
        fraction: As in RoPE; at least 4 dimensions must rotate.
        base: As in RoPE, up to the training length.
        training_length: T_train in tokens; None for the model's context_length. Set it if you raise context_length to
            evaluate on longer sequences.
    """

    def __init__(self, fraction: float = 0.5, base: float = 10_000.0, training_length: int | None = None) -> None:
        super().__init__(fraction, base)
        if training_length is not None and training_length < 1:
            raise ValueError(f"DynamicNTK's training_length must be at least 1, not {training_length}")
        self.training_length = training_length

    def check(self, d_head: int) -> None:
        super().check(d_head)
        if round(self.fraction * d_head) < 4:
            raise ValueError(
                f"DynamicNTK with positions.fraction={self.fraction:g} of d_head={d_head} rotates one pair of "
                "dimensions, but needs two: choose a larger fraction or d_model, or fewer n_heads"
            )

    def for_context(self, context_length: int) -> Positions:
        return DynamicNTK(self.fraction, self.base, self.training_length or context_length)

    def frequencies(self, d_head: int, length: int) -> Tensor:
        assert self.training_length is not None, "for_context names the training length"
        width = round(self.fraction * d_head)
        stretch = max(1.0, length / self.training_length)
        base = self.base * stretch ** (width / (width - 2))
        return base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)


class PRoPE(Positions):
    """p-RoPE as in [SI] (arXiv 2505.17083): the lower half of the frequencies is zero, so half the pairs are NoPE.

    Args:
        base: The d_head/4 rotating pairs turn by base^(−i/(d_head/4 − 1)), i = 0 … d_head/4 − 1, radians per token.
    """

    def __init__(self, base: float = 1024.0) -> None:
        super().__init__()
        self.base = base

    def check(self, d_head: int) -> None:
        if d_head % 4 or d_head < 8:
            raise ValueError(
                f"PRoPE needs a head width (d_model/n_heads) that is a multiple of 4 and at least 8, not {d_head}"
            )

    def frequencies(self, d_head: int, length: int) -> Tensor:
        quarter = d_head // 4
        frequencies = self.base ** (-torch.arange(quarter, dtype=torch.float64) / (quarter - 1))
        return torch.cat((frequencies, torch.zeros(quarter, dtype=torch.float64)))


class NoPE(Positions):
    """No positions: order enters through the causal mask alone (arXiv 2305.19466)."""

    def rotation(self, d_head: int, length: int, index: Tensor | None, like: Tensor) -> Rotation | None:
        return None


class PositionsPattern(Positions):
    """Different positions in different layers: layer number l (from 0) has `layers[l mod len(layers)]`.

    Args:
        layers: The positions of each layer in the period, such as three times RoPE and then NoPE.
    """

    def __init__(self, layers: Sequence[Positions]) -> None:
        super().__init__()
        if not layers:
            raise ValueError("PositionsPattern's layers must name at least one kind of positions")
        self.layers = list(layers)

    def check(self, d_head: int) -> None:
        for positions in self.layers:
            positions.check(d_head)

    def for_context(self, context_length: int) -> Positions:
        return PositionsPattern([positions.for_context(context_length) for positions in self.layers])

    def for_layer(self, layer: int) -> Positions:
        return self.layers[layer % len(self.layers)]
