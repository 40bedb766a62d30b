"""Position encodings: rotations of q and k, chosen apart from the attention mechanism.

Half-split pairing as in Qwen3 and GPT-NeoX: of the R rotated dimensions, dimension i is paired with i + R/2. The other
dimensions pass through. Every class here gives a true rotation, so scores depend on the distance alone. YaRN also makes
the rotated dimensions longer by a constant.

Shape letters: B batch, H heads, T time, D = d_head, R = rotated width.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anlit.nn.layers.cpu_gradients import Rotate, is_trained_eagerly_on_cpu

Rotation = tuple[Tensor, Tensor]
"""`scale` × cos and sin of each token's angles, (T, R/2), or (B, 1, T, R/2) if positions restart in each document."""


class Positions(nn.Module):
    """Base class. A subclass gives the angular frequency of each rotated pair, in radians per token."""

    @property
    def scale(self) -> float:
        """What the rotated dimensions of queries and keys are multiplied by; their scores by its square."""
        return 1.0

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
        """scale × cos and sin of position × frequency, each (T, R/2), on the device of `like`, in float32 at least.

        Computed in float64, because at 64k tokens a float32 product of position and frequency is off by 0.004 rad, and
        outside inference mode, so that training can use tables that were made in validation.
        """
        key = (d_head, length, like.device, like.dtype == torch.float64)
        if getattr(self, "_key", None) != key:
            with torch.inference_mode(False):
                angles = torch.outer(
                    torch.arange(length, dtype=torch.float64), self.frequencies(d_head, length)
                )
                dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
                cos, sin = (
                    (self.scale * part).to(like.device, dtype)
                    for part in (angles.cos(), angles.sin())
                )
            self._key, self._tables = key, (cos, sin)
        return self._tables

    def rotation(
        self, d_head: int, length: int, index: Tensor | None, like: Tensor
    ) -> Rotation | None:
        """The rotation of a batch's queries and keys, for all layers with these positions; None for no rotation.

        `length` is that of the whole sequence. `index`, (B or 1, T) integers, is each token's position in its document;
        None for 0, 1 … length−1. The rotation has the device and precision of `like`.
        """
        cos, sin = self.tables(d_head, length, like)
        if index is not None:
            cos, sin = cos[index][:, None], sin[index][:, None]
        return cos, sin


def rotate(rotation: Rotation | None, *vectors: Tensor) -> tuple[Tensor, ...]:
    """Rotate the pairs (i, i + R/2) of the first R dimensions of each (B, H, T, D) tensor, and scale them."""
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
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(
        x.dtype
    )
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


class RoPE(Positions):
    """Rotary positions (arXiv 2104.09864) on a fraction of the head width.

    Args:
        fraction: Share of the head width that rotates, in (0, 1]; fraction × d_head must be an even number.
            [anGPT] uses 0.5; 1.0 is Qwen3's.
        base: Pair i of the R/2 rotated pairs turns by base^(−2i/R) radians per token.
    """

    fewest = 2
    """The smallest rotated width."""

    def __init__(self, fraction: float = 0.5, base: float = 10_000.0) -> None:
        super().__init__()
        if not 0 < fraction <= 1:
            raise ValueError(f"RoPE's fraction must be in (0, 1], not {fraction}")
        self.fraction, self.base = fraction, _checked_base(self, base)

    def check(self, d_head: int) -> None:
        width = self.fraction * d_head
        if round(width) < self.fewest or round(width) % 2 or not math.isclose(width, round(width)):
            raise ValueError(
                f"positions.fraction={self.fraction:g} of d_head={d_head} rotates {width:g} dimensions, but the "
                f"rotary width must be an even number of at least {self.fewest}: choose another fraction or d_head"
            )

    def frequencies(self, d_head: int, length: int) -> Tensor:
        return _geometric(self.base, round(self.fraction * d_head))


def _checked_base(positions: Positions, base: float) -> float:
    if not 1 < base < math.inf:
        raise ValueError(
            f"{type(positions).__name__}'s base must be more than 1 and finite, not {base:g}"
        )
    return base


def _geometric(base: float, width: int) -> Tensor:
    """base^(−2i/R) for i = 0 … R/2 − 1, R = `width`."""
    return base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)


class DynamicNTK(RoPE):
    """RoPE whose base grows with the sequence: base·(T/T_train)^{R/(R−2)} for a sequence of T > T_train tokens.

    The fastest pair turns as in training. The slowest pair turns as far over T tokens as it did over T_train, so a
    longer sequence has no angle that the model was not trained on. Up to T_train this is RoPE exactly.

    T is the length of the whole sequence, also where it packs several documents. So beyond T_train a document's logits
    depend on the length of the sequence that it is packed into.

    Args:
        fraction: As in RoPE; at least 4 dimensions must rotate.
        base: As in RoPE, up to the training length.
        training_length: T_train in tokens; None for the model's context_length. Set it if you raise context_length to
            evaluate on longer sequences.
    """

    fewest = 4

    def __init__(
        self, fraction: float = 0.5, base: float = 10_000.0, training_length: int | None = None
    ) -> None:
        super().__init__(fraction, base)
        self.training_length = training_length
        _check_stretch(self)

    def for_context(self, context_length: int) -> Positions:
        return DynamicNTK(self.fraction, self.base, self.training_length or context_length)

    def frequencies(self, d_head: int, length: int) -> Tensor:
        assert self.training_length is not None, "for_context names the training length"
        width = round(self.fraction * d_head)
        stretch = max(1.0, length / self.training_length)
        return _geometric(self.base * stretch ** (width / (width - 2)), width)


class LinearRoPE(RoPE):
    """RoPE with positions divided by a constant (position interpolation, arXiv 2306.15595).

    Args:
        factor: At least 1.
        rope: `fraction` and `base`, as in RoPE.
    """

    def __init__(self, factor: float, **rope: Any) -> None:
        super().__init__(**rope)
        self.factor = factor
        _check_stretch(self)

    def frequencies(self, d_head: int, length: int) -> Tensor:
        return super().frequencies(d_head, length) / self.factor


class Llama3RoPE(RoPE):
    """RoPE of Llama 3.1 and later: pairs that make few turns over T_train tokens turn slower by `factor`.

    A pair of n turns keeps its frequency if n ≥ high_freq_factor, is slower by `factor` if n ≤ low_freq_factor, and
    between them is interpolated by n.

    Args:
        factor: At least 1.
        training_length: T_train, tokens of a training sequence before the model was stretched.
        low_freq_factor: In turns.
        high_freq_factor: In turns, more than low_freq_factor.
        rope: `fraction` and `base`, as in RoPE.
    """

    def __init__(
        self, factor: float, training_length: int, low_freq_factor: float = 1.0, high_freq_factor: float = 4.0,
        **rope: Any,
    ) -> None:  # fmt: skip
        super().__init__(**rope)
        self.factor, self.training_length = factor, training_length
        self.low_freq_factor, self.high_freq_factor = low_freq_factor, high_freq_factor
        _check_stretch(self, "low_freq_factor", "high_freq_factor")

    def frequencies(self, d_head: int, length: int) -> Tensor:
        fast = super().frequencies(d_head, length)
        turns = self.training_length * fast / (2 * math.pi)
        kept = (
            (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        ).clamp(0, 1)
        return kept * fast + (1 - kept) * fast / self.factor


class YaRN(RoPE):
    """YaRN (arXiv 2309.00071): pairs that make few turns over T_train tokens turn slower, and scores are larger.

    Pair number i keeps its frequency up to that of beta_fast turns, is slower by `factor` from that of beta_slow turns
    on, and between them is interpolated by i.

    Args:
        factor: At least 1.
        training_length: T_train, tokens of a training sequence before the model was stretched.
        attention_factor: The rotated dimensions of queries and keys are multiplied by it; None for 0.1·ln(factor) + 1.
        beta_fast: In turns.
        beta_slow: In turns, less than beta_fast.
        truncate: Round the limits of i outwards to whole numbers, as most models do.
        rope: `fraction` and `base`, as in RoPE.
    """

    def __init__(
        self, factor: float, training_length: int, attention_factor: float | None = None, beta_fast: float = 32.0,
        beta_slow: float = 1.0, truncate: bool = True, **rope: Any,
    ) -> None:  # fmt: skip
        super().__init__(**rope)
        self.factor, self.training_length, self.attention_factor = (
            factor,
            training_length,
            attention_factor,
        )
        self.beta_fast, self.beta_slow, self.truncate = beta_fast, beta_slow, truncate
        _check_stretch(self, "beta_slow", "beta_fast")
        if attention_factor is not None and attention_factor <= 0:
            raise ValueError(f"YaRN's attention_factor must be positive, not {attention_factor:g}")

    @property
    def scale(self) -> float:
        return (
            0.1 * math.log(self.factor) + 1
            if self.attention_factor is None
            else self.attention_factor
        )

    def frequencies(self, d_head: int, length: int) -> Tensor:
        fast = super().frequencies(d_head, length)
        low, high = (
            len(fast) * math.log(self.training_length / (2 * math.pi * turns)) / math.log(self.base)
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * len(fast) - 1)
        if low == high:
            high += 0.001  # as transformers does
        slowed = ((torch.arange(len(fast), dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
        return (1 - slowed) * fast + slowed * fast / self.factor


def _check_stretch(positions: Any, low: str = "", high: str = "") -> None:
    """Raise ValueError unless factor and training length, where there are any, are at least 1, and 0 < low < high."""
    kind = type(positions).__name__
    for name in ("factor", "training_length"):
        value = getattr(positions, name, None)
        if value is not None and not 1 <= value < math.inf:
            raise ValueError(f"{kind}'s {name} must be at least 1, not {value:g}")
    if low and not 0 < (least := getattr(positions, low)) < (most := getattr(positions, high)):
        raise ValueError(
            f"{kind}'s {low} must be positive and less than {high}, not {least:g} and {most:g}"
        )


class PRoPE(Positions):
    """p-RoPE as in [SI] (arXiv 2505.17083): the lower half of the frequencies is zero, so half the pairs are NoPE.

    Args:
        base: The d_head/4 rotating pairs turn by base^(−i/(d_head/4 − 1)), i = 0 … d_head/4 − 1, radians per token.
    """

    def __init__(self, base: float = 1024.0) -> None:
        super().__init__()
        self.base = _checked_base(self, base)

    def check(self, d_head: int) -> None:
        if d_head % 4 or d_head < 8:
            raise ValueError(
                f"PRoPE needs a d_head (default d_model/n_heads) that is a multiple of 4 and at least 8, not {d_head}"
            )

    def frequencies(self, d_head: int, length: int) -> Tensor:
        quarter = d_head // 4
        frequencies = self.base ** (-torch.arange(quarter, dtype=torch.float64) / (quarter - 1))
        return torch.cat((frequencies, torch.zeros(quarter, dtype=torch.float64)))


class NoPE(Positions):
    """No positions: order enters through the causal mask alone (arXiv 2305.19466)."""

    def rotation(
        self, d_head: int, length: int, index: Tensor | None, like: Tensor
    ) -> Rotation | None:
        return None


class PositionsPattern(Positions):
    """Different positions in different layers: layer number l (from 0) has `layers[l mod len(layers)]`.

    An entry counts its own layers from 0, so a pattern inside a pattern has its entries in turn.

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
        return PositionsPattern(
            [positions.for_context(context_length) for positions in self.layers]
        )

    def for_layer(self, layer: int) -> Positions:
        turn, entry = divmod(layer, len(self.layers))
        return self.layers[entry].for_layer(turn)
